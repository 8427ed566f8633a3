"""Ranks that sockets connect, here of one process, against numpy; and what becomes of them when one is gone."""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest

import whale_ops
from tests.whale_ops import harness
from tests.whale_ops.harness import each
from whale.errors import CommError
from whale_ops import Communicator

pytestmark = pytest.mark.core
_NAMES = itertools.count()


@contextmanager
def ranks(size: int) -> Iterator[Sequence[Communicator]]:
    ends = [[-1] * size for _ in range(size)]
    for one, other in itertools.combinations(range(size), 2):
        pair = socket.socketpair()
        ends[one][other], ends[other][one] = (end.detach() for end in pair)
    name = f"sockets {next(_NAMES)}"
    found = [
        whale_ops.connect_over_sockets(f"{name} {rank}", rank, sockets, share_memory=False)
        for rank, sockets in enumerate(ends)
    ]
    try:
        yield found
    finally:
        each(found, lambda comm: comm.leave(5.0))


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("count", [0, 1, 600, 700_001])
def test_what_is_exchanged_equals_numpy(size: int, count: int) -> None:
    generator = np.random.default_rng(count)
    inputs = [generator.integers(-9, 9, count).astype(np.float64) for _ in range(size)]
    with ranks(size) as comms:
        cases = [
            harness.all_reduce("sum", [x.copy() for x in inputs]),
            harness.broadcast("first", inputs, size - 1),
            harness.all_gather("all", inputs),
        ]
        for case in cases:
            case.run(comms)
        for total, first, everything in zip(*(case.outputs for case in cases)):
            np.testing.assert_array_equal(total, sum(inputs))
            np.testing.assert_array_equal(first, inputs[-1])
            np.testing.assert_array_equal(everything, np.concatenate(inputs))
        said = each(comms, lambda comm: comm.allgather_bytes("said", bytes([comm.rank]) * 9000 * comm.rank))
        assert said == [[bytes([rank]) * 9000 * rank for rank in range(size)]] * size


def test_payloads_that_nobody_has_asked_for_wait_and_others_go_on() -> None:
    """One rank begins operations long before the other, more than it may send unasked, and in another order."""
    inputs = [[np.full(200_000 + number, rank + number, np.float64) for rank in range(2)] for number in range(24)]
    cases = [harness.all_reduce(f"sum {number}", values) for number, values in enumerate(inputs)]
    large = harness.broadcast("large", [np.arange(3_000_000.0)] * 2, 0)
    with ranks(2) as comms:
        first = [case.start(comms[0]) for case in [*cases, large]]
        comms[0].waits()
        late = [case.start(comms[1]) for case in [large, *reversed(cases)]]
        for operation in [*first, *late]:
            operation.wait(harness.TIMEOUT_S)
    for number, case in enumerate(cases):
        for output in case.outputs:
            np.testing.assert_array_equal(output, np.full(200_000 + number, 1.0 + 2 * number))
    np.testing.assert_array_equal(large.outputs[1], np.arange(3_000_000.0))


def test_who_has_left_is_named_and_who_has_gone_without_a_word_is_found() -> None:
    with ranks(3) as comms:
        comms[2].leave(0.0)
        found = each(comms[:2], lambda comm: comm.allgather_bytes("said", b"", 5.0))
        assert all(isinstance(one, CommError) and "rank 2" in str(one) for one in found)


def test_an_abort_reaches_all() -> None:
    with ranks(3) as comms:
        comms[0].abort("enough")
        found = each(comms[1:], lambda comm: comm.allgather_bytes("said", b"", 5.0))
        assert all(isinstance(one, CommError) and "enough" in str(one) for one in found)


def test_a_connection_that_breaks_is_said_within_seconds() -> None:
    ends = socket.socketpair()
    breaker = ends[0].dup()
    comms = [
        whale_ops.connect_over_sockets(f"broken {rank}", rank, sockets, share_memory=False)
        for rank, sockets in enumerate([[-1, ends[0].detach()], [ends[1].detach(), -1]])
    ]
    assert each(comms, lambda comm: comm.allgather_bytes("before", b"1")) == [[b"1", b"1"]] * 2
    started_s = time.monotonic()
    breaker.shutdown(socket.SHUT_RDWR)
    breaker.close()
    found = each(comms, lambda comm: comm.allgather_bytes("after", b"1" * 9000, harness.TIMEOUT_S))
    assert time.monotonic() - started_s < 5
    assert all(isinstance(one, CommError) and "the connection with rank" in str(one) for one in found), found
    for comm in comms:
        comm.lose(1 - comm.rank, "is gone")
        comm.leave(0.0)
