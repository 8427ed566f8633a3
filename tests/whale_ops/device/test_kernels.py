"""The kernels for GPUs, compiled as host code by a small header: every element, against numpy."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from whale_ops import build
from whale_ops._native import DTYPES, REDUCTIONS

ROOT = Path(__file__).resolve().parents[3]
HERE = ROOT / "tests/whale_ops/device/cuda_as_host"
COUNTS = [1, 0, 700, 3, *[5] * 140]  # more tensors than one launch takes, and more elements than a block has threads
PAIRS = [("float32", "float32"), ("float32", "float16"), ("float32", "bfloat16"), ("float16", "float16")]
PAIRS += [("bfloat16", "bfloat16"), ("float64", "float64")]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    output = tmp_path_factory.mktemp("kernels") / "libhost_kernels.so"
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall", f"-I{HERE}", f"-I{ROOT}"]
    core = [f"-L{build.IN_PLACE}", f"-l:{build.CORE_NAME}", f"-Wl,-rpath,{build.IN_PLACE}"]
    subprocess.run([*build.find_compiler(), *flags, str(HERE / "kernels.cpp"), "-o", str(output), *core], check=True)
    return ctypes.CDLL(str(output))


def dtype_of(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def random(count: int, dtype: str, seed: int) -> np.ndarray:
    return (10 * np.random.default_rng(seed).standard_normal(count)).astype(dtype_of(dtype))


def addresses(arrays: Sequence[np.ndarray]) -> ctypes.Array:
    return (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))


def call(function: object, tensors: list[np.ndarray], tensor: str, buffer: np.ndarray, wire: str, scale: float) -> int:
    counts = (ctypes.c_int64 * len(tensors))(*(t.size for t in tensors))
    placed = ctypes.c_void_p(buffer.ctypes.data)
    size, dtypes = len(tensors), (DTYPES[tensor], DTYPES[wire])
    return function(addresses(tensors), counts, size, dtypes[0], placed, dtypes[1], ctypes.c_float(scale))  # type: ignore[operator]


@pytest.mark.parametrize(("tensor", "wire"), PAIRS)
@pytest.mark.parametrize("scale", [1.0, 0.375])
def test_tensors_are_packed_and_unpacked(kernels: ctypes.CDLL, tensor: str, wire: str, scale: float) -> None:
    wide = np.float64 if tensor == "float64" else np.float32
    tensors = [random(n, tensor, i) for i, n in enumerate(COUNTS)]
    buffer = np.zeros(sum(COUNTS), dtype_of(wire))
    assert call(kernels.host_pack, tensors, tensor, buffer, wire, scale) == 0
    expected = (np.concatenate(tensors).astype(wide) * wide(scale)).astype(dtype_of(wire))
    np.testing.assert_array_equal(buffer, expected)
    taken = [np.zeros_like(t) for t in tensors]
    assert call(kernels.host_unpack, taken, tensor, buffer, wire, scale) == 0
    np.testing.assert_array_equal(np.concatenate(taken), (expected.astype(wide) * wide(scale)).astype(dtype_of(tensor)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("reduction", ["sum", "prod", "min", "max"])
def test_buffers_of_ranks_are_reduced_in_order(kernels: ctypes.CDLL, dtype: str, reduction: str) -> None:
    sources = [random(3000, dtype, seed) for seed in range(3)]
    sources[1][7] = np.nan
    result = np.zeros_like(sources[0])
    numbers = ctypes.c_int64(result.size), DTYPES[dtype], REDUCTIONS[reduction]
    assert kernels.host_reduce(addresses(sources), 3, ctypes.c_void_p(result.ctypes.data), *numbers) == 0
    function = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}[reduction]
    wide = [s.astype(np.float64 if dtype == "float64" else np.float32) for s in sources]
    expected = function(function(wide[0], wide[1]), wide[2]).astype(result.dtype)
    np.testing.assert_array_equal(result.astype(np.float64), expected.astype(np.float64))
    assert np.isnan(result[7].astype(np.float64))


def test_pairs_that_no_kernel_has_are_refused(kernels: ctypes.CDLL) -> None:
    one = np.zeros(4, np.float32)
    assert call(kernels.host_pack, [one], "float64", one, "float32", 1.0) != 0
    assert call(kernels.host_pack, [one], "int32", one, "int32", 1.0) != 0
