"""Stage groups: the part of a program that one group of ranks runs, and what travels between groups.

The plan is made for the whole program over as many ranks as a group has; groups of other sizes have plans of their
own. A group then runs its nodes as its plan says. A tensor that another group makes arrives in the placement in which
it is made, from the rank of the same coordinate, or between groups of unequal sizes as ``whale.ir.crossing`` says.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from whale.ir.crossing import Crossing, crossing
from whale.ir.layout import FIRST, B, Broadcast, Placement, Split, Strategy
from whale.ir.plan import STAGE_INPUT, STAGE_OUTPUT, Edge, Plan, Reshard, StageGroup
from whale.ir.program import Node, Program, Ref, const_node
from whale.ir.values import UNMOVABLE, TensorType
from whale.passes.exchange.reshards import reshards_of_tensor
from whale.passes.facts.stages import does_nothing, free_nodes, stage_of


@dataclass(frozen=True, slots=True)
class Cut:
    """What one stage group runs.

    Attributes:
      program: its part; a tensor from elsewhere is an output of a ``WhaleStageInput`` with its producer's name.
      taken: tensors that come from other groups, with the number of the group.
      given: tensors that go to other groups.
      fetched: outputs of the program that come from another group: number of the output -> of the group.
    """

    program: Program
    taken: Mapping[Ref, int]
    given: Mapping[Ref, tuple[int, ...]]
    fetched: Mapping[int, int]


FETCHED = "whale/fetched_{}"
_FETCH_KEY = "fetched {}"
Crossings = Mapping[tuple[str, int, int], Crossing]  # (key of a tensor, number of the source, of the target)


def cut(program: Program, groups: Sequence[StageGroup]) -> tuple[Cut, ...]:
    """The program of each stage group.

    Args:
      program: with stages assigned (see ``assign_stages``), expanded.
    """
    return _Cutter(program, groups).run()


class _Cutter:
    def __init__(self, program: Program, groups: Sequence[StageGroup]):
        self.program, self.groups = with_tokens(program, groups), groups
        self.free = free_nodes(self.program)
        self.group_of = _group_numbers(self.program, groups, self.free)

    def run(self) -> tuple[Cut, ...]:
        needed = [self._needed(k) for k in range(len(self.groups))]
        taken = [self._taken(k, names) for k, names in enumerate(needed)]
        given: list[dict[Ref, list[int]]] = [{} for _ in self.groups]
        for k, refs in enumerate(taken):
            for ref, source in refs.items():
                given[source].setdefault(ref, []).append(k)
        return tuple(self._program(k, needed[k], taken[k], given[k]) for k in range(len(self.groups)))

    def _needed(self, k: int) -> set[str]:
        """Its nodes, and the free ones that they read."""
        by_name, found = self.program.by_name, set()
        stack = [n for n, group in self.group_of.items() if group == k]
        stack += [n for n in self.program.effects if n in self.free]
        stack += [r.node for r in self.program.outputs if r.node in self.free]
        while stack:
            name = stack.pop()
            if name in found or self.group_of.get(name, k) != k:
                continue
            found.add(name)
            stack.extend(r.node for r in by_name[name].inputs)
            stack.extend(by_name[name].controls)
        return found

    def _taken(self, k: int, needed: Collection[str]) -> dict[Ref, int]:
        found: dict[Ref, int] = {}
        for node in self.program.nodes:
            if node.name in needed:
                for ref in node.inputs:
                    if self.group_of.get(ref.node, k) != k:
                        found[ref] = self.group_of[ref.node]
                for control in node.controls:  # what is left of them are tokens
                    if self.group_of.get(control, k) != k:
                        found[Ref(control)] = self.group_of[control]
        return found

    def _program(
        self, k: int, needed: Collection[str], taken: Mapping[Ref, int], given: Mapping[Ref, list[int]]
    ) -> Cut:
        program = self.program
        foreign = {ref.node for ref in taken}
        nodes: list[Node] = []
        for node in program.nodes:
            if node.name in needed:
                nodes.append(node)
            elif node.name in foreign:
                source = next(k for ref, k in taken.items() if ref.node == node.name)
                nodes.append(_input(node.name, node.outputs, source, [str(r) for r in node.refs()], node.scope))
            elif node.name in program.inputs:
                nodes.append(node)
        sent = [
            self._output(f"whale/sent/{ref.node}_{ref.index}/to_{target}", ref, k, target, str(ref))
            for ref, targets in given.items()
            for target in targets
        ]
        others = [target for target in range(len(self.groups)) if target != k]
        outputs, fetched = [], {}
        for i, ref in enumerate(program.outputs):
            source = self.group_of.get(ref.node, k)
            t = program.type_of(ref)
            if source != k:
                ref = Ref(FETCHED.format(i))
                if t.dtype in UNMOVABLE:
                    nodes.append(const_node(ref.node, np.array(b"", object)))
                else:
                    fetched[i] = source
                    nodes.append(_input(ref.node, (t,), source, [_FETCH_KEY.format(i)], ""))
            elif ref.node in self.group_of and t.dtype not in UNMOVABLE:
                key = _FETCH_KEY.format(i)
                sent += [self._output(f"whale/fetch_sent_{i}/to_{to}", ref, k, to, key) for to in others]
            outputs.append(ref)
        effects = [n for n in program.effects if n in needed] + [n.name for n in sent]
        part = program.with_nodes((*nodes, *sent), outputs=tuple(outputs), effects=tuple(effects))
        variables = tuple(v for v in program.variables if v.node in needed)
        return Cut(replace(part, variables=variables), taken, {r: tuple(to) for r, to in given.items()}, fetched)

    def _output(self, name: str, ref: Ref, k: int, target: int, key: str) -> Node:
        attrs = {"target": target, "key": key}
        return Node(name, STAGE_OUTPUT, (ref,), (), attrs, (), self.groups[k].name, True)


def _input(name: str, outputs: tuple[TensorType, ...], source: int, keys: Sequence[str], scope: str) -> Node:
    return Node(name, STAGE_INPUT, (), (), {"source": source, "keys": tuple(keys)}, outputs, scope, True)


def _group_numbers(program: Program, groups: Sequence[StageGroup], free: Collection[str]) -> dict[str, int]:
    number = {stage: k for k, group in enumerate(groups) for stage in group.stages}
    found = {}
    for node in program.nodes:
        if node.name not in free and not does_nothing(node):
            found[node.name] = number[stage_of(node.scope)]
    return found


def with_tokens(program: Program, groups: Sequence[StageGroup]) -> Program:
    """``program`` without NoOps, and with a small tensor to be sent in place of each control edge between groups."""
    free = free_nodes(program)
    group_of = _group_numbers(program, groups, free)
    behind: dict[str, tuple[str, ...]] = {}  # a NoOp -> what it waits for

    def resolved(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(n for name in names for n in behind.get(name, (name,))))

    nodes: list[Node] = []
    tokens: dict[str, str] = {}
    # A result that only waits, so that whoever fetches it has the rest done, need not.
    last = {r.node for r in program.outputs} - {c for n in program.nodes for c in n.controls}
    last -= {r.node for n in program.nodes for r in n.inputs}
    alone: list[str] = []
    for node in program.nodes:
        controls = resolved(node.controls)
        if node.name in last and not node.stateful:
            alone += controls
            node, controls = replace(node, controls=()), ()
        if does_nothing(node):
            behind[node.name] = controls
            continue
        mine = group_of.get(node.name)
        elsewhere = [c for c in controls if mine is not None and group_of.get(c, mine) != mine]
        for name in elsewhere:
            if name not in tokens:
                tokens[name] = f"{name}/whale_token"
                token = const_node(tokens[name], np.zeros((), np.int32))
                nodes.append(replace(token, controls=(name,), scope=program.by_name[name].scope))
        if controls != node.controls or elsewhere:
            node = replace(node, controls=tuple(tokens[c] if c in elsewhere else c for c in controls))
        nodes.append(node)
    effects = resolved((*program.effects, *alone))
    return program.with_nodes(tuple(nodes), effects=effects)


def crossings(program: Program, cuts: Sequence[Cut], plan: Plan, rows: Mapping[Ref, Split]) -> dict:
    """How each tensor goes from group to group: (key, source, target) -> crossing.

    Args:
      rows: tensors that travel for each micro-batch -> how these cut them.
    """
    plans = [plan.of(len(group.ranks)) for group in plan.stage_groups]

    def made(k: int, ref: Ref) -> Placement:
        strategy = plans[k].strategies[""].get(ref.node)
        return strategy.outputs[ref.index] if strategy is not None else B

    found = {}
    for k, part in enumerate(cuts):
        for ref, source in part.taken.items():
            t, cut_by = part.program.type_of(ref), rows.get(ref)
            found[str(ref), source, k] = crossing(
                t, made(source, ref), plans[source].size, made(k, ref), plans[k].size, cut_by.dim if cut_by else None
            )
        for i, source in part.fetched.items():
            t = program.type_of(program.outputs[i])
            ends = plans[source].returned[""][i], plans[k].returned[""][i]
            found[_FETCH_KEY.format(i), source, k] = crossing(t, ends[0], plans[source].size, ends[1], plans[k].size)
    return found


def edges_of(program: Program, cuts: Sequence[Cut], plan: Plan, found: Crossings) -> tuple[Edge, ...]:
    """What travels between stage groups in one step, in logical bytes of all ranks together.

    Args:
      found: see ``crossings``.
    """
    edges = []
    for k, part in enumerate(cuts):
        size = len(plan.stage_groups[k].ranks)
        for ref, source in part.taken.items():
            moved = found[str(ref), source, k].bytes(part.program.type_of(ref), size)
            edges.append(Edge(ref, source, k, moved))
        for i, source in part.fetched.items():
            ref = program.outputs[i]
            moved = found[_FETCH_KEY.format(i), source, k].bytes(program.type_of(ref), size)
            edges.append(Edge(ref, source, k, moved))
    return tuple(edges)


def plan_of_part(plan: Plan, part: Cut, number: int, found: Crossings) -> Plan:
    """The plan for the program of stage group ``number``.

    Args:
      plan: of all groups, or of one of this size.
    """
    plan = plan.of(len(plan.stage_groups[number].ranks)) if plan.stage_groups else plan
    base, returned = plan.strategies[""], plan.returned[""]
    strategies: dict[str, Strategy] = {}
    produced: dict[Ref, Placement] = {}
    table = {(r.ref, r.target): r for r in plan.reshards if not r.graph}
    for node in part.program.nodes:
        if node.op == STAGE_INPUT:
            keys = [(key, int(node.attrs["source"]), number) for key in node.attrs["keys"]]
            lies = tuple(found[key].received if key in found else B for key in keys)
            known = Strategy((), lies, "from another stage", FIRST in lies)
            planned = base[node.name].outputs if node.name in base else lies
            for ref, have, was in zip(node.refs(), lies, planned):
                _arrive_as(table, part.program, ref, have, was, plan.size)
        elif node.op == STAGE_OUTPUT:
            (ref,) = node.inputs
            wanted = found[node.attrs["key"], number, node.attrs["target"]].sent
            if wanted != produced[ref] and (ref, wanted) not in table:
                for r in reshards_of_tensor("", part.program, ref, produced[ref], {wanted: node.name}, plan.size):
                    table.setdefault((r.ref, r.target), r)
            known = Strategy((wanted,), (), "to another stage", wanted == FIRST)
        else:
            known = base.get(node.name) or Strategy((), (B,) * len(node.outputs), "order between stages")
        strategies[node.name] = known
        produced.update(zip(node.refs(), known.outputs))
    outputs = tuple(
        B if FETCHED.format(i) == ref.node and i not in part.fetched else returned[i]
        for i, ref in enumerate(part.program.outputs)
    )
    for i in part.fetched:
        ref = part.program.outputs[i]
        _arrive_as(table, part.program, ref, produced[ref], outputs[i], plan.size)
    read = [(r, p) for n in part.program.nodes for r, p in zip(n.inputs, strategies[n.name].inputs)]
    kept: dict[tuple[Ref, Placement], None] = {}
    for ref, placement in (*read, *zip(part.program.outputs, outputs)):
        step = table.get((ref, placement)) if placement != produced[ref] else None
        while step is not None and (ref, step.target) not in kept:
            kept[ref, step.target] = None
            step = table.get((ref, step.source)) if step.source != produced[ref] else None
    order = {key: i for i, key in enumerate(table)}
    return replace(
        plan,
        strategies={**plan.strategies, "": strategies},
        reshards=(
            *(table[key] for key in sorted(kept, key=order.__getitem__)),
            *(r for r in plan.reshards if r.graph),
        ),
        returned={**plan.returned, "": outputs},
    )


def _arrive_as(
    table: dict[tuple[Ref, Placement], Reshard], program: Program, ref: Ref, have: Placement, was: Placement, size: int
) -> None:
    """The changes of a tensor that is there as ``have``, in place of those of one that is there as ``was``."""
    if have == was:
        return
    wanted: dict[Placement, str] = {was: "its readers"} if isinstance(was, Broadcast) else {}
    wanted |= {r.target: r.origin for (of, _), r in table.items() if of == ref and r.source == was and was != B}
    if not isinstance(was, Broadcast):
        wanted.setdefault(was, "its readers")
    for r in reshards_of_tensor("", program, ref, have, {t: why for t, why in wanted.items() if t != have}, size):
        table[ref, r.target] = r
