"""One rank of test_cuda.py, which runs this module with LIBRARY IMAGE TRANSPORT RANK SIZE DEVICE FD [MODE].

IMAGE is a file with the kernels' machine code for the GPU. Needs no TensorFlow and no MPI: the ranks meet through a
socket (file descriptor FD) whose other end the test holds. MODE is one of

* ``short``: every exchange once, as for compute-sanitizer;
* ``buckets``: many tensors in all-reduces of several sizes, and the first rank prints seconds of all of them by the
  bytes of one;
* ``rates``: all-reduces are measured, and the first rank prints a line of JSON: seconds by bytes;
* ``lost``: all-reduces until one fails; the last rank stops taking part after the third, and says so before. What the
  others say of it is printed with the time;
* ``abandon``: all-reduces of two groups at once, which the first rank gives up since the others are late.
"""

from __future__ import annotations

import ctypes
import json
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from whale_ops import device_library
from whale_ops._native import DTYPES, KINDS, REDUCTIONS

BUFFER_BYTES = 1 << 20  # less than the tensors have: they travel in parts
BUCKETED, BUCKETED_BYTES = 160, 100 << 20
BUCKETS_BYTES = [4 << 20, 16 << 20, 32 << 20, 64 << 20]
RATED_BYTES = [1 << 16, 1 << 20, 1 << 24, 1 << 26]
GATHER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
COUNTS = (1, 0, 1000, 257, 300_001)  # of the tensors that travel together
# dtype, dtype on the wire, reduction, scale
CASES = (
    ("float32", "float32", "sum", 1.0),
    ("float32", "float16", "sum", 0.25),
    ("float32", "bfloat16", "sum", 1.0),
    ("float16", "float16", "max", 1.0),
    ("bfloat16", "bfloat16", "sum", 0.5),
    ("float64", "float64", "prod", 1.0),
    ("float64", "float64", "min", 1.0),
    ("float32", "float16", "sum", 1.0),
)
LARGE, TIMES = len(CASES) - 1, 8192  # of which two ranks' sum is too large for float16
# Kinds and dtypes of the others; the parts have the same size on all ranks, or not.
OTHERS = [
    (kind, dtype, even)
    for kind, dtypes in {
        "AllGather": ("float32", "bool"),
        "ReduceScatter": ("float64", "bfloat16"),
        "AllToAll": ("float32", "int64"),
        "Broadcast": ("float16", "int32"),
        "Send": ("float64", "uint8"),
    }.items()
    for dtype in dtypes
    for even in (True, False)
]


class Operation(ctypes.Structure):
    """WhaleCudaOperation of whale_ops/gpu/c_api.cc."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("kind", "root", "dtype", "wire", "reduction", "repeats")),
        ("scale", ctypes.c_float),
        ("backwards", ctypes.c_int32),
        *((name, ctypes.c_int64) for name in ("element_bytes", "largest", "tensors_size", "counts_size")),
        ("inputs", ctypes.POINTER(ctypes.c_void_p)),
        ("outputs", ctypes.POINTER(ctypes.c_void_p)),
        *((name, ctypes.POINTER(ctypes.c_int64)) for name in ("input_counts", "output_counts", "counts")),
        ("recv_counts", ctypes.POINTER(ctypes.c_int64)),
        ("limit_s", ctypes.c_double),
        ("seconds", ctypes.c_double),
    ]


def dtype_of(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def values(count: int, dtype: str, *seed: int) -> np.ndarray:
    """Small whole numbers: exact in every dtype, whatever the order of additions."""
    low = 0 if np.dtype(dtype_of(dtype)).kind in "ub" else -4
    return np.random.default_rng(seed).integers(low, 5, count).astype(dtype_of(dtype))


def inputs(rank: int, case: int) -> list[np.ndarray]:
    times = TIMES if case == LARGE else 1
    return [times * values(n, CASES[case][0], rank, case, i) for i, n in enumerate(COUNTS)]


def expected(size: int, case: int) -> list[np.ndarray]:
    dtype, _, reduction, scale = CASES[case]
    function = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}[reduction]
    ranks = [[tensor.astype(np.float64) for tensor in inputs(rank, case)] for rank in range(size)]
    return [(function.reduce(tensors) * scale).astype(dtype_of(dtype)) for tensors in zip(*ranks)]


def operation(
    kind: str,
    dtype: str,
    tensors: Sequence[np.ndarray],
    results: Sequence[np.ndarray],
    counts: Sequence[int] = (),
    recv_counts: Sequence[int] = (),
    wire: str = "",
    reduction: str = "sum",
    scale: float = 1.0,
    root: int = 0,
    largest: int = 0,
    repeats: int = 1,
) -> Operation:
    """Arrays must outlive what is made of them."""

    def numbers(of: Sequence[int]) -> ctypes.Array:
        return (ctypes.c_int64 * max(1, len(of)))(*of)

    def addresses(of: Sequence[np.ndarray]) -> ctypes.Array:
        return (ctypes.c_void_p * len(of))(*(array.ctypes.data for array in of))

    return Operation(
        KINDS[kind],
        root,
        DTYPES[dtype],
        DTYPES[wire or dtype],
        REDUCTIONS[reduction],
        repeats,
        scale,
        0,
        dtype_of(dtype).itemsize,
        largest,
        len(tensors),
        len(counts),
        addresses(tensors),
        addresses(results),
        numbers([t.size for t in tensors]),
        numbers([t.size for t in results]),
        numbers(counts),
        numbers(recv_counts or [0] * len(counts)),
    )


def other(kind: str, dtype: str, even: bool, rank: int, size: int) -> tuple[Operation, np.ndarray, np.ndarray, object]:
    """(one of OTHERS on a rank, what it fills, what must be in it, what it refers to)."""
    counts = [200_003 if even else 150_000 * (r % 3) + r for r in range(size)]
    offsets = np.concatenate([[0], np.cumsum(counts)])
    found: dict[str, Any]
    if kind == "AllGather":
        ranks = [values(n, dtype, r) for r, n in enumerate(counts)]
        mine, wanted, found = ranks[rank], np.concatenate(ranks), {"counts": counts}
    elif kind == "ReduceScatter":
        whole = [values(int(offsets[-1]), dtype, r) for r in range(size)]
        total = np.add.reduce([w.astype(np.float64) for w in whole]).astype(dtype_of(dtype))
        mine, wanted, found = whole[rank], total[offsets[rank] : offsets[rank + 1]], {"counts": counts}
    elif kind == "AllToAll":
        matrix = [[counts[(s + t) % size] for t in range(size)] for s in range(size)]
        parts = [[values(n, dtype, s, t) for t, n in enumerate(row)] for s, row in enumerate(matrix)]
        mine, wanted = np.concatenate(parts[rank]), np.concatenate([row[rank] for row in parts])
        found = {"counts": matrix[rank], "recv_counts": [row[rank] for row in matrix], "largest": max(counts)}
    elif kind == "Broadcast":
        root = size - 1
        wanted = values(counts[0] + 300_000, dtype, root)
        mine, found = wanted if rank == root else np.zeros_like(wanted), {"root": root}
    else:  # from the first to the second
        wanted = values(300_000 if even else 5, dtype, 0)
        mine, wanted = (wanted, wanted[:0]) if rank == 0 else (wanted[:0], wanted)
        kind, found = ("Send", {}) if rank == 0 else ("Recv", {})
    got = np.zeros_like(wanted)
    tensors = np.ascontiguousarray(mine)
    return operation(kind, dtype, [tensors], [got], **found), got, wanted, tensors


class Rank:
    """One rank with a GPU, that meets the others through a socket."""

    def __init__(self, argv: Sequence[str]) -> None:
        path, image, transport = argv[:3]
        self.rank, self.size, device, descriptor = map(int, argv[3:7])
        self.mode = argv[7] if argv[7:] else ""
        if transport == "nccl":
            device_library.load_nccl()
        device_library.load_kernels(path, device, Path(image).read_bytes())
        self._library, self._meeting = ctypes.CDLL(path), socket.socket(fileno=descriptor)
        self._library.whale_cuda_last_error.restype = ctypes.c_char_p
        self._gather = GATHER(self._meet)  # as long as the library may call it
        self._handle = ctypes.c_void_p()
        limit = ctypes.c_size_t(max(RATED_BYTES) if self.mode in ("rates", "buckets") else BUFFER_BYTES)
        place = transport.encode(), self.rank, self.size, device, limit, self._gather
        self._check(self._library.whale_cuda_open(*place, ctypes.byref(self._handle)))

    def _meet(self, mine: int, count: int, everybody: int) -> int:
        try:
            self._meeting.sendall(ctypes.string_at(mine, count))
            data = b""
            while len(data) < count * self.size:
                part = self._meeting.recv(count * self.size - len(data))
                if not part:
                    return 1
                data += part
        except OSError:
            return 1
        ctypes.memmove(everybody, data, len(data))
        return 0

    def _check(self, code: int) -> None:
        if code != 0:
            raise RuntimeError(self._library.whale_cuda_last_error().decode())

    def run(self, one: Operation) -> None:
        self._check(self._library.whale_cuda_run(self._handle, ctypes.byref(one)))

    def close(self) -> None:
        self._library.whale_cuda_close(self._handle)

    def check_all(self, repeats: int) -> None:
        """Every kind of exchange against NumPy."""
        for _ in range(repeats):  # buffers and events are used again
            for backwards in (0, 1):
                for case, (dtype, wire, reduction, scale) in enumerate(CASES):
                    tensors = inputs(self.rank, case)
                    results = [np.zeros_like(tensor) for tensor in tensors]
                    one = operation("AllReduce", dtype, tensors, results, wire=wire, reduction=reduction, scale=scale)
                    one.backwards = backwards
                    self.run(one)
                    for got, wanted in zip(results, expected(self.size, case)):
                        np.testing.assert_array_equal(got, wanted, f"rank {self.rank}: {CASES[case]}")
            for kind, dtype, even in OTHERS:
                if kind == "Send" and self.size != 2:
                    continue
                one, result, wanted, _held = other(kind, dtype, even, self.rank, self.size)
                self.run(one)
                np.testing.assert_array_equal(result, wanted, f"rank {self.rank}: {kind} of {dtype}, even: {even}")
        print(f"rank {self.rank}: all right", flush=True)

    def rates(self) -> None:
        seconds = {}
        for size_bytes in RATED_BYTES:
            tensor, result = np.ones((2, size_bytes // 4), np.float32)
            for repeats in (3, 20):  # the first ones make what the others use again
                one = operation("AllReduce", "float32", [tensor], [result], repeats=repeats)
                self.run(one)
            seconds[size_bytes] = one.seconds
        if self.rank == 0:
            print(json.dumps(seconds), flush=True)

    def buckets(self) -> None:
        """Tensors of BUCKETED_BYTES in all, as gradients are, in groups of at most so many bytes."""
        count = BUCKETED_BYTES // BUCKETED // 4
        seconds = {}
        for bucket_bytes in BUCKETS_BYTES:
            together = max(1, bucket_bytes // (4 * count))
            for _ in range(2):  # the first time makes what the second uses again
                seconds[bucket_bytes] = 0.0
                for begin in range(0, BUCKETED, together):
                    size = min(together, BUCKETED - begin)
                    tensors, results = np.ones((2, size, count), np.float32)
                    one = operation("AllReduce", "float32", [*tensors], [*results])
                    self.run(one)
                    seconds[bucket_bytes] += one.seconds
        if self.rank == 0:
            print(json.dumps(seconds), flush=True)

    def lost(self) -> None:
        """All-reduces until a rank is gone."""
        tensor, result = np.ones((2, BUFFER_BYTES), np.float32)
        for number in range(1000):
            if number == 3 and self.rank == self.size - 1:
                print(f"rank {self.rank}: ready {time.time()}", flush=True)
                time.sleep(60)  # the test ends or freezes it
            one = operation("AllReduce", "float32", [tensor], [result])
            one.limit_s = 5.0  # NCCL's kernels wait for ever
            try:
                self.run(one)
            except RuntimeError as error:
                print(f"rank {self.rank}: {time.time()} {error}", flush=True)
                return

    def abandon(self) -> None:
        """The first rank gives up all-reduces of two groups, for which the others never come."""
        tensor, result = np.ones((2, 1000), np.float32)
        for backwards in (0, 1):  # a communicator for each
            one = operation("AllReduce", "float32", [tensor], [result])
            one.backwards = backwards
            self.run(one)
        if self.rank > 0:
            print(f"rank {self.rank}: late", flush=True)
            time.sleep(60)  # the test ends it
            return
        one.limit_s, start_s = 1.0, time.perf_counter()
        try:
            self.run(one)
        except RuntimeError as error:
            print(f"rank 0: after {time.perf_counter() - start_s:.3f} s: {error}", flush=True)


def main() -> None:
    rank = Rank(sys.argv[1:])
    modes = {
        "buckets": rank.buckets,
        "rates": rank.rates,
        "lost": rank.lost,
        "abandon": rank.abandon,
        "short": lambda: rank.check_all(1),
    }
    modes.get(rank.mode, lambda: rank.check_all(3))()
    rank.close()


if __name__ == "__main__":
    main()
