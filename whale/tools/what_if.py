"""Plans a script's step again with one choice fixed, and compares: `whale plan script --set 'dense*.split=2'`.

read_what_if  parses PATTERN.split=N
with_choice   plans the step again, with all other choices unchanged
compare       compares the two plans (predicted time, exchanges, bytes), or says why the choice is impossible
"""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Callable, Set
from dataclasses import dataclass, replace

from cost_model.cluster.cluster_file import Cluster
from cost_model.graph.machine_profile import MachineProfile
from whale.errors import PlanError
from whale.ir.mesh import TENSOR, Axis
from whale.ir.ops import EXCHANGES
from whale.ir.plan_text import format_bytes
from whale.ir.program import Program, Ref
from whale.partition.lower import make_any_plan
from whale.passes.analysis.scopes import split_scope
from whale.passes.normalize.annotate import annotate
from whale.passes.settings import PlanSettings
from whale.planner.graph_search.plan_prediction import Planned, predict_plan, rank_programs
from whale.planner.graph_search.strategies import products

SCOPE = "set/split_0"


@dataclass(frozen=True)
class WhatIf:
    """Represents a fixed choice: operations that match ``pattern`` are sharded over groups of ``ways`` ranks; 1:
    replicated.
    """

    pattern: str
    ways: int

    def __str__(self) -> str:
        return f"{self.pattern}.split={self.ways}"

    def names(self, name: str) -> bool:
        """Returns True if the pattern matches an operation's name, or the part of the name after some scope (as for a
        gradient).
        """
        return fnmatch.fnmatchcase(name, self.pattern) or fnmatch.fnmatchcase(name, f"*/{self.pattern}")


def read_what_if(text: str) -> WhatIf:
    """Parses a choice in the form PATTERN.split=N.

    Raises:
      PlanError: the text has another form.
    """
    match = re.fullmatch(r"(.+)\.split=([1-9]\d*)", text)
    if match is None:
        raise PlanError(
            "this choice cannot be fixed for a script",
            given=text,
            expected="PATTERN.split=N, N ranks over which operations of matching names are sharded: 'dense*.split=2'",
            action="correct the choice; stages=..., tensor=... and the like are for --describe",
        )
    return WhatIf(match[1], int(match[2]))


def with_choice(planned: Planned, one: WhatIf) -> Planned:
    """Plans the step again with the choice fixed, and all other choices unchanged.

    Raises:
      PlanError: the pattern matches no operation with a weight. _Infeasible: the choice is impossible.
    """
    program, settings = planned.program, planned.settings
    meant = {n.name for n in program.nodes if one.names(n.name)}
    weights = {handle for handle, nodes in products(program).items() if any(n.name in meant for n in nodes)}
    if not weights:
        known = [n.name for nodes in products(program).values() for n in nodes[:1]]
        raise PlanError(
            "no operation of that name has a weight that could be divided",
            given=one.pattern,
            expected="a name or pattern that matches one of " + ", ".join(known[:6]),
            action="correct the name (`whale plan -o plan.json` and `whale show -v plan.json` list them)",
        )
    if settings.size % one.ways:
        raise _Infeasible(f"{settings.size} ranks are not divisible by {one.ways}")
    for handle in sorted(weights):
        weight = program.variable_of[handle]
        if max(size or 0 for size in weight.type.shape or (0,)) < one.ways:
            raise _Infeasible(
                f"{weight.name} of shape {list(weight.type.shape or ())} cannot be divided into {one.ways} parts"
            )
    readers = {n.name for handle in weights for n, _ in program.consumers.get(Ref(handle), ())}
    inside = meant | weights | readers
    if one.ways == 1:
        program = _change_scopes(program, inside, _replicate)
        if not any(split_scope(n.scope) for nodes in products(program).values() for n in nodes):
            program = _change_scopes(
                program, program.by_name.keys(), _replicate
            )  # without a split product the remaining split scopes serve no purpose
        return _plan(program, planned.settings)
    program = annotate(_change_scopes(program, inside, _divide))
    return _plan(program, settings.but(mesh=(Axis(TENSOR, one.ways),) if one.ways < settings.size else ()))


def _divide(path: str) -> str:
    if split_scope(path):
        return path
    return f"{path}/{SCOPE}" if path else SCOPE


def _replicate(path: str) -> str:
    return path.rpartition("/")[0] if split_scope(path) else path


def _change_scopes(program: Program, names: Set[str], scope: Callable[[str], str]) -> Program:
    """Returns the program with the scopes of nodes and variables in ``names`` replaced by ``scope`` of the old
    scope.
    """
    nodes = tuple(replace(n, scope=scope(n.scope)) if n.name in names else n for n in program.nodes)
    variables = tuple(replace(v, scope=scope(v.scope)) if v.node in names else v for v in program.variables)
    return replace(program, nodes=nodes, variables=variables)


def _plan(program: Program, settings: PlanSettings) -> Planned:
    try:
        return Planned(program, make_any_plan(program, settings), settings)
    except PlanError as error:
        raise _Infeasible(str(error)) from error


class _Infeasible(Exception):
    """Raised, with the reason, if a choice is impossible."""


def compare(planned: Planned, one: WhatIf, on: MachineProfile | Cluster | None) -> str:
    """Formats one line that says what a choice changes, or why it is impossible.

    Args:
      planned: the plan without the choice.
      on: the machine for predicted times; None: times are not predicted.

    Raises:
      PlanError: the pattern matches no operation with a weight.
    """
    try:
        other = with_choice(planned, one)
    except _Infeasible as reason:
        return f"{one}: infeasible: {reason}"
    mine, theirs = exchanges(planned), exchanges(other)
    times = [predict_plan(p, on).step_s for p in (planned, other)] if on is not None else []
    changes = []
    for kind in sorted(EXCHANGES):
        more = theirs[kind] - mine[kind]
        if more:
            name = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", kind.removeprefix("Whale")).lower()
            changes.append(f"{abs(more)} {'more' if more > 0 else 'fewer'} {name}")
    before, after = planned.plan.logical_bytes, other.plan.logical_bytes
    if before != after:
        changes.append(f"{format_bytes(before)} -> {format_bytes(after)} moved a step")
    split = [p.plan.split_flops_fraction for p in (planned, other)]
    if split[0] != split[1]:
        changes.append(f"sharded part of products {split[0]:.0%} -> {split[1]:.0%}")
    told = ", ".join(changes) or "the plan stays as it is"
    if not times:
        return f"{one}: {told} (no predicted time)"
    return f"{one}: {1e3 * (times[1] - times[0]):+.2f} ms ({1e3 * times[0]:.2f} -> {1e3 * times[1]:.2f} ms): {told}"


def exchanges(planned: Planned) -> Counter[str]:
    """Returns the number of exchanges of each kind in the first rank's program, by op."""
    return Counter(n.op for n in rank_programs(planned)[0].nodes if n.op in EXCHANGES)
