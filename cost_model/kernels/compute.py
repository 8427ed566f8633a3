"""Computes the seconds of one kernel on one device: a roofline with size-dependent efficiency.

A matrix product is computed in tiles of its result, one per multiprocessor at a time, so the last wave of tiles may
leave multiprocessors idle, and a tile has a start and an end outside its main loop; see NVIDIA, "Matrix Multiplication
Background User's Guide" (tile and wave quantisation). Other kernels stream their operands through memory once.

Decision: 0201, 0202.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

from cost_model.hardware import AttentionKernel, Device, Efficiency, load_efficiencies

# Output tiles that vendors' libraries have (CUTLASS and cuBLAS on Ampere and Hopper), largest first.
TILES = ((256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64))
# A tile of m x n reads m + n operands per m n multiply-adds from on-chip memory. Slope by which the main loop slows
# with that ratio, against 256 x 128: 128 x 128 runs at 0.95 of it, 64 x 64 at 0.79 (same guide, figure "tile
# efficiency").
TILE_SLOPE = 14.0
LEAST_TRAFFIC = 1.0 / TILES[0][0] + 1.0 / TILES[0][1]
# The inner dimension may be divided over several multiprocessors; partial results are added in float32 through memory.
SPLITS = (1, 2, 4, 8)
LEAST_K = 256  # least part of the inner dimension that a multiprocessor gets if it is divided
MANY_RANKS = 8  # larger numbers of ranks are rounded
MOST_WAVES = 2  # products with more waves of tiles do not have their inner dimension divided
# Multiprocessors that run a collective's channels instead of the kernels beside it (NCCL: 16 to 24 channels with one
# block each between the GPUs of a host; src/graph/connect.cc).
CHANNELS = 16
SIZE_BYTES = {"float64": 8, "float32": 4, "tf32": 4, "float16": 2, "bfloat16": 2, "float8": 1, "float4": 0.5, "int8": 1}


@dataclass(frozen=True, slots=True)
class Rates:
    """Holds what one device (or a share of it) reaches for one dtype.

    Attributes:
        units: number of multiprocessors or cores.
        matmul_flops_per_s: FLOP/s of large matrix products.
        fill_k: steps of the inner dimension that a tile's start and end are worth.
        memory_bytes_per_s: bytes/s of streaming kernels.
        kernel_s: seconds that each kernel takes at least.
        attention_flops_per_s: FLOP/s of fused attention on long sequences.
        attention_ramp: sequence length at which fused attention reaches half of that.
        element_bytes: bytes of an element.
        lost_units: fraction of `units` that a collective takes from the kernels beside it.
    """

    units: int
    matmul_flops_per_s: float
    fill_k: float
    memory_bytes_per_s: float
    kernel_s: float
    attention_flops_per_s: float
    attention_ramp: float
    element_bytes: float
    lost_units: float = 0.0


@lru_cache(maxsize=65536)
def round_ranks(ranks: int) -> int:
    """Returns a rounded number of ranks, so that costs of the slowest rank can be cached: above 8, four values per
    doubling.

    The slowest of the rounded number differs by less than 0.1 % from that of the exact number. A search looks at
    thousands of numbers, and would otherwise compute all costs for each of them.
    """
    return ranks if ranks <= MANY_RANKS else round(2 ** (round(4 * math.log2(ranks)) / 4))


@lru_cache(maxsize=1024)
def compute_slowdown(ranks: int, variation: float) -> float:
    """Returns how much slower the slowest of `ranks` equal devices is than the mean one, as a factor; the others wait
    for it.

    The mean of the largest of n normal values, by Blom's approximation (G. Blom, "Statistical estimates and transformed
    beta-variables", 1958).

    Args:
        variation: standard deviation of speed between devices, relative.
    """
    if ranks == 1:
        return 1.0
    return 1.0 + variation * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


def find_rates(
    device: Device,
    dtype: str,
    share: float = 1.0,
    ranks: int = 1,
    attention: AttentionKernel = "flash-1",
    slower: float = 1.0,
) -> Rates:
    """Returns the rates of a share of a device for a dtype.

    Args:
        share: fraction of the device that is used.
        ranks: number of ranks that wait for each other; rates are those of the slowest.
        attention: the kernel that computes fused attention.
        slower: factor by which kernels take longer than the device's efficiency curve says.
    """
    curve: Efficiency = load_efficiencies()[device.efficiency]
    peak = device.peak_flops_per_s(dtype) / compute_slowdown(ranks, curve.variation) / slower
    units = max(1, round(device.units * share))
    return Rates(
        units=units,
        matmul_flops_per_s=peak * curve.find_matmul_fraction(dtype) * share,
        fill_k=curve.matmul_fill_k * _step_rate(device, dtype),
        memory_bytes_per_s=device.memory_bytes_per_s * curve.memory_fraction * share / slower,
        kernel_s=curve.kernel_us * 1e-6,
        attention_flops_per_s=peak * curve.find_attention_fraction(attention) * share,
        attention_ramp=curve.attention_ramp,
        element_bytes=SIZE_BYTES[dtype],
        lost_units=_count_channels(device) / units,
    )


def _count_channels(device: Device) -> float:
    """Returns the number of a device's units that a collective takes from the kernels beside it.

    Accelerators other than GPUs have separate engines for communication; a processor has one thread that sends.
    """
    return {"gpu": min(CHANNELS, device.units), "cpu": 1, "accelerator": 0}[device.kind]


def _step_rate(device: Device, dtype: str) -> float:
    """Returns how much faster matrix products are in `dtype` than in 16-bit floats, to correct
    `Efficiency.matmul_fill_k`.

    Computing a tile of the result has a fixed time at its start and end, which `matmul_fill_k` expresses as a number of
    steps of the inner dimension, in 16-bit floats. That time is about the same in every dtype, as results and partial
    sums are no shorter in float8, so it is worth more steps of a faster dtype. Returns 1 for processors, whose curve
    already counts steps of the dtype that they compute in.
    """
    if device.kind == "cpu":
        return 1.0
    half = max(device.peak_tflops.get(name, 0.0) for name in ("bfloat16", "float16"))
    return device.peak_tflops[dtype] / half if half else 1.0


def matmul_flops(m: int, n: int, k: int, batch: int = 1) -> float:
    """Counts the FLOPs of `batch` products [m, k] x [k, n]: two for each multiply-add."""
    return 2.0 * m * n * k * batch


@lru_cache(maxsize=65536)
def _least_tile_flops(units: int, fill_k: float, m: int, n: int, k: int, batch: int) -> tuple[tuple[int, float], ...]:
    """Returns (split, FLOPs) for each possible split of the inner dimension, with the tile size that is fastest for it.

    FLOPs are those of the multiprocessor with most tiles, times the slowdown of small tiles.
    """
    least: dict[int, float] = {}
    for rows, columns in TILES:
        slowdown = 1.0 + TILE_SLOPE * max(0.0, 1.0 / rows + 1.0 / columns - LEAST_TRAFFIC)
        tiles = -(-m // rows) * -(-n // columns) * batch
        for split in SPLITS:
            if split > 1 and (k < LEAST_K * split or tiles * split > MOST_WAVES * units):
                break
            waves = -(-tiles * split // units)
            flops = waves * 2.0 * rows * columns * (k / split + fill_k) * slowdown
            least[split] = min(flops, least.get(split, float("inf")))
    return tuple(least.items())


@lru_cache(maxsize=65536)
def matmul_s(on: Rates, m: int, n: int, k: int, batch: int = 1) -> float:
    """Returns the seconds of `batch` products [m, k] x [k, n], by the fastest tile size and split.

    At least the time in which operands and result go through memory.
    """
    per_unit, rate, e = on.matmul_flops_per_s / on.units, on.memory_bytes_per_s, on.element_bytes
    best = float("inf")
    for split, flops in _least_tile_flops(on.units, on.fill_k, m, n, k, batch):
        # Partial results are written and read again.
        partial_s = 2.0 * SIZE_BYTES["float32"] * m * n * batch * split / rate if split > 1 else 0.0
        best = min(best, flops / per_unit + partial_s)
    return max(best, e * batch * (m * k + k * n + m * n) / rate) + on.kernel_s


def streaming_s(on: Rates, moved_bytes: float) -> float:
    """Returns the seconds of a kernel bound by memory that moves `moved_bytes` (pointwise, normalisation, reduction,
    update).
    """
    return moved_bytes / on.memory_bytes_per_s + on.kernel_s


def attention_s(on: Rates, flops: float, sequence: int) -> float:
    """Returns the seconds of a fused attention kernel; its efficiency grows with the sequence length.

    Source: Dao, "FlashAttention-2", 2023, figure 4.
    """
    return flops / (on.attention_flops_per_s * sequence / (sequence + on.attention_ramp)) + on.kernel_s


def update_bytes(optimizer: str, parameter_bytes: int = 4) -> float:
    """Returns the bytes per parameter that a fused optimizer update reads and writes, if all is in one precision.

    SGD reads gradient and parameter and writes the parameter; momentum also reads and writes one state, Adam two.
    """
    states = {"sgd": 0, "momentum": 1, "adam": 2}[optimizer]
    return (3 + 2 * states) * parameter_bytes


def load_s(sample_bytes: float, samples: int, bytes_per_s: float, work_s: float, workers: int) -> float:
    """Returns the seconds to load a batch: reading from storage or preparing by `workers`, whichever takes longer.

    Args:
        work_s: seconds in which one worker prepares a sample.
    """
    return max(sample_bytes * samples / bytes_per_s, work_s * samples / max(1, workers))
