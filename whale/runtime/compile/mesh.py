"""Meshes of two axes: groups of ranks that divide tensors under ``wh.split``, and among the groups, rows of the batch.

A rule says what one axis may do, and two axes do it one after the other. The program is planned and lowered for the
first axis, where all of it is data parallel; what a group then runs is a program again, with local shapes and
communication ops, and is planned and lowered for the second axis like any other: outside of split scopes its rows are
divided further, inside its tensors. Communication ops of the first axis have rules like other ops: each rank of a group
sends the part that it holds to the ranks with the same place in the other groups.

    rank = group * ranks per group + place in the group
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from whale.errors import PlanError
from whale.ir.fingerprint import fingerprint
from whale.ir.layout import Split, split
from whale.ir.ops import EXCHANGES
from whale.ir.plan import BatchInput, Plan
from whale.ir.program import Node, Program, Ref, const_node
from whale.ir.values import DType, Shape
from whale.lowering.local import localise
from whale.passes.facts.batch import batch_inputs, rows_of_ranks
from whale.passes.facts.scopes import has_split_scopes
from whale.passes.lay_out import expand
from whale.passes.normalise.annotate import annotate
from whale.passes.order import complete_plan, make_plan
from whale.passes.settings import PlanSettings

SECOND_AXIS = "whale/second_axis"


def plan_program(program: Program, settings: PlanSettings) -> Plan:
    """The plan of a normalised program over one group of all ranks, or over several where that makes a difference.

    Raises:
      PlanError: see ``make_plan`` and ``plan_mesh``.
    """
    size, group = settings.size, settings.split.ranks
    if group > size or (group and size % group):
        raise PlanError(
            "the ranks cannot be divided into equal groups",
            given=f"split.ranks={group}, {size} ranks",
            expected=f"split.ranks={' or '.join(str(n) for n in range(1, size + 1) if size % n == 0)}",
            action="change split.ranks or the number of ranks",
        )
    divided = has_split_scopes(program) or any(isinstance(p, Split) for p in settings.split.known.values())
    return plan_mesh(program, settings, group) if 0 < group < size and divided else make_plan(program, settings)


def plan_mesh(program: Program, settings: PlanSettings, group: int) -> Plan:
    """The plan of the first axis, with that of the second one as its ``inner``.

    Args:
      settings: of all ranks.
      group: ranks that divide tensors together.

    Raises:
      PlanError: the ranks, or the rows of the batch, do not make equal groups; the program has loops or branches, or
        sends its gradients through Horovod.
    """
    _refuse(program, settings, group)
    groups = settings.size // group
    rows = _rows(program, settings, group)
    first = settings.but(
        size=groups,
        devices=tuple(f"ranks {g * group} to {(g + 1) * group - 1}" for g in range(groups)),
        batch__shares=(),
        batch__local={},
        batch__inputs=tuple(_as_local(b, group) for b in rows),
        split__known={},
        split__scopes=False,
        exchange__group_bytes=0,
    )
    outer = make_plan(program, first)
    base = _first_axis(program, outer, first, 0)
    second = _second(settings, group, rows)
    inner = make_plan(base, second)
    inner = replace(inner, fingerprint=fingerprint(program))
    # The first group has what the others lack: nodes that run once.
    other = _plan_of_others(_first_axis(program, outer, first, 1), second, inner, outer)
    moved = inner.logical_bytes + (groups - 1) * other.logical_bytes
    outer = replace(outer, batch_inputs=rows, inner=inner, inner_bytes=moved, variables=inner.variables)
    return replace(outer, repeats=_repeats(base, outer, inner))


def _plan_of_others(base: Program, second: PlanSettings, inner: Plan, outer: Plan) -> Plan:
    """The first group's plan for what the other groups run."""
    try:
        return complete_plan(base, second, inner)
    except PlanError as error:
        for name, strategy in outer.strategies[""].items():
            for p in strategy.outputs:
                if isinstance(p, Split) and len(set(p.sizes)) > 1:
                    raise PlanError(
                        "the groups of ranks do not get equal rows of a tensor",
                        op=name,
                        given=f"{sum(p.sizes)} in dimension {p.dim}, divided {list(p.sizes)} over {outer.size} groups",
                        expected=f"a multiple of {outer.size}",
                        action="change that size, or leave split.ranks out",
                    ) from error
        raise


def lower_mesh(
    program: Program, plan: Plan, settings: PlanSettings, ranks: Sequence[int], comm: str, what: str
) -> list[Program]:
    """What each of ``ranks`` runs under a plan of ``plan_mesh``."""
    inner = plan.inner
    assert inner is not None
    group = inner.size
    first = settings.but(size=plan.size)
    local = replace(plan, batch_inputs=tuple(_as_local(b, group) for b in plan.batch_inputs))
    found: list[Program] = []
    bases: dict[int, tuple[Program, Program, Plan]] = {}
    for rank in ranks:
        number, place = divmod(rank, group)
        if number not in bases:
            base = _first_axis(program, local, first, number)
            second = _second(settings, group, plan.batch_inputs)
            mine = inner if number == 0 else complete_plan(base, second, inner)
            bases[number] = base, expand(base, mine.expanded, second), mine
        base, expanded, mine = bases[number]
        lowered = localise(expanded, mine, place, comm, what, SECOND_AXIS)
        lowered = _placed(lowered, set(base.by_name), comm, rank, group, plan.size)
        for b in plan.batch_inputs:
            if not b.local:
                lowered = _cut_rows(lowered, program, b, number, group)
        found.append(lowered)
    return found


def _refuse(program: Program, settings: PlanSettings, group: int) -> None:
    given = f"split.ranks={group}, {settings.size} ranks"
    if program.functions:
        raise PlanError(
            "programs with loops or branches cannot be spread over groups of ranks",
            op=next(iter(program.functions)),
            given=given,
            expected="one group of all ranks",
            action="leave split.ranks out",
        )
    if settings.exchange.wire_dtype:
        raise PlanError(
            "groups of ranks send gradients as they are",
            given=f'{given}, communication.wire_dtype="{settings.exchange.wire_dtype}"',
            expected="communication.wire_dtype empty, or one group of all ranks",
            action="leave communication.wire_dtype out",
        )
    if settings.exchange.backend != "whale":
        raise PlanError(
            "groups of ranks communicate through Whale only",
            given=f'{given}, communication.backend="{settings.exchange.backend}"',
            expected='communication.backend="whale"',
            action="leave communication.backend out",
        )


def _rows(program: Program, settings: PlanSettings, group: int) -> tuple[BatchInput, ...]:
    """The batch inputs with the rows of all ranks, which are the same in each group."""
    found = batch_inputs(program, settings.size, settings.batch.shares, settings.batch.marked, settings.batch.local)
    groups = settings.size // group
    rows = []
    for b in found:
        sizes = b.placement.sizes if isinstance(b.placement, Split) else ()
        if not settings.batch.local and not settings.batch.shares:
            total = sum(sizes)
            sizes = rows_of_ranks(total // groups, group) * groups if total % groups == 0 else sizes
        if sizes != sizes[:group] * groups:
            raise PlanError(
                "the groups of ranks do not get equal rows of the batch",
                given=f"{sum(sizes)} rows of {b.name}, divided {list(sizes)}, for {groups} groups of {group} ranks",
                expected=f"a multiple of {groups} rows, and the same shares in each group",
                action="change the size of the batch (drop_remainder=True drops a smaller last one) or the shares",
            )
        rows.append(replace(b, placement=split(0, sizes)))
    return tuple(rows)


def _sums(sizes: Sequence[int], group: int) -> tuple[int, ...]:
    return tuple(sum(sizes[i : i + group]) for i in range(0, len(sizes), group))


def _as_local(b: BatchInput, group: int) -> BatchInput:
    assert isinstance(b.placement, Split)
    return replace(b, placement=split(0, _sums(b.placement.sizes, group)), local=True)


def _second(settings: PlanSettings, group: int, rows: Sequence[BatchInput]) -> PlanSettings:
    """Within a group: statistics and random numbers are the group's."""
    batch = tuple(replace(b, placement=split(0, b.placement.sizes[:group])) for b in rows)  # type: ignore[union-attr]
    return settings.but(
        size=group, batch__inputs=batch, batch__local={}, batch__local_statistics=False, batch__local_streams=False
    )


def _first_axis(program: Program, plan: Plan, settings: PlanSettings, number: int) -> Program:
    """What group ``number`` runs, as a program whose communication ops have the scope of what they move."""
    expanded = expand(program, plan.expanded, settings)
    lowered = localise(expanded, replace(plan, inner=None), number, "", None)
    scope: dict[str, str] = {}
    for node in lowered.nodes:
        found = [scope[r.node] for r in node.inputs if scope[r.node]]
        scope[node.name] = node.scope or (found[0] if found and node.name not in expanded.by_name else "")
    return annotate(lowered.with_nodes(tuple(replace(n, scope=scope[n.name]) for n in lowered.nodes)))


def _repeats(base: Program, outer: Plan, inner: Plan) -> dict[str, int]:
    found = {}
    keys = {r.key for r in outer.reshards if r.bytes}
    for node in base.nodes:
        key = str(node.attrs.get("key", "")) if node.op in EXCHANGES else ""
        key = key if key in keys else key.rpartition("/")[0]  # sends and receives say who
        if key in keys:
            strategy = inner.strategies[""][node.name]
            parts = any(isinstance(p, Split) for p in strategy.inputs + strategy.outputs)
            found[key] = 1 if parts else inner.size
    return found


def _placed(program: Program, before: set[str], comm: str, rank: int, group: int, groups: int) -> Program:
    """``rank``'s program with its groups' ranks in the communication ops, and keys that are a group's own.

    Args:
      before: names of the nodes that the first axis made; its groups are ranks of equal place.
    """
    number, place = divmod(rank, group)

    def of_first(coordinate: int) -> int:
        return coordinate * group + place

    def of_second(coordinate: int) -> int:
        return number * group + coordinate

    def of_node(node: Node) -> Node:
        if node.op == "WhaleCommunicator":
            return replace(node, attrs={**node.attrs, "rank": rank, "communicator": comm})
        if node.op not in EXCHANGES:
            return node
        first = node.name in before
        where: Callable[[int], int] = of_first if first else of_second
        whose = f"place {place}" if first else f"group {number}"
        attrs = {**node.attrs, "key": f"{node.attrs['key']}@{whose}"}
        if "peer" in attrs:
            attrs["peer"] = where(attrs["peer"])
            attrs["ranks"] = ()
        else:
            attrs["ranks"] = tuple(where(i) for i in range(groups if first else group))
        return replace(node, attrs=attrs)

    return program.with_nodes(tuple(map(of_node, program.nodes)))


def _cut_rows(program: Program, whole: Program, b: BatchInput, number: int, group: int) -> Program:
    """``program`` that takes the whole batch input ``b`` and cuts the rows of its group."""
    assert isinstance(b.placement, Split)
    node = program.by_name[b.name]
    t = whole.by_name[b.name].outputs[0]
    rank = len(t.shape or ())
    sizes = _sums(b.placement.sizes, group)
    begin, size = np.zeros(rank, np.int32), np.full(rank, -1, np.int32)
    begin[0], size[0] = sum(sizes[:number]), sizes[number]
    operands = []
    nodes = [replace(node, attrs={**node.attrs, "shape": Shape(t.shape)}, outputs=(t,))]
    for name, value in (("begin", begin), ("size", size)):
        nodes.append(const_node(f"{b.name}/whale_{name}", value))
        operands.append(Ref(nodes[-1].name))
    rows = Ref(f"{b.name}/whale_rows")
    kind = {"T": DType(t.dtype), "Index": DType("int32")}
    nodes.append(Node(rows.node, "Slice", (Ref(b.name), *operands), (), kind, node.outputs))

    def moved(ref: Ref) -> Ref:
        return rows if ref == Ref(b.name) else ref

    for other in program.nodes:
        if other.name != b.name:
            nodes.append(replace(other, inputs=tuple(map(moved, other.inputs))))
    return program.with_nodes(tuple(nodes), outputs=tuple(map(moved, program.outputs)))
