"""Compares how the tensors of programs lie under two plans."""

from __future__ import annotations

from whale.ir.mesh import find_tiles
from whale.ir.plan import Plan, Reshard
from whale.ir.plan_explain import format_layout
from whale.ir.plan_text import format_bytes

ROWS = 12  # operations, variables, and changes of layout listed at most


def list_changed_layouts(one: Plan, other: Plan) -> list[str]:
    """Lists how the batch, stages, layouts and communication of two programs' plans differ; []: they do not."""
    lines = []
    if one.program == other.program and one.fingerprint != other.fingerprint:
        lines.append("  the programs of that name are not equal")
    if (mine := _list_groups(one)) != (theirs := _list_groups(other)):
        lines.append(f"  {'groups':14} {mine} -> {theirs}")
    before, after = ({b.name: str(b.placement) for b in p.batch_inputs} for p in (one, other))
    lines += _list_changed("batch", before, after)
    before, after = ({n: str(tiles) for n, tiles in find_tiles(q).items()} for q in (one, other))
    lines += _list_changed("variable", before, after, "whole")
    layouts = [{n: format_layout(s) for n, s in (q.inner or q).strategies.get("", {}).items()} for q in (one, other)]
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


def _list_groups(plan: Plan) -> str:
    """Says which ranks are together: in groups of an inner axis, or in stages."""
    if plan.stage_groups:
        return ", ".join(f"{p.name} on {list(p.ranks)}" for p in plan.stage_groups)
    return f"{plan.size} groups of {plan.inner.size}" if plan.inner is not None else "none"


def _list_changed(what: str, mine: dict[str, str], theirs: dict[str, str], missing: str = "none") -> list[str]:
    names = [n for n in dict.fromkeys((*mine, *theirs)) if mine.get(n, missing) != theirs.get(n, missing)]
    rows = [f"  {what} {n}: {mine.get(n, missing)} -> {theirs.get(n, missing)}" for n in names[:ROWS]]
    return rows + ([f"  ... and {len(names) - ROWS} more {what}s"] if len(names) > ROWS else [])


def _list_moved(one: Plan, other: Plan) -> list[str]:
    def make_table(plan: Plan) -> dict[tuple[str, str, str], Reshard]:
        of = (*plan.reshards, *(plan.inner.reshards if plan.inner is not None else ()))
        return {(str(r.ref), str(r.source), str(r.target)): r for r in of if r.bytes}

    mine, theirs = make_table(one), make_table(other)
    rows = [(-r.bytes, f"  no longer: {r.ref} {r.source} -> {r.target}") for k, r in mine.items() if k not in theirs]
    rows += [(r.bytes, f"  new: {r.ref} {r.source} -> {r.target}") for k, r in theirs.items() if k not in mine]
    rows.sort(key=lambda row: -abs(row[0]))
    shown = [f"{text} ({format_bytes(abs(moved))})" for moved, text in rows[:ROWS]]
    return shown + ([f"  ... and {len(rows) - ROWS} smaller ones"] if len(rows) > ROWS else [])
