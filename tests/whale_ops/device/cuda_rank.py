"""One rank of test_cuda.py: `python -m tests.whale_ops.device.cuda_rank LIBRARY TRANSPORT RANK SIZE DEVICE FD`.

Needs no TensorFlow and no MPI: the ranks meet through a socket (file descriptor FD) whose other end the test holds.
"""

from __future__ import annotations

import ctypes
import socket
import sys

import ml_dtypes
import numpy as np

from whale_ops._native import DTYPES, REDUCTIONS

BUFFER_BYTES = 1 << 20  # less than the tensors have: they are reduced in parts
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
)


def dtype_of(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def inputs(rank: int, case: int) -> list[np.ndarray]:
    """Small whole numbers: exact in every dtype, whatever the order of additions."""
    dtype = dtype_of(CASES[case][0])
    generator = np.random.default_rng([rank, case])
    return [generator.integers(-4, 5, n).astype(dtype) for n in COUNTS]


def expected(size: int, case: int) -> list[np.ndarray]:
    dtype, _, reduction, scale = CASES[case]
    function = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}[reduction]
    ranks = [[tensor.astype(np.float64) for tensor in inputs(rank, case)] for rank in range(size)]
    return [(function.reduce(tensors) * scale).astype(dtype_of(dtype)) for tensors in zip(*ranks)]


def main() -> None:
    path, transport = sys.argv[1:3]
    rank, size, device, descriptor = map(int, sys.argv[3:])
    library, meeting = ctypes.CDLL(path), socket.socket(fileno=descriptor)
    library.whale_cuda_last_error.restype = ctypes.c_char_p

    @GATHER
    def gather(mine: int, count: int, everybody: int) -> int:
        meeting.sendall(ctypes.string_at(mine, count))
        data = b""
        while len(data) < count * size:
            part = meeting.recv(count * size - len(data))
            if not part:
                return 1
            data += part
        ctypes.memmove(everybody, data, len(data))
        return 0

    def check(code: int) -> None:
        if code != 0:
            raise SystemExit(f"rank {rank}: {library.whale_cuda_last_error().decode()}")

    handle = ctypes.c_void_p()
    limit = ctypes.c_size_t(BUFFER_BYTES)
    check(library.whale_cuda_open(transport.encode(), rank, size, device, limit, gather, ctypes.byref(handle)))
    for _ in range(3):  # buffers and events are used again
        for case, (dtype, wire, reduction, scale) in enumerate(CASES):
            tensors = inputs(rank, case)
            addresses = (ctypes.c_void_p * len(tensors))(*(tensor.ctypes.data for tensor in tensors))
            counts = (ctypes.c_int64 * len(tensors))(*(tensor.size for tensor in tensors))
            numbers = (len(tensors), DTYPES[dtype], tensors[0].itemsize, DTYPES[wire], REDUCTIONS[reduction])
            check(library.whale_cuda_all_reduce(handle, addresses, counts, *numbers, ctypes.c_float(scale)))
            for got, wanted in zip(tensors, expected(size, case)):
                np.testing.assert_array_equal(got, wanted, f"rank {rank}: {CASES[case]}")
    library.whale_cuda_close(handle)
    print(f"rank {rank}: all right", flush=True)


if __name__ == "__main__":
    main()
