"""Draws the plan of a captured program for the page of `draw`: ranks' timelines and memory, and layers over the
mesh.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cost_model.graph.predict import CapturedPrediction, Span, Timeline
from whale.ir.layout import Partial, Shard, Strategy
from whale.ir.mesh import find_tiles, iterate_levels
from whale.ir.plan import Plan, strategy_of
from whale.ir.plan_text import format_bytes, format_seconds
from whale.ir.program import Program
from whale.planner.graph_search.pipelines import levels
from whale.planner.report.analysis import layer_of
from whale.planner.report.draw import COMPUTE_COLOUR, LOST_COLOUR
from whale.planner.report.layer_graph import describe_layer_graph
from whale.planner.report.page_parts import describe_likely, describe_limit, mesh_of_plan, short, side_by_side
from whale.planner.report.plan_graph import add_step

KINDS = ("forward", "backward", "bytes move", "update and other", "an exchange waits for other ranks")
_COLOURS = ("--f", "--b", "--c", "--u", "--wait")
FORWARD, BACKWARD, MOVES, OTHER, WAITS = range(5)
_MEMORY = (("variables, inputs, buffers", "--m1"), ("during the step", "--m4"))
MOST_SPANS = 20_000  # most spans that are drawn; the shortest are left out
POINTS = 400  # about how many points a curve has
COLUMNS = 96  # most layers that are drawn
MOVES = 14  # rows of the table of what moves


@dataclass(frozen=True)
class Drawn:
    """Holds what the page of a captured plan is drawn from.

    Attributes:
      program: the normalised program that was planned.
      prediction: the predicted step, with timelines.
      alone_s: predicted seconds of a step of the same program on one of its ranks.
      limits_bytes: memory of each rank.
      where: describes the machine of the prediction.
      sliders: step times with faster or slower exchanges and ranks (see whale.planner.report.sliders); None: too large.
      likely_s: interval in which nine of ten such steps lie; None: no steps were compared on such a machine.
    """

    plan: Plan
    program: Program
    prediction: CapturedPrediction
    alone_s: float
    limits_bytes: Sequence[float]
    where: str
    sliders: Mapping[str, Any] | None = None
    likely_s: tuple[float, float] | None = None


def describe_page(drawn: Drawn, measured: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns the data that `whale.planner.report.draw.page` draws for a captured program's plan.

    Args:
      measured: a measured step to draw below the predicted one (see whale.planner.report.measured_step).
    """
    plan, found = drawn.plan, drawn.prediction
    ranks = _names(plan, len(found.ranks))
    layers = _layers(drawn)
    explained = [_explain(plan, drawn.program, layer) for layer in layers]
    full = [
        r.peak_bytes / limit if math.isfinite(limit) and limit else None
        for r, limit in zip(found.ranks, drawn.limits_bytes)
    ]
    stages = any(where for _, where in ranks)
    return {
        "limits": _limit(drawn, full),
        "likely_s": None if drawn.likely_s is None else [short(s) for s in drawn.likely_s],
        "likely": describe_likely(drawn.likely_s, "compared steps"),
        "colours": list(_COLOURS),
        "model": f"{plan.program}, {len(found.ranks)} ranks",
        "summary": _summary(plan),
        "cluster": drawn.where,
        "cards": _cards(drawn),
        "kinds": list(KINDS),
        "rows": [{"name": name, "where": where} for name, where in ranks],
        "tracks": _tracks(drawn),
        "shown_s": found.step_s,
        "step_s": found.step_s,
        "timeline_label": "kernels of each rank above, its exchanges below; hover names them, the wheel zooms",
        "measured": measured,
        "mesh": mesh_of_plan(plan, full),
        "sliders": drawn.sliders,
        "fall": _fall(drawn),
        "fall_label": "of the slowest rank",
        "others_title": "What moves between ranks",
        "others_label": "in one step, the largest first",
        "others_head": ["bytes", "change of layout"],
        "others": _moves(plan),
        "heat_label": "by name scope, in the order of the program",
        "heat": _heat(drawn, layers),
        "columns": layers,
        "layers": explained,
        "graph": describe_layer_graph(
            add_step(plan, drawn.program).graph(),
            layers,
            _time_s(drawn),
            dict(zip(layers, explained)),
        ),
        "table": {
            "title": "Ranks",
            "head": ["rank", *["stage"] * stages, "memory", "kernels", "waits", "bytes move"],
            "rows": [_rank(drawn, rank, *ranks[rank], stages) for rank in range(len(found.ranks))],
        },
        "memory_kinds": _MEMORY,
        "memory_label": "of each rank, over a step",
        "memory": [_memory(drawn, rank, ranks[rank][0]) for rank in range(len(found.ranks))],
        "last": _last(drawn),
    }


def trace(drawn: Drawn) -> str:
    """Returns the timeline as JSON for ui.perfetto.dev: a process per rank, with tracks of kernels and of exchanges."""
    events: list[dict[str, object]] = []
    for rank, (timeline, (name, stage)) in enumerate(
        zip(drawn.prediction.timelines, _names(drawn.plan, len(drawn.prediction.ranks)))
    ):
        events.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"{name} {stage}".strip()}})
        kernels, threads = side_by_side([s for s in timeline.spans if not s.exchange])
        exchanges, _ = side_by_side([s for s in timeline.spans if s.exchange])
        for lane, span in [*kernels, *((100 + lane, s) for lane, s in exchanges)]:
            times = {"ts": 1e6 * span.start_s, "dur": 1e6 * (span.end_s - span.start_s)}
            events.append({"name": span.name, "cat": span.op, "ph": "X", "pid": rank, "tid": lane, **times})
        for lane, name in [(n, f"kernels {n}") for n in range(threads)] + [(100, "exchanges")]:
            events.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": lane, "args": {"name": name}})
    return json.dumps({"traceEvents": events})


def _names(plan: Plan, count: int) -> list[tuple[str, str]]:
    stage = {rank: group.name for group in plan.stage_groups for rank in group.ranks}
    return [(f"rank {rank}", stage.get(rank, "")) for rank in range(count)]


def _summary(plan: Plan) -> str:
    text = (plan.strategy or strategy_of(plan)).format_summary()
    text += f"; {plan.split_flops_fraction:.0%} of products and convolutions divided"
    sharded = len(find_tiles(plan))
    return text + (f", {sharded} variables are sharded" if sharded else "")


def _slowest(found: CapturedPrediction) -> int:
    return max(range(len(found.ranks)), key=lambda r: found.ranks[r].end_s)


def _cards(drawn: Drawn) -> list[tuple[str, str, str]]:
    found = drawn.prediction
    most = max(range(len(found.ranks)), key=lambda r: found.ranks[r].peak_bytes)
    gain = drawn.alone_s / found.step_s
    return [
        ("against one rank", f"{gain:.2f} x", f"one rank alone: {format_seconds(drawn.alone_s)}"),
        ("moved", format_bytes(drawn.plan.logical_bytes), "between ranks, in one step"),
        (
            "memory",
            format_bytes(found.ranks[most].peak_bytes),
            f"rank {most}, of {format_bytes(drawn.limits_bytes[most])}",
        ),
    ]


def _limit(drawn: Drawn, full: Sequence[float | None]) -> str:
    ideal, below, communication, idle = (value for _, value, _, _ in _fall(drawn))
    parts = {"compute": ideal + below, "communication": communication, "idle": idle}
    name, most_s = max(parts.items(), key=lambda e: e[1])
    rank, step_s = _slowest(drawn.prediction), drawn.prediction.step_s
    stage = _names(drawn.plan, len(drawn.prediction.ranks))[rank][1]
    where = f"rank {rank}" + f", which has {stage}," * bool(stage)
    known = [f for f in full if f is not None]
    # Exposed communication is mostly waiting for other ranks, which a faster network does not shorten.
    network_s = min(communication, drawn.prediction.ranks[rank].exchange_s)
    return describe_limit(name, most_s, step_s, where, network_s, max(known) if known else None)


def _fall(drawn: Drawn) -> list[tuple[str, float, str, str]]:
    """Returns the bars of the waterfall chart, as (name, seconds, colour, explanation); the seconds add up to the step.

    The first bar is one rank's step alone divided by the number of ranks.
    """
    found = drawn.prediction
    rank = _slowest(found)
    timeline, step_s = found.timelines[rank], found.step_s
    kernels_s = min(step_s, timeline.busy_s(exchange=False))
    ideal_s = min(kernels_s, drawn.alone_s / len(found.ranks))
    exposed_s = _measure_exposed_s(timeline)
    idle_s = max(0.0, step_s - kernels_s - exposed_s)
    return [
        ("its part", ideal_s, COMPUTE_COLOUR, "one rank's step alone, divided by the number of ranks"),
        (
            "computing beyond it",
            kernels_s - ideal_s,
            LOST_COLOUR,
            "what every rank does, smaller kernels, unequal parts",
        ),
        ("communication", exposed_s, "var(--c)", "no kernel runs: bytes move, or an exchange waits for other ranks"),
        ("idle", idle_s, "var(--wait)", "calls, and waits for cores"),
    ]


def _measure_exposed_s(timeline: Timeline) -> float:
    """Returns the seconds in which an exchange is under way and no kernel runs."""
    marks = sorted(
        [(s.start_s, 1, s.exchange) for s in timeline.spans] + [(s.end_s, -1, s.exchange) for s in timeline.spans]
    )
    running = Counter[bool]()
    last, exposed = 0.0, 0.0
    for at_s, change, exchange in marks:
        if running[True] and not running[False]:
            exposed += at_s - last
        running[exchange] += change
        last = at_s
    return exposed


def _tracks(drawn: Drawn) -> list[list[tuple[int, float, float, str, int, int]]]:
    """Returns the timeline spans of each rank, as (kind, start, end, text, lane, number of lanes)."""
    at = levels(drawn.program)
    timelines = drawn.prediction.timelines
    shown = sorted((s for t in timelines for s in t.spans), key=lambda s: s.start_s - s.end_s)[:MOST_SPANS]
    least_s = shown[-1].end_s - shown[-1].start_s if shown else 0.0
    tracks = []
    for timeline in timelines:
        spans = [s for s in timeline.spans if s.end_s - s.start_s >= least_s]
        kernels, threads = side_by_side([s for s in spans if not s.exchange])
        exchanges, _ = side_by_side([s for s in spans if s.exchange])
        lanes = threads + bool(exchanges)
        track = []
        for lane, span in [*kernels, *((threads, s) for _, s in exchanges)]:
            text = f"{span.name} ({span.op})"
            kind, come_s = _kind(span, at.forward, at.backward), span.start_s
            if span.exchange and span.seconds:  # the exchange itself; before it, the rank waited for others
                come_s = min(span.end_s, span.start_s + max(0.0, span.end_s - span.start_s - span.seconds))
                if come_s - span.start_s >= least_s:
                    track.append((WAITS, short(span.start_s), short(come_s), text, lane, lanes))
            track.append((kind, short(come_s), short(span.end_s), text, lane, lanes))
        tracks.append(track)
    return tracks


def _kind(span: Span, forward: Mapping[str, int], backward: Mapping[str, int]) -> int:
    if span.exchange:
        return MOVES
    name = span.name
    while name not in forward and name not in backward and "/" in name:
        name = name.partition("/")[2]  # remove the name of the micro-batch's call in front
    return FORWARD if name in forward else BACKWARD if name in backward else OTHER


def _moves(plan: Plan) -> list[tuple[str, str]]:
    rows = [(r.bytes * plan.repeats.get(r.key, 1), f"{r.source} -> {r.target}: {r.ref}") for r in plan.reshards]
    groups = plan.size
    for level in itertools.islice(iterate_levels(plan), 1, None):
        rows += [(r.bytes * groups, f"{r.source} -> {r.target} in each group: {r.ref}") for r in level.reshards]
        groups *= level.size
    for e in plan.edges:
        rows.append((e.bytes, f"{plan.stage_groups[e.source].name} -> {plan.stage_groups[e.target].name}: {e.ref}"))
    ordered = sorted((row for row in rows if row[0]), key=lambda row: -row[0])
    shown = [(format_bytes(moved), text) for moved, text in ordered[:MOVES]]
    rest = ordered[MOVES:]
    return shown + ([(format_bytes(sum(moved for moved, _ in rest)), f"{len(rest)} smaller ones")] if rest else [])


def _layers(drawn: Drawn) -> list[str]:
    """Returns the layers (name scopes) to draw, in program order: those that compute or communicate, at most
    `COLUMNS`.
    """
    time_s, moved = _time_s(drawn), _count_moved(drawn.plan)
    order = list(dict.fromkeys(layer_of(n.name) for n in drawn.program.nodes if n.outputs))
    order = [name for name in order if time_s.get(name) or moved.get(name)]
    kept = set(sorted(order, key=lambda name: -time_s.get(name, 0.0))[:COLUMNS])
    return [name for name in order if name in kept]


def _time_s(drawn: Drawn) -> dict[str, float]:
    """Returns {layer: seconds} of kernels, summed over ranks."""
    known = {node.name for node in drawn.program.nodes}
    found: defaultdict[str, float] = defaultdict(float)
    for timeline in drawn.prediction.timelines:
        for span in timeline.spans:
            if not span.exchange:
                name = span.name
                while name not in known and "/" in name:  # remove the name of the micro-batch's call in front
                    name = name.partition("/")[2]
                found[layer_of(name if name in known else span.name)] += span.seconds
    return found


def _count_moved(plan: Plan) -> dict[str, int]:
    """Returns {layer: bytes} communicated of tensors that the layer produces."""
    found: Counter[str] = Counter()
    for level in iterate_levels(plan):
        for r in level.reshards:
            found[layer_of(r.ref.node)] += r.bytes
    for edge in plan.edges:
        found[layer_of(edge.ref.node)] += edge.bytes
    return found


def _heat(drawn: Drawn, layers: Sequence[str]) -> list[tuple[str, list[float], list[str]]]:
    plan = drawn.plan
    rows = []
    axes = [("ranks", plan)] if plan.inner is None else [("groups", plan), ("ranks of a group", plan.inner)]
    for name, of in axes:
        # A node is divided by rows of the batch, or along another dimension, or replicated on every rank.
        divided = _describe_divided(of, drawn.program)
        batch = [divided.get(layer, (0.0, 0.0))[0] for layer in layers]
        other = [divided.get(layer, (0.0, 0.0))[1] for layer in layers]
        of_name = "" if name == "ranks" else f", {name}"
        rows.append((f"nodes with divided rows{of_name}", batch, [f"{v:.0%}" for v in batch]))
        rows.append((f"nodes with divided tensors{of_name}", other, [f"{v:.0%}" for v in other]))
    if plan.stage_groups:
        stage: dict[str, int] = {}
        for number, group in enumerate(plan.stage_groups):
            for node in drawn.program.nodes:
                if any(node.scope.startswith(s) or s in node.scope for s in group.stages):
                    stage.setdefault(layer_of(node.name), number)
        at = [float(stage.get(layer, -1)) for layer in layers]
        rows.append(("stage", at, [plan.stage_groups[int(v)].name if v >= 0 else "no stage" for v in at]))
    moved, time_s = _count_moved(plan), _time_s(drawn)
    rows.append(
        ("bytes moved", [float(moved.get(n, 0)) for n in layers], [format_bytes(moved.get(n, 0)) for n in layers])
    )
    rows.append(
        ("kernels' time", [time_s.get(n, 0.0) for n in layers], [format_seconds(time_s.get(n, 0.0)) for n in layers])
    )
    return rows


def _describe_divided(plan: Plan, program: Program) -> dict[str, tuple[float, float]]:
    """Returns, for each layer, two fractions of its nodes: those divided by rows, and those divided otherwise.

    Nodes whose result is a partial sum count as divided otherwise.
    """
    counts: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for name, s in plan.strategies.get("", {}).items():
        if s.outputs and not name.startswith("whale/"):
            counts[layer_of(name)][_way(s)] += 1
    return {layer: (a / (a + b + c), b / (a + b + c)) for layer, (a, b, c) in counts.items()}


def _way(s: Strategy) -> int:
    """Classifies how a node is divided: 0: by rows only; 1: along another dimension, or into partial sums; 2: not at
    all.
    """
    placed = s.inputs + s.outputs
    if any(isinstance(p, Shard) and p.dim for p in placed):
        return 1
    if any(isinstance(p, Shard) for p in placed):
        return 0
    return 1 if any(isinstance(p, Partial) for p in s.outputs) else 2


def _explain(plan: Plan, program: Program, layer: str) -> str:
    """Lists the most frequent layouts of a layer's nodes, one per line, for the page's tooltip."""
    found = Counter(
        f"{program.by_name[name].op} {'on the first rank' if s.once else s}"
        for name, s in plan.strategies.get("", {}).items()
        if name in program.by_name and layer_of(name) == layer and s.outputs and program.by_name[name].op != "Const"
    )
    return "\n".join(f"{count} x {text}" for text, count in found.most_common(6)) or "not planned by itself"


def _rank(drawn: Drawn, rank: int, name: str, where: str, stages: bool) -> list[Any]:
    """Returns a row of the table of ranks.

    Args:
        where: the rank's stage; drawn if ``stages``, that is, if the plan has stages.
    """
    found, timeline = drawn.prediction.ranks[rank], drawn.prediction.timelines[rank]
    sizes = (float(found.resident_bytes), float(found.peak_bytes - found.resident_bytes))
    parts = [(kind, size, colour) for (kind, colour), size in zip(_MEMORY, sizes)]
    memory = {"parts": parts, "used": found.peak_bytes, "limit": drawn.limits_bytes[rank]}
    seconds = (timeline.busy_s(exchange=False), _measure_exposed_s(timeline), found.exchange_s)
    return [name.removeprefix("rank "), *[where] * stages, memory, *({"s": short(s)} for s in seconds)]


def _memory(drawn: Drawn, rank: int, name: str) -> dict[str, Any]:
    curve = drawn.prediction.timelines[rank].held
    width = max(1, len(curve) // POINTS)
    points = [max(curve[i : i + width], key=lambda p: p[1]) for i in range(0, len(curve), width)]
    peak = max(held for _, held in curve) if curve else 0
    return {
        "name": name,
        "where": drawn.where,
        "limit": drawn.limits_bytes[rank],
        "peak": max(peak, drawn.prediction.ranks[rank].peak_bytes),
        "points": [(short(at_s), held) for at_s, held in points],
    }


def _last(drawn: Drawn) -> str:
    plan, found = drawn.plan, drawn.prediction
    moving = [r for r in plan.reshards if r.bytes]
    share = ", ".join(f"{n} {v / found.step_s:.0%}" for n, v, _, _ in _fall(drawn) if v > 0)
    return (
        f"Plan: {len(found.ranks)} ranks, {len(moving)} tensors change their layout "
        f"({format_bytes(plan.logical_bytes)} a step). Predicted {format_seconds(found.step_s)}: {share}."
    )
