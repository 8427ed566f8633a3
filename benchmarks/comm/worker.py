"""One process of `make bench-comm`: all-reduces of one kind, one after the other, through one library; or all-to-alls.

A question gives the bytes of a tensor, how many tensors are one exchange, how many exchanges are one step, and how
many steps to run. Within a step each exchange takes what the one before gave, so that none overlaps another: the time
of a step divided by its exchanges is the time of one, from a tensor of the graph to a tensor of the graph.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.groups import Answer, serve

KINDS = ("whale", "whale-slots", "whale-mpi", "horovod", "tensorflow", "mpi", "limit", "limit-exchange")
ALL_REDUCE, ALL_TO_ALL = "all-reduce", "all-to-all"
Step = Callable[[], None]  # runs to its end
MakeStep = Callable[[int, int, int], Step]  # elements of a tensor, tensors, exchanges


def whale(rank: int, what: str, share_memory: bool, share_tensors: bool) -> tuple[MakeStep, Callable[[], None]]:
    """Through Whale's ops; several tensors are one op, as a plan makes them."""
    import tensorflow as tf

    import whale_ops
    from whale_ops import memory

    if share_tensors and (obstacle := memory.share_tensors()):
        raise RuntimeError(f"tensors cannot be shared: {obstacle}")
    communicator = whale_ops.connect_mpi("benchmark", share_memory=share_memory)
    ops = whale_ops.load_ops()

    def exchange(tensors: list[Any], key: str) -> list[Any]:
        handle = ops.whale_communicator(communicator=communicator.name)
        if what == ALL_REDUCE:
            return ops.whale_all_reduce(handle, tensors, key=key)
        # Rank r's part of what each rank has: rows are cut, columns are joined, so all parts lie one behind the other.
        (tensor,) = tensors
        ranks = int(os.environ["BENCH_RANKS"])
        each = tensor.shape[0] // ranks
        sizes = {"split_axis": 0, "split_sizes": [1] * ranks, "concat_axis": 1, "concat_sizes": [each] * ranks}
        rows = tf.reshape(tensor, [ranks, each])
        return [tf.reshape(ops.whale_all_to_all(handle, rows, key=key, **sizes), [-1])]

    def end() -> None:
        communicator.leave()

    return _in_graph(exchange, of_whale=True), end


def horovod(rank: int, what: str) -> tuple[MakeStep, Callable[[], None]]:
    """Through Horovod's ops; several tensors are a group, which it need not gather by time."""
    if os.environ.get("HOROVOD_CONTROLLER") == "gloo":  # then MPI tells it nothing
        size = os.environ["BENCH_RANKS"]
        os.environ |= {"HOROVOD_HOSTNAME": "localhost", "HOROVOD_RANK": str(rank), "HOROVOD_SIZE": size}
        os.environ |= {"HOROVOD_LOCAL_RANK": str(rank), "HOROVOD_LOCAL_SIZE": size}
        os.environ |= {"HOROVOD_CROSS_RANK": "0", "HOROVOD_CROSS_SIZE": "1"}
    import horovod.tensorflow as hvd

    hvd.init()

    def exchange(tensors: list[Any], key: str) -> list[Any]:
        if what == ALL_TO_ALL:
            counts = [tensors[0].shape[0] // hvd.size()] * hvd.size()
            received, _ = hvd.alltoall(tensors[0], counts, name=key)
            received.set_shape([sum(counts)])  # the next one of this step asks for it
            return [received]
        if len(tensors) == 1:
            return [hvd.allreduce(tensors[0], op=hvd.Sum, name=key)]
        return hvd.grouped_allreduce(tensors, op=hvd.Sum, name=key)

    return _in_graph(exchange), hvd.shutdown


def tensorflow_ring(rank: int) -> tuple[MakeStep, Callable[[], None]]:
    """Through TensorFlow's own ring over gRPC."""
    workers = os.environ["BENCH_WORKERS"].split(",")
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}})
    import tensorflow as tf

    experimental = tf.distribute.experimental
    ring = experimental.CommunicationOptions(implementation=experimental.CommunicationImplementation.RING)
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=ring)

    def reduce_all(tensors: list[Any], key: str) -> list[Any]:
        here = [tf.identity(tensor) for tensor in tensors] if key.endswith("_0") else tensors
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, here)

    # It has no orderly end for one of several servers.
    return _in_graph(reduce_all, lambda body: lambda *parts: strategy.run(body, parts)), lambda: os._exit(0)


def mpi(rank: int, what: str) -> tuple[MakeStep, Callable[[], None]]:
    """MPI_Allreduce in place, through mpi4py; several tensors are copied into one buffer and back. Or MPI_Alltoallv
    from one buffer to another and back."""
    from mpi4py import MPI

    def make_all_to_all(elements: int, tensors: int, reductions: int) -> Step:
        ranks = MPI.COMM_WORLD.size
        counts = [elements // ranks] * ranks
        one, other = (np.full(sum(counts), 0, np.float32) for _ in range(2))

        def step() -> None:
            nonlocal one, other
            for _ in range(reductions):
                MPI.COMM_WORLD.Alltoallv([one, counts], [other, counts])
                one, other = other, one

        return step

    def make(elements: int, tensors: int, reductions: int) -> Step:
        parts = [np.full(elements, 0, np.float32) for _ in range(tensors)]  # written once, unlike zeros
        buffer = parts[0] if tensors == 1 else np.empty(elements * tensors, np.float32)

        def step() -> None:
            for _ in range(reductions):
                if tensors > 1:
                    np.concatenate(parts, out=buffer)
                MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, buffer)
                if tensors > 1:
                    for index, part in enumerate(parts):
                        part[:] = buffer[index * elements : (index + 1) * elements]

        return step

    return make if what == ALL_REDUCE else make_all_to_all, MPI.Finalize


def limit(rank: int, name: str) -> tuple[MakeStep, Callable[[], None]]:
    """The memory traffic of an all-reduce and nothing else: see probe.cc."""
    probe = getattr(ctypes.CDLL(os.environ["BENCH_PROBE"]), name)
    probe.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int]
    ranks = int(os.environ["BENCH_RANKS"])

    def make(elements: int, tensors: int, reductions: int) -> Step:
        return functools.partial(probe, ranks, elements * tensors, reductions)

    return make, lambda: None


def _in_graph(
    reduce_all: Callable[[list[Any], str], list[Any]],
    wrap: Callable[[Any], Any] = lambda body: body,
    of_whale: bool = False,
) -> MakeStep:
    """Steps that are one tf.function each, called as Whale calls steps if `of_whale`."""
    import tensorflow as tf

    def make(elements: int, tensors: int, reductions: int) -> Step:
        values = [tf.ones(elements) for _ in range(tensors)]

        def body(*parts: Any) -> Any:
            reduced = list(parts)
            for number in range(reductions):
                reduced = reduce_all(reduced, f"sum_{elements}_{tensors}_{number}")
            return [part[0] for part in reduced]

        step = tf.function(wrap(body), autograph=False)
        if not of_whale:
            return lambda: step(*values)[0].numpy()

        from whale.runtime.compile.function_calls import bind_as_step

        call = bind_as_step(step.get_concrete_function(*values), values)
        return lambda: (call() or [])[0].numpy()

    return make


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--what", choices=(ALL_REDUCE, ALL_TO_ALL), default=ALL_REDUCE)
    options = parser.parse_args()
    kind, what = options.kind, options.what
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")))

    def start() -> tuple[Answer, Callable[[], None]]:
        starters: dict[str, Callable[[int], tuple[MakeStep, Callable[[], None]]]] = {
            "whale": functools.partial(whale, what=what, share_memory=True, share_tensors=True),
            "whale-slots": functools.partial(whale, what=what, share_memory=True, share_tensors=False),
            "whale-mpi": functools.partial(whale, what=what, share_memory=False, share_tensors=False),
            "horovod": functools.partial(horovod, what=what),
            "tensorflow": tensorflow_ring,
            "mpi": functools.partial(mpi, what=what),
            "limit": functools.partial(limit, name="all_reduce_limit"),
            "limit-exchange": functools.partial(limit, name="exchange_limit"),
        }
        make, end = starters[kind](rank)
        latest: tuple[tuple[int, int, int], Step] | None = None

        def answer(tensor_bytes: int, tensors: int, reductions: int, steps: int) -> dict[str, Any]:
            nonlocal latest
            shape = (tensor_bytes // 4, tensors, reductions)
            if latest is None or latest[0] != shape:
                latest = None  # the memory of the one before
                latest = (shape, make(*shape))
            step = latest[1]
            start_s = time.perf_counter()
            for _ in range(steps):
                step()
            return {"seconds": (time.perf_counter() - start_s) / (steps * reductions)}

        return answer, end

    serve(rank, start)


if __name__ == "__main__":
    main()
