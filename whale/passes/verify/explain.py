"""Explains the layout of an operation of a plan: where it comes from, what it moves, what else is legal.

What a saved plan says without its program is in `whale.ir.plan_text`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from whale.errors import PlanError
from whale.ir.layout import B, Partial, Placement, Shard, Strategy, count_moved_bytes, divide_evenly, shard
from whale.ir.plan import Plan
from whale.ir.plan_text import MOST_OPS, explain_operation, find_ops, format_bytes, format_layout
from whale.ir.program import Node, Program, Ref
from whale.passes.analysis.resharding_cost import change_cost, fraction
from whale.sharding_rules import find_rule
from whale.sharding_rules.graph import make_op_view

MOST_ALTERNATIVES = 6
SHOWN_STEPS = 5  # steps of a chain that are shown, beside its end


def explain_matches(program: Program, plan: Plan, pattern: str) -> list[str]:
    """Describes the operations that a pattern matches, with the chain back to the batch and the alternatives.

    Args:
        program: the expanded one of the plan (see whale.passes.plan_builder.expand).

    Raises:
        PlanError: there is no such operation.
    """
    lines: list[str] = []
    found = [name for name in find_ops(plan, pattern) if name in program.by_name]
    for name in found[:MOST_OPS]:
        node = program.by_name[name]
        lines += [f"{name}: {node.op}" + (f", in {node.scope}" if node.scope else "")]
        lines += explain_operation(plan, name, node)
        lines += [
            "  because  " + line if i == 0 else "           " + line
            for i, line in enumerate(_chain(program, plan, name))
        ]
        lines += _alternatives(program, plan, node)
        lines.append("")
    if len(found) > MOST_OPS:
        lines.append(f"... and {len(found) - MOST_OPS} more")
    return lines


def _chain(program: Program, plan: Plan, name: str) -> list[str]:
    """Follows the divided (or partial) operand from the operation back to the node where the division began."""
    strategies, seen = plan.strategies[""], {name}
    lines: list[str] = []
    inputs = {b.name: b for b in plan.batch_inputs}
    while True:
        node, s = program.by_name[name], strategies[name]
        following = next(
            (
                (r, p)
                for r, p in zip(node.inputs, s.inputs)
                if isinstance(p, (Shard, Partial)) and r.node in strategies and r.node not in seen
            ),
            None,
        )
        if following is None:
            if name in inputs:
                lines.append(f"{name} is the batch, {inputs[name].placement}: {inputs[name].origin}")
            elif name in plan.variables:
                lines.append(f"{name} is a variable that lies {plan.variables[name]}")
            break
        ref, wanted = following
        made = strategies[ref.node].outputs[ref.index]
        lines.append(
            f"{ref} comes {made}"
            + ("" if made == wanted else f", wanted {wanted}")
            + f" from {program.by_name[ref.node].op}"
        )
        name = ref.node
        seen.add(name)
    if len(lines) > SHOWN_STEPS + 2:
        lines = [*lines[:SHOWN_STEPS], f"... {len(lines) - SHOWN_STEPS - 2} steps ...", *lines[-2:]]
    return lines or ["nothing that it reads is divided"]


def _alternatives(program: Program, plan: Plan, node: Node) -> list[str]:
    rule, strategies = find_rule(node.op), plan.strategies[""]
    chosen = strategies[node.name]
    if rule is None:
        return [f"  else     nothing: {node.op} has no rule"]
    op = make_op_view(program, node, plan.size)
    made = [strategies[r.node].outputs[r.index] if r.node in strategies else B for r in node.inputs]
    options: dict[Strategy, None] = {}
    for current in _starts(made, [program.find_type(r).shape for r in node.inputs], plan.size):
        try:
            options.update(dict.fromkeys(rule.strategies(op, current)))
        except PlanError:
            continue
    rows = []
    work = fraction(chosen.inputs + chosen.outputs)
    own = _count_moved(program, plan, node, made, chosen)
    for option in options:
        if option.inputs == chosen.inputs and option.outputs == chosen.outputs:
            continue
        sent = _count_moved(program, plan, node, made, option)
        if sent is None or own is None:
            continue
        times = fraction(option.inputs + option.outputs) / work
        rows.append((sent - own, times, option))
    rows.sort(key=lambda e: (e[0], e[1]))
    lines = []
    for more, times, option in rows[:MOST_ALTERNATIVES]:
        sent_text = f"{'+' if more >= 0 else '-'}{format_bytes(abs(more))} a step"
        lines.append(f"  else     {format_layout(option):40} {sent_text:>18}, {times:.2g} x the work on a rank")
    return lines or ["  else     nothing that its operands can be brought to"]


def _starts(
    made: Sequence[Placement], shapes: Iterable[tuple[int | None, ...] | None], parts: int
) -> Iterable[list[Placement]]:
    """Yields placements of the operands for which a rule lists its strategies: as produced, all replicated, or one
    divided.
    """
    yield list(made)
    yield [B] * len(made)
    for i, shape in enumerate(shapes):
        for dim, size in itertools.islice(enumerate(shape or ()), 4):
            if size and size >= parts:
                one: list[Placement] = [B] * len(made)
                one[i] = shard(dim, divide_evenly(size, parts))
                yield one


def _count_moved(program: Program, plan: Plan, node: Node, made: Sequence[Placement], option: Strategy) -> int | None:
    """Returns the bytes that a step moves for the operation's operands and the readers of its results; None if
    impossible.
    """
    strategies, moved = plan.strategies[""], 0
    pairs = [(program.find_type(r), source, wanted) for r, source, wanted in zip(node.inputs, made, option.inputs)]
    for index, placement in enumerate(option.outputs):
        ref = Ref(node.name, index)
        wanted_by = {
            strategies[reader.name].inputs[at]
            for reader, at in program.consumers.get(ref, ())
            if reader.name in strategies
        }
        pairs += [(node.outputs[index], placement, wanted) for wanted in wanted_by]
    for tensor, source, wanted in pairs:
        if source == wanted:
            continue
        if not tensor.is_static or change_cost(tensor, source, wanted, plan.size) == float("inf"):
            return None
        moved += count_moved_bytes(source, wanted, tensor.bytes, plan.size)
    return moved
