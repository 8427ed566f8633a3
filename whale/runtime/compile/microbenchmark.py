"""Measures briefly how fast ranks compute, read memory and exchange, on all ranks at the same time, for the search of
`auto_parallel`.

Decision: 0154.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from cost_model.graph.machine import Link, Rates
from whale.distributed.device_exchange import ExchangeOps
from whale.distributed.gpus import await_gpus, has_gpu
from whale.ir.program import Program
from whale.passes.resharding.on_devices import DEVICE_BACKENDS
from whale.planner.graph_search.environment import unequal
from whale.runtime.compile.function_calls import bind_as_step
from whale.runtime.context import Context

# Seconds of the first measurement of products, and half of that of memory streams: long enough to include that a CPU
# quota takes a rank's core away once in 100 ms. Ranks that seem to differ by more than SUSPECT are measured again.
FIRST_S, SUSPECT = 0.2, 1.1
# Unequal ranks whose speeds differ by less than this factor are of one kind: the difference is mostly noise, and
# unequal parts of the work cost more than they gain.
ONE_KIND = 1.15
# Unequal ranks are measured again in rounds, twice at least and as long as they seem to differ. The median of each
# rank's rounds counts.
ROUNDS, ROUND_S = 5, 0.25
ASSUMED_EXCHANGE_S, ASSUMED_BYTES_PER_S = 100e-6, 1e9
# Assumed seconds to start an operation; `whale profile` measures them (`MachineProfile.node_s`).
START_S = 5e-6
# `y + y * 0.5` is two kernels: the product reads and writes y, the sum reads y and the product and writes: 5 arrays.
STREAMED_ARRAYS = 5
# Small exchanges in one measured call, and calls: as many as fit into SMALL_S seconds; if these are fewer than
# LEAST_SMALL_CALLS, one exchange measured before counts.
SMALL_IN_A_CALL, SMALL_CALLS, LEAST_SMALL_CALLS, SMALL_S = 8, 18, 3, 1.0
_SEED = (0, 0)  # for stateless draws, which leave the script's random streams untouched
# On GPUs a call of TensorFlow takes longer on the host than a product on the GPU. So IN_A_CALL products are in a call,
# and grow until a call takes GPU_CALL_S or they have the largest size. Arrays are larger than any cache then.
IN_A_CALL, GPU_CALL_S = 16, 5e-3
FIRST_ROWS, MOST_ROWS = 128, 8192
FIRST_STREAMED, MOST_STREAMED = 1 << 16, 64 << 20
_PRODUCT_DTYPES = ("float16", "bfloat16", "float32", "float64")
# Elements of large exchanges: as many as take LARGE_S by the time of the first one. MOST_ELEMENTS would take 7 s at
# 10 Mbit/s.
FIRST_ELEMENTS, MOST_ELEMENTS, LARGE_S = 1 << 14, 1 << 20, 0.25
# An exchange through the memory of one process reads, adds and writes, on both sides of it.
PASSES_IN_PROCESS = 4


def measure_rates(context: Context, dry: bool, program: Program) -> list[Rates]:
    """Returns the rates of each rank: FLOP/s of matrix products, bytes/s of memory streams, latency and bandwidth of
    exchanges.

    Takes about half a second, on all ranks at the same time; longer if ranks seem unequal, to measure these more
    exactly. Collective between processes, unless ``dry``.

    Args:
      dry: whether the ranks are those of a dry run: this process is measured, and a link of 1 GB/s assumed.
      program: whose variables set the dtype of products and the bytes of streams.
    """
    on_gpu = has_gpu()
    measure = _measured_chains(_product_dtype(context, program)) if on_gpu else measured_calls(program)
    between = context.has_other_processes and not dry
    exchange_s, exchanged, how = ASSUMED_EXCHANGE_S, ASSUMED_BYTES_PER_S, "assumed link of 1 GB/s"
    devices: Link | None = None
    pairs = _together(context, "first", measure, FIRST_S) if between else [measure(FIRST_S)]
    if between:
        host = _link(context, "")
        exchange_s, exchanged, how = host.exchange_s, host.bytes_per_s, f"exchange {_describe(host)}"
        if (backend := context.config["communication.backend"]) in DEVICE_BACKENDS:
            devices = _link(context, backend)
            how += f", through {backend} {_describe(devices)}"
    elif not dry:
        # Ranks of one process exchange through its memory.
        exchanged, how = pairs[0][1] / PASSES_IN_PROCESS, "ranks of one process"

    # Between GPUs exchanges run beside computation; on processors they take the rank's own core.
    exchanges_compute = not on_gpu

    def make_rates(flops_per_s: float, bytes_per_s: float) -> Rates:
        origin = f"measured: {flops_per_s / 1e9:.0f} GFLOP/s, {bytes_per_s / 1e9:.1f} GB/s, {how}"
        return Rates(
            flops_per_s,
            bytes_per_s,
            START_S,
            exchange_s,
            exchanged,
            origin,
            exchanges_compute=exchanges_compute,
            devices=devices,
            packs=not on_gpu,
        )

    if not between:
        return [make_rates(*pairs[0])] * context.planned_size
    rounds: list[list[tuple[float, float]]] = []
    while len(rounds) < ROUNDS and (len(rounds) == 1 or unequal([make_rates(*pair) for pair in pairs], SUSPECT)):
        # Ranks get work in proportion to these figures, which therefore have to be exact.
        rounds.append(_together(context, f"again/{len(rounds)}", measure, ROUND_S))
        pairs = [
            (statistics.median(f for f, _ in rank), statistics.median(m for _, m in rank)) for rank in zip(*rounds)
        ]
    if unequal([make_rates(*pair) for pair in pairs]):
        flops, moved = zip(*pairs)
        return [make_rates(*pair) for pair in zip(average_kinds(flops), average_kinds(moved))]
    # Ranks share the search, so that all have to predict by the same figures.
    return [make_rates(min(f for f, _ in pairs), pairs[0][1])] * len(pairs)


def _product_dtype(context: Context, program: Program) -> str:
    """Returns the dtype to measure matrix products in: the configured compute dtype, or that of the program's largest
    variable.
    """
    weights = [v.type for v in program.variables if v.type.is_static and v.type.dtype in _PRODUCT_DTYPES]
    largest = max(weights, key=lambda t: t.bytes).dtype if weights else "float32"
    return context.config["precision.compute_dtype"] or largest


# (FLOP/s of products, bytes/s of streams), measured for so many seconds
_Measured = Callable[[float], tuple[float, float]]


def measured_calls(program: Program) -> _Measured:
    """Returns a function that measures a CPU for so many seconds, with one matrix product or one memory stream in each
    call.

    The function returns (FLOP/s, bytes/s).
    """
    import tensorflow as tf

    x = tf.random.stateless_normal([1024, 1024], _SEED)
    # The stream has as many bytes as the variables, which may lie in caches.
    held = sum(v.type.bytes for v in program.variables if v.type.is_static)
    count = min(16 << 20, max(1 << 18, held // 12))
    y = tf.random.stateless_normal([count], _SEED)
    product = tf.function(lambda: tf.linalg.matmul(x, x), autograph=False)
    stream = tf.function(lambda: y + y * 0.5, autograph=False)
    product(), product(), stream(), stream()

    def measured(seconds: float) -> tuple[float, float]:
        flops_per_s = 2.0 * 1024**3 / _seconds(product, seconds)
        return flops_per_s, STREAMED_ARRAYS * y.dtype.size * count / _seconds(stream, seconds / 2)

    return measured


def _measured_chains(dtype: str) -> _Measured:
    """Returns a function that measures a GPU for so many seconds, with a chain of products or streams in each call, so
    that a call takes long enough.

    Args:
      dtype: of the products; streams are of float32.
    """
    import tensorflow as tf

    def products(rows: int) -> Callable[[], Any]:
        # Values stay of one size in the chain.
        x = tf.cast(tf.random.stateless_normal([rows, rows], _SEED) / rows**0.5, dtype)

        def chain() -> Any:
            y = x
            for _ in range(IN_A_CALL):
                y = tf.linalg.matmul(x, y)
            return y

        return awaited(tf.function(chain, autograph=False))

    def streams(count: int) -> Callable[[], Any]:
        x = tf.random.stateless_normal([count], _SEED)

        def chain() -> Any:
            y = x
            for _ in range(IN_A_CALL):
                y = y + y * 0.5
            return y

        return awaited(tf.function(chain, autograph=False))

    def awaited(call: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> None:
            call()
            await_gpus()

        return run

    def grow(make: Callable[[int], Callable[[], Any]], size: int, most: int) -> tuple[Callable[[], Any], int]:
        while True:
            call = make(size)
            call()
            if size >= most or _seconds(call, 0.0, 2) >= GPU_CALL_S:
                return call, size
            size *= 2 if most == MOST_ROWS else 4

    product, rows = grow(products, FIRST_ROWS, MOST_ROWS)
    stream, count = grow(streams, FIRST_STREAMED, MOST_STREAMED)

    def measured(seconds: float) -> tuple[float, float]:
        flops = IN_A_CALL * 2.0 * rows**3
        moved_bytes = IN_A_CALL * STREAMED_ARRAYS * 4.0 * count
        return flops / _seconds(product, seconds), moved_bytes / _seconds(stream, seconds / 2)

    return measured


def average_kinds(values: Sequence[float]) -> list[float]:
    """Makes ranks of the same kind of processor count as equally fast: replaces each measured value by the mean of the
    values within a factor of ONE_KIND of the largest one of its kind.
    """
    found = list(values)
    order = sorted(range(len(values)), key=lambda r: -values[r])
    while order:
        kind = [r for r in order if values[r] * ONE_KIND >= values[order[0]]]
        for rank in kind:
            found[rank] = statistics.mean(values[r] for r in kind)
        order = order[len(kind) :]
    return found


def _together(
    context: Context, what: str, measured: Callable[[float], tuple[float, float]], seconds: float
) -> list[tuple[float, float]]:
    """Runs a measurement on all ranks at the same time, since they share caches and cores; returns the results of all
    ranks.

    Args:
      what: name of what is measured; part of the keys by which ranks match these messages.
      measured: takes the seconds for which to measure; returns (FLOP/s, bytes/s).
      seconds: for which to measure.
    """
    comm = context.comms[0]
    comm.allgather_bytes(f"whale/auto/begin/{what}", b"")
    said = comm.allgather_bytes(f"whale/auto/rates/{what}", msgspec.json.encode(measured(seconds)))
    return [msgspec.json.decode(one, type=tuple[float, float]) for one in said]


def _describe(link: Link) -> str:
    return f"{1e6 * link.exchange_s:.0f} us and {link.bytes_per_s / 1e9:.2f} GB/s"


def _link(context: Context, through: str) -> Link:
    """Measures the latency of a minimal all-reduce, and the bandwidth of one rank in large ones; collective.

    Tensors are where TensorFlow places them, so exchanges between GPUs through the host include the copies to the host
    and back.

    Args:
      through: the backend between devices (NCCL); "": Whale's own exchange.
    """
    import tensorflow as tf

    comm = context.comms[0]

    def agree_on_most(seconds: float, name: str) -> float:
        """Returns the largest of the ranks' measurements, so that all exchange equally often and equally much."""
        said = comm.allgather_bytes(f"whale/auto/{through}/{name}", msgspec.json.encode(seconds))
        return max(msgspec.json.decode(one, type=float) for one in said)

    def measure(size: int, calls: int, each: int = 1) -> float:
        x = tf.ones([size])

        def exchange() -> Any:
            # One after the other, as in a step: how a call begins on busy processors is no part of each of them.
            y = x
            for n in range(each):
                (y,) = ExchangeOps(comm, through)("all_reduce", [y], key=f"whale/auto/{through}/{size}/{n}")
            return y

        step = bind_as_step(tf.function(exchange, autograph=False).get_concrete_function())
        times = []
        for _ in range(calls + 2):
            start_s = time.perf_counter()
            step()
            await_gpus()
            times.append((time.perf_counter() - start_s) / each)
        return statistics.median(times[2:])

    # Over a link of 20 ms, or one that loses packets, the usual number of calls would take seconds.
    small_s = agree_on_most(measure(1, 1), "small")
    calls = round(SMALL_S / SMALL_IN_A_CALL / small_s)
    if calls >= LEAST_SMALL_CALLS:
        small_s = measure(1, min(SMALL_CALLS, calls), SMALL_IN_A_CALL)
    first_s = agree_on_most(measure(FIRST_ELEMENTS, 3), "first")
    size = min(MOST_ELEMENTS, max(FIRST_ELEMENTS, int(FIRST_ELEMENTS * LARGE_S / first_s)))
    sent = 2 * (comm.size - 1) / comm.size * 4 * size
    return Link(small_s, sent / max(1e-6, measure(size, 4) - small_s))


def _seconds(call: Callable[[], Any], least_s: float, least_calls: int = 5) -> float:
    """Returns the mean seconds of a call.

    It is the mean because a CPU quota that interrupts the process now and then slows real steps as well.

    Args:
      least_s: how long to repeat the call at least.
      least_calls: how often to repeat it at least.
    """
    count, start_s = 0, time.perf_counter()
    while count < least_calls or time.perf_counter() < start_s + least_s:
        call()
        count += 1
    await_gpus()
    return (time.perf_counter() - start_s) / count
