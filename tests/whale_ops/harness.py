"""Runs operations of several in-process ranks on numpy arrays, and computes what they must give."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import whale_ops
from whale.errors import CommError
from whale_ops import Communicator, _native

_NAMES = itertools.count()
TIMEOUT_S = 60.0  # of what takes moments on a quiet machine


@contextmanager
def ranks(size: int, name: str | None = None, hosts: Sequence[int] = ()):
    """Communicators of `size` ranks, on so many per emulated host, that leave at the end."""
    communicators = whale_ops.connect_in_process(name or f"test {next(_NAMES)}", size, hosts=hosts)
    try:
        yield communicators
    finally:
        for communicator in communicators:
            communicator.leave()


def each(communicators: Sequence[Communicator], body: Callable[[Communicator], object]) -> list:
    """body(communicator) of every rank, each in a thread of its own; errors are returned as values."""

    def guarded(communicator: Communicator) -> object:
        try:
            return body(communicator)
        except CommError as error:
            return error

    with ThreadPoolExecutor(len(communicators)) as pool:
        return list(pool.map(guarded, communicators))


def dtype_name(array: np.ndarray) -> str:
    return array.dtype.name


@dataclass
class Case:
    """One operation over all ranks: inputs, outputs to be filled, and the arguments of each rank."""

    kind: str
    key: str
    inputs: list[np.ndarray]
    outputs: list[np.ndarray]
    arguments: list[dict] = field(default_factory=list)

    def start(self, communicator: Communicator) -> _native.HostOperation:
        rank = communicator.rank
        source, target = self.inputs[rank], self.outputs[rank]
        return _native.HostOperation(
            communicator.handle,
            self.kind,
            self.key,
            dtype=dtype_name(source),
            element_bytes=source.itemsize,
            input_address=source.ctypes.data,
            output_address=target.ctypes.data,
            buffers=(source, target),
            **self.arguments[rank],
        )

    def run(self, communicators: Sequence[Communicator]) -> None:
        operations = [self.start(c) for c in communicators]
        for operation in operations:
            operation.wait(TIMEOUT_S)


def all_reduce(key: str, inputs: list[np.ndarray], reduction: str = "sum", in_place: bool = False) -> Case:
    outputs = inputs if in_place else [np.zeros_like(x) for x in inputs]
    return Case("AllReduce", key, inputs, outputs, [{"counts": [x.size], "reduction": reduction} for x in inputs])


def all_gather(key: str, inputs: list[np.ndarray]) -> Case:
    counts = [x.size for x in inputs]
    outputs = [np.zeros(sum(counts), inputs[0].dtype) for _ in inputs]
    return Case("AllGather", key, inputs, outputs, [{"counts": counts} for _ in inputs])


def reduce_scatter(key: str, inputs: list[np.ndarray], counts: list[int], reduction: str = "sum") -> Case:
    outputs = [np.zeros(n, inputs[0].dtype) for n in counts]
    return Case("ReduceScatter", key, inputs, outputs, [{"counts": counts, "reduction": reduction} for _ in inputs])


def all_to_all(key: str, inputs: list[np.ndarray], matrix: np.ndarray) -> Case:
    """matrix[i, j]: elements that rank i sends to rank j."""
    outputs = [np.zeros(int(matrix[:, rank].sum()), inputs[0].dtype) for rank in range(len(inputs))]
    arguments = [{"counts": list(matrix[r]), "recv_counts": list(matrix[:, r])} for r in range(len(inputs))]
    return Case("AllToAll", key, inputs, outputs, arguments)


def broadcast(key: str, inputs: list[np.ndarray], root: int) -> Case:
    outputs = [np.zeros_like(x) for x in inputs]
    return Case("Broadcast", key, inputs, outputs, [{"counts": [x.size], "root": root} for x in inputs])


def read_trace(path: Path) -> list[dict]:
    """The events that the core has written to a file."""
    return json.loads(f"[{path.read_text().rstrip().rstrip(',')}]")


def assert_side_by_side(trace: Path, count: int, latency_s: float) -> None:
    """So many all-reduces of the trace were under way at once, each for at least as long as a message takes."""
    events = [event for event in read_trace(trace) if event.get("cat") == "AllReduce"]
    assert len(events) == count
    assert min(event["dur"] for event in events) >= latency_s * 1e6
    assert max(event["ts"] for event in events) < min(event["ts"] + event["dur"] for event in events)


def reduced(inputs: Sequence[np.ndarray], reduction: str) -> np.ndarray:
    """What numpy makes of it, in rank order; 16-bit floats in float32, rounded once."""
    dtype = inputs[0].dtype
    wide = [x.astype(np.float32) if dtype.itemsize == 2 and dtype.kind not in "iu" else x for x in inputs]
    function: np.ufunc
    if dtype == np.bool_:
        function = np.logical_or if reduction in ("sum", "max") else np.logical_and
    else:
        function = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}[reduction]
    total = wide[0]
    for x in wide[1:]:
        total = function(total, x)
    return total.astype(dtype)


def random_array(generator: np.random.Generator, dtype: np.dtype, size: int) -> np.ndarray:
    if dtype == np.bool_:
        return generator.integers(0, 2, size).astype(np.bool_)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return generator.integers(limits.min, limits.max, size, dtype=dtype, endpoint=True)
    if dtype.kind == "c":
        return (generator.standard_normal(size) + 1j * generator.standard_normal(size)).astype(dtype)
    return generator.standard_normal(size).astype(dtype)
