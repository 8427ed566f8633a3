"""Explains operations of a saved plan: a table of all, and what the plan alone says of some."""

from __future__ import annotations

import fnmatch

from whale.errors import PlanError
from whale.ir.layout import Strategy
from whale.ir.plan import Plan, Reshard
from whale.ir.plan_text import format_bytes
from whale.ir.program import Node

MOST_OPS = 5  # explained at a time


def find_ops(plan: Plan, pattern: str) -> list[str]:
    """Finds the plan's nodes whose names match a pattern (`*` and `?` as in file names), or else contain it.

    A pattern is of the whole name, or of what follows a scope's name: `dense*MatMul` is `model/dense_1/MatMul` as well.

    Raises:
        PlanError: none does.
    """
    names = list(plan.strategies.get("", {}))
    matching = [n for n in names if fnmatch.fnmatchcase(n, pattern) or fnmatch.fnmatchcase(n, f"*/{pattern}")]
    found = matching or [n for n in names if pattern in n]
    if not found:
        raise PlanError(
            "the plan has no such operation",
            given=pattern,
            expected=f"a name, or a pattern, of one of {len(names)} operations (`whale show -v` lists them)",
            action="correct the name",
        )
    return found


def list_op_rows(plan: Plan) -> list[str]:
    """Returns a row for each operation: its layout, the bytes that resharding its operands and results moves, its
    origin.
    """
    moved: dict[str, int] = {}
    for r in plan.reshards:
        if not r.graph:
            moved[r.ref.node] = moved.get(r.ref.node, 0) + r.bytes
    rows = [f"{'operation':44} {'layout':44} {'moved':>10}  why"]
    for name, s in plan.strategies.get("", {}).items():
        short = name if len(name) <= 44 else "..." + name[-41:]
        sent = format_bytes(moved[name]) if moved.get(name) else ""
        rows.append(f"{short:44} {format_layout(s):44} {sent:>10}  {s.why}")
    return rows


def explain_operations(plan: Plan, pattern: str) -> list[str]:
    """Describes what a saved plan decides for the operations that a pattern names.

    Raises:
        PlanError: there is none.
    """
    lines: list[str] = []
    found = find_ops(plan, pattern)
    for name in found[:MOST_OPS]:
        lines += [name, *explain_operation(plan, name, None), ""]
    if len(found) > MOST_OPS:
        lines += [f"... and {len(found) - MOST_OPS} more", ""]
    return [*lines, "Chains and alternatives need the program: `whale plan SCRIPT --explain OP`."]


def format_layout(s: Strategy) -> str:
    """Formats a strategy as text."""
    return "first rank only" if s.once else str(s)


def explain_operation(plan: Plan, name: str, node: Node | None) -> list[str]:
    """Describes an operation's layout and the reshards of its results, and of its operands if ``node`` is given."""
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
