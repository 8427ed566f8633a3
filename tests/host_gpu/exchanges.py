"""Exchanges between GPUs whose streams are late, right, and with faults planted in the driver: what faults show.

    python -m tests.host_gpu.exchanges                       the whole table
    python -m tests.host_gpu.exchanges --late-us 20000 --kinds send --faults none early-query --transports pinned

Ranks are threads of this process, each with a GPU of its own. Every rank computes, exchanges what it has computed,
computes with the result, and exchanges again; a fault is found if a result is not what NumPy says, or if there is an
error. A line for each case; ends with 1 where a fault is not found, or a result is wrong without one.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.host_gpu.build import HostGpu, build_host_cuda

RANKS, ROUNDS = 3, 3
KERNELS = 8  # products before each exchange: streams are behind when it begins
ROWS, EACH = 24, 8  # of what is exchanged, and columns; of each rank's part
BUFFER_BYTES = 1024  # less than the tensors have: they travel in pieces
LATE_US = (20_000, 200)
TRANSPORTS = ("cuda-ipc", "pinned", "nccl")
WITH_STREAMS = ("cuda-ipc", "nccl")
# As streams.h numbers them; the transports that each is about, and those with which it is tried in stream.
FAULTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "none": (TRANSPORTS, WITH_STREAMS),
    "no-wait-for-mark": (TRANSPORTS, ()),
    "no-wait-for-written": (("cuda-ipc",), ()),
    "no-wait-for-taken": (("cuda-ipc",), ()),
    "early-mark": (TRANSPORTS, WITH_STREAMS),
    "mark-elsewhere": (TRANSPORTS, ()),
    "early-record": (TRANSPORTS, WITH_STREAMS),
    "early-query": (TRANSPORTS, ()),
    "no-wait-in-stream": ((), WITH_STREAMS),
}
# What is a matter of luck where streams are hardly late: so often is it tried before it counts as not found.
TRIES = 100


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of exchange, through a transport, with a fault; ``in_stream``: done when it is queued."""

    kind: str
    transport: str
    fault: str
    late_us: int
    in_stream: bool = False

    def __str__(self) -> str:
        how = " in stream" if self.in_stream else ""
        return f"{self.kind}{how} through {self.transport}, {self.late_us} us late, fault: {self.fault}"


Array = np.ndarray


def _split(array: Array, rank: int, axis: int) -> Array:
    return np.split(array, RANKS, axis)[rank]


# By kind: what each rank has after the exchange of what all ranks have, (ROWS, ROWS) each, as an array of that shape.
EXPECTED: dict[str, Callable[[Sequence[Array], int], Array]] = {
    "all_reduce": lambda x, rank: np.sum(x, 0),
    "all_reduce_of_one": lambda x, rank: np.sum(x, 0),  # which is not packed
    "all_gather": lambda x, rank: np.concatenate([one[:, :EACH] for one in x], 1),
    "reduce_scatter": lambda x, rank: np.tile(_split(np.sum(x, 0), rank, 1), (1, RANKS)),
    "all_to_all": lambda x, rank: np.tile(np.concatenate([_split(one[:, :EACH], rank, 0) for one in x], 1), (RANKS, 1)),
    "broadcast": lambda x, rank: x[1],
    "send": lambda x, rank: x[rank - 1],
}


class Exchanges:
    """The exchanges of ranks that have a GPU each, by TensorFlow's ops."""

    def __init__(self, transport: str, in_stream: bool = False) -> None:
        from tests.whale_ops.gpu.opened import Opened, device_of, opened_ranks
        from whale_ops import device_library

        def open_device(comm: object) -> None:
            device_of(device_library.PATH, transport, comm.rank, BUFFER_BYTES)(comm)  # type: ignore[attr-defined]

        self._order = {"in_stream": True} if in_stream else {}
        self._scope = opened_ranks(RANKS, open_device)
        self._opened: Opened = self._scope.__enter__()

    def close(self) -> None:
        self._scope.__exit__(None, None, None)

    def exchange(self, kind: str, rank: int, x: Any, key: str) -> Any:
        """Adds an exchange to the graph; the result has the shape of ``x``."""
        import tensorflow as tf

        everyone, even = list(range(RANKS)), [EACH] * RANKS
        place = {"key": key, "ranks": everyone, **self._order}
        run = self._opened.exchange
        if kind == "all_reduce":
            (first, second) = self._opened.reduce(rank, [x[:2], x[2:]], key, **self._order)
            return tf.concat([first, second], 0)
        if kind == "all_reduce_of_one":
            return self._opened.reduce(rank, [x], key, **self._order)[0]
        if kind == "all_gather":
            return run(kind, rank, x[:, :EACH], axis=1, sizes=even, **place)
        if kind == "reduce_scatter":
            return tf.tile(run(kind, rank, x, axis=1, sizes=even, **place), [1, RANKS])
        if kind == "all_to_all":
            attrs = {"split_axis": 0, "split_sizes": even, "concat_axis": 1, "concat_sizes": even}
            return tf.tile(run(kind, rank, x[:, :EACH], **attrs, **place), [RANKS, 1])
        if kind == "broadcast":
            return run(kind, rank, [x], root=1, shapes=[x.shape], **place)[0]
        run("send", rank, x, key=key, peer=(rank + 1) % RANKS)
        return run("recv", rank, key=key, peer=(rank - 1) % RANKS, T=x.dtype, shape=x.shape)

    def run(self, kind: str, weights: Array, first: Sequence[Array], name: str) -> list[Array]:
        """Computes and exchanges in turns; the last result of every rank."""
        import tensorflow as tf

        def body(rank: int) -> list[object]:
            with tf.device(f"/GPU:{rank}"):
                w, x = tf.constant(weights), tf.constant(first[rank])
                for turn in range(ROUNDS):
                    for _ in range(KERNELS):
                        x = tf.tanh(x @ w)
                    x = self.exchange(kind, rank, x, f"{name}/{turn}") + 0.5
                return [x]

        found = []
        for said in self._opened.each(body):
            if isinstance(said, Exception):
                raise said
            found.append(said[0])
        return found


def expect(kind: str, weights: Array, first: Sequence[Array]) -> list[Array]:
    """Computes what `Exchanges.run` has to return."""
    x = list(first)
    for _ in range(ROUNDS):
        for _ in range(KERNELS):
            x = [np.tanh(one @ weights) for one in x]
        x = [EXPECTED[kind](x, rank) + 0.5 for rank in range(RANKS)]
    return x


def try_case(case: Case, driver: ctypes.CDLL, seed: int) -> str:
    """Runs a case once; what is wrong with the results, "" is nothing."""
    import tensorflow as tf

    generator = np.random.default_rng(seed)
    weights = generator.standard_normal((ROWS, ROWS)) / 4
    first = [generator.standard_normal((ROWS, ROWS)) for _ in range(RANKS)]
    driver.host_gpu_be_late(case.late_us)
    exchanges = Exchanges(case.transport, case.in_stream)
    driver.host_gpu_plant([*FAULTS].index(case.fault))
    try:
        found = exchanges.run(case.kind, weights, first, f"{case.kind}/{seed}")
    except tf.errors.OpError as error:
        return error.message[:200]
    finally:
        driver.host_gpu_plant(0)
        driver.host_gpu_drain()  # what a fault has left behind
        exchanges.close()
    worst = max(float(np.max(np.abs(a - b))) for a, b in zip(found, expect(case.kind, weights, first)))
    return "" if worst <= 1e-12 else f"differs by {worst:.1e}"


def list_cases(
    kinds: Sequence[str], transports: Sequence[str], faults: Sequence[str], late: Sequence[int]
) -> Iterator[Case]:
    for late_us, fault, kind in itertools.product(late, faults, kinds):
        for in_stream, about in enumerate(FAULTS[fault]):
            for transport in about if kind != "send" or not in_stream else ():
                if transport in transports:
                    yield Case(kind, transport, fault, late_us, bool(in_stream))


def main() -> int:
    """Runs the cases; 1 where one is not as it has to be."""
    parser = argparse.ArgumentParser(prog="python -m tests.host_gpu.exchanges")
    parser.add_argument("--kinds", nargs="*", default=[*EXPECTED], choices=[*EXPECTED])
    parser.add_argument("--transports", nargs="*", default=[*TRANSPORTS])
    parser.add_argument("--faults", nargs="*", default=[*FAULTS], choices=[*FAULTS])
    parser.add_argument("--late-us", nargs="*", type=int, default=[*LATE_US])
    asked = parser.parse_args()
    cuda = build_host_cuda()
    os.environ |= cuda.variables(*[HostGpu(name=f"GPU {rank}") for rank in range(RANKS)])
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    from tests.host_gpu.on_host_gpus import take_host_gpus
    from whale_ops import device_library

    take_host_gpus()
    device_library.load_nccl()
    for rank in range(RANKS):
        device_library.load_kernels(device_library.PATH, rank, cuda.image.read_bytes())
    driver = ctypes.CDLL(str(cuda.driver))
    planted, found, wrong = 0, 0, 0
    for case in list_cases(asked.kinds, asked.transports, asked.faults, asked.late_us):
        start_s, said, number = time.perf_counter(), "", 0
        while not said and number < (TRIES if case.fault != "none" else ROUNDS):
            said, number = try_case(case, driver, number), number + 1
        good = bool(said) == (case.fault != "none")
        planted += case.fault != "none"
        found += case.fault != "none" and good
        wrong += not good
        took = f"{number} {'try' if number == 1 else 'tries'}, {time.perf_counter() - start_s:.2f} s"
        print(f"{'' if good else 'WRONG: '}{case}: {said or 'right'} ({took})", flush=True)
    print(f"found {found} of {planted} planted faults; {wrong} cases are not as they have to be")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
