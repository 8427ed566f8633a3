"""Formats a plan as text for people, on about one screen, and explains and compares plans."""

from __future__ import annotations

import fnmatch
import html
import re
import textwrap
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

from whale.errors import PlanError
from whale.ir.layout import Partial, Shard, Strategy
from whale.ir.mesh import count_moved_along, find_tiles, iterate_levels, make_mesh
from whale.ir.pipeline_schedule import format_schedule, make_schedule
from whale.ir.plan import Plan, Reshard, TaskGraph
from whale.ir.prediction import Prediction
from whale.ir.program import Node
from whale.ir.strategy import format_count

ROWS = 12  # operations, variables, and changes of layout listed at most

MOST_OPS = 5  # operations that are explained at a time
_WHY = 24  # characters of a line that are kept free for the column "why" and the gaps between columns

# Backends that carry out a reduction instead of Whale, in words.
_THROUGH = {"horovod": "through Horovod"}


def format_bytes(count: float) -> str:
    """Formats a number of bytes: 1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def format_flops(count: float) -> str:
    """Formats a number of FLOPs: 1500 -> '1.50 kFLOP'."""
    for unit in ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "FLOP" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} PFLOP"


def format_seconds(value: float) -> str:
    """Formats seconds in a unit fit for people: 123 s, 1.23 s, 123.4 ms, 12 us."""
    if value >= 100:
        return f"{value:.0f} s"
    if value >= 1:
        return f"{value:.2f} s"
    return f"{1e3 * value:.1f} ms" if value >= 1e-4 or value <= 0 else f"{1e6 * value:.0f} us"


def format_change(seconds: float) -> str:
    """Formats a change of time with its sign: +12.3 ms, -1.20 s."""
    return f"{'-' if seconds < 0 else '+'}{format_seconds(abs(seconds))}"


def fit(lines: Iterable[str], width: int) -> list[str]:
    """Wraps lines to ``width`` characters, and aligns the continuation of a long line with a column of that line.

    Columns are separated by two or more spaces; the continuation is indented to the last column that begins in the left
    half. A line without columns continues two spaces further in than it begins.
    """
    found: list[str] = []
    for line in lines:
        if len(line) <= width:
            found.append(line)
            continue
        begins = len(line) - len(line.lstrip())
        columns = [at.end() for at in re.finditer(r"(?<=\S) {2,}(?=\S)", line) if at.end() <= width // 2]
        indent = " " * (columns[-1] if columns else begins + 2)
        found += textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)
    return found


def _find_verb(r: Reshard) -> str:
    source, target = str(r.source)[0], str(r.target)[0]
    table = {
        "PB": "all-reduce", "PS": "reduce-scatter", "SB": "all-gather", "OB": "broadcast", "OS": "scatter",
        "OP": "place", "SS": "all-to-all", "BS": "slice", "BP": "fill", "SP": "fill", "BO": "keep first",
        "PP": "all-reduce",
    }  # fmt: skip
    return table.get(source + target, f"{r.source} -> {r.target}")


def format_plan(plan: Plan, rows: int = 12) -> str:
    """Formats a plan for `whale plan`: devices, task graphs, batch inputs, layouts, communication, memory, prediction.

    Args:
      rows: the most lines of a list of reshards or of ops without a rule; the rest is counted.
    """
    out = [f"Plan for {plan.program}: {plan.ranks} rank{'s' * (plan.ranks != 1)}{_format_parallelism(plan)}"]
    if plan.lent_threads:
        out += _format_lending(plan)
    elif plan.inner is None and not plan.stage_groups:
        out[0] += f" ({', '.join(plan.devices)})"
    else:
        out += _format_mesh(plan)
    out.append("Task graphs")
    out += [
        f"  {t.scope:<28} {t.kind} over {_format_task_graph_ranks(plan, t)}, {format_count(t.nodes, 'node')}"
        for t in plan.task_graphs
    ]
    if plan.stage_groups and not plan.lent_threads:
        out += _format_stages(plan)
    whole = "rank 0 computes" if plan.lent_threads else "every rank computes"
    out.append("Batch inputs" if plan.batch_inputs else f"Batch inputs: none, {whole} the whole program")
    out += [f"  {b.name:<28} {b.placement}   {b.origin}" for b in plan.batch_inputs]
    nodes = [s for g in plan.strategies.values() for s in g.values()]
    kinds: Counter[str] = Counter()
    for s in nodes:
        kinds["first rank only" if s.once else
              "divided" if any(isinstance(p, Shard) for p in s.inputs + s.outputs) else
              "partial" if any(isinstance(p, Partial) for p in s.outputs or s.inputs) else
              "on every rank"] += 1  # fmt: skip
    share = (
        f"{100 * plan.split_flops_fraction:.1f} % of {format_flops(plan.total_flops)} "
        "in products and convolutions divided"
    )
    out.append("Nodes    " + ", ".join(f"{n} {k}" for k, n in kinds.most_common()) + f"; {share}")
    layouts = Counter(str(p) for s in nodes for p in s.outputs)
    shown = [f"{n} {layout}" for layout, n in layouts.most_common(6)]
    more = [f"{len(layouts) - 6} other kinds"] if len(layouts) > 6 else []
    out.append("Tensors  " + ", ".join(shown + more))
    out += _explain_letters(layouts)
    if plan.variables:
        ways = Counter(
            "whole on one rank" if len(p.holders) == 1 < len(p.sizes) else f"along dimension {p.dim}"
            for p in plan.variables.values()
            if isinstance(p, Shard)
        )
        out.append(f"Split variables  {', '.join(f'{n} {way}' for way, n in sorted(ways.items()))}")
    if plan.offloaded:
        out.append(f"In the host's memory  {len(plan.offloaded)} variables")
    if plan.updates[0]:
        count, written = plan.updates
        others = f"; every other rank updates {'those of its own stage' if plan.stage_groups else 'likewise'}"
        updated = f"{format_count(written, 'variable')} written by {format_count(count, 'operation')}"
        out.append(f"Updates  {updated} on rank 0{others if plan.ranks > 1 and not plan.lent_threads else ''}")
    if plan.declined:
        counts = Counter(name.partition(" ")[0] for name in plan.declined)
        kinds_left = ", ".join(f"{n} of {kind}" for kind, n in sorted(counts.items()))
        out.append(f"Kernels  as the program says where Whale's measured slower: {kinds_left}")
    moving = [r for r in plan.reshards if r.bytes]
    along = f", of which {format_bytes(count_moved_along(plan)[0])} along {plan.axis}" if plan.inner is not None else ""
    backends = Counter(r.backend for r in moving)
    collectives = len([r for r in moving if r.group < 0]) + len({r.group for r in moving if r.group >= 0})
    sent = [f"{format_count(len(plan.edges), 'tensor')} sent {_name_edges(plan)}"] if plan.edges else []
    if moving or not sent:
        sent.insert(0, f"{format_count(len(moving), 'tensor')} in {format_count(collectives, 'collective')}")
    out.append(
        f"Communication per step: {format_bytes(plan.logical_bytes)} logical{along}, {', '.join(sent)}"
        + "".join(f"; {n} of the tensors {_THROUGH[b]}" for b, n in backends.items() if b in _THROUGH)
    )
    out += _format_traffic(plan, moving, rows)
    if plan.predicted is None:  # else there is one figure for memory: the peak of the simulated step
        out += _format_memory(plan)
    if plan.exceptions:
        out.append("Not as on one device")
        out += [f"  {line}" for line in plan.exceptions]
    if plan.unruled:
        out.append("Ops without a rule (every rank computes them whole, or the first rank runs them)")
        table = sorted(plan.unruled.items(), key=lambda kv: -kv[1])
        out += [f"  {name:<50} {format_bytes(moved)} gathered" for name, moved in table[:rows]]
        out += [f"  ... and {len(table) - rows} more"] if len(table) > rows else []
    if plan.inner is not None:
        out.append(f"Along {plan.inner.axis}, in each group of {plan.inner.mesh_size} ranks")
        out += [f"  {line}" for line in format_plan(plan.inner, rows).splitlines()[1:]]
    if plan.predicted is not None:
        out += format_prediction(plan, plan.predicted)
    return "\n".join(out) + "\n"


def format_short(plan: Plan) -> str:
    """Formats a plan in one or two lines: its parallelism, the bytes moved per step, and predicted time or memory.

    Python's prompt shows this as the plan's ``repr``.
    """
    first = format_plan(plan).partition("\n")[0].partition(" (")[0]
    splits = [s for nodes in plan.strategies.values() for s in nodes.values()]
    divided = sum(any(isinstance(p, Shard) for p in s.outputs) for s in splits)
    moving = sum(bool(r.bytes) for r in plan.reshards)
    lines = [f"{first}; {_format_moves(plan, divided, moving)}, {format_bytes(plan.logical_bytes)} a step"]
    if plan.predicted is not None:
        lines.append(f"predicted: {format_seconds(plan.predicted.step_s)} a step")
    elif memory := _format_memory(plan):
        lines.append(memory[0].partition(": ")[0])
    return "\n".join(lines)


def _format_unfolding(plan: Plan) -> str:
    style = "white-space: pre; overflow-x: auto"
    text, more = (html.escape(text) for text in (format_short(plan), format_plan(plan)))
    return f'<pre>{text}</pre><details><summary>the whole plan</summary><pre style="{style}">{more}</pre></details>'


# A notebook, and Python's prompt, look for these in the class, whose module cannot import this one.
Plan.__repr__ = format_short  # type: ignore[assignment, method-assign]
Plan._repr_html_ = _format_unfolding  # type: ignore[attr-defined]


def _format_parallelism(plan: Plan) -> str:
    """Formats the degree of each kind of parallelism: ``: 2 stages x 2 replicas``; "" for one rank."""
    if plan.lent_threads:
        return ": 1 computes"
    groups = plan.stage_groups
    sizes = sorted({len(group.ranks) for group in groups}) or [plan.mesh_size]
    found = [f"{len(groups)} stages"] if groups else []
    if len(sizes) > 1:
        return f": {found[0]} of {sizes[0]} to {sizes[-1]} ranks"
    # Other plans of as many ranks have the same axes.
    found += [
        _format_axis_parallelism(plan, axis.name, axis.size)
        for axis in make_mesh(plan, range(sizes[0])).axes
        if axis.size > 1
    ]
    return f": {' x '.join(found)}" if found else ""


def _format_axis_parallelism(plan: Plan, axis: str, count: int) -> str:
    unnamed = axis.startswith("axis_")
    if axis == "tensor" or (unnamed and any(t.kind == "split" for t in plan.task_graphs)):
        return f"tensors sharded {count} ways"
    return f"{count} replicas" if axis == "data" or unnamed else f"{axis} {count}"


_MEANINGS = {
    "S": "S(d)[a,b] sharded along d, a and b indices on the ranks",
    "B": "B replicated",
    "P": "P(op) partial, to be reduced",
    "O": "O on the first rank only",
    "o": "own[a,b] each rank's own, of a and b rows",
}


def _explain_letters(layouts: Counter[str]) -> list[str]:
    """Returns a line that explains the letters (S, B, P, O, own) of the placements that occur in the plan."""
    first = {layout[0] for layout in layouts}
    said = [text for letter, text in _MEANINGS.items() if letter in first]
    return [f"         {'; '.join(said)}"] if said else []


def _format_task_graph_ranks(plan: Plan, graph: TaskGraph) -> str:
    """Formats the ranks that run a task graph; on a mesh of several axes, its coordinates on the outermost axis."""
    numbers = list(graph.devices)
    if plan.stage_groups or plan.inner is None:
        return f"ranks {numbers}" if numbers else "the ranks that need it"
    return f"{plan.axis} {numbers}"


def _format_mesh(plan: Plan, rows: int = 4) -> list[str]:
    """Formats the mesh, one line per axis: the groups of ranks that communicate along it, and the bytes moved in a
    step.
    """
    groups = plan.stage_groups
    plans = (plan, *plan.others)
    alike = len(plans) == 1
    found: list[tuple[str, list[tuple[int, ...]], int]] = []
    if groups:
        found.append((f"stage={len(groups)}", [g.ranks for g in groups], sum(e.bytes for e in plan.edges)))
    for number, one in enumerate(plans):
        size = one.mesh_size
        members = [g.ranks for g in groups if g.plan == number] or [plan.mesh_ranks]
        for k, (axis, moved) in enumerate(zip(make_mesh(one, range(size)).axes, count_moved_along(one))):
            lines = [make_mesh(one, ranks).list_ranks_along(r, axis.name) for ranks in members for r in ranks]
            where = str(axis) if alike or k == len(found) else f"{axis} of {size} ranks"
            found.append((where, list(dict.fromkeys(lines)), moved))
    name = ",".join(where for where, _, _ in found) if alike else f"{len(groups)} stages of their own meshes"
    out = [f"Mesh {name}: the groups along each axis, and what they move in a step"]
    if plan.rank_order:
        out.append(f"  ranks lie by the links between their hosts: {', '.join(map(str, plan.rank_order))}")
    for where, lines, moved in found:
        between = " -> " if where.startswith("stage=") else " "
        shown = between.join("+".join(map(str, line)) for line in lines[:rows])
        more = f" and {len(lines) - rows} more" if len(lines) > rows else ""
        out.append(f"  {where:<16} {format_bytes(moved):>10}  {shown}{more}")
    own = [(where, moved) for where, _, moved in found[bool(groups) :]]
    for (outer, most), (inner, less) in pairwise(own):
        if alike and most > less:
            out.append(
                f"  {outer} moves more than {inner}: where links differ, name it later in the mesh, so that its ranks "
                "are neighbours"
            )
    return out


def format_prediction(plan: Plan, found: Prediction) -> list[str]:
    """Formats the prediction of a program's step: time and bytes by rank, rows per second, the bottleneck, a summary
    line.
    """
    out = format_step(found)
    sizes = [b.placement.sizes for b in plan.batch_inputs if isinstance(b.placement, Shard)]
    if sizes and plan.inner is None:
        out[0] += f", {sum(sizes[0]) / found.step_s:,.0f} rows/s"
    last = max(range(len(found.ranks)), key=lambda r: found.ranks[r].end_s)
    computing = min(1.0, found.ranks[last].compute_s / found.step_s)
    out.append(f"Bound by {'kernels' if computing > 0.5 else 'communication and waiting'} of rank {last}")
    splits = [s for nodes in plan.strategies.values() for s in nodes.values()]
    divided = sum(any(isinstance(p, Shard) for p in s.outputs) for s in splits)
    moving = sum(bool(r.bytes) for r in plan.reshards)
    return [
        *out,
        f"Plan: {_format_moves(plan, divided, moving)} ({format_bytes(plan.logical_bytes)} a step). "
        f"Predicted {format_seconds(found.step_s)}: compute {computing:.0%}, communication and waiting "
        f"{1 - computing:.0%}.",
    ]


def _format_moves(plan: Plan, divided: int, moving: int) -> str:
    """Formats the number of stages, of sharded tensors, of reshards, and of tensors sent between stages."""
    stages = [format_count(len(plan.stage_groups), "stage")] if plan.stage_groups and not plan.lent_threads else []
    sent = [f"{format_count(len(plan.edges), 'tensor')} sent {_name_edges(plan)}"] if plan.edges else []
    return ", ".join([*stages, f"{format_count(divided, 'tensor')} split", format_count(moving, "reshard"), *sent])


def format_step(found: Prediction) -> list[str]:
    """Formats the predicted time of a step, and a line for each of the first eight ranks: kernels, communication,
    memory.
    """
    out = [f"Predicted on {found.where}: {format_seconds(found.step_s)} a step"]
    if found.likely_s is not None:
        low, high = map(format_seconds, found.likely_s)
        out.append(f"  likely {low} to {high}, as nine of ten steps that were compared")
    for rank, ran in enumerate(found.ranks[:8]):
        out.append(
            f"  rank {rank}: {format_seconds(ran.compute_s)} of kernels, {format_seconds(ran.exchange_s)} of "
            f"communication, {format_bytes(ran.peak_bytes)} of tensors at most, "
            f"{format_bytes(ran.resident_bytes)} between steps"
        )
    out += [f"  ... and {len(found.ranks) - 8} ranks more"] if len(found.ranks) > 8 else []
    return out


def _format_memory(plan: Plan) -> list[str]:
    """Formats the predicted peak memory of the fullest rank, and of the others if they differ by over 1 %."""
    if not plan.memory:
        return []
    totals = [sum(row) for row in zip(*plan.memory.values())]
    rank = totals.index(max(totals))

    def format_parts(rank: int) -> str:
        return ", ".join(f"{name} {format_bytes(sizes[rank])}" for name, sizes in plan.memory.items() if sizes[rank])

    out = [f"Memory at most {format_bytes(totals[rank])}, on rank {rank} (predicted): {format_parts(rank)}"]
    if max(totals) > 1.01 * min(totals):
        out += [f"  rank {r}: {format_bytes(n)}: {format_parts(r)}" for r, n in enumerate(totals) if r != rank]
    return out


def _name_edges(plan: Plan) -> str:
    return "to ranks that lend their cores" if plan.lent_threads else "between stages"


def _format_lending(plan: Plan) -> list[str]:
    """Formats a plan in which rank 0 alone computes: its threads, and what the other ranks receive in a step."""
    lenders = plan.ranks - 1
    received = f"{format_count(len(plan.edges), 'tensor')}, {format_bytes(sum(e.bytes for e in plan.edges))} a step"
    return [
        f"Rank 0 computes with {plan.lent_threads} threads, on the cores of all ranks",
        f"  {lenders} {'rank lends its' if lenders == 1 else 'ranks lend their'} cores, and "
        f"{'receives' if lenders == 1 else 'receive'} what the step returns ({received})",
    ]


def _format_stages(plan: Plan) -> list[str]:
    """Formats the ranks of each stage group, the tensors sent between groups, and the schedule."""
    ranks = sorted({len(group.ranks) for group in plan.stage_groups})
    many = " and ".join(map(str, ranks))
    out = [f"Stages over {len(plan.stage_groups)} groups of {many} rank{'s' * (ranks != [1])}"]
    for group in plan.stage_groups:
        rows = [str(b.placement) for b in plan.find_group_plan(group).batch_inputs[:1]] if plan.others else []
        out.append(", rows ".join([f"  {group.name:<28} ranks {list(group.ranks)}", *rows]))
    sent: dict[tuple[int, int], list[int]] = {}
    for edge in plan.edges:
        sent.setdefault((edge.source, edge.target), []).append(edge.bytes)
    for (source, target), sizes in sorted(sent.items()):
        names = f"{plan.stage_groups[source].name} -> {plan.stage_groups[target].name}"
        out.append(f"  {format_bytes(sum(sizes)):>10}  {names}, {len(sizes)} tensor{'s' * (len(sizes) != 1)}")
    if plan.schedule:
        out.append(f"Schedule {plan.schedule}, {plan.micro_batches} micro-batches")
        times = make_schedule(
            plan.schedule, len(plan.stage_groups), len(plan.stage_groups[0].stages), plan.micro_batches
        )
        out += [f"  {line}" for line in format_schedule(times).splitlines()]
    return out


def _format_traffic(plan: Plan, moving: list[Reshard], rows: int) -> list[str]:
    lines: list[tuple[int, str, str]] = []
    by_group: dict[int, list[Reshard]] = {}
    for r in moving:
        if r.group >= 0:
            by_group.setdefault(r.group, []).append(r)
        else:
            lines.append((r.bytes, _format_change(r), _shorten(f"{r.graph + '/' if r.graph else ''}{r.ref.node}")))
    for members in by_group.values():
        first = _shorten(members[0].ref.node, 28)
        lines.append(
            (sum(m.bytes for m in members), _format_change(members[0]), f"{len(members)} tensors: {first}, ...")
        )
    lines += [(moved, "rows, by their ids", _shorten(name)) for name, moved in plan.routed.items()]
    lines.sort(key=lambda row: -row[0])
    shown = [f"  {format_bytes(moved):>10}  {change:<28} {what}" for moved, change, what in lines[:rows]]
    return shown + ([f"  ... and {len(lines) - rows} smaller"] if len(lines) > rows else [])


def _format_change(r: Reshard) -> str:
    through = f" {_THROUGH[r.backend]}" if r.backend in _THROUGH else ""
    wire = f" as {r.wire_dtype}" if r.wire_dtype else ""
    return f"{_find_verb(r)} {r.source} -> {r.target}{through}{wire}"


def _shorten(name: str, limit: int = 44) -> str:
    """Shortens a name to ``limit`` characters, keeping its end, which says more than its beginning."""
    return name if len(name) <= limit else "..." + name[3 - limit :]


def find_ops(plan: Plan, pattern: str) -> list[str]:
    """Returns the names of the plan's nodes that match a pattern with `*` and `?`; if none match, those that contain
    it.

    The pattern has to match the whole name, or the name below some scope: `dense*MatMul` matches
    `model/dense_1/MatMul`.

    Raises:
        PlanError: no node matches or contains the pattern.
    """
    names = list(plan.strategies.get("", {}))
    matching = [n for n in names if fnmatch.fnmatchcase(n, pattern) or fnmatch.fnmatchcase(n, f"*/{pattern}")]
    found = matching or [n for n in names if pattern in n]
    if not found:
        raise PlanError(
            "the plan has no such operation",
            given=pattern,
            expected=f"a name, or a pattern with * and ?, of one of the plan's {len(names)} operations",
            action="correct the name; `whale show -v FILE` lists the operations",
        )
    return found


def list_op_rows(plan: Plan, width: int = 120) -> list[str]:
    """Returns a table with a row for each operation, in lines of ``width`` characters at most.

    The columns are the operation's name, its layout, the bytes moved by reshards of its results, and why it lies so.
    """
    moved: dict[str, int] = {}
    for r in plan.reshards:
        if not r.graph:
            moved[r.ref.node] = moved.get(r.ref.node, 0) + r.bytes
    most = max(24, width * 3 // 8 - 4)
    cells = [("operation", "layout", "moved", "why")]
    for name, s in plan.strategies.get("", {}).items():
        sent = format_bytes(moved[name]) if moved.get(name) else ""
        cells.append((_shorten(name, most), format_layout(s), sent, s.why))
    sizes = [max(len(row[i]) for row in cells) for i in range(3)]
    # If the columns are wider than the line, the few rows with long layouts continue in a second line.
    sizes[1] = min(sizes[1], max(16, width - sizes[0] - sizes[2] - _WHY))
    rows = [f"{a:{sizes[0]}}  {b:{sizes[1]}}  {c:>{sizes[2]}}  {d}" for a, b, c, d in cells]
    return fit(rows, width)


def explain_operations(plan: Plan, pattern: str) -> list[str]:
    """Describes the layouts and reshards of the operations of a saved plan that match a pattern (see ``find_ops``).

    Raises:
        PlanError: no operation matches.
    """
    lines: list[str] = []
    found = find_ops(plan, pattern)
    for name in found[:MOST_OPS]:
        lines += [name, *explain_operation(plan, name, None), ""]
    if len(found) > MOST_OPS:
        lines += [f"... and {len(found) - MOST_OPS} more", ""]
    return [*lines, "Chains and alternatives need the program: `whale plan SCRIPT --explain OP`."]


def format_layout(s: Strategy) -> str:
    """Formats a node's strategy as ``operand placements -> output placements``, or "first rank only"."""
    return "first rank only" if s.once else str(s)


def explain_operation(plan: Plan, name: str, node: Node | None) -> list[str]:
    """Describes the layout of one operation, and the reshards of its results.

    Args:
        node: the operation in the program, whose operands' reshards are described too; None if only the plan is known.
    """
    s = plan.strategies[""][name]
    lines = [f"  layout   {format_layout(s)}   ({s.why})"]
    read = set(node.inputs) if node is not None else set()
    for r in plan.reshards:
        if r.graph or not r.bytes:
            continue
        if r.ref.node == name:
            lines.append(f"  result   {_format_move(r, plan)}")
        elif r.ref in read and node is not None and s.inputs[node.inputs.index(r.ref)] == r.target:
            lines.append(f"  operand  {r.ref} {_format_move(r, plan)}")
    return lines


def _format_move(r: Reshard, plan: Plan) -> str:
    others = len(plan.groups.get(r.group, ())) - 1 if r.group >= 0 else 0
    together = f", together with {others} others" if others > 0 else ""
    return f"{r.source} -> {r.target}, {format_bytes(r.bytes)}{together}" + (f" ({r.origin})" if r.origin else "")


def list_changed_layouts(one: Plan, other: Plan) -> list[str]:
    """Lists how two plans differ: batch, stages, layouts of variables and operations, reshards, memory; [] if they do
    not.
    """
    lines = []
    if one.program == other.program and one.fingerprint != other.fingerprint:
        lines.append("  the programs of that name are not equal")
    if (mine := _list_groups(one)) != (theirs := _list_groups(other)):
        lines.append(f"  {'groups':14} {mine} -> {theirs}")
    before, after = ({b.name: str(b.placement) for b in p.batch_inputs} for p in (one, other))
    lines += _list_changed("batch", before, after)
    before, after = ({n: str(tiles) for n, tiles in find_tiles(q).items()} for q in (one, other))
    lines += _list_changed("variable", before, after, "whole")
    layouts = [_list_layouts(q) for q in (one, other)]
    shared = layouts[0].keys() & layouts[1].keys()
    before, after = ({n: v for n, v in each.items() if n in shared} for each in layouts)
    lines += _list_changed("operation", before, after)
    lines += _list_moved(one, other)
    totals = [sum(map(sum, zip(*p.memory.values()))) if p.memory else 0 for p in (one, other)]
    if totals[0] != totals[1] and all(totals):
        lines.append(f"  memory of all ranks together: {format_bytes(totals[0])} -> {format_bytes(totals[1])}")
    if not lines:
        return []
    moved = f"{format_bytes(one.logical_bytes)} -> {format_bytes(other.logical_bytes)} a step"
    share = [f"{p.split_flops_fraction:.0%}" for p in (one, other)]
    return [*lines, f"  moved {moved}; products divided: {share[0]} -> {share[1]}"]


def _list_layouts(plan: Plan) -> dict[str, str]:
    """Returns the layout of each operation along the innermost mesh axis, {name: layout}."""
    innermost = [list(iterate_levels(one))[-1] for one in (plan, *plan.others)]
    return {name: format_layout(s) for one in innermost for name, s in one.strategies.get("", {}).items()}


def _list_groups(plan: Plan) -> str:
    """Describes which ranks form groups: those of each stage, or those along the inner axis."""
    if plan.stage_groups:
        return ", ".join(f"{p.name} on {list(p.ranks)}" for p in plan.stage_groups)
    sizes = [level.size for level in iterate_levels(plan)]
    return " groups of ".join(map(str, sizes)) if len(sizes) > 1 else "none"


def _list_changed(what: str, mine: dict[str, str], theirs: dict[str, str], missing: str = "none") -> list[str]:
    names = [n for n in dict.fromkeys((*mine, *theirs)) if mine.get(n, missing) != theirs.get(n, missing)]
    rows = [f"  {what} {n}: {mine.get(n, missing)} -> {theirs.get(n, missing)}" for n in names[:ROWS]]
    return rows + ([f"  ... and {len(names) - ROWS} more {what}s"] if len(names) > ROWS else [])


def _list_moved(one: Plan, other: Plan) -> list[str]:
    def make_table(plan: Plan) -> dict[tuple[str, str, str], Reshard]:
        plans = [level for one in (plan, *plan.others) for level in iterate_levels(one)]
        return {(str(r.ref), str(r.source), str(r.target)): r for one in plans for r in one.reshards if r.bytes}

    mine, theirs = make_table(one), make_table(other)
    rows = [(-r.bytes, f"  no longer: {r.ref} {r.source} -> {r.target}") for k, r in mine.items() if k not in theirs]
    rows += [(r.bytes, f"  new: {r.ref} {r.source} -> {r.target}") for k, r in theirs.items() if k not in mine]
    rows.sort(key=lambda row: -abs(row[0]))
    shown = [f"{text} ({format_bytes(abs(moved))})" for moved, text in rows[:ROWS]]
    return shown + ([f"  ... and {len(rows) - ROWS} smaller ones"] if len(rows) > ROWS else [])
