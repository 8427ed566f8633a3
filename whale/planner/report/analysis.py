"""Compares a captured plan's prediction with a measured run (`whale show --analyze`): step, ranks and layers.

Figures that differ by more than a fifth are marked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from whale.ir.plan_text import format_bytes, format_seconds

OFF = 0.2  # relative difference above which a figure is marked
ROWS = 24  # most layers that are printed
NO_SCOPE = "(no scope)"
SMALL = 0.01  # layers below this part of all kernels share one row


class MeasuredRank(msgspec.Struct, frozen=True):
    """Holds the measurements of one rank; all but `steps_s` are of one step.

    Attributes:
        program: name of the step's function.
        steps_s: seconds of each step.
        kernels_s: seconds of kernels by operation; empty where TensorFlow's profiler does not report them (on GPUs).
        busy_s: seconds in which at least one kernel ran; unknown if `kernels_s` is empty.
        moving_s: seconds of exchanges, each counted from the arrival of its last participant.
        peak_bytes: peak of TensorFlow's allocator; None where it keeps no statistics.
    """

    rank: int
    program: str
    steps_s: list[float]
    kernels_s: dict[str, float]
    busy_s: float
    moving_s: float
    peak_bytes: int | None


class PredictedRank(msgspec.Struct, frozen=True):
    """Holds the prediction of one rank's step.

    Attributes:
        compute_s: seconds of its kernels, added up.
        busy_s: seconds in which at least one kernel runs.
        exchange_s: seconds of its exchanges, without waits.
        peak_bytes: peak memory.
        kernels_s: seconds of kernels by operation.
    """

    compute_s: float
    busy_s: float
    exchange_s: float
    peak_bytes: int
    kernels_s: dict[str, float]


class PredictedStep(msgspec.Struct, frozen=True):
    """Holds the prediction of a step.

    Attributes:
        where: describes the machine that the prediction is for.
        step_s: seconds of the step.
        ranks: the prediction of each rank.
        stages: the stage name of each rank; empty: there are no stages.
    """

    where: str
    step_s: float
    ranks: list[PredictedRank]
    stages: list[str]


def median(values: Sequence[float]) -> float:
    """Returns the median of at least one value."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def mark(predicted: float, measured: float, small: float = 0.0) -> str:
    """Formats the difference between a measured and a predicted value: "+3 %", or "+35 % <--" if it is large.

    Args:
        small: an absolute difference below this is not marked.
    """
    if predicted <= 0:
        return "" if measured <= small else "not predicted <--"
    off = measured / predicted - 1
    return f"{100 * off:+.0f} %" + (" <--" if abs(off) > OFF and abs(measured - predicted) > small else "")


def layer_of(name: str) -> str:
    """Returns the layer of an operation, that is, its name scope up to two levels deep; (no scope) for none.

    An operation of a gradient has the layer of its forward operation: "gradient_tape/a/b/MatMul/MatMul" and
    "a/b/MatMul" are both in "a/b".
    """
    parts = name.partition("/ReadVariableOp")[0].split("/")
    if "gradient_tape" in parts:  # the rest is the forward operation's name, then the gradient operation's
        parts = parts[parts.index("gradient_tape") + 1 :]
        parts = parts[:-1] if len(parts) > 2 else parts
    return "/".join(parts[: min(2, len(parts) - 1)]) or NO_SCOPE


def layers(kernels_s: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns {layer: seconds} of kernels, summed over ranks.

    Args:
        kernels_s: seconds of kernels by operation, for each rank.
    """
    found: dict[str, float] = {}
    for one in kernels_s:
        for name, value in one.items():
            found[layer_of(name)] = found.get(layer_of(name), 0.0) + value
    return found


def report(predicted: PredictedStep, measured: Sequence[MeasuredRank]) -> str:
    """Formats a text that sets predicted beside measured figures: the step, each rank, and layers, with a verdict."""
    each = sorted(measured, key=lambda m: m.rank)
    step_s = max(median(m.steps_s) for m in each)
    steps = len(each[0].steps_s)
    lines = [
        f"{each[0].program} on {len(each)} ranks, {steps} steps; predicted for {predicted.where}",
        f"{'':28} {'predicted':>11} {'measured':>11}  off (<-- by more than {100 * OFF:.0f} %)",
        _row("step (median)", predicted.step_s, step_s),
    ]
    spread = [f"{format_seconds(min(m.steps_s))} to {format_seconds(max(m.steps_s))}" for m in each]
    lines.append(f"{'  from the fastest to the slowest':28} {'':>8} {spread[0]}")
    for m, p in zip(each, predicted.ranks):
        stage = predicted.stages[m.rank] if predicted.stages else ""
        lines.append(f"rank {m.rank}" + (f", {stage}" if stage else ""))
        if m.kernels_s:
            lines.append(_row("  compute (kernels added up)", p.compute_s, sum(m.kernels_s.values())))
            waits_s = max(0.0, predicted.step_s - p.busy_s), max(0.0, median(m.steps_s) - m.busy_s)
            lines.append(_row("  waits, computing nothing", *waits_s, SMALL * step_s))
        else:
            lines.append(f"{'  compute':28} {format_seconds(p.compute_s):>11} {'not known':>11}")
        moving = f"{format_seconds(p.exchange_s):>11} {format_seconds(m.moving_s):>11}"
        lines.append(f"{'  communication alone':28} {moving}  (bytes moving)")
        if m.peak_bytes is not None:
            off = mark(p.peak_bytes, m.peak_bytes)
            lines.append(f"{'  memory':28} {format_bytes(p.peak_bytes):>11} {format_bytes(m.peak_bytes):>11}  {off}")
    return "\n".join([*lines, *_layers(predicted, each), "", _verdict(predicted, each, step_s)])


def _row(name: str, predicted: float, measured: float, small: float = 0.0) -> str:
    figures = f"{format_seconds(predicted):>11} {format_seconds(measured):>11}"
    return f"{name:28} {figures}  {mark(predicted, measured, small)}".rstrip()


def _layers(predicted: PredictedStep, each: Sequence[MeasuredRank]) -> list[str]:
    """Formats a row for each layer with its kernels on all ranks; operations that only one side knows are left out."""
    alike = [_match_names(p.kernels_s, m.kernels_s) for p, m in zip(predicted.ranks, each)]
    ahead = layers(alike)
    real = layers([{n: m.kernels_s[n] for n in one} for m, one in zip(each, alike)])
    whole = sum(real.values())
    if not whole:
        return []
    covered = whole / sum(sum(m.kernels_s.values()) for m in each)
    shown = sorted((n for n in real if real[n] + ahead.get(n, 0.0) >= SMALL * whole), key=lambda n: -real[n])[:ROWS]
    rest = [n for n in real if n not in shown]
    rows = ["", f"kernels by layer, all ranks ({covered:.0%} of the measured time is of operations known to both)"]
    rows += [_row("  " + _short(name), ahead.get(name, 0.0), real[name], SMALL * whole) for name in shown]
    if rest:
        rows.append(
            _row(
                f"  {len(rest)} others", sum(ahead.get(n, 0.0) for n in rest), sum(real[n] for n in rest), SMALL * whole
            )
        )
    return rows


def _match_names(predicted: Mapping[str, float], measured: Mapping[str, float]) -> dict[str, float]:
    """Returns the predicted seconds under the names that were measured; predictions without a measured name are left
    out.

    The predicted program has the operations of a micro-batch's function inlined, with the name of the call and "/"
    before their names. If the measurement does not have that prefix, it is removed, so that all calls of the function
    add up.
    """
    found: dict[str, float] = {}
    for name, value in predicted.items():
        while name not in measured and "/" in name:
            name = name.partition("/")[2]
        if name in measured:
            found[name] = found.get(name, 0.0) + value
    return found


def _short(name: str, limit: int = 26) -> str:
    return name if len(name) <= limit else "..." + name[3 - limit :]


def _verdict(predicted: PredictedStep, each: Sequence[MeasuredRank], step_s: float) -> str:
    """Formats one line that names the main cause of the difference between predicted and measured step."""
    off = step_s / predicted.step_s - 1
    lead = f"Predicted {format_seconds(predicted.step_s)}, measured {format_seconds(step_s)} ({100 * off:+.0f} %)"
    slowest = max(each, key=lambda m: median(m.steps_s))
    p = predicted.ranks[slowest.rank]
    if abs(off) <= OFF:
        return f"{lead}: as predicted."
    if not slowest.kernels_s:
        return f"{lead}; kernels were not measured."
    waits_s = (median(slowest.steps_s) - slowest.busy_s) - (predicted.step_s - p.busy_s)
    name, most = max((("compute", slowest.busy_s - p.busy_s), ("waits", waits_s)), key=lambda e: abs(e[1]))
    return f"{lead}: mostly {name} of rank {slowest.rank} ({1e3 * most:+.1f} ms against the prediction)."
