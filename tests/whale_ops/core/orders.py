"""Operations that every rank starts in an order of its own.

    python -m tests.whale_ops.core.orders [--orders 10000] [--ranks 3] [--transport in-process|memory|mpi]
                                     [--hosts 2,1] [--seed 1]

Each order is 50 operations of all kinds and some sizes under way together; the operations are the same on all ranks,
the order in which a rank starts them is not. Every result is compared with what it must be. Ranks are threads of this
process ("in-process"), or processes under mpirun that exchange data through shared memory or through MPI. With
--hosts they are on emulated hosts of so many ranks, and all-reduces go by "hierarchical".
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass

import numpy as np

import whale_ops
from tests.whale_ops import harness
from whale_ops import _native

OPERATIONS = 50
TIMEOUT_S = 60.0
_KINDS = ("AllReduce", "AllGather", "ReduceScatter", "AllToAll", "Broadcast", "Barrier", "Send")
# Nothing, small, beyond what travels with a message's head, beyond a slot of shared memory when a group has it.
_COUNTS = (0, 1, 7, 100, 2_000, 40_000)
_WEIGHTS = (0.05, 0.2, 0.3, 0.3, 0.1, 0.05)


@dataclass(frozen=True)
class Operation:
    """One operation of all ranks: ``root`` is the source of a broadcast or a send, which goes to the next rank."""

    kind: str
    key: str
    count: int
    root: int


@dataclass(frozen=True)
class _Started:
    operation: _native.HostOperation
    output: np.ndarray
    expected: np.ndarray


def draw(generator: np.random.Generator, ranks: int) -> list[Operation]:
    """The operations of one order. A key names one kind, so that all ranks count its calls alike."""
    kinds = generator.integers(0, len(_KINDS), OPERATIONS)
    counts = generator.choice(_COUNTS, OPERATIONS, p=_WEIGHTS)
    roots = generator.integers(0, ranks, OPERATIONS)
    return [
        Operation(_KINDS[kind], f"{_KINDS[kind]} {index} from {root}", int(count), int(root))
        for index, (kind, count, root) in enumerate(zip(kinds, counts, roots))
    ]


def _start(communicator: whale_ops.Communicator, what: Operation) -> _Started | None:
    """This rank's part; None where it has none."""
    rank, size, n = communicator.rank, communicator.size, what.count
    target = (what.root + 1) % size
    kind, root = what.kind, 0
    given = expected = np.zeros(0, np.int64)
    counts: list[int] = []
    recv_counts: list[int] = []
    if kind == "AllReduce":
        given, expected, counts = np.full(n, rank + 1), np.full(n, size * (size + 1) // 2), [n]
    elif kind == "AllGather":
        counts = [n + r for r in range(size)]
        given, expected = np.full(n + rank, rank), np.repeat(np.arange(size), counts)
    elif kind == "ReduceScatter":
        counts = [n] * size
        given, expected = np.repeat(np.arange(size), n), np.full(n, rank * size)
    elif kind == "AllToAll":
        counts = recv_counts = [n] * size
        given, expected = np.full(n * size, rank), np.repeat(np.arange(size), n)
    elif kind == "Broadcast":
        given, expected, counts, root = np.full(n, rank), np.full(n, what.root), [n], what.root
    elif kind == "Send":
        counts = [n]
        if rank == what.root:
            given, root = np.full(n, what.root), target
        elif rank == target:
            expected, kind, root = np.full(n, what.root), "Recv", what.root
        else:
            return None
    output = np.full(len(expected), -1)
    operation = _native.HostOperation(
        communicator.handle,
        kind,
        what.key,
        dtype="int64",
        element_bytes=8,
        root=root,
        input_address=given.ctypes.data,
        output_address=output.ctypes.data,
        counts=counts,
        recv_counts=recv_counts,
        buffers=(given, output),
    )
    return _Started(operation, output, expected)


def run(communicator: whale_ops.Communicator, orders: int, seed: int, several_hosts: bool = False) -> None:
    """This rank's part of all orders.

    Raises:
        CommError: an operation failed, or was still under way after a minute.
        AssertionError: a result is wrong.
    """
    if several_hosts:
        communicator.set_algorithm("hierarchical")
    shared, own = np.random.default_rng(seed), np.random.default_rng([seed, communicator.rank])
    for number in range(orders):
        operations = draw(shared, communicator.size)
        started = [(operations[i], _start(communicator, operations[i])) for i in own.permutation(OPERATIONS)]
        for what, mine in started:
            if mine is not None:
                mine.operation.wait(TIMEOUT_S)
                assert np.array_equal(mine.output, mine.expected), f"order {number}, rank {communicator.rank}: {what}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.whale_ops.core.orders", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--orders", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--transport", choices=("in-process", "memory", "mpi"), default="in-process")
    parser.add_argument("--hosts", type=lambda text: [int(n) for n in text.split(",")], default=[])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rank", action="store_true", help="be one of the ranks; mpirun says this")
    options = parser.parse_args()
    started_s = time.monotonic()
    if options.rank:
        communicator = whale_ops.connect_mpi("orders", share_memory=options.transport == "memory", hosts=options.hosts)
        run(communicator, options.orders, options.seed, bool(options.hosts))
        assert communicator.leave(30)
        return
    if options.transport == "in-process":
        with harness.ranks(options.ranks, hosts=options.hosts) as communicators:
            outcomes = harness.each(communicators, lambda c: run(c, options.orders, options.seed, bool(options.hosts)))
        failures = [outcome for outcome in outcomes if outcome is not None]
        assert not failures, failures
    else:
        from benchmarks.groups import under_mpirun

        worker = [sys.executable, "-m", "tests.whale_ops.core.orders", *sys.argv[1:], "--rank"]
        subprocess.run(under_mpirun(worker, options.ranks), check=True)
    took_s = time.monotonic() - started_s
    where = f"{options.transport}, hosts of {options.hosts} ranks" if options.hosts else options.transport
    what = f"{options.orders} orders of {OPERATIONS} operations, {options.ranks} ranks, {where}"
    print(f"{what}: all complete and right, {took_s:.0f} s")


if __name__ == "__main__":
    main()
