"""What happens when ranks do not do the same: errors on every rank, in time, that say what is wrong."""

from __future__ import annotations

import os
import re
import time

import numpy as np
import pytest

import whale_ops
from tests.whale_ops import harness
from tests.whale_ops.harness import TIMEOUT_S, each, ranks
from whale.errors import CommError


def failures(communicators, cases, timeout_s: float = TIMEOUT_S) -> list[str]:
    """Starts cases[rank] on each rank; the errors of all ranks, all of which must fail in time."""
    operations = [case.start(c) for case, c in zip(cases, communicators)]
    messages = []
    for operation in operations:
        with pytest.raises(CommError) as caught:
            operation.wait(timeout_s)
        assert caught.value.facts["kind"] != "timed out"
        messages.append(str(caught.value))
    return messages


def floats(size: int, n: int = 4) -> list[np.ndarray]:
    return [np.ones(n, np.float32)] * size


DISAGREEMENTS = {
    "dtype": (
        harness.all_reduce("k", floats(3)),
        harness.all_reduce("k", [np.ones(4, np.float64)] * 3),
        "float32",
        "float64",
    ),
    "operation": (
        harness.all_reduce("k", floats(3)),
        harness.all_gather("k", floats(3)),
        r"AllReduce\(sum\)",
        "AllGather",
    ),
    "reduction": (
        harness.all_reduce("k", floats(3)),
        harness.all_reduce("k", floats(3), "max"),
        r"\(sum\)",
        r"\(max\)",
    ),
    "barrier": (
        harness.all_reduce("k", floats(3)),
        harness.Case("Barrier", "k", floats(3), floats(3), [{}] * 3),
        "AllReduce",
        "Barrier",
    ),
    "large": (
        harness.all_reduce("k", floats(3, 400_000)),
        harness.all_gather("k", floats(3, 400_000)),
        "AllReduce",
        "AllGather",
    ),
}


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_a_disagreement_is_an_error_on_every_rank(name: str) -> None:
    two, one, first, second = DISAGREEMENTS[name]
    with ranks(3) as communicators:
        for message in failures(communicators, [two, two, one]):
            assert "'k'" in message and "rank 2" in message
            assert re.search(first, message) and re.search(second, message)


def test_different_sizes_are_an_error_on_every_rank() -> None:
    cases = [harness.all_reduce("k", [np.ones(n, np.float32)] * 2) for n in (10, 11)]
    for rank, case in enumerate(cases):
        for argument in case.arguments:
            argument["text"] = f"[{10 + rank}]"
    with ranks(2) as communicators:
        for message in failures(communicators, cases):
            assert "[10]" in message and "[11]" in message and "'k'" in message
    # Even where the caller's text does not give the sizes away.
    plain = [harness.all_reduce("k", [np.ones(n, np.float32)] * 2) for n in (10, 11)]
    with ranks(2) as communicators:
        for message in failures(communicators, plain):
            assert "40 bytes" in message and "44 bytes" in message and "'k'" in message


def test_two_roots_are_noticed_although_nobody_waits() -> None:
    cases = [harness.broadcast("k", floats(2), root) for root in (0, 1)]
    with ranks(2) as communicators:
        started = [case.start(c) for case, c in zip(cases, communicators)]
        time.sleep(0.2)
        del started
        for message in failures(communicators, [harness.all_reduce("next", floats(2))] * 2):
            assert "disagree" in message and "'k'" in message


def test_abort_fails_pending_and_later_operations_everywhere() -> None:
    with ranks(3) as communicators:
        pending = harness.all_reduce("pending", floats(3)).start(communicators[0])
        communicators[2].abort("data ran out; look at the input files")
        with pytest.raises(CommError, match="data ran out") as caught:
            pending.wait(TIMEOUT_S)
        assert caught.value.action == "look at the input files"
        for message in failures(communicators, [harness.all_reduce("later", floats(3))] * 3):
            assert "data ran out" in message


def test_a_rank_that_leaves_is_named() -> None:
    with ranks(3) as communicators:
        waiting = [harness.all_reduce("step", floats(3)).start(c) for c in communicators[:1]]
        communicators[1].leave()
        for operation in waiting:
            with pytest.raises(
                CommError, match=r"rank 1 has left the run .* while rank 0 waits for it in AllReduce 'step'"
            ):
                operation.wait(TIMEOUT_S)
        with pytest.raises(CommError, match="rank 1 has left"):
            harness.all_reduce("step", floats(3)).start(communicators[2]).wait(TIMEOUT_S)


def test_what_waits_for_a_rank_that_leaves_is_said_in_words() -> None:
    with ranks(2) as communicators:
        communicators[1].leave()
        with pytest.raises(CommError, match=r"rank 1 has left .* waits for it in the reading of the map"):
            communicators[0].allgather_bytes("k", b"", TIMEOUT_S, "the reading of the map")


def test_what_a_rank_sent_before_it_left_still_arrives() -> None:
    data = np.arange(5, dtype=np.float32)
    with ranks(2) as communicators:
        send = harness.Case("Send", "k", [data] * 2, [data] * 2, [{"counts": [5], "root": 1}] * 2)
        send.start(communicators[0]).wait(TIMEOUT_S)
        communicators[0].leave()
        time.sleep(0.1)
        received = np.zeros(5, np.float32)
        harness.Case("Recv", "k", [data] * 2, [received] * 2, [{"counts": [5], "root": 0}] * 2).start(
            communicators[1]
        ).wait(TIMEOUT_S)
        np.testing.assert_array_equal(received, data)


def test_a_large_send_to_a_rank_that_left_fails() -> None:
    data = np.zeros(100_000, np.float32)
    with ranks(2) as communicators:
        send = harness.Case("Send", "k", [data] * 2, [data] * 2, [{"counts": [100_000], "root": 1}] * 2)
        communicators[1].leave()
        time.sleep(0.2)  # a message on its way when the other rank leaves has been handed over, and is no failure
        operation = send.start(communicators[0])
        with pytest.raises(CommError, match="rank 1 has left"):
            operation.wait(TIMEOUT_S)


def test_host_exchanges() -> None:
    with ranks(3) as communicators:
        parts = each(communicators, lambda c: c.allgather_bytes("k", b"%d" % c.rank * 10_000 * c.rank, TIMEOUT_S))
        assert parts == [[b"", b"1" * 10_000, b"2" * 20_000]] * 3
        plans = each(communicators, lambda c: c.broadcast_bytes("p", b"plan\0" if c.rank == 1 else None, 1, TIMEOUT_S))
        assert plans == [b"plan\0"] * 3
        assert each(communicators, lambda c: c.barrier(timeout_s=TIMEOUT_S)) == [None] * 3


def test_a_host_exchange_that_nobody_answers_ends_for_all() -> None:
    with ranks(2) as communicators:
        with pytest.raises(CommError, match=r"rank 0 waited 0.3 s for rank 1 in the exchange 'k'"):
            communicators[0].allgather_bytes("k", b"", 0.3)
        with pytest.raises(CommError, match="rank 0 waited"):
            communicators[1].allgather_bytes("k", b"", TIMEOUT_S)


def test_only_the_root_gives_data() -> None:
    with ranks(2) as communicators, pytest.raises(CommError, match="takes data from the root rank"):
        communicators[0].broadcast_bytes("k", None, 0, 1)


def test_an_operation_that_waits_is_shown_with_the_missing_rank() -> None:
    with ranks(2) as communicators:
        started = time.monotonic()
        operation = harness.all_reduce("slow 'x'", floats(2)).start(communicators[0])
        early = communicators[0].waits()
        assert early == [] or time.monotonic() - started > 0.1  # waits count from 0.1 s on
        while not (waits := communicators[0].waits()) and time.monotonic() - started < TIMEOUT_S:
            time.sleep(0.01)
        (wait,) = waits
        assert wait.what == "AllReduce 'slow 'x''" and wait.missing == (1,)
        assert 0.1 <= wait.seconds <= time.monotonic() - started
        assert communicators[1].waits() == []
        harness.all_reduce("slow 'x'", floats(2)).start(communicators[1]).wait(TIMEOUT_S)
        operation.wait(TIMEOUT_S)


def test_operations_name_themselves_when_another_rank_is_lost() -> None:
    with ranks(3) as communicators:
        pending = harness.all_reduce("gradient", floats(3)).start(communicators[0])
        communicators[0].lose(1, "was killed by SIGKILL")
        with pytest.raises(
            CommError, match="rank 1 was killed by SIGKILL while rank 0 waited for it in AllReduce 'gradient'"
        ):
            pending.wait(TIMEOUT_S)
        later = harness.all_reduce("later", floats(3)).start(communicators[0])
        with pytest.raises(CommError, match=r"rank 1 was killed .* rank 0 can no longer run AllReduce 'later'"):
            later.wait(TIMEOUT_S)


def test_a_rank_that_has_said_good_bye_is_not_lost() -> None:
    with ranks(3) as communicators:
        communicators[1].leave()
        time.sleep(0.1)
        communicators[0].lose(1, "has ended")
        case = harness.all_reduce("two", floats(3))
        for arguments in case.arguments:
            arguments["ranks"] = [0, 2]
        operations = [case.start(communicators[rank]) for rank in (0, 2)]
        for operation in operations:
            operation.wait(TIMEOUT_S)


@pytest.mark.parametrize("first", [0, 1], ids=["exchange first", "operation first"])
def test_ranks_at_different_places_are_told_so(first: int) -> None:
    """One rank is in an exchange, beside which it runs nothing, the other in an operation: neither would end."""
    case = harness.all_reduce("gradient", floats(2))

    def body(communicator: whale_ops.Communicator) -> object:
        time.sleep(0.3 * (communicator.rank != first))
        if communicator.rank == 0:
            return communicator.allgather_bytes("program", b"", TIMEOUT_S, "the compilation of `step`")
        return case.start(communicator).wait(TIMEOUT_S)

    with ranks(2) as communicators:
        for error in each(communicators, body):
            assert "the ranks are at different places of the program" in str(error)
            assert "the compilation of `step`" in str(error) and "'gradient'" in str(error)


def test_operations_side_by_side_may_wait_for_each_other() -> None:
    """Operations of one step start in any order: to wait in one for a rank that has begun another is no mistake."""
    cases = [harness.all_reduce(key, floats(2)) for key in ("a", "b")]
    with ranks(2) as communicators:
        first = cases[0].start(communicators[0]), cases[1].start(communicators[1])
        time.sleep(0.4)
        second = cases[1].start(communicators[0]), cases[0].start(communicators[1])
        for operation in (*first, *second):
            operation.wait(TIMEOUT_S)


WRONG = {
    "peer": (harness.Case("Send", "k", floats(2), floats(2), [{"counts": [4], "root": 0}] * 2), "peer is 0"),
    "group": (harness.Case("Barrier", "k", floats(2), floats(2), [{"ranks": [0, 0]}] * 2), "ranks are 0 and 0"),
    "not a member": (
        harness.Case("Barrier", "k", floats(2), floats(2), [{"ranks": [1]}] * 2),
        "not one of the ranks 1",
    ),
    "sizes": (harness.Case("AllGather", "k", floats(2), floats(2), [{"counts": [4]}] * 2), "one per rank"),
    "negative": (harness.Case("AllGather", "k", floats(2), floats(2), [{"counts": [4, -1]}] * 2), "negative"),
    "root": (harness.broadcast("k", floats(2), 2), "root is 2"),
    "complex": (harness.all_reduce("k", [np.ones(2, np.complex64)] * 2, "max"), "expected 'sum'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_told_to_the_caller_alone(name: str) -> None:
    case, message = WRONG[name]
    with ranks(2) as communicators:
        with pytest.raises(CommError, match=message):
            case.start(communicators[0]).wait(TIMEOUT_S)
        harness.all_reduce("good", floats(2)).run(communicators)


def test_names_are_unique_until_left() -> None:
    with ranks(2, "unique") as communicators:
        with pytest.raises(CommError, match="'unique' exists"), ranks(2, "unique"):
            pass
        del communicators
    with ranks(3, "unique") as communicators:
        harness.all_reduce("x", floats(3)).run(communicators)


def test_a_forked_child_is_refused() -> None:
    with ranks(1) as communicators:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                communicators[0].barrier(timeout_s=1)
                os.write(write, b"it ran")
            except CommError as error:
                os.write(write, str(error).encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert b"forked" in os.read(read, 4096)
        communicators[0].barrier(timeout_s=TIMEOUT_S)
