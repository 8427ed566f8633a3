"""Shows a plan as a person reads it: one screen, one stage, or the difference of two."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Set
from textwrap import wrap

from cost_model.analytic.evaluate import Evaluation, evaluate, likely_s
from cost_model.analytic.layer_costs import Model, costs_of
from cost_model.analytic.memory import Footprint, offloaded_bytes
from cost_model.cluster.pools import Machines
from whale.errors import PlanError
from whale.ir.plan_text import human_bytes, human_seconds
from whale.ir.schedule import schedule
from whale.ir.strategy import ParallelStrategy, Stage, counted, expert_ranks
from whale.planner.analytic_search.neighbours import move_cut
from whale.planner.report.planfile import PlanFile

BAR = 10  # characters of a bar
PASSES = 18  # of a stage that are printed
CHANGES = 16  # stages that are printed of a difference
SAME_S = 5e-5  # what two plans differ by at most without being said to differ: half of the last digit printed
ROWS = 24  # stages printed at most; others are summed up in runs of equal ones
WIDTH = 120  # characters of a line, where no terminal says how many it has


def terminal_width() -> int:
    """Returns the characters of a line of the terminal, or of COLUMNS."""
    return max(60, shutil.get_terminal_size((WIDTH, 24)).columns)


def show(plan: PlanFile, width: int = WIDTH) -> str:
    """Returns one screen: model, cluster, step time by parts, a row per stage, schedule, alternatives, a last line."""
    model, machines, found = plan.evaluate()
    strategy = plan.strategy
    low_s, high_s = likely_s(strategy, machines, found.step_s)
    lines = [
        f"model      {model.name}, {model.count} layers, batch {plan.batch}",
        f"cluster    {plan.cluster.name}: " + ", ".join(f"{p.devices} {p.name}" for p in machines.pools),
        f"plan       {strategy.summary()}",
        f"predicted  {human_seconds(found.step_s)} a step, {plan.batch / found.step_s:,.1f} rows/s"
        + (f", {_speed(plan, found) / 1e12:.1f} TFLOP/s per device" if plan.transformer else ""),
        f"likely     {human_seconds(low_s)} to {human_seconds(high_s)}, as nine of ten published steps",
        f"bound by   {bound_by(found)}",
        f"optimum    not below {human_seconds(plan.bound_s)}: at most {found.step_s / plan.bound_s - 1:.0%} to gain",
        "",
        *stage_table(plan, machines, found, width),
        "",
        *schedule_lines(plan),
    ]
    if model.experts:
        ways = sorted({expert_ranks(model.experts, stage.replicas) for stage in strategy.stages})
        lines += ["", f"experts    {model.experts} of each layer, divided over {', '.join(map(str, ways))} replicas"]
    if strategy.offload != "none":
        lines += ["", *host_lines(plan, model, machines)]
    if plan.alternatives:
        lines += ["", "alternatives that lost"]
        most = max(len(one.reason) for one in plan.alternatives)
        for one in plan.alternatives:
            lines += wrap(f"  {one.reason:{most}}  {one.strategy.summary()}", width, subsequent_indent=" " * (most + 4))
    lines = [line for text in lines for line in (wrap(text, width, subsequent_indent=" " * 11) if text else [""])]
    return "\n".join([*lines, "", *wrap(last_line(plan, machines, found), width)])


def _speed(plan: PlanFile, found: Evaluation) -> float:
    assert plan.transformer is not None
    return plan.transformer.step_flops(plan.batch) / found.step_s / plan.strategy.ranks


def parts_of(found: Evaluation) -> dict[str, float]:
    """Returns the step's seconds by what the busiest stage does; they add up to the step."""
    return {
        "compute": found.compute_s,
        "communication": found.send_s + found.reduce_s,
        "bubble": found.bubble_s,
        "update": found.update_s,
    }


def bound_by(found: Evaluation) -> str:
    """Says what takes most of the step, of which stage."""
    name, most = max(parts_of(found).items(), key=lambda e: e[1])
    return f"{name} of stage {found.busiest} ({most / found.step_s:.0%} of the step)"


def stage_table(plan: PlanFile, machines: Machines, found: Evaluation, width: int = WIDTH) -> list[str]:
    """Returns a row for every part of a stage, ``width`` characters at most; runs of equal stages are one row."""
    head = ["stage", "layers", "devices", "DPxTP", "rows", "params", "recompute", "memory"]
    head += ["forward", "backward", "send", "reduce"]
    rows: list[list[str]] = []
    stages, first = plan.strategy.stages, 0
    hidden = 0
    for at in range(1, len(stages) + 1):
        if at < len(stages) and _alike(plan.strategy, found, at, first):
            continue
        name = str(first) if at == first + 1 else f"{first}-{at - 1}"
        if len(rows) >= ROWS:
            hidden += at - first
        else:
            rows += _rows(name, plan, machines, found, first, at)
        first = at
    if set(plan.strategy.recomputes) == {"none"}:
        head, *rows = [[*row[:6], *row[7:]] for row in (head, *rows)]
    lines = columns(head, rows, {"devices", "memory"}, width, head.index("forward"))
    return [*lines, f"  ... and {hidden} more stages"] if hidden else lines


def _alike(strategy: ParallelStrategy, found: Evaluation, a: int, b: int) -> bool:
    one, other = strategy.stages[a], strategy.stages[b]
    if one.parts != other.parts or one.count != other.count or strategy.recomputes[a] != strategy.recomputes[b]:
        return False
    return found.stages[a].forward_s == found.stages[b].forward_s


def _rows(name: str, plan: PlanFile, machines: Machines, found: Evaluation, first: int, end: int) -> list[list[str]]:
    """Returns the cells of a run of equal stages: a row for each part; what is of the stage stands in the first one."""
    stage, cost, count = plan.strategy.stages[first], found.stages[first], end - first
    lead = [name, str(stage.count) if count == 1 else f"{count} x {stage.count}"]
    times = (sum(cost.forward_s), sum(cost.backward_s), cost.send_s, cost.reduce_s)
    rows = []
    for part, used in zip(stage.parts, cost.memory):
        pool = machines.pools[part.pool]
        cells = [f"{part.ranks * count} {pool.name[:28]}", f"{part.replicas}x{part.tensor}", str(part.rows)]
        cells += [f"{used.parameters_bytes / 2e9:.2f} G", plan.strategy.recompute_of(stage)]
        rows.append([*lead, *cells, memory_bar(used, pool.memory_bytes), *(f"{1e3 * t:.1f} ms" for t in times)])
    return [rows[0]] + [["", "", *row[2:8], "", "", "", ""] for row in rows[1:]]


def columns(head: list[str], rows: list[list[str]], left: Set[str], width: int, apart: int) -> list[str]:
    """Returns a table; where its lines would be longer than `width`, several, each with the first column.

    Args:
        left: names of the columns that are aligned on the left.
        apart: number of the column that a second table begins with, if there is one.
    """
    sizes = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    groups, used = [[0]], sizes[0]
    whole = sum(sizes) + 2 * len(sizes) - 2 <= width
    for i in range(1, len(head)):
        if used + 2 + sizes[i] > width or (i == apart and not whole):
            groups.append([0])
            used = sizes[0]
        groups[-1].append(i)
        used += 2 + sizes[i]
    lines = []
    for group in groups:
        for row in (head, *rows):
            cells = (row[i].ljust(sizes[i]) if head[i] in left else row[i].rjust(sizes[i]) for i in group)
            lines.append("  ".join(cells).rstrip())
        lines.append("")
    return lines[:-1]


def memory_bar(used: Footprint, limit_bytes: float) -> str:
    """Returns how full a device's memory is, drawn and in figures."""
    part = used.total_bytes / limit_bytes
    full = min(BAR, round(BAR * part))
    return f"[{'#' * full}{'.' * (BAR - full)}] {used.total_bytes / 2**30:5.1f} of {limit_bytes / 2**30:5.1f} GiB"


def host_lines(plan: PlanFile, model: Model, machines: Machines) -> list[str]:
    """Returns what lies in the hosts' memory: of each pool the host that holds most."""
    strategy, most = plan.strategy, dict[int, float]()
    for stage in strategy.stages:
        for part in stage.parts:
            one = costs_of(model, strategy, part, strategy.ranks, stage.replicas, stage.recompute)
            used = offloaded_bytes(one, stage.layers, stage.replicas, strategy.zero, strategy.offload)
            most[part.pool] = max(most.get(part.pool, 0.0), used)
    return [
        f"offloaded  {human_bytes(used * machines.pools[k].on_host)} of "
        f"{human_bytes(1e9 * (machines.pools[k].host.memory_gb or 0))} of each {machines.pools[k].host.name} host"
        for k, used in sorted(most.items())
    ]


def schedule_lines(plan: PlanFile) -> list[str]:
    """Returns the order of passes on the first stages, as text: F and B with their micro-batch."""
    strategy = plan.strategy
    if len(strategy.stages) == 1:
        if strategy.micro_batches == 1:
            return ["schedule   the whole batch at once, gradients summed at the end"]
        return [f"schedule   {strategy.micro_batches} micro-batches one after the other, gradients summed at the end"]
    orders = schedule(strategy.schedule, len(strategy.stages), strategy.chunks, strategy.micro_batches)
    lines = [
        f"schedule   {strategy.schedule}" + (f", {strategy.chunks} chunks per stage" if strategy.chunks > 1 else "")
    ]
    stages = len(orders)
    for stage in sorted({0, 1, stages - 2, stages - 1} if stages > 4 else set(range(stages))):
        passes = [
            f"{'B' if b else 'F'}{m}" + ("abcdefgh"[c] if strategy.chunks > 1 else "") for c, m, b in orders[stage]
        ]
        text = " ".join(passes[:PASSES]) + (" ..." if len(passes) > PASSES else "")
        lines.append(f"  {stage:>5}    {text}")
    return lines


def layer_table(plan: PlanFile) -> list[str]:
    """Returns a row for each layer: its stage, seconds of a micro-batch on its slowest device, what it holds there."""
    model, _, found = plan.evaluate()
    rows = [f"{'layer':>6} {'stage':>6} {'forward':>10} {'backward':>10} {'params':>10} {'kept of a micro-batch':>22}"]
    of = {
        layer: index
        for index, stage in enumerate(plan.strategy.stages)
        for low, high in stage.layers
        for layer in range(low, high)
    }
    for layer in range(model.count):
        index = of[layer]
        stage = plan.strategy.stages[index]
        part = stage.parts[found.stages[index].limiting]
        costs = costs_of(model, plan.strategy, part, plan.strategy.ranks, stage.replicas, stage.recompute)
        one = slice(layer, layer + 2)
        forward, backward, held, own = (
            values[1] - values[0]
            for values in (costs.forward_s[one], costs.backward_s[one], costs.held_bytes[one], costs.parameters[one])
        )
        own += costs.experts_of(((layer, layer + 1),))
        times = f"{1e3 * forward:>7.2f} ms {1e3 * backward:>7.2f} ms"
        rows.append(f"{layer:>6} {index:>6} {times} {own / 1e6:>8.1f} M {human_bytes(held):>22}")
    return rows


def last_line(plan: PlanFile, machines: Machines, found: Evaluation) -> str:
    """Says in one line what will happen."""
    parts = parts_of(found)
    share = ", ".join(f"{name} {value / found.step_s:.0%}" for name, value in parts.items() if value > 0)
    strategy = plan.strategy
    tensor = max(p.tensor for s in strategy.stages for p in s.parts)
    data = max(s.replicas for s in strategy.stages)
    whole_or = ["whole" if n == 1 else f"sharded {n} ways" for n in (tensor, data)]
    return (
        f"Plan: {counted(len(strategy.stages), 'stage')}, layers {whole_or[0]}, rows {whole_or[1]}, {strategy.ranks} "
        f"of {counted(machines.devices, 'device')}. Predicted {human_seconds(found.step_s)}: {share}."
    )


def explain(plan: PlanFile, layer: int) -> str:
    """Explains one layer: where it lies, why there, and what its neighbours would cost."""
    model, machines, found = plan.evaluate()
    if not 0 <= layer < model.count:
        raise PlanError("there is no such layer", given=layer, expected=f"0 to {model.count - 1}")
    index = next(i for i, s in enumerate(plan.strategy.stages) if any(low <= layer < high for low, high in s.layers))
    stage, cost = plan.strategy.stages[index], found.stages[index]
    lines = [
        f"layer {layer} lies in stage {index} (layers {', '.join(f'{low}-{high - 1}' for low, high in stage.layers)})"
    ]
    for part, used in zip(stage.parts, cost.memory):
        pool = machines.pools[part.pool]
        lines.append(
            f"  on {part.replicas} x {part.tensor} {pool.name}, {counted(part.rows, 'row')} of each micro-batch, "
            f"{human_bytes(used.total_bytes)} of {human_bytes(pool.memory_bytes)}"
        )
    lines.append(
        f"  a micro-batch: forward {human_seconds(sum(cost.forward_s))}, backward "
        f"{human_seconds(sum(cost.backward_s))}, send {human_seconds(cost.send_s)}; after the last: reduce "
        f"{human_seconds(cost.reduce_s)}"
    )
    lines += _other_recompute(plan, model, machines, found, index)
    low, high = stage.layers[0]
    for at, move, words in ((index - 1, layer - low + 1, "the stage before"), (index, layer - high, "the next stage")):
        other = (
            move_cut(plan.strategy, at, move)
            if 0 <= at < len(plan.strategy.stages) - 1 and plan.strategy.chunks == 1
            else None
        )
        if other is not None:
            lines.append(f"  in {words}: {_against(found, evaluate(model, machines, other))}")
    lines += [f"  {one.strategy.summary()}: {one.reason}" for one in plan.alternatives[:5]]
    return "\n".join(lines)


def _other_recompute(plan: PlanFile, model: Model, machines: Machines, found: Evaluation, index: int) -> Iterator[str]:
    """Yields what the stage computes again, and what it would cost to compute more or less."""
    strategy = plan.strategy
    own = strategy.recompute_of(strategy.stages[index])
    yield "  activations are all kept" if own == "none" else f"  activations are computed again: {own}"
    for how in (kind for kind in dict.fromkeys(kind for kind, _ in model.recomputes()) if kind != own):
        each = [how if i == index else kind for i, kind in enumerate(strategy.recomputes)]
        other = evaluate(model, machines, strategy.recomputing(each))
        yield f"    {how} recompute in this stage: {_against(found, other)}"


def _against(found: Evaluation, other: Evaluation) -> str:
    if not other.fits:
        return f"infeasible: a rank lacks {human_bytes(other.lacking_bytes)}"
    return f"{1e3 * (other.step_s - found.step_s):+.2f} ms a step"


def diff(one: PlanFile, other: PlanFile) -> str:
    """Says what differs between two plans, and what that does to the step."""
    (_, machines, a), (_, other_machines, b) = one.evaluate(), other.evaluate()
    lines = []
    facts = [
        ("cluster", one.cluster.name, other.cluster.name),
        ("batch", one.batch, other.batch),
        ("stages", len(one.strategy.stages), len(other.strategy.stages)),
        ("devices", one.strategy.ranks, other.strategy.ranks),
        ("micro-batches", one.strategy.micro_batches, other.strategy.micro_batches),
        ("chunks", one.strategy.chunks, other.strategy.chunks),
        ("recompute", *(", ".join(dict.fromkeys(p.strategy.recomputes)) for p in (one, other))),
        ("ZeRO", one.strategy.zero, other.strategy.zero),
        ("offload", one.strategy.offload, other.strategy.offload),
    ]
    lines += [f"  {name:14} {x} -> {y}" for name, x, y in facts if x != y]
    pairs = enumerate(zip(one.strategy.stages, other.strategy.stages))
    changed = [
        (i, x, y)
        for i, (x, y) in pairs
        if _stage(one.strategy, x, machines) != _stage(other.strategy, y, other_machines)
    ]
    for i, x, y in changed[:CHANGES]:
        lines.append(
            f"  stage {i:<8} {_stage(one.strategy, x, machines)} -> {_stage(other.strategy, y, other_machines)}"
        )
    if len(changed) > CHANGES:
        lines.append(f"  ... and {len(changed) - CHANGES} more stages")
    for name, value in parts_of(a).items():
        after = parts_of(b)[name]
        if abs(after - value) > SAME_S:
            lines.append(
                f"  {name:14} {human_seconds(value)} -> {human_seconds(after)} ({1e3 * (after - value):+.1f} ms)"
            )
    if not lines:
        return "The plans are equal."
    change = b.step_s / a.step_s - 1
    return "\n".join([*lines, f"Step: {human_seconds(a.step_s)} -> {human_seconds(b.step_s)} ({change:+.1%})."])


def against(fixed: PlanFile, free: PlanFile) -> str:
    """Says what a plan with something fixed costs beside the one that was found without, by the step's parts."""
    (_, _, mine), (_, _, other) = fixed.evaluate(), free.evaluate()
    change_s = mine.step_s - other.step_s
    if abs(change_s) < 1e-6 * other.step_s:
        return "costs nothing, the step stays as it is"
    before, after = parts_of(other), parts_of(mine)
    parts = [f"{name} {1e3 * (after[name] - before[name]):+.1f} ms" for name in before]
    parts = [text for text in parts if not text.endswith(("+0.0 ms", "-0.0 ms"))]
    total = f"{1e3 * change_s:+.1f} ms ({human_seconds(other.step_s)} -> {human_seconds(mine.step_s)})"
    return f"{total}: {', '.join(parts)}; without: {free.strategy.summary()}"


def _stage(strategy: ParallelStrategy, stage: Stage, machines: Machines) -> str:
    parts = " + ".join(
        f"{p.replicas}x{p.tensor} {machines.pools[p.pool].name} ({counted(p.rows, 'row')})" for p in stage.parts
    )
    how = strategy.recompute_of(stage)
    return f"{stage.count} layers on {parts}" + (f", {how} recompute" if how != "none" else "")
