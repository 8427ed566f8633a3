"""Kernels for GPUs against NumPy: ``python -m tests.whale_ops.gpu.cuda_kernels LIBRARY IMAGE [short|rates]``.

IMAGE is a file with machine code for the first GPU. Needs no TensorFlow. Prints how many results were compared, every
element of each; ``short``: fewer and smaller ones, as for compute-sanitizer. ``rates``: GB/s that the kernels read and
write, as JSON, instead.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

from whale_ops import device_library
from whale_ops._native import DTYPES, REDUCTIONS

# More tensors than one launch takes, more elements than a block has threads, lengths around those of 16 bytes.
COUNTS = [1, 0, 700, 3, 4096, *[5, 8] * 70, 1031]
LARGE = 300_001  # more than all blocks take at once
PAIRS = [("float32", "float32"), ("float32", "float16"), ("float32", "bfloat16"), ("float16", "float16")]
PAIRS += [("bfloat16", "bfloat16"), ("float64", "float64")]
FLOATS = ("float16", "bfloat16", "float32", "float64")
FUNCTIONS = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}
_RATED_BYTES = 1 << 28


def dtype_of(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def wide_of(name: str) -> type:
    return np.float64 if name == "float64" else np.float32


def random(count: int, dtype: str, seed: int) -> np.ndarray:
    """Numbers of all sizes, with NaN, infinities and subnormal ones among them."""
    draw = np.random.default_rng(seed)
    numbers = draw.standard_normal(count) * 10.0 ** draw.integers(-9, 5, count)
    special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 65519.9, 65520.1, 1e-40])
    places = draw.random(count) < 0.01
    numbers[places] = draw.choice(special, places.sum())
    with np.errstate(over="ignore"):
        return numbers.astype(dtype_of(dtype))


def addresses(arrays: Sequence[np.ndarray]) -> ctypes.Array:
    return (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))


class Kernels:
    """The library's kernels, on arrays of the host."""

    def __init__(self, library: str, image: bytes) -> None:
        self._library = ctypes.CDLL(library)
        self._library.whale_cuda_last_error.restype = ctypes.c_char_p
        self.seconds = 0.0  # of one of the last repeats
        device_library.load_kernels(library, 0, image)

    def copy(
        self,
        packs: bool,
        tensors: list[np.ndarray],
        tensor: str,
        buffer: np.ndarray,
        wire: str,
        scale: float,
        repeats: int = 1,
    ) -> None:
        counts = (ctypes.c_int64 * len(tensors))(*(t.size for t in tensors))
        arguments = (0, int(packs), addresses(tensors), counts, len(tensors), DTYPES[tensor])
        placed = ctypes.c_void_p(buffer.ctypes.data)
        self._call("whale_cuda_copy", *arguments, placed, DTYPES[wire], ctypes.c_float(scale), repeats)

    def reduce(
        self, sources: list[np.ndarray], result: np.ndarray, dtype: str, reduction: str, repeats: int = 1
    ) -> None:
        placed, count = ctypes.c_void_p(result.ctypes.data), ctypes.c_int64(result.size)
        arguments = (0, addresses(sources), len(sources), placed, count, DTYPES[dtype], REDUCTIONS[reduction], repeats)
        self._call("whale_cuda_reduce", *arguments)

    def copy_rows(self, rows: np.ndarray, width: int, pitch: int) -> None:
        """Copies rows of so many bytes to the GPU, where they lie so far apart, and back."""
        sizes = (ctypes.c_size_t(one) for one in (width, pitch, rows.nbytes // width))
        if self._library.whale_cuda_rows(0, rows.ctypes.data_as(ctypes.c_void_p), *sizes) != 0:
            raise RuntimeError(self._library.whale_cuda_last_error().decode())

    def _call(self, name: str, *arguments: object) -> None:
        seconds = ctypes.c_double()
        if getattr(self._library, name)(*arguments, ctypes.byref(seconds)) != 0:
            raise RuntimeError(self._library.whale_cuda_last_error().decode())
        self.seconds = seconds.value


def compare(got: np.ndarray, wanted: np.ndarray, what: str) -> None:
    np.testing.assert_array_equal(got.astype(np.float64), wanted.astype(np.float64), what)


def check_copies(kernels: Kernels, counts: Sequence[int]) -> int:
    compared = 0
    for tensor, wire in PAIRS:
        for scale in (1.0, 0.375):
            tensors = [random(n, tensor, i) for i, n in enumerate(counts)]
            buffer = np.zeros(sum(counts), dtype_of(wire))
            kernels.copy(True, tensors, tensor, buffer, wire, scale)
            wide = wide_of(tensor)
            with np.errstate(over="ignore"):
                packed = (np.concatenate(tensors).astype(wide) * wide(scale)).astype(dtype_of(wire))
                unpacked = (packed.astype(wide) * wide(scale)).astype(dtype_of(tensor))
            compare(buffer, packed, f"pack {tensor} as {wire}, {scale}")
            taken = [np.zeros_like(t) for t in tensors]
            kernels.copy(False, taken, tensor, packed, wire, scale)
            compare(np.concatenate(taken), unpacked, f"unpack {wire} to {tensor}, {scale}")
            compared += 2
    return compared


def check_reductions(kernels: Kernels, counts: Sequence[int]) -> int:
    compared = 0
    for dtype in FLOATS:
        for reduction, function in FUNCTIONS.items():
            for count in counts:
                for size in (1, 2, 3, 64):
                    sources = [random(count, dtype, 100 * size + s) for s in range(size)]
                    result = np.zeros_like(sources[0])
                    kernels.reduce(sources, result, dtype, reduction)
                    total = sources[0].astype(wide_of(dtype))
                    with np.errstate(over="ignore", invalid="ignore"):
                        for source in sources[1:]:
                            total = function(total, source.astype(wide_of(dtype)))
                        compare(result, total.astype(dtype_of(dtype)), f"{reduction} of {size} {dtype}")
                    compared += 1
    return compared


def check_refusals(kernels: Kernels) -> int:
    one = np.zeros(4, np.float32)
    for tensor, wire in (("float64", "float32"), ("int32", "int32")):
        try:
            kernels.copy(True, [one], tensor, one, wire, 1.0)
        except RuntimeError as refused:
            assert "no kernel for GPUs copies" in str(refused), refused
        else:
            raise AssertionError(f"{tensor} was packed as {wire}")
    return 2


def check_rows(kernels: Kernels) -> int:
    """Rows that lie apart in the GPU's memory; those of large tensors farther than the driver copies at once."""
    pitches = (20, 1 << 31)
    for pitch in pitches:
        rows = random(2 * 5, "float32", pitch)
        expected = rows.copy()
        kernels.copy_rows(rows, 5 * 4, pitch)
        compare(rows, expected, f"rows {pitch} bytes apart")
    return len(pitches)


def rates(kernels: Kernels) -> dict[str, float]:
    """GB/s that are read and written together, of the largest tensors."""
    found = {}
    for tensor, wire in PAIRS:
        count = _RATED_BYTES // dtype_of(tensor).itemsize
        tensors, buffer = [random(1 << 16, tensor, 1).repeat(count >> 16)], np.zeros(count, dtype_of(wire))
        moved = count * (dtype_of(tensor).itemsize + dtype_of(wire).itemsize)
        for packs in (True, False):
            kernels.copy(packs, tensors, tensor, buffer, wire, 1.0, repeats=21)
            found[f"{'pack' if packs else 'unpack'} {tensor} as {wire}"] = moved / kernels.seconds * 1e-9
    for dtype in FLOATS:
        count = _RATED_BYTES // dtype_of(dtype).itemsize
        sources = [random(1 << 16, dtype, s).repeat(count >> 16) for s in range(2)]
        kernels.reduce(sources, np.zeros_like(sources[0]), dtype, "sum", repeats=21)
        found[f"sum of 2 {dtype}"] = 3 * _RATED_BYTES / kernels.seconds * 1e-9
    return found


def main() -> None:
    kernels = Kernels(sys.argv[1], Path(sys.argv[2]).read_bytes())
    if sys.argv[3:] == ["rates"]:
        print(json.dumps(rates(kernels)))
        return
    short = sys.argv[3:] == ["short"]
    compared = check_copies(kernels, COUNTS if short else [*COUNTS, LARGE])
    compared += check_reductions(kernels, (5, 700) if short else (1, 5, 8, 700, 4099, LARGE))
    compared += check_refusals(kernels) + check_rows(kernels)
    print(f"{compared} results: all right", flush=True)


if __name__ == "__main__":
    main()
