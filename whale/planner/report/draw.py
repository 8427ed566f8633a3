"""Draws the plan of a described model: its simulated timeline as a Chrome trace, and a self-contained HTML page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cost_model.analytic.evaluate import Evaluation, likely_s, simulate_passes
from cost_model.cluster.pools import Machines
from cost_model.simulator import Tasks, Timeline, memory_curve
from whale.ir.pipeline_schedule import make_schedule
from whale.ir.plan_text import format_seconds
from whale.ir.strategy import ParallelStrategy, Stage, format_count
from whale.planner.report import show
from whale.planner.report.page_parts import describe_likely, describe_limit, mesh_of_strategy, short
from whale.planner.report.planfile import PlanFile
from whale.planner.report.sliders import sliders


def trace(plan: PlanFile) -> str:
    """Returns the simulated timeline as JSON for ui.perfetto.dev or chrome://tracing: a row per stage, an event per
    pass.
    """
    _, machines, found = plan.evaluate()
    events: list[dict[str, object]] = []
    for index, stage in enumerate(plan.strategy.stages):
        where = ", ".join(f"{p.ranks} {machines.pools[p.pool].name}" for p in stage.parts)
        name = {"name": f"stage {index}: {stage.count} layers on {where}"}
        events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": index, "args": name})
    tasks, times = simulate_passes(plan.strategy, found)
    strategy = plan.strategy
    orders = make_schedule(strategy.schedule, len(strategy.stages), strategy.chunks, strategy.micro_batches)
    passes = [one for order in orders for one in order]
    for (chunk, number, backward), row, start, end in zip(passes, tasks.resource, times.start_s, times.end_s):
        event: dict[str, object] = {
            "name": f"{'backward' if backward else 'forward'} {number}",
            "ph": "X",
            "pid": 0,
            "tid": row,
        }
        facts = {"micro_batch": number, "chunk": chunk}
        events.append({**event, "ts": 1e6 * start, "dur": 1e6 * (end - start), "args": facts})
    for curve in _memory(plan, machines, found, tasks, times):
        event = {"name": f"memory of {curve['name']}", "ph": "C", "pid": 0}
        events += [{**event, "ts": 1e6 * at, "args": {"bytes": level}} for at, level in curve["points"]]
    total_s = times.total_s
    for index, cost in enumerate(found.stages):
        for what, start, length in (
            ("reduce", times.total_s, cost.reduce_s),
            ("update", total_s + found.reduce_s, cost.update_s),
        ):
            if length:
                events.append({"name": what, "ph": "X", "pid": 0, "tid": index, "ts": 1e6 * start, "dur": 1e6 * length})
    return json.dumps({"traceEvents": events})


DRAWN = 60_000  # most passes of a timeline that are drawn, from its start
CURVES = 24  # most stages whose memory is drawn
POINTS = 160  # about how many points a curve has


COMPUTE_COLOUR, LOST_COLOUR = "var(--k)", "color-mix(in srgb, var(--k) 50%, var(--w))"


def page(plans: Sequence[Mapping[str, Any]]) -> str:
    """Returns one self-contained HTML page for one or several plans.

    Each plan has a timeline, a waterfall chart of the step's parts, memory, layers and stages; several plans also have
    their steps side by side.

    Args:
        plans: for each plan what `describe_page` or `draw_captured.describe_page` returns, and its "name".
    """
    text = json.dumps(plans, separators=(",", ":"), sort_keys=True).replace("</", "<\\/")
    return Path(__file__).with_name("page.html").read_text(encoding="utf-8").replace("/*DATA*/null", text)


def describe_page(plan: PlanFile, measured: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns the data that `page` draws for a described model's plan.

    Args:
        measured: a measured step to draw below the predicted one (see whale.planner.report.measured_step).
    """
    model, machines, found = plan.evaluate()
    strategy = plan.strategy
    tasks, times = simulate_passes(strategy, found)
    tracks, shown_s, label = _tracks(plan, found, times)
    parts = show.parts_of(found)
    name, most_s = max(parts.items(), key=lambda e: e[1])
    low_high_s = likely_s(model.stack, strategy, machines, found.step_s)
    busiest = strategy.stages[found.busiest]
    where = f"stage {found.busiest} ({busiest.count} layers on {_describe_place(busiest, strategy, machines)})"
    full = [
        used.total_bytes / machines.pools[part.pool].memory_bytes
        for stage, cost in zip(strategy.stages, found.stages)
        for part, used in zip(stage.parts, cost.memory)
    ]
    return {
        "measured": measured,
        "limits": describe_limit(name, most_s, found.step_s, where, parts["communication"], max(full)),
        "likely_s": [short(s) for s in low_high_s],
        "likely": describe_likely(low_high_s, show.compared_with(model, strategy, machines)),
        "colours": ["--f", "--b", "--c", "--u"],
        "model": f"{model.name}, batch {plan.batch}",
        "summary": strategy.format_summary(),
        "cluster": ", ".join(f"{p.devices} {p.name}" for p in machines.pools),
        "cards": _cards(plan, found),
        "kinds": ["forward", "backward", "reduce", "update"],
        "rows": [
            {"name": f"stage {i}", "where": _describe_place(s, strategy, machines)}
            for i, s in enumerate(strategy.stages)
        ],
        "tracks": tracks,
        "shown_s": shown_s,
        "step_s": found.step_s,
        "timeline_label": label,
        "fall": _fall(plan, found),
        "fall_label": "of the busiest stage, from the best that these devices could do",
        "others_title": "Alternatives that lost",
        "others_label": "the best of each shape",
        "others_head": ["why", "plan"],
        "others": [(one.reason, one.strategy.format_summary()) for one in plan.alternatives],
        "heat_label": "from the first layer to the last; time of a micro-batch, memory of one device",
        "heat": _heat(plan, found),
        "columns": [f"layer {i}" for i in range(model.count)],
        "layers": _layers(plan, machines),
        "table": {
            "title": "Stages",
            "head": ["stage", "layers", "devices", "data x tensor", "rows", "memory of a device", *_SECONDS],
            "rows": [row for index in range(len(strategy.stages)) for row in _stage(plan, machines, found, index)],
        },
        "memory_kinds": _MEMORY,
        "memory_label": "of one device of each stage, over a step",
        "memory": _memory(plan, machines, found, tasks, times),
        "mesh": mesh_of_strategy(strategy, [pool.name for pool in machines.pools], full),
        "sliders": sliders(plan, machines),
        "last": show.last_line(plan, machines, found),
    }


def _cards(plan: PlanFile, found: Evaluation) -> list[tuple[str, str, str]]:
    whole = sum(pool.devices for pool in plan.machines.pools)
    cards = [
        ("speed", f"{plan.batch / found.step_s:,.1f} rows/s", f"batch {plan.batch}"),
        ("devices", f"{plan.strategy.ranks:,}", f"of {whole:,}"),
        ("optimum", format_seconds(plan.bound_s), "no plan is faster on these devices"),
    ]
    if plan.transformer is not None:
        flops = plan.transformer.step_flops(plan.batch) / found.step_s / plan.strategy.ranks
        cards.insert(1, ("work", f"{flops / 1e12:.1f} TFLOP/s", "per device, recompute not counted"))
    return cards


def _tracks(
    plan: PlanFile, found: Evaluation, times: Timeline
) -> tuple[list[list[tuple[int, float, float, str]]], float, str]:
    """Returns what the timeline draws for each stage.

    Returns:
        (per stage its passes as (kind, start, end, text), the seconds from the step's start that are drawn, a caption).
    """
    strategy = plan.strategy
    orders = make_schedule(strategy.schedule, len(strategy.stages), strategy.chunks, strategy.micro_batches)
    shown_s, label = (
        found.step_s,
        f"{strategy.micro_batches} micro-batches, {len(strategy.stages)} stages; the wheel zooms",
    )
    count = len(times.start_s)
    if count > DRAWN:
        shown_s = sorted(times.start_s)[DRAWN]
        label += f"; the first {shown_s / found.step_s:.0%} of the step"
    tracks: list[list[tuple[int, float, float, str]]] = []
    number = 0
    for stage, order in enumerate(orders):
        track = []
        for _, micro_batch, backward in order:
            if times.start_s[number] <= shown_s:
                start, end = times.start_s[number], min(shown_s, times.end_s[number])
                track.append((int(backward), short(start), short(end), f"micro-batch {micro_batch}"))
            number += 1
        cost, end = found.stages[stage], times.end_s[number - 1]
        if count <= DRAWN:
            if cost.reduce_s:
                track.append((2, short(end), short(end + cost.reduce_s), ""))
            if cost.update_s:
                begin = found.step_s - found.update_s
                track.append((3, short(begin), short(begin + cost.update_s), ""))
        tracks.append(track)
    return tracks, shown_s, label


def _fall(plan: PlanFile, found: Evaluation) -> list[tuple[str, float, str, str]]:
    """Returns the bars of the waterfall chart, from the ideal step on; as (name, seconds, colour, explanation).

    The seconds add up to the step.
    """
    parts = show.parts_of(found)
    ideal = min(plan.bound_s, parts["compute"])
    return [
        ("optimum", ideal, COMPUTE_COLOUR, "all devices at their best rate, all of the time"),
        (
            "computing below it",
            parts["compute"] - ideal,
            LOST_COLOUR,
            "smaller kernels, recompute, stages of unequal length, devices left out",
        ),
        ("communication", parts["communication"], "var(--c)", "sends between stages, sums of gradients"),
        ("waiting", parts["bubble"], "var(--wait)", "for other stages: the pipeline's bubble"),
        ("update", parts["update"], "var(--u)", "the optimizer"),
    ]


def _map_layers(plan: PlanFile) -> list[int]:
    """Returns the stage number of each layer, in layer order."""
    where = {}
    for index, stage in enumerate(plan.strategy.stages):
        for low, high in stage.layers:
            where.update(dict.fromkeys(range(low, high), index))
    return [where[layer] for layer in sorted(where)]


def _heat(plan: PlanFile, found: Evaluation) -> list[tuple[str, list[float], list[str]]]:
    stages, of = plan.strategy.stages, _map_layers(plan)
    per_layer = [(sum(c.forward_s) + sum(c.backward_s)) / s.count for s, c in zip(stages, found.stages)]
    held = [max(m.total_bytes for m in c.memory) / s.count for s, c in zip(stages, found.stages)]
    rows = (
        ("stage", [float(i) for i in range(len(stages))], "stage {:.0f}"),
        ("tensors divided", [float(max(p.tensor for p in s.parts)) for s in stages], "way"),
        ("rows divided", [float(s.replicas) for s in stages], "way"),
        ("devices", [float(s.ranks) for s in stages], "device"),
        ("time of a layer", per_layer, ""),
        ("memory of a layer", [h / 2**30 for h in held], "{:.2f} GiB"),
    )
    heat = [(name, [values[s] for s in of], [_format_cell(values[s], text) for s in of]) for name, values, text in rows]
    again = plan.strategy.recomputes
    if set(again) != {"none"}:
        level = {"none": 0.0, "selective": 1.0, "full": 2.0}
        heat.append(("computed again", [level[again[s]] for s in of], [f"{again[s]} recompute" for s in of]))
    return heat


def _format_cell(value: float, text: str) -> str:
    """Formats a cell of the heat map of layers.

    Args:
        text: empty for seconds, a format string such as "{:.2f} GiB", or a noun to count, such as "device".
    """
    if not text:
        return format_seconds(value)
    return text.format(value) if "{" in text else format_count(round(value), text)


def _describe_place(stage: Stage, strategy: ParallelStrategy, machines: Machines) -> str:
    how = strategy.find_recompute(stage)
    devices = ", ".join(f"{p.ranks} {machines.pools[p.pool].name}" for p in stage.parts)
    return devices + (f"; {how} recompute" if how != "none" else "")


def _layers(plan: PlanFile, machines: Machines) -> list[str]:
    stages = plan.strategy.stages
    return [f"stage {s}: {_describe_place(stages[s], plan.strategy, machines)}" for s in _map_layers(plan)]


_MEMORY = (
    ("parameters", "--m1"),
    ("gradients", "--m2"),
    ("optimizer state", "--m3"),
    ("activations", "--m4"),
    ("buffers, framework, fragmentation", "--m5"),
)


_SECONDS = ("forward", "backward", "send", "reduce")


def _stage(plan: PlanFile, machines: Machines, found: Evaluation, index: int) -> list[list[Any]]:
    """Returns the table rows of a stage, one per device group; cells that are the same for the whole stage are in the
    first.
    """
    stage, cost = plan.strategy.stages[index], found.stages[index]
    layers = ", ".join(f"{low}-{high - 1}" for low, high in stage.layers)
    seconds = (sum(cost.forward_s), sum(cost.backward_s), cost.send_s, cost.reduce_s)
    rows: list[list[Any]] = []
    for part, used in zip(stage.parts, cost.memory):
        sizes = [used.parameters_bytes, used.gradients_bytes, used.optimizer_bytes, used.activations_bytes]
        sizes.append(used.total_bytes - sum(sizes))
        pool = machines.pools[part.pool]
        memory = {
            "parts": [(name, size, colour) for (name, colour), size in zip(_MEMORY, sizes)],
            "used": used.total_bytes,
            "limit": pool.memory_bytes,
        }
        lead = ["", ""] if rows else [str(index), layers]
        row = [*lead, f"{part.ranks} {pool.name}", f"{part.replicas} x {part.tensor}", part.rows, memory]
        rows.append([*row, *([""] * 4 if rows else [{"s": short(s)} for s in seconds])])
    return rows


def _memory(
    plan: PlanFile, machines: Machines, found: Evaluation, tasks: Tasks, times: Timeline
) -> list[dict[str, Any]]:
    """Returns curves of memory over time, one for the fullest device of each stage (at most `CURVES` stages)."""
    stages = plan.strategy.stages
    step = max(1, -(-len(stages) // CURVES))
    rows = []
    for index in range(0, len(stages), step):
        cost = found.stages[index]
        at = max(
            range(len(cost.memory)),
            key=lambda i: cost.memory[i].total_bytes / machines.pools[stages[index].parts[i].pool].memory_bytes,
        )
        used, pool = cost.memory[at], machines.pools[stages[index].parts[at].pool]
        curve = memory_curve(tasks, times, [index])
        peak = max(level for _, level in curve) or 1.0
        scale, base = used.activations_bytes / peak, used.total_bytes - used.activations_bytes
        width = max(1, len(curve) // POINTS)
        points = [max(curve[i : i + width], key=lambda p: p[1]) for i in range(0, len(curve), width)]
        rows.append(
            {
                "name": f"stage {index}",
                "where": pool.name,
                "limit": pool.memory_bytes,
                "peak": used.total_bytes,
                "points": [(short(t), round(base + scale * level)) for t, level in points],
            }
        )
    return rows
