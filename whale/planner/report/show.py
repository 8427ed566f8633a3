"""Formats plans as text: a plan on one screen, a layer's explanation, or the difference between two plans."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from string import ascii_lowercase
from textwrap import wrap

from cost_model.analytic.evaluate import Evaluation, not_compared, prediction_of
from cost_model.analytic.layer_costs import Model, costs_of
from cost_model.analytic.memory import count_offloaded_bytes
from cost_model.cluster.pools import Machines
from whale.errors import PlanError
from whale.ir.pipeline_schedule import make_schedule
from whale.ir.plan_text import (
    fit,
    format_bytes,
    format_change,
    format_plan,
    format_prediction,
    format_seconds,
    list_changed_layouts,
    list_op_rows,
)
from whale.ir.prediction import Prediction
from whale.ir.strategy import ParallelStrategy, Stage, count_expert_ranks, format_count
from whale.planner.analytic_search.neighbours import move_cut
from whale.planner.analytic_search.simplicity import TIE, find_front, measure_complexity
from whale.planner.report.planfile import Alternative, PlanFile

BAR = 10  # characters of a bar
_SHOWN_GIB = 0.1  # less memory than this is printed in a smaller unit
PASSES = 18  # most passes of a stage that are printed
CHANGES = 16  # most changed stages that are printed
SAME_S = 5e-5  # parts of a step that differ by less count as equal: half of the last digit printed
ROWS = 24  # most rows of a table of stages or ranks
REASON = 40  # most characters of the column that says why an alternative lost
WIDTH = 120  # characters of a line if the terminal does not say its width
LONG_SEQUENCE = 1 << 17  # tokens from which on a hint to context parallelism is printed
TIED = 0.01  # part of a step from which on the all-reduce of tied weights is printed
ROUNDING = 1e-6  # steps that differ by a smaller part count as equal


def terminal_width() -> int:
    """Returns the width of the terminal (or COLUMNS) in characters, at least 60."""
    return max(60, shutil.get_terminal_size((WIDTH, 24)).columns)


@dataclass(frozen=True)
class _Page:
    """Holds the parts of the screen that differ between described models and captured programs, as lines of text.

    Attributes:
        model: the line that says what is trained.
        devices: the line that says on what.
        speed: text after the seconds of a step, such as rows per second.
        of: the kind of steps that predictions were compared with.
        bound: what takes most of the step.
        found: the prediction of a step; None: the plan has none.
        tables: sections that follow the first lines.
        layouts: layouts of a program's tensors, and its communication; (): a described model.
        last: the last line, which sums the plan up.
    """

    model: str
    devices: str
    speed: str
    of: str
    bound: str
    found: Prediction | None
    tables: Sequence[Sequence[str]]
    layouts: Sequence[str]
    last: str


def show(plan: PlanFile, width: int = WIDTH) -> str:
    """Formats a plan for one screen: model, devices, step time by parts, a table of stages or ranks, schedule,
    alternatives.

    Args:
        width: characters per line.
    """
    page = _describe_model(plan, width) if plan.program is None else _describe_program(plan, width)
    lines = [page.model, page.devices]
    if plan.cluster is not None and (overridden := list(plan.cluster.list_overridden())):
        lines.append(f"overridden {'; '.join(overridden)}")
    lines.append(f"plan       {plan.strategy.format_summary()}")
    if (found := page.found) is not None:
        lines.append(f"predicted  {format_seconds(found.step_s)} a step{page.speed}")
        if found.likely_s is not None:
            low_s, high_s = found.likely_s
            likely = f"{format_seconds(low_s)} to {format_seconds(high_s)}"
            lines.append(f"likely     {likely}, as nine of ten {page.of}")
        lines.append(f"bound by   {page.bound}")
        if plan.bound_s:
            most = f"at most {max(0.0, 1 - plan.bound_s / found.step_s):.0%} of the step to gain"
            lines.append(f"optimum    not below {format_seconds(plan.bound_s)}: {most}")
        if plan.cut:
            lines.append(f"search     ended by {plan.cut} before all was looked at: more --budget may gain some of it")
    for table in page.tables:
        lines += ["", *table] if table else []
    lost = alternatives_table(plan.alternatives, width)
    if not page.layouts:
        lines += lost
    lines = [line for text in lines for line in (wrap(text, width, subsequent_indent=" " * 11) if text else [""])]
    if page.layouts:
        lines += ["", *fit(page.layouts, width), *lost]
    return "\n".join([*lines, *(["", *wrap(page.last, width)] if page.last else [])])


def alternatives_table(alternatives: Sequence[Alternative], width: int = WIDTH) -> list[str]:
    """Formats a row for each strategy that was not chosen, with the reason."""
    lines = ["", "alternatives that lost"] if alternatives else []
    most = min(REASON, max((len(one.reason) for one in alternatives), default=0))
    for one in alternatives:
        text = f"  {one.reason:{most}}  {one.strategy.name or one.strategy.format_summary()}"
        lines += wrap(text, width, subsequent_indent=" " * (most + 4))
    return lines


def _describe_model(plan: PlanFile, width: int) -> _Page:
    """Returns the parts of the screen for a described model's plan, whose strategy is evaluated again."""
    model, machines, found = plan.evaluate()
    strategy = plan.strategy
    speed = f", {plan.batch / found.step_s:,.1f} rows/s"
    if plan.transformer is not None:
        speed += f", {_describe_speed(plan, found) / 1e12:.1f} TFLOP/s per device"
    tables = [stage_table(plan, machines, found, width), schedule_lines(strategy)]
    if found.tied_s >= TIED * found.step_s:
        tables.append(
            [
                f"tied       the first and the last stage all-reduce the gradients of their tied weights: "
                f"{format_seconds(found.tied_s)} ({found.tied_s / found.step_s:.0%} of the step)"
            ]
        )
    if model.experts:
        own = strategy.expert_ranks
        ways = sorted({own or count_expert_ranks(model.experts, stage.replicas) for stage in strategy.stages})
        tables.append([f"experts    {model.experts} of each layer, divided over {', '.join(map(str, ways))} replicas"])
    if strategy.offload != "none":
        tables.append(host_lines(plan, model, machines))
    if strategy.context > 1:
        each = -(-model.sequence // strategy.context)
        text = f"context    {strategy.context} ranks divide the {model.sequence:,} tokens of a row, {each:,} each; "
        tables.append([text + "keys and values are passed around among them"])
    elif model.sequence >= LONG_SEQUENCE:
        text = f"context    attention has all {model.sequence:,} tokens of a row on one rank; `--set context=2` "
        tables.append([text + "plans with 2 ranks that divide them"])
    return _Page(
        model=f"model      {model.name}, {model.count} layers, batch {plan.batch}",
        devices=_devices(machines),
        speed=speed,
        of=compared_with(model, strategy, machines),
        bound=bound_by(found),
        found=prediction_of(found, strategy, machines, model.stack),
        tables=tables,
        layouts=(),
        last=last_line(plan, machines, found),
    )


def compared_with(model: Model, strategy: ParallelStrategy, machines: Machines) -> str:
    """Describes the measured steps from which the likely interval comes, and says if none of them was of this kind."""
    others = not_compared(model.stack, strategy, machines)
    if not others:
        return "published steps"
    kind = "of a model with experts " if model.experts else ""
    return f"published steps of other kinds: none {kind}under {model.stack.name} on {', '.join(others)} was compared"


def _devices(machines: Machines) -> str:
    return f"cluster    {machines.cluster.name}: " + ", ".join(f"{p.devices} {p.name}" for p in machines.pools)


def _describe_program(plan: PlanFile, width: int) -> _Page:
    """Returns the parts of the screen for a captured program's plan, with layouts of tensors and communication."""
    program = plan.plan
    assert program is not None
    found, strategy = plan.predicted, plan.strategy
    what = plan.description or " ".join([program.program, *(["of", *plan.script] if plan.script else [])])
    batch = f", batch {plan.batch}" if plan.batch else ""
    devices = _devices(plan.machines) if plan.cluster is not None else f"devices    {', '.join(program.devices)}"
    tables: list[Sequence[str]] = [schedule_lines(strategy)] if strategy.micro_batches > 1 else []
    bound = ""
    if found is not None:
        devices += f"; predicted on {found.where}" if plan.cluster is None else ""
        tables.insert(0, rank_table(plan, found, width))
        name, most = max(found.parts_s.items(), key=lambda e: e[1])
        slowest = max(range(len(found.ranks)), key=lambda rank: found.ranks[rank].end_s)
        bound = f"{name} of rank {slowest} ({most / found.step_s:.0%} of the step)"
    # The prediction's peak replaces the plan's own estimate of memory, so that one figure is printed.
    told = replace(program, predicted=None, memory={} if found is not None else program.memory)
    last = format_prediction(program, found)[-1] if found is not None else ""
    return _Page(
        model=f"model      {what}{batch}",
        devices=devices,
        speed=f", {plan.batch / found.step_s:,.0f} rows/s" if found is not None and plan.batch else "",
        of="compared steps",
        bound=bound,
        found=found,
        tables=tables,
        layouts=format_plan(told).splitlines(),
        last=last,
    )


def rank_table(plan: PlanFile, found: Prediction, width: int = WIDTH) -> list[str]:
    """Formats a row for each rank of a program's plan; consecutive equal ranks share one row."""
    stage_of = {rank: number for number, one in enumerate(plan.strategy.stages) for rank in one.bound_ranks}
    head = ["ranks", "stage", "DPxTP", "memory", "between steps", "kernels", "communication"]
    rows: list[list[str]] = []
    first, ranks = 0, found.ranks
    for at in range(1, len(ranks) + 1):
        if at < len(ranks) and ranks[at] == ranks[first] and stage_of.get(at) == stage_of.get(first):
            continue
        one, number = ranks[first], stage_of.get(first, 0)
        part = plan.strategy.stages[min(number, len(plan.strategy.stages) - 1)].parts[0]
        name = str(first) if at == first + 1 else f"{first}-{at - 1}"
        memory = memory_bar(one.peak_bytes, one.limit_bytes) if one.limit_bytes else format_bytes(one.peak_bytes)
        cells = [name, str(number), f"{part.replicas}x{part.tensor}", memory, format_bytes(one.resident_bytes)]
        rows.append([*cells, format_seconds(one.compute_s), format_seconds(one.exchange_s)])
        first = at
    hidden = len(rows) - ROWS
    lines = columns(head, rows[:ROWS], {"memory"}, width, head.index("kernels"))
    return [*lines, f"  ... and {hidden} more ranks"] if hidden > 0 else lines


def details(plan: PlanFile, width: int = WIDTH) -> list[str]:
    """Formats a row for each layer of a described model, or for each operation of a program."""
    program = plan.plan
    return layer_table(plan) if program is None else list_op_rows(program, width)


def _describe_speed(plan: PlanFile, found: Evaluation) -> float:
    assert plan.transformer is not None
    return plan.transformer.step_flops(plan.batch) / found.step_s / plan.strategy.ranks


def parts_of(found: Evaluation) -> dict[str, float]:
    """Returns the step's seconds by activity (compute, communication, bubble, update) of the busiest stage.

    The seconds add up to the step.
    """
    return {
        "compute": found.compute_s,
        "communication": found.send_s + found.reduce_s,
        "bubble": found.bubble_s,
        "update": found.update_s,
    }


def bound_by(found: Evaluation) -> str:
    """Formats which activity takes most of the step, in which stage, and its share."""
    name, most = max(parts_of(found).items(), key=lambda e: e[1])
    return f"{name} of stage {found.busiest} ({most / found.step_s:.0%} of the step)"


def stage_table(plan: PlanFile, machines: Machines, found: Evaluation, width: int = WIDTH) -> list[str]:
    """Formats a row for each device group of a stage, at most ``width`` characters wide; equal neighbours share a
    row.
    """
    head = ["stage", "layers", "devices", "DPxTP", "rows", "params", "recompute", "memory"]
    head += ["forward", "backward", "send", "reduce"]
    rows: list[list[str]] = []
    stages, first = plan.strategy.stages, 0
    hidden = 0
    for at in range(1, len(stages) + 1):
        if at < len(stages) and _group_alike(plan.strategy, found, at, first):
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


def _group_alike(strategy: ParallelStrategy, found: Evaluation, a: int, b: int) -> bool:
    one, other = strategy.stages[a], strategy.stages[b]
    if one.parts != other.parts or one.count != other.count or strategy.recomputes[a] != strategy.recomputes[b]:
        return False
    return found.stages[a].forward_s == found.stages[b].forward_s


def _rows(name: str, plan: PlanFile, machines: Machines, found: Evaluation, first: int, end: int) -> list[list[str]]:
    """Returns the table rows of consecutive equal stages, one per device group; the stage's own cells are in the first
    row.

    Args:
        name: text of the column "stage".
        first, end: numbers of the stages, `end` exclusive.
    """
    stage, cost, count = plan.strategy.stages[first], found.stages[first], end - first
    lead = [name, str(stage.count) if count == 1 else f"{count} x {stage.count}"]
    times = (sum(cost.forward_s), sum(cost.backward_s), cost.send_s, cost.reduce_s)
    rows = []
    for part, used in zip(stage.parts, cost.memory):
        pool = machines.pools[part.pool]
        cells = [f"{part.ranks * count} {pool.name[:28]}", f"{part.replicas}x{part.tensor}", str(part.rows)]
        cells += [_format_parameters(used.parameters_bytes / 2), plan.strategy.find_recompute(stage)]
        bar = memory_bar(used.total_bytes, pool.memory_bytes)
        rows.append([*lead, *cells, bar, *map(format_seconds, times)])
    return [rows[0]] + [["", "", *row[2:8], "", "", "", ""] for row in rows[1:]]


def _format_parameters(count: float) -> str:
    """Formats a number of parameters with a unit that suits its size: 1.52 G, 12.6 M, 98.3 k."""
    for unit, size, digits in (("G", 1e9, 2), ("M", 1e6, 1), ("k", 1e3, 1)):
        if count >= size:
            return f"{count / size:.{digits}f} {unit}"
    return f"{count:.0f}"


def columns(head: list[str], rows: list[list[str]], left: Set[str], width: int, apart: int) -> list[str]:
    """Formats a table; if lines would be longer than `width`, several tables that each repeat the first column.

    Args:
        head: names of the columns.
        rows: cells of each row.
        left: names of the columns that are aligned on the left.
        apart: number of the column that begins the second table, if the table has to be divided.
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


def memory_bar(used_bytes: float, limit_bytes: float) -> str:
    """Formats how much of a device's memory is in use, as a bar and in figures."""
    full = min(BAR, round(BAR * used_bytes / limit_bytes))
    bar = f"[{'#' * full}{'.' * (BAR - full)}]"
    if used_bytes < _SHOWN_GIB * 2**30:
        return f"{bar} {format_bytes(used_bytes)} of {limit_bytes / 2**30:.1f} GiB"
    return f"{bar} {used_bytes / 2**30:5.1f} of {limit_bytes / 2**30:5.1f} GiB"


def host_lines(plan: PlanFile, model: Model, machines: Machines) -> list[str]:
    """Formats how much of the hosts' memory offloaded state takes: a line per pool, for its host with the highest
    use.
    """
    strategy, most = plan.strategy, dict[int, float]()
    for stage in strategy.stages:
        for part in stage.parts:
            one = costs_of(model, strategy, part, strategy.ranks, stage.replicas, stage.recompute)
            used = count_offloaded_bytes(one, stage.layers, stage.replicas, strategy.zero, strategy.offload)
            most[part.pool] = max(most.get(part.pool, 0.0), used)
    return [
        f"offloaded  {format_bytes(used * machines.pools[k].host_devices)} of "
        f"{format_bytes(1e9 * (machines.pools[k].host.memory_gb or 0))} of each {machines.pools[k].host.name} host"
        for k, used in sorted(most.items())
    ]


def schedule_lines(strategy: ParallelStrategy) -> list[str]:
    """Formats the order of passes on the first and last stages, such as F0 F1 B0: forward or backward, and the
    micro-batch.
    """
    if len(strategy.stages) == 1:
        if strategy.micro_batches == 1:
            return ["schedule   the whole batch at once, gradients summed at the end"]
        return [f"schedule   {strategy.micro_batches} micro-batches one after the other, gradients summed at the end"]
    orders = make_schedule(strategy.schedule, len(strategy.stages), strategy.chunks, strategy.micro_batches)
    lines = [
        f"schedule   {strategy.schedule}" + (f", {strategy.chunks} chunks per stage" if strategy.chunks > 1 else "")
    ]
    stages = len(orders)
    for stage in sorted({0, 1, stages - 2, stages - 1} if stages > 4 else set(range(stages))):
        passes = [
            f"{'B' if b else 'F'}{m}" + (_name_chunk(c) if strategy.chunks > 1 else "") for c, m, b in orders[stage]
        ]
        text = " ".join(passes[:PASSES]) + (" ..." if len(passes) > PASSES else "")
        lines.append(f"  {stage:>5}    {text}")
    return lines


def _name_chunk(chunk: int) -> str:
    """Returns the letters that name a model chunk: a to z, then aa, ab, ..."""
    before, last = divmod(chunk, len(ascii_lowercase))
    return (ascii_lowercase[before - 1] if before else "") + ascii_lowercase[last]


def layer_table(plan: PlanFile) -> list[str]:
    """Formats a row for each layer: stage, and on its slowest device seconds of a micro-batch, parameters and
    memory.
    """
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
        rows.append(f"{layer:>6} {index:>6} {times} {own / 1e6:>8.1f} M {format_bytes(held):>22}")
    return rows


def last_line(plan: PlanFile, machines: Machines, found: Evaluation) -> str:
    """Formats the last line of the screen, which sums up the plan and its step."""
    parts = parts_of(found)
    share = ", ".join(f"{name} {value / found.step_s:.0%}" for name, value in parts.items() if value > 0)
    strategy = plan.strategy
    tensor = max(p.tensor for s in strategy.stages for p in s.parts)
    data = max(s.replicas for s in strategy.stages)
    whole_or = ["whole" if n == 1 else f"sharded {n} ways" for n in (tensor, data)]
    return (
        f"Plan: {format_count(len(strategy.stages), 'stage')}, layers {whole_or[0]}, rows {whole_or[1]}, "
        f"{strategy.ranks} of {format_count(machines.devices, 'device')}. "
        f"Predicted {format_seconds(found.step_s)}: {share}."
    )


def explain_layer(plan: PlanFile, layer: int) -> str:
    """Explains one layer of a described model: its stage, why it is there, and what moving it to a neighbour would
    cost.
    """
    model, machines, found = plan.evaluate()
    if not 0 <= layer < model.count:
        raise PlanError(
            "there is no such layer",
            given=f"layer {layer}",
            expected=f"0 to {model.count - 1}",
            action="give the number of a layer of the model (`whale show -v` lists them)",
        )
    index = next(i for i, s in enumerate(plan.strategy.stages) if any(low <= layer < high for low, high in s.layers))
    stage, cost = plan.strategy.stages[index], found.stages[index]
    lines = [
        f"layer {layer} lies in stage {index} (layers {', '.join(f'{low}-{high - 1}' for low, high in stage.layers)})"
    ]
    for part, used in zip(stage.parts, cost.memory):
        pool = machines.pools[part.pool]
        lines.append(
            f"  on {part.replicas} x {part.tensor} {pool.name}, {format_count(part.rows, 'row')} of each micro-batch, "
            f"{format_bytes(used.total_bytes)} of {format_bytes(pool.memory_bytes)}"
        )
    lines.append(
        f"  a micro-batch: forward {format_seconds(sum(cost.forward_s))}, backward "
        f"{format_seconds(sum(cost.backward_s))}, send {format_seconds(cost.send_s)}; after the last: reduce "
        f"{format_seconds(cost.reduce_s)}"
    )
    lines += _other_recompute(plan, model, found, index)
    low, high = stage.layers[0]
    for at, move, words in ((index - 1, layer - low + 1, "the stage before"), (index, layer - high, "the next stage")):
        other = (
            move_cut(plan.strategy, at, move)
            if 0 <= at < len(plan.strategy.stages) - 1 and plan.strategy.chunks == 1
            else None
        )
        if other is not None:
            lines.append(f"  in {words}: {_against(found, plan.evaluator().evaluate(other))}")
    simpler = list_simpler(plan)
    told = [one for one in plan.alternatives[:5] if not any(one.strategy.format_summary() in text for text in simpler)]
    lines += [f"  {one.strategy.format_summary()}: {one.reason}" for one in told]
    return "\n".join([*lines, *(f"  {text}" for text in simpler)])


def list_simpler(plan: PlanFile) -> list[str]:
    """Formats a line for each simpler alternative, with how much slower it is, and for faster ones that are less
    simple.
    """
    others = [(one.slower_s, measure_complexity(one.strategy), one.strategy) for one in plan.alternatives
              if one.slower_s is not None]  # fmt: skip
    told = [(f"not as simple, which has to gain {TIE:.1%}", *one) for one in others if one[0] < 0]
    told += [("simpler", *one) for one in find_front(others, measure_complexity(plan.strategy))]
    said = [
        f"{words}: {strategy.format_summary()}: {format_change(slower_s)} a step ({slower_s / plan.step_s:+.2%})"
        for words, slower_s, _, strategy in told
    ]
    return said if told and told[-1][0] == "simpler" else [*said, "simpler: nothing that fits was found"]


def _other_recompute(plan: PlanFile, model: Model, found: Evaluation, index: int) -> Iterator[str]:
    """Describes a stage's recompute, and what each other kind of recompute would cost."""
    strategy = plan.strategy
    own = strategy.find_recompute(strategy.stages[index])
    yield "  all activations are kept" if own == "none" else f"  activations are recomputed: {own}"
    for how in (kind for kind in dict.fromkeys(kind for kind, _ in model.recomputes()) if kind != own):
        each = [how if i == index else kind for i, kind in enumerate(strategy.recomputes)]
        other = plan.evaluator().evaluate(strategy.replace_recompute(each))
        yield f"    {how} recompute in this stage: {_against(found, other)}"


def _against(found: Evaluation, other: Prediction) -> str:
    if not other.fits:
        return f"infeasible: a rank lacks {format_bytes(other.lacking_bytes)}"
    faster = ", faster than the plan" if other.step_s < found.step_s * (1 - ROUNDING) else ""
    return f"{format_change(other.step_s - found.step_s)} a step{faster}"


def diff(one: PlanFile, other: PlanFile) -> str:
    """Describes how two plans of any kind differ, and how that changes the step."""
    a, b = one.prediction(), other.prediction()
    lines = [f"  {name:14} {x} -> {y}" for (name, x), (_, y) in zip(_facts(one), _facts(other)) if x != y]
    programs = one.plan, other.plan
    if programs[0] is None and programs[1] is None:
        lines += _list_changed_stages(one, other)
    if programs[0] is not None and programs[1] is not None:
        lines += list_changed_layouts(programs[0], programs[1])
    if a is not None and b is not None:
        for name, value in a.parts_s.items():
            after = b.parts_s[name]
            if abs(after - value) > SAME_S:
                more = f"({format_change(after - value)})"
                lines.append(f"  {name:14} {format_seconds(value)} -> {format_seconds(after)} {more}")
    if not lines:
        return "The plans are equal."
    if a is None or b is None:
        return "\n".join(lines)
    change = b.step_s / a.step_s - 1
    return "\n".join([*lines, f"Step: {format_seconds(a.step_s)} -> {format_seconds(b.step_s)} ({change:+.1%})."])


def _facts(plan: PlanFile) -> list[tuple[str, object]]:
    """Returns (name, value) for the fields of a plan that `diff` compares."""
    s = plan.strategy
    datas, tensors = ({n for stage in s.stages for n in each(stage)} for each in (_replicas, _tensors))
    return [
        ("model", plan.description or (plan.program.program if plan.program is not None else _model_of(plan))),
        ("cluster", plan.cluster.name if plan.cluster is not None else "none"),
        ("batch", plan.batch),
        ("stages", len(s.stages)),
        ("devices", s.ranks),
        ("data", "-".join(map(str, sorted({min(datas), max(datas)})))),
        ("tensor", "-".join(map(str, sorted({min(tensors), max(tensors)})))),
        ("tensors from", ", ".join(s.split) or "the first layer on"),
        ("micro-batches", s.micro_batches),
        ("schedule", s.schedule),
        ("chunks", s.chunks),
        ("recompute", ", ".join(dict.fromkeys(s.recomputes))),
        ("ZeRO", s.zero),
        ("offload", s.offload),
        ("every rank", "lends rank 0 its cores" if s.lent_threads else "everything" if s.replicated else "its part"),
        ("rows", "+".join(map(str, s.shares)) or "as stages say"),
    ]


def _replicas(stage: Stage) -> list[int]:
    return [stage.replicas]


def _tensors(stage: Stage) -> list[int]:
    return [part.tensor for part in stage.parts]


def _model_of(plan: PlanFile) -> str:
    if plan.transformer is not None:
        t = plan.transformer
        experts = f", {t.experts} experts" if t.experts else ""
        return f"transformer of {t.layers} layers, hidden {t.hidden}, sequence {t.sequence}{experts}"
    return "measured layers"


def _list_changed_stages(one: PlanFile, other: PlanFile) -> list[str]:
    machines, other_machines = one.machines, other.machines
    pairs = enumerate(zip(one.strategy.stages, other.strategy.stages))
    texts = [(i, _stage(one.strategy, x, machines), _stage(other.strategy, y, other_machines)) for i, (x, y) in pairs]
    changed = [f"  stage {i:<8} {mine} -> {theirs}" for i, mine, theirs in texts if mine != theirs]
    rest = len(changed) - CHANGES
    return changed[:CHANGES] + ([f"  ... and {rest} more stages"] if rest > 0 else [])


def is_faster(one: PlanFile, other: PlanFile) -> bool:
    """Returns True if the step of `one` is shorter than that of `other` by more than a tie (see `simplicity`)."""
    return one.step_s < other.step_s * (1 - TIE)


def against(fixed: PlanFile, free: PlanFile) -> str:
    """Describes what fixed choices cost: compares the plan with them to the plan found without, by the step's parts."""
    (_, _, mine), (_, _, other) = fixed.evaluate(), free.evaluate()
    change_s = mine.step_s - other.step_s
    if abs(change_s) < ROUNDING * other.step_s:
        return "costs nothing, the step stays as it is"
    before, after = parts_of(other), parts_of(mine)
    changes = {name: after[name] - before[name] for name in before}
    parts = [f"{name} {format_change(changed)}" for name, changed in changes.items() if abs(changed) >= SAME_S]
    total = f"{format_change(change_s)} ({format_seconds(other.step_s)} -> {format_seconds(mine.step_s)})"
    return f"{total}: {', '.join(parts)}; without: {free.strategy.format_summary()}"


def _stage(strategy: ParallelStrategy, stage: Stage, machines: Machines) -> str:
    parts = " + ".join(
        f"{p.replicas}x{p.tensor} {machines.pools[p.pool].name} ({format_count(p.rows, 'row')})" for p in stage.parts
    )
    how = strategy.find_recompute(stage)
    return f"{stage.count} layers on {parts}" + (f", {how} recompute" if how != "none" else "")
