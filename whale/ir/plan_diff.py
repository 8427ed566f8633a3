"""Compares two plans of captured programs."""

from __future__ import annotations

from whale.ir.mesh import tiles_of
from whale.ir.plan import Plan, Reshard
from whale.ir.plan_explain import layout_of
from whale.ir.plan_text import human_bytes

ROWS = 12  # operations, variables, and changes of layout listed at most


def diff_plans(one: Plan, other: Plan) -> str:
    """Lists how ranks, batch, stages, layouts and communication of two plans differ."""
    facts = [
        ("program", one.program, other.program),
        ("ranks", _ranks(one), _ranks(other)),
        ("stages", _stages(one), _stages(other)),
        ("micro-batches", one.micro_batches, other.micro_batches),
        ("schedule", one.schedule or "none", other.schedule or "none"),
        ("strategy", *(p.strategy.name if p.strategy is not None else "as scopes say" for p in (one, other))),
    ]
    lines = [f"  {name:14} {a} -> {b}" for name, a, b in facts if a != b]
    if one.program == other.program and one.fingerprint != other.fingerprint:
        lines.insert(0, "  the programs of that name are not equal")
    mine, theirs = ({b.name: str(b.placement) for b in p.batch_inputs} for p in (one, other))
    lines += _changed("batch", mine, theirs)
    mine, theirs = ({n: str(tiles) for n, tiles in tiles_of(q).items()} for q in (one, other))
    lines += _changed("variable", mine, theirs, "whole")
    mine, theirs = ({n: layout_of(s) for n, s in (q.inner or q).strategies.get("", {}).items()} for q in (one, other))
    shared = mine.keys() & theirs.keys()
    lines += _changed("operation", {n: v for n, v in mine.items() if n in shared}, {n: theirs[n] for n in shared})
    lines += _moved(one, other)
    totals = [sum(map(sum, zip(*p.memory.values()))) if p.memory else 0 for p in (one, other)]
    if totals[0] != totals[1] and all(totals):
        lines.append(f"  memory of all ranks together: {human_bytes(totals[0])} -> {human_bytes(totals[1])}")
    if not lines:
        return "The plans are equal."
    last = f"Communication: {human_bytes(one.logical_bytes)} -> {human_bytes(other.logical_bytes)} a step"
    share = [f"{p.split_flops_fraction:.0%}" for p in (one, other)]
    return "\n".join([*lines, f"{last}; products divided: {share[0]} -> {share[1]}."])


def _ranks(plan: Plan) -> str:
    groups = f" ({plan.size} groups of {plan.inner.size})" if plan.inner is not None else ""
    return f"{plan.ranks}{groups}"


def _stages(plan: Plan) -> str:
    return ", ".join(f"{p.name} on {list(p.ranks)}" for p in plan.stage_groups) or "none"


def _changed(what: str, mine: dict[str, str], theirs: dict[str, str], missing: str = "none") -> list[str]:
    names = [n for n in dict.fromkeys((*mine, *theirs)) if mine.get(n, missing) != theirs.get(n, missing)]
    rows = [f"  {what} {n}: {mine.get(n, missing)} -> {theirs.get(n, missing)}" for n in names[:ROWS]]
    return rows + ([f"  ... and {len(names) - ROWS} more {what}s"] if len(names) > ROWS else [])


def _moved(one: Plan, other: Plan) -> list[str]:
    def table(plan: Plan) -> dict[tuple[str, str, str], Reshard]:
        of = (*plan.reshards, *(plan.inner.reshards if plan.inner is not None else ()))
        return {(str(r.ref), str(r.source), str(r.target)): r for r in of if r.bytes}

    mine, theirs = table(one), table(other)
    rows = [(-r.bytes, f"  no longer: {r.ref} {r.source} -> {r.target}") for k, r in mine.items() if k not in theirs]
    rows += [(r.bytes, f"  new: {r.ref} {r.source} -> {r.target}") for k, r in theirs.items() if k not in mine]
    rows.sort(key=lambda row: -abs(row[0]))
    shown = [f"{text} ({human_bytes(abs(moved))})" for moved, text in rows[:ROWS]]
    return shown + ([f"  ... and {len(rows) - ROWS} smaller ones"] if len(rows) > ROWS else [])
