"""Kernel times: limits, monotony, and the shapes from which the constants come."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_model import hardware
from cost_model.kernels.compute import (
    compute_slowdown,
    find_rates,
    load_s,
    matmul_flops,
    matmul_s,
    streaming_s,
    update_bytes,
)
from whale.errors import ClusterError

A100 = find_rates(hardware.find_device("a100-sxm-80gb"), "float16")
SIZES = st.integers(1, 20_000)


def tflops(device: str, dtype: str, m: int, n: int, k: int) -> float:
    return matmul_flops(m, n, k) / matmul_s(find_rates(hardware.find_device(device), dtype), m, n, k) / 1e12


@pytest.mark.parametrize(
    ("device", "dtype", "m", "n", "k", "measured"),
    [
        # S. Bekman, github.com/stas00/ml-engineering, compute/accelerator; these set the constants: a test of form.
        ("a100-sxm-80gb", "bfloat16", 1024, 10240, 5120, 271.2),
        ("a100-sxm-80gb", "bfloat16", 6912, 2048, 16384, 267.9),
        ("h200", "bfloat16", 1536, 2816, 10240, 746.0),
        ("h200", "float8", 1536, 2816, 10240, 1337.0),
    ],
)
def test_measured_products(device: str, dtype: str, m: int, n: int, k: int, measured: float) -> None:
    assert tflops(device, dtype, m, n, k) == pytest.approx(measured, rel=0.05)


@given(SIZES, SIZES, SIZES)
def test_a_product_is_never_faster_than_arithmetic_or_memory(m: int, n: int, k: int) -> None:
    seconds = matmul_s(A100, m, n, k)
    assert seconds >= matmul_flops(m, n, k) / 312e12
    assert seconds >= 2 * (m * k + k * n + m * n) / 2039e9
    assert matmul_s(A100, m, n, k, 2) >= seconds


@given(SIZES, SIZES)
def test_a_longer_inner_dimension_is_never_faster(m: int, k: int) -> None:
    # Not so for m and n: one more tile may let the work be divided better.
    assert matmul_s(A100, m, 512, 2 * k) >= 0.999 * matmul_s(A100, m, 512, k)


def test_a_last_wave_of_few_tiles_wastes_time() -> None:
    full, one_more = matmul_s(A100, 256 * 108, 128, 65536), matmul_s(A100, 256 * 109, 128, 65536)
    assert (
        1.03 < one_more / full < 2.0
    )  # smaller tiles, or a split of the inner dimension, save a part of the second wave


def test_a_share_of_a_device_is_slower_and_small_kernels_have_a_floor() -> None:
    half = find_rates(hardware.find_device("a100-sxm-80gb"), "float16", share=0.5)
    assert matmul_s(half, 8192, 8192, 8192) == pytest.approx(2 * matmul_s(A100, 8192, 8192, 8192), rel=0.1)
    assert streaming_s(A100, 0) == pytest.approx(2.5e-6)
    with pytest.raises(ClusterError, match="does not compute in float8"):
        find_rates(hardware.find_device("a100-sxm-80gb"), "float8")


def test_the_slowest_of_many() -> None:
    assert compute_slowdown(1, 0.015) == 1.0
    paces = [compute_slowdown(n, 0.015) for n in (2, 8, 64, 512, 4096)]
    assert paces == sorted(paces)
    # Mean of the largest of eight normal values: 1.4236 standard deviations (tables of order statistics).
    assert compute_slowdown(8, 1.0) - 1 == pytest.approx(1.4236, abs=0.02)


def test_update_traffic() -> None:
    assert [update_bytes(name) for name in ("sgd", "momentum", "adam")] == [12, 20, 28]


def test_loading_is_as_slow_as_storage_or_workers() -> None:
    assert load_s(1e6, 100, 1e9, work_s=1e-3, workers=4) == pytest.approx(0.1)
    assert load_s(1e6, 100, 1e9, work_s=1e-2, workers=4) == pytest.approx(0.25)


def test_a_tile_begins_and_ends_in_as_long_in_every_dtype() -> None:
    """Loses little of a long inner dimension, and of a short one twice as much in float8, which is twice as fast."""
    h100 = hardware.find_device("h100-sxm-80gb")
    half, eighth = find_rates(h100, "bfloat16"), find_rates(h100, "float8")
    assert eighth.fill_k == pytest.approx(2 * half.fill_k, rel=1e-3)
    assert find_rates(h100, "tf32").fill_k == pytest.approx(half.fill_k / 2, rel=1e-3)
    lost = [matmul_s(on, 8192, 8192, 512) / matmul_s(on, 8192, 8192, 16384) * 32 for on in (half, eighth)]
    assert lost[1] - 1 > 1.7 * (lost[0] - 1) > 0.3
    cpu = next(one for one in hardware.load_devices().values() if one.kind == "cpu")
    assert len({find_rates(cpu, dtype).fill_k for dtype in cpu.peak_tflops}) == 1


@pytest.mark.parametrize(("name", "lost"), [("h100-sxm-80gb", 16 / 132), ("tpu-v6e", 0.0), ("gaudi3", 0.0)])
def test_collectives_take_units_from_kernels_where_these_run_them(name: str, lost: float) -> None:
    device = hardware.find_device(name)
    assert find_rates(device, "bfloat16").lost_units == pytest.approx(lost)
    assert find_rates(device, "bfloat16", share=0.5).lost_units == pytest.approx(2 * lost)
