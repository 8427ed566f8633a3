"""One rank of test_mpi.py: `python -m tests.whale_ops.mpi.mpi_worker memory|mpi|both|hosts|arena SCENARIO`.

With "both", rank 0 does without shared memory: the others speak through it among themselves. With "hosts", the first
two ranks are on one emulated host and the others on a second one. With "arena", TensorFlow's large tensors lie where
all ranks reach them.
"""

from __future__ import annotations

import glob
import os
import sys
import time
from typing import Any

import numpy as np

import whale_ops
from tests.whale_ops import harness
from tests.whale_ops.core import orders
from tests.whale_ops.harness import Case
from whale.errors import CommError
from whale_ops import memory


def run_all(communicator: whale_ops.Communicator, cases: list[Case]) -> None:
    """All at once, each rank in an order of its own."""
    order = list(np.random.default_rng(communicator.rank).permutation(len(cases)))
    for operation in [cases[i].start(communicator) for i in order]:
        operation.wait(harness.TIMEOUT_S)


def values(communicator: whale_ops.Communicator) -> str:
    """The collectives against numpy, from nothing to several chunks."""
    size, rank = communicator.size, communicator.rank
    own = [link for link in glob.glob("/proc/self/fd/*") if "/memfd:whale_" in os.path.realpath(link)]
    assert own and {os.stat(link).st_mode & 0o777 for link in own} == {0o600}, "its memory is open to others"
    checks: list[tuple[Case, np.ndarray]] = []
    for n in (0, 3, 1500, 2_000_003):
        generator = np.random.default_rng(n)
        inputs = [harness.random_array(generator, np.dtype("int64"), n) for _ in range(size)]
        checks.append((harness.all_reduce(f"ar {n}", inputs), harness.reduced(inputs, "sum")))
        rows = [x[: n // (r + 1)] for r, x in enumerate(inputs)]
        checks.append((harness.all_gather(f"ag {n}", rows), np.concatenate(rows)))
        checks.append((harness.broadcast(f"bc {n}", inputs, size - 1), inputs[-1]))
        matrix = generator.integers(0, n + 1, (size, size))
        parts = [harness.random_array(generator, np.dtype("uint8"), int(matrix[r].sum())) for r in range(size)]
        blocks = [np.split(parts[r], np.cumsum(matrix[r])[:-1]) for r in range(size)]
        expected = np.concatenate([blocks[s][rank] for s in range(size)])
        checks.append((harness.all_to_all(f"aa {n}", parts, matrix), expected))
    halves = [np.random.default_rng(r).integers(-9, 9, 300_001).astype(np.float16) for r in range(size)]
    checks.append((harness.all_reduce("halves", halves), harness.reduced(halves, "sum")))
    floats = [np.random.default_rng(r).standard_normal(300_000).astype(np.float32) for r in range(size)]
    total = harness.all_reduce("floats", floats)
    run_all(communicator, [case for case, _ in checks] + [total])
    for case, expected in checks:
        np.testing.assert_array_equal(case.outputs[rank], expected, case.key)
    everybody = communicator.allgather_bytes("bits", total.outputs[rank].tobytes(), harness.TIMEOUT_S)
    assert len(set(everybody)) == 1, "the ranks hold different sums"
    return "values agree"


def random_orders(communicator: whale_ops.Communicator) -> str:
    """A sample; `python -m tests.whale_ops.core.orders` runs as many as one likes."""
    orders.run(communicator, 20, seed=3)
    return "orders agree"


def large(communicator: whale_ops.Communicator) -> str:
    """A message of more than 2^30 bytes, which MPI carries in parts."""
    n = 2**30 + 7
    data = np.full(n if communicator.rank == 0 else 0, 5, np.uint8)
    out = np.zeros(n if communicator.rank == 1 else 0, np.uint8)
    if communicator.rank == 0:
        data[-1] = 9
    kind, peer = ("Send", 1) if communicator.rank == 0 else ("Recv", 0)
    case = Case(kind, "large", [data] * 2, [out] * 2, [{"counts": [n], "root": peer}] * 2)
    case.start(communicator).wait(harness.TIMEOUT_S)
    assert communicator.rank == 0 or (int(out[-1]), int(out[0]), int(out[2**29])) == (9, 5, 5)
    return "large agrees"


def disagree(communicator: whale_ops.Communicator) -> str:
    # Whoever is here can find the ranks in disagreement while another's connecting ends: a second one waits for that.
    assert whale_ops.connect_mpi("all are connected").leave(harness.TIMEOUT_S)
    dtype = np.float32 if communicator.rank else np.float64
    return failure(harness.all_reduce("k", [np.ones(100_000, dtype)] * communicator.size), communicator)


def abort(communicator: whale_ops.Communicator) -> str:
    case = harness.all_reduce("k", [np.ones(100_000)] * communicator.size)
    if communicator.rank == 1:
        time.sleep(0.3)
        communicator.abort("rank 1 gave up; look at its log")
    return failure(case, communicator)


def leave(communicator: whale_ops.Communicator) -> str:
    if communicator.rank == 1:
        time.sleep(0.3)  # what the others send is there then, and nobody will ask for it
        return "rank 1 is done"
    return failure(harness.all_reduce("k", [np.ones(100_000)] * communicator.size), communicator)


def twice(communicator: whale_ops.Communicator) -> str:
    """Two communicators, left one after the other; the same keys do not meet across them."""
    other = whale_ops.connect_mpi("other")
    cases = [harness.all_reduce("k", [np.array([float(c)])] * other.size) for c in (1, 10)]
    operations = [case.start(c) for case, c in zip(cases, (communicator, other))]
    for operation in operations:
        operation.wait(harness.TIMEOUT_S)
    assert other.leave(harness.TIMEOUT_S)
    communicator.barrier(timeout_s=harness.TIMEOUT_S)
    return " ".join(str(float(case.outputs[other.rank][0]) / other.size) for case in cases)


def flood(communicator: whale_ops.Communicator) -> str:
    """Rank 0 announces more than a ring of shared memory holds before rank 1 waits for any of it."""
    n, count = 900, 400
    data = [np.full(n, i, np.float32) for i in range(count)]
    outs = [np.zeros(n, np.float32) for _ in range(count)]
    kind, peer = ("Send", 1) if communicator.rank == 0 else ("Recv", 0)
    if communicator.rank == 1:
        time.sleep(0.5)
    order = reversed(range(count)) if communicator.rank else range(count)
    facts = [{"counts": [n], "root": peer}] * 2
    started = [Case(kind, f"message {i}", [data[i]] * 2, [outs[i]] * 2, facts).start(communicator) for i in order]
    for operation in started:
        operation.wait(harness.TIMEOUT_S)
    assert communicator.rank == 0 or all((out == i).all() for i, out in enumerate(outs))
    return "flood agrees"


def tensorflow(communicator: whale_ops.Communicator) -> str:
    import tensorflow as tf

    ops = whale_ops.load_ops()

    @tf.function
    def step(x):
        handle = ops.whale_communicator(communicator=communicator.name)
        total = ops.whale_all_reduce(handle, [x, x[:1]], key="sum")
        counted = [tf.range(n, dtype=tf.float32) for n in (3, 0, 70_000, 1, 200_000, 5)]
        for n, value in enumerate(ops.whale_all_reduce(handle, counted, key="group")):
            tf.debugging.assert_equal(value, communicator.size * counted[n])
        rows = ops.whale_all_gather(handle, [x[: communicator.rank]], key="rows")[0]
        ops.whale_check(handle, key="check", fingerprint="f", what="step")
        return total[0], rows

    for _ in range(5):
        total, rows = step(tf.ones((3, 100_000)) * (communicator.rank + 1))
    size = communicator.size
    assert (total.numpy() == size * (size + 1) / 2).all()
    assert rows.shape[0] == size * (size - 1) // 2
    return "tensorflow agrees"


def shared_tensors(communicator: whale_ops.Communicator) -> str:
    """Exchanges of tensors that lie in the ranks' arenas, and of such that do not on some ranks, all at once."""
    import ctypes

    import tensorflow as tf

    outcome = tensorflow(communicator)
    ops, rank, size = whale_ops.load_ops(), communicator.rank, communicator.size
    generators = [np.random.default_rng(r) for r in range(size)]
    floats = [g.standard_normal(300_001).astype(np.float32) for g in generators]
    whole = [g.integers(-99, 99, 70_003) for g in generators]
    halves = [g.integers(-9, 9, 300_007).astype(np.float16) for g in generators]
    small = [g.integers(-9, 9, 5).astype(np.float32) for g in generators]

    @tf.function
    def step(x, a, b, c, d):
        handle = ops.whale_communicator(communicator=communicator.name)
        sums = ops.whale_all_reduce(handle, [a * 2, d * 2, a * 4], key="group")
        sums += ops.whale_all_reduce(handle, [b], key="max", reduction="max")  # in another place than its input
        sums += ops.whale_all_reduce(handle, [c + 1], key="halves")
        sums += ops.whale_all_reduce(handle, [tf.round(a * 4)], key="wire", wire_dtype="bfloat16")
        sums += ops.whale_all_reduce(handle, [x], key="elsewhere")
        for name, rows in (("here", a), ("there", x)):  # payloads of 600 KB: too large for a slot
            rows = tf.reshape(rows[: 150_000 * size], [size, -1])
            sizes = {"split_sizes": [1] * size, "concat_sizes": [150_000] * size}
            all_to_all = ops.whale_all_to_all(handle, rows, key=f"all {name}", split_axis=0, concat_axis=1, **sizes)
            part = ops.whale_reduce_scatter(handle, rows, key=f"part {name}", axis=0, sizes=[1] * size)
            sums += [all_to_all, part]
        return sums

    def in_arena(array):
        return tf.convert_to_tensor(array) + tf.zeros((), array.dtype)

    mine = [in_arena(arrays[rank]) for arrays in (floats, whole, halves, small)]
    # NumPy's memory, where TensorFlow reads it without a copy, on one rank.
    odd = tf.convert_to_tensor(floats[rank]) if rank == 1 else in_arena(floats[rank])
    added = np.sum([x.astype(np.float64) for x in floats], 0)
    for _ in range(5):
        first, few, second, most, half, wire, elsewhere, *moved = (value.numpy() for value in step(odd, *mine))
        np.testing.assert_allclose(first, 2 * added, atol=1e-5)
        np.testing.assert_array_equal(second, 2 * first)
        np.testing.assert_array_equal(few, 2 * np.sum(small, 0))
        np.testing.assert_array_equal(most, np.max(whole, 0))
        np.testing.assert_array_equal(half, np.sum(halves, 0) + np.float16(size))
        np.testing.assert_array_equal(wire, np.sum([np.round(x * 4) for x in floats], 0))
        np.testing.assert_array_equal(elsewhere, first / 2)
        parts = np.stack([x[: 150_000 * size].reshape(size, -1)[rank] for x in floats])
        for all_to_all, part in (moved[:2], moved[2:]):
            np.testing.assert_array_equal(all_to_all[0], parts.ravel())
            np.testing.assert_allclose(part[0], parts.sum(0), atol=1e-5)
    np.testing.assert_array_equal(mine[0].numpy(), floats[rank], "an input was written")
    everybody = communicator.allgather_bytes("bits", first.tobytes(), harness.TIMEOUT_S)
    assert len(set(everybody)) == 1, "the ranks hold different sums"
    if (child := os.fork()) == 0:
        ctypes.memset(mine[0].numpy().ctypes.data, 7, floats[rank].nbytes)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    np.testing.assert_array_equal(mine[0].numpy(), floats[rank], "a child wrote into its parent's tensor")
    _lent(communicator, floats, odd)
    return f"{outcome}, shared tensors agree, {_shared_abort(communicator)}"


def _lent(communicator: whale_ops.Communicator, arrays: list[np.ndarray], odd: Any) -> None:
    """What a rank has lent is read by a peer, as it was when it was lent, also if it lay elsewhere before."""
    import tensorflow as tf

    ops, peer = whale_ops.load_ops(), (communicator.rank + 1) % communicator.size
    variable = tf.Variable(2 * odd)
    lent, places = ops.whale_lend(inputs=[odd, *ops.whale_values(variables=[variable.handle], T=[tf.float32])])
    variable.assign(-odd)
    np.testing.assert_array_equal(lent[1], 2 * arrays[communicator.rank])
    said = communicator.allgather_bytes("places", places.numpy().tobytes(), harness.TIMEOUT_S)
    assert communicator.is_sharing_tensors(peer) and not communicator.is_sharing_tensors(communicator.rank)
    for place, factor in zip(np.frombuffer(said[peer], np.int64), (1, 2)):
        found = np.empty_like(arrays[peer])
        communicator.read_lent(peer, int(place), found)
        np.testing.assert_array_equal(found, factor * arrays[peer])
    try:
        communicator.read_lent(peer, 1 << 60, found)
        raise AssertionError("memory outside of what is shared was read")
    except CommError as error:
        assert "has not mapped" in str(error)
    try:
        ops.whale_lend(inputs=[tf.zeros(5)])
        raise AssertionError("a small tensor was lent")
    except tf.errors.InvalidArgumentError as error:
        assert "256 KiB" in error.message
    communicator.allgather_bytes("read", b"", harness.TIMEOUT_S)


def _shared_abort(communicator: whale_ops.Communicator) -> str:
    """A rank gives up when the others have lent it their tensors."""
    import tensorflow as tf

    ops = whale_ops.load_ops()
    x = tf.ones(3_000_000)
    if communicator.rank == 1:
        time.sleep(0.3)
        communicator.abort("rank 1 gave up; look at its log")
    try:
        handle = ops.whale_communicator(communicator=communicator.name)
        ops.whale_all_reduce(handle, [x], key="k")
    except tf.errors.AbortedError as error:
        assert (x.numpy() == 1).all(), "an input was written"
        return error.message
    return "no error"


def failure(case: Case, communicator: whale_ops.Communicator) -> str:
    """Whether the error came by itself, and not because a time ran out, and what it says."""
    try:
        case.start(communicator).wait(harness.TIMEOUT_S)
    except CommError as error:
        return f"{error.facts['kind'] != 'timed out'} {' '.join(str(error).split())}"
    return "no error"


def main() -> None:
    transport, scenario_name = sys.argv[1:]
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    hosts = [2, int(os.environ["OMPI_COMM_WORLD_SIZE"]) - 2] if transport == "hosts" else []
    share_memory = transport != "mpi" and (transport != "both" or rank > 0)
    if transport == "arena":
        assert not (obstacle := memory.share_tensors()), obstacle
    communicator = whale_ops.connect_mpi("run", share_memory=share_memory, hosts=hosts)
    if hosts:
        communicator.set_algorithm("hierarchical")
    scenario = globals()[scenario_name]
    outcome = scenario(communicator)
    # One write, so that the lines of the ranks do not mix.
    os.write(1, f"rank {communicator.rank}: {outcome}\n".encode())
    os.write(1, f"rank {communicator.rank}: all left {communicator.leave(harness.TIMEOUT_S)}\n".encode())


if __name__ == "__main__":
    main()
