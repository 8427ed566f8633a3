"""The core against numpy, on in-process ranks; no TensorFlow."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.whale_ops import harness
from tests.whale_ops.core import orders
from tests.whale_ops.harness import Case, each, random_array, ranks, reduced
from whale.errors import CommError

DTYPES = [
    np.dtype(name)
    for name in (
        "float16",
        ml_dtypes.bfloat16,
        "float32",
        "float64",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "bool",
        "complex64",
        "complex128",
    )
]
REDUCTIONS = ["sum", "min", "max", "prod"]
# Elements: nothing, less than one per rank, one message, and more than one chunk per rank.
COUNTS = st.sampled_from([0, 1, 2, 7, 1000, 40_000, 700_001])


def assert_close(result: np.ndarray, expected: np.ndarray, terms: int) -> None:
    """Equal where the arithmetic is exact or rounded once; else within the rounding of `terms` additions."""
    if result.dtype.kind in "fc" and result.dtype.itemsize > 2:
        np.testing.assert_allclose(result, expected, rtol=4 * terms * np.finfo(result.dtype).eps, atol=1e-6)
    else:
        np.testing.assert_array_equal(result, expected)


@settings(max_examples=60)
@given(st.data())
def test_reductions_equal_numpy(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 5), "ranks")
    dtype = data.draw(st.sampled_from(DTYPES), "dtype")
    reduction = data.draw(st.sampled_from(["sum"] if dtype.kind == "c" else REDUCTIONS), "reduction")
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32), "seed"))
    scatter = data.draw(st.booleans(), "scatter")
    if scatter:
        counts = data.draw(st.lists(st.sampled_from([0, 1, 5, 3000, 150_001]), min_size=size, max_size=size), "counts")
        inputs = [random_array(generator, dtype, sum(counts)) for _ in range(size)]
        case = harness.reduce_scatter("r", inputs, counts, reduction)
    else:
        inputs = [random_array(generator, dtype, data.draw(st.shared(COUNTS, key="n"))) for _ in range(size)]
        case = harness.all_reduce("r", inputs, reduction, data.draw(st.booleans(), "in place"))
    with np.errstate(all="ignore"):
        expected = reduced([x.copy() for x in inputs], reduction)
    with ranks(size) as communicators:
        case.run(communicators)
    if scatter:
        assert_close(np.concatenate(case.outputs), expected, size)
    else:
        for output in case.outputs:
            assert output.tobytes() == case.outputs[0].tobytes()
        assert_close(case.outputs[0], expected, size)


@settings(max_examples=40)
@given(st.data())
def test_movement_equals_numpy(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 5), "ranks")
    dtype = data.draw(st.sampled_from(DTYPES), "dtype")
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32), "seed"))
    kind = data.draw(st.sampled_from(["gather", "all to all", "broadcast"]), "kind")
    with ranks(size) as communicators:
        if kind == "gather":
            inputs = [random_array(generator, dtype, data.draw(COUNTS)) for _ in range(size)]
            case = harness.all_gather("m", inputs)
            case.run(communicators)
            expected = [np.concatenate(inputs)] * size
        elif kind == "broadcast":
            n, root = data.draw(COUNTS), data.draw(st.integers(0, size - 1))
            inputs = [random_array(generator, dtype, n) for _ in range(size)]
            case = harness.broadcast("m", inputs, root)
            case.run(communicators)
            expected = [inputs[root]] * size
        else:
            matrix = generator.choice([0, 1, 3, 2000, 90_000], (size, size))
            inputs = [random_array(generator, dtype, int(matrix[r].sum())) for r in range(size)]
            case = harness.all_to_all("m", inputs, matrix)
            case.run(communicators)
            blocks = [np.split(inputs[r], np.cumsum(matrix[r])[:-1]) for r in range(size)]
            expected = [np.concatenate([blocks[s][r] for s in range(size)]) for r in range(size)]
    for output, wanted in zip(case.outputs, expected):
        assert output.tobytes() == wanted.tobytes()


def test_every_rank_starts_its_operations_in_an_order_of_its_own() -> None:
    with ranks(4) as communicators:
        assert each(communicators, lambda c: orders.run(c, 10, seed=2)) == [None] * 4


@pytest.mark.parametrize("algorithm", ["direct", "pairwise", "ring", "halving-doubling", "tree"])
def test_every_algorithm_gives_every_rank_the_same_sum(algorithm: str) -> None:
    for size in (2, 3, 4, 5, 8):
        with ranks(size) as communicators:
            for communicator in communicators:
                communicator.set_algorithm(algorithm)
            for n in (0, 1, 1000, 300_001):
                inputs = [random_array(np.random.default_rng(r), np.dtype("float32"), n) for r in range(size)]
                for in_place in (False, True):
                    case = harness.all_reduce(f"{n} {in_place}", [x.copy() for x in inputs], in_place=in_place)
                    case.run(communicators)
                    assert len({output.tobytes() for output in case.outputs}) == 1
                    assert_close(case.outputs[0], reduced(inputs, "sum"), size)


@pytest.mark.parametrize("algorithm", ["hierarchical", "leader"])
@pytest.mark.parametrize("hosts", [(2, 2), (1, 3), (3, 1, 2), (2, 2, 2, 1)])
def test_sums_over_hosts_equal_those_of_one_host(algorithm: str, hosts: tuple[int, ...]) -> None:
    size = sum(hosts)
    with ranks(size, hosts=hosts) as communicators, ranks(size) as flat:
        for communicator in communicators:
            communicator.set_algorithm(algorithm)
        for n in (0, 1, 1000, 300_001):
            for dtype in (np.dtype("float64"), np.dtype("float16"), np.dtype(ml_dtypes.bfloat16), np.dtype("int32")):
                inputs = [random_array(np.random.default_rng([n, r]), dtype, n) for r in range(size)]
                at_once = harness.all_reduce(f"{n} {dtype}", [x.copy() for x in inputs])
                at_once.run(flat)
                for in_place in (False, True):
                    key = f"{n} {dtype} {in_place}"
                    case = harness.all_reduce(key, [x.copy() for x in inputs], in_place=in_place)
                    case.run(communicators)
                    assert len({output.tobytes() for output in case.outputs}) == 1
                    assert_rounded_once(case.outputs[0], at_once.outputs[0], inputs)


@pytest.mark.parametrize("hosts", [(1, 3), (3, 1, 2), (3, 3)])
def test_what_is_exchanged_over_hosts_equals_that_of_one_host(hosts: tuple[int, ...]) -> None:
    size = sum(hosts)
    draw = np.random.default_rng(size)
    with ranks(size, hosts=hosts) as communicators, ranks(size) as flat:
        for communicator in communicators:
            communicator.set_algorithm("hierarchical")
        for n in (0, 1, 100, 100_001):
            counts = [n + 3 * rank if n > 1 else n * (rank % 2) for rank in range(size)]
            for dtype in (np.dtype("float64"), np.dtype("float16"), np.dtype(ml_dtypes.bfloat16), np.dtype("int32")):
                mine = [random_array(draw, dtype, count) for count in counts]
                all_of = [random_array(draw, dtype, sum(counts)) for _ in range(size)]
                even = [random_array(draw, dtype, n * size) for _ in range(size)]
                made = []
                for name, of in (("one", flat), ("several", communicators)):
                    cases = [
                        harness.all_gather(f"gather {name} {n} {dtype}", mine),
                        harness.all_to_all(f"all-to-all {name} {n} {dtype}", even, np.full((size, size), n)),
                        harness.reduce_scatter(f"scatter {name} {n} {dtype}", all_of, counts),
                    ]
                    for arguments in cases[1].arguments:
                        arguments["even"] = True
                    for case in cases:
                        case.run(of)
                    made.append(cases)
                for one, other in zip(*made):
                    for rank in range(size):
                        if one.kind == "ReduceScatter" and dtype.itemsize == 2:
                            begin = sum(counts[:rank])
                            parts = [x[begin : begin + counts[rank]] for x in all_of]
                            assert_rounded_once(other.outputs[rank], one.outputs[rank], parts)
                        elif one.kind == "ReduceScatter":
                            assert_close(other.outputs[rank], one.outputs[rank], size)
                        else:
                            assert other.outputs[rank].tobytes() == one.outputs[rank].tobytes()


def test_exchanges_over_hosts_are_chosen_by_price(tmp_path: Path) -> None:
    def used(kind: str, elements: int, hosts: tuple[int, ...], even: bool = True) -> str:
        size = sum(hosts)
        with ranks(size, hosts=hosts) as communicators, open(tmp_path / "trace", "w+b") as file:
            inputs = [np.ones(elements * (1 if kind == "AllGather" else size), np.float32) for _ in range(size)]
            case = (
                harness.all_gather("x", inputs)
                if kind == "AllGather"
                else harness.reduce_scatter("x", inputs, [elements] * size)
                if kind == "ReduceScatter"
                else harness.all_to_all("x", inputs, np.full((size, size), elements))
            )
            if kind == "AllToAll":
                for arguments in case.arguments:
                    arguments["even"] = even
            communicators[0].trace_start(file.fileno())
            case.run(communicators)
            communicators[0].trace_stop()
            return next(e["args"]["algorithm"] for e in harness.read_trace(tmp_path / "trace") if e.get("cat") == kind)

    for kind in ("AllGather", "ReduceScatter"):
        assert used(kind, 100_000, (2, 2)) == "hierarchical"
        assert used(kind, 10, (2, 2)) == "direct" and used(kind, 100_000, (4,)) == "ring"
        assert used(kind, 100_000, (1, 1, 1)) == "ring"
    assert used("AllToAll", 10, (4, 4, 4, 4)) == "hierarchical" and used("AllToAll", 10, (2, 2)) == "pairwise"
    assert used("AllToAll", 10, (4, 4, 4, 4), even=False) == "pairwise" == used("AllToAll", 10, (4, 4, 4, 3))
    assert used("AllToAll", 100_000, (4, 4)) == "pairwise"  # the bytes between hosts are the same


def assert_rounded_once(result: np.ndarray, other: np.ndarray, inputs: list[np.ndarray]) -> None:
    """Integers are equal, float64 sums in another order nearly; a 16-bit sum is the exact one, rounded."""
    if result.dtype.itemsize != 2:
        assert_close(result, other, len(inputs))
        return
    exact = np.sum([x.astype(np.float64) for x in inputs], axis=0)
    unit = np.spacing(np.abs(exact).astype(result.dtype)).astype(np.float64)
    assert np.all(np.abs(result.astype(np.float64) - exact) <= 0.51 * unit + 1e-6)


def test_a_group_of_ranks_knows_which_of_its_ranks_share_a_host() -> None:
    with ranks(5, hosts=(2, 3)) as communicators:
        for communicator in communicators:
            communicator.set_algorithm("hierarchical")
        members = [4, 1, 2, 0]
        inputs = [np.full(100_003, 1.0 + r) for r in range(5)]
        case = harness.all_reduce("group", inputs)
        for arguments in case.arguments:
            arguments["ranks"] = members
        started = [case.start(communicators[r]) for r in members]
        for operation in started:
            operation.wait(harness.TIMEOUT_S)
        for r in members:
            np.testing.assert_array_equal(case.outputs[r], 5.0 + 2.0 + 3.0 + 1.0)
        # What leaves the hosts: each host's sum of its blocks, once in each direction.
        counters = [c.counters()[0].wire_bytes for r, c in enumerate(communicators) if r in members]
        assert sum(counters) == 6 * 100_003 * 8


def test_hosts_that_hold_another_number_of_ranks_are_refused() -> None:
    with pytest.raises(CommError, match="another number of ranks"), ranks(3, hosts=(2, 2)):
        pass


def test_the_emulated_link_lies_between_the_hosts() -> None:
    with ranks(4, hosts=(2, 2)) as communicators:
        for communicator in communicators:
            communicator.set_link(2 * harness.TIMEOUT_S, 0)  # what takes this way does not arrive in time
        pair = [np.ones(8)] * 4
        case = harness.all_reduce("inside", pair)
        for arguments in case.arguments:
            arguments["ranks"] = [2, 3]
        for operation in [case.start(communicators[r]) for r in (2, 3)]:
            operation.wait(harness.TIMEOUT_S)
        for communicator in communicators:
            communicator.set_link(0.2, 0)
        started = time.monotonic()
        harness.all_reduce("across", pair).run(communicators)
        assert time.monotonic() - started >= 0.2


def test_the_algorithm_follows_size_and_ranks_and_is_named_in_the_trace(tmp_path: Path) -> None:
    def used(
        size: int, elements: int, dtype: str = "float32", algorithm: str = "auto", hosts: tuple[int, ...] = ()
    ) -> str:
        with ranks(size, hosts=hosts) as communicators, open(tmp_path / "trace", "w+b") as file:
            for communicator in communicators:
                communicator.set_algorithm(algorithm)
            communicators[0].trace_start(file.fileno())
            harness.all_reduce("x", [np.ones(elements, dtype) for _ in range(size)]).run(communicators)
            communicators[0].trace_stop()
            events = json.loads(f"[{(tmp_path / 'trace').read_text().rstrip().rstrip(',')}]")
            return next(e["args"]["algorithm"] for e in events if e.get("cat") == "AllReduce")

    assert used(4, 100) == "direct"
    assert used(4, 1_000_000) == "pairwise"
    assert used(4, 100_000, algorithm="ring") == "ring"
    assert used(4, 100_000, algorithm="tree") == "tree"
    assert used(4, 100_000, algorithm="halving-doubling") == "halving-doubling"
    assert used(3, 1_000_000, algorithm="halving-doubling") == "pairwise"  # no power of two
    assert used(4, 1_000_000, "float16", "ring") == "pairwise"  # rounded once
    assert used(4, 100, hosts=(2, 2)) == "direct"
    assert used(8, 1000, hosts=(4, 4)) == "leader"
    assert used(4, 1_000_000, hosts=(2, 2)) == "hierarchical"
    assert used(4, 1_000_000, "float16", hosts=(2, 2)) == "hierarchical"
    assert used(2, 1_000_000, hosts=(1, 1)) == "pairwise"
    assert used(4, 1_000_000, algorithm="hierarchical") == "pairwise"  # one host


def test_ranks_with_other_algorithms_are_told() -> None:
    with ranks(2) as communicators:
        communicators[1].set_algorithm("ring")
        case = harness.all_reduce("x", [np.ones(100_000)] * 2)
        errors = each(communicators, lambda c: case.start(c).wait(harness.TIMEOUT_S))
    assert all("by ring" in str(error) for error in errors)


def test_an_unknown_algorithm_is_refused() -> None:
    with ranks(1) as communicators, pytest.raises(CommError, match="expected auto, direct"):
        communicators[0].set_algorithm("fastest")


def test_sums_are_the_same_bits_from_run_to_run() -> None:
    inputs = [random_array(np.random.default_rng(r), np.dtype("float32"), 300_000) for r in range(4)]
    seen = set()
    for _ in range(3):
        with ranks(4) as communicators:
            case = harness.all_reduce("x", inputs)
            case.run(communicators)
            seen |= {output.tobytes() for output in case.outputs}
    assert len(seen) == 1


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16])
def test_16_bit_floats_round_like_numpy_for_every_pattern(dtype) -> None:
    patterns = np.arange(65536, dtype=np.uint16).view(dtype)
    others = np.roll(patterns, 12345)
    with ranks(2) as communicators, np.errstate(all="ignore"):
        case = harness.all_reduce("x", [patterns, others])
        case.run(communicators)
        expected = reduced([patterns, others], "sum")
    result, nan = case.outputs[0], np.isnan(expected.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(result.astype(np.float32)), nan)
    np.testing.assert_array_equal(result[~nan].view(np.uint16), expected[~nan].view(np.uint16))


def test_nan_wins_minimum_and_maximum() -> None:
    with ranks(3) as communicators:
        for reduction in ("min", "max"):
            for holder in range(3):
                inputs = [np.array([np.nan if r == holder else r], np.float32) for r in range(3)]
                case = harness.all_reduce(f"{reduction} {holder}", inputs, reduction)
                case.run(communicators)
                assert all(np.isnan(output[0]) for output in case.outputs)


@pytest.mark.parametrize("seed", range(3))
def test_fifty_operations_in_any_order(seed: int) -> None:
    size, generator = 3, np.random.default_rng(seed)
    cases: list[Case] = []
    for i in range(50):
        n = int(generator.choice([0, 3, 500, 20_000, 200_000]))
        inputs = [random_array(generator, np.dtype("int32"), n) for _ in range(size)]
        cases.append(harness.all_reduce(f"op {i}", inputs) if i % 2 else harness.all_gather(f"op {i}", inputs))
    with ranks(size) as communicators:

        def body(communicator) -> None:
            order = list(cases)
            random.Random(seed * 10 + communicator.rank).shuffle(order)
            operations = []
            for case in order:
                operations.append(case.start(communicator))
                if len(operations) % 7 == communicator.rank:
                    time.sleep(0.001)
            for operation in operations:
                operation.wait(harness.TIMEOUT_S)

        assert each(communicators, body) == [None] * size
    for i, case in enumerate(cases):
        expected = reduced(case.inputs, "sum") if i % 2 else np.concatenate(case.inputs)
        for output in case.outputs:
            np.testing.assert_array_equal(output, expected)


def test_calls_under_one_key_meet_in_order() -> None:
    with ranks(2) as communicators:
        cases = [harness.all_reduce("same", [np.array([i]), np.array([10 * i])]) for i in range(20)]
        operations = [case.start(communicators[0]) for case in cases] + [case.start(communicators[1]) for case in cases]
        for operation in operations:
            operation.wait(harness.TIMEOUT_S)
    assert [int(case.outputs[1][0]) for case in cases] == [11 * i for i in range(20)]


def test_subgroups_run_beside_each_other() -> None:
    with ranks(4) as communicators:
        inputs = [np.array([float(r)]) for r in range(4)]
        case = harness.all_reduce("pair", inputs)
        for r in range(4):
            case.arguments[r]["ranks"] = [3, 1] if r % 2 else [0, 2]
        case.run(communicators)
    assert [float(x[0]) for x in case.outputs] == [2.0, 4.0, 2.0, 4.0]


@pytest.mark.long
def test_more_than_two_to_the_31_elements() -> None:
    n = 2**31 + 5
    inputs = [np.full(n, rank + 1, np.int8) for rank in range(2)]
    inputs[0][-1], inputs[1][2**31] = 40, 50
    with ranks(2) as communicators:
        case = harness.all_reduce("large", inputs, in_place=True)
        operations = [case.start(c) for c in communicators]
        for operation in operations:
            operation.wait(100)
    for output in inputs:
        assert (output[0], output[-1], output[2**31], output[2**31 - 1]) == (3, 42, 51, 3)
        assert int(output[::4097].sum(dtype=np.int64)) == 3 * len(output[::4097])


def test_what_was_moved_is_counted_as_the_design_counts_it() -> None:
    size, n = 3, 1001
    rows = [np.ones(n * (r + 1), np.float32) for r in range(size)]
    equal = [np.ones(n, np.float32) for _ in range(size)]
    with ranks(size) as communicators:
        harness.all_reduce("ar", equal).run(communicators)
        harness.all_gather("ag", rows).run(communicators)
        harness.reduce_scatter("rs", [np.ones(6 * n, np.float32)] * size, [n, 2 * n, 3 * n]).run(communicators)
        harness.broadcast("bc", equal, 1).run(communicators)
        harness.all_to_all("aa", [np.ones(3 * n, np.float32)] * size, np.full((size, size), n)).run(communicators)
        logical = dict.fromkeys(("ar", "ag", "rs", "bc", "aa"), 0)
        for communicator in communicators:
            for counter in communicator.counters():
                logical[counter.key] += counter.logical_bytes
                assert counter.calls == 1 and counter.seconds > 0
    one = 4 * n
    assert logical == {"ar": 4 * one, "ag": 12 * one, "rs": 12 * one, "bc": 2 * one, "aa": 6 * one}


@pytest.mark.parametrize("algorithm", ["pairwise", "ring", "halving-doubling"])
def test_large_all_reduces_send_no_more_than_they_must(algorithm: str) -> None:
    size, n = 4, 400_000
    with ranks(size) as communicators:
        for communicator in communicators:
            communicator.set_algorithm(algorithm)
        harness.all_reduce("ring", [np.ones(n, np.float32)] * size).run(communicators)
        sent = sum(c.counters()[0].wire_bytes for c in communicators)
    assert sent == 2 * (size - 1) * n * 4


def test_the_emulated_link_delays_and_divides_bandwidth(tmp_path: Path) -> None:
    latency_s = 0.5
    with ranks(2) as communicators:
        for communicator in communicators:
            communicator.set_link(latency_s, 0)
        cases = [harness.all_reduce(f"x{i}", [np.ones(3)] * 2) for i in range(32)]
        with open(tmp_path / "trace", "wb") as file:
            communicators[0].trace_start(file.fileno())
            operations = [case.start(c) for case in cases for c in communicators]
            for operation in operations:
                operation.wait(harness.TIMEOUT_S)
            communicators[0].trace_stop()
        harness.assert_side_by_side(tmp_path / "trace", 32, latency_s)
        for communicator in communicators:
            communicator.set_link(0, 10e6)
        started = time.monotonic()
        harness.all_reduce("large", [np.ones(125_000)] * 2).run(communicators)
        assert 0.1 <= time.monotonic() - started  # 1 MB at 10 MB/s


@pytest.mark.parametrize("value", ["latency_us=x", "speed=3", "latency_us=-1"])
def test_a_wrong_emulated_link_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHALE_EMULATE_LINK", value)
    with pytest.raises(CommError, match="WHALE_EMULATE_LINK"), ranks(1):
        pass
