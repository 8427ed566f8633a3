"""Places: the part of a program that one group of ranks runs, and what travels between groups.

The plan is made for the whole program over as many ranks as a group has. A group then runs its nodes as that plan says;
a tensor that another group makes arrives in the placement in which it is made, from the rank of the same coordinate.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from whale.ir.layout import B, Owner, Placement, Split, Strategy
from whale.ir.plan import STAGE_INPUT, STAGE_OUTPUT, Edge, Place, Plan
from whale.ir.program import Node, Program, Ref, const_node
from whale.ir.values import UNMOVABLE, TensorType
from whale.passes.stages import does_nothing, free_nodes, stage_of


@dataclass(frozen=True, slots=True)
class Cut:
    """What one place runs.

    Attributes:
      program: its part; a tensor from elsewhere is an output of a ``WhaleStageInput`` with its producer's name.
      taken: tensors that come from other places, with the number of the place.
      given: tensors that go to other places.
      fetched: outputs of the program that come from another place: number -> place.
    """

    program: Program
    taken: Mapping[Ref, int]
    given: Mapping[Ref, tuple[int, ...]]
    fetched: Mapping[int, int]


FETCHED = "whale/fetched_{}"
FETCH_SENT = "whale/fetch_sent_{}"
SENT = "whale/sent/{}_{}"


def cut(program: Program, places: Sequence[Place]) -> tuple[Cut, ...]:
    """The program of each place.

    Args:
      program: with stages assigned (see ``assign_stages``), expanded.
    """
    return _Cutter(program, places).run()


class _Cutter:
    def __init__(self, program: Program, places: Sequence[Place]):
        self.program, self.places = with_tokens(program, places), places
        self.free = free_nodes(self.program)
        self.place = _place_numbers(self.program, places, self.free)

    def run(self) -> tuple[Cut, ...]:
        needed = [self._needed(k) for k in range(len(self.places))]
        taken = [self._taken(k, names) for k, names in enumerate(needed)]
        given: list[dict[Ref, list[int]]] = [{} for _ in self.places]
        for k, refs in enumerate(taken):
            for ref, source in refs.items():
                given[source].setdefault(ref, []).append(k)
        return tuple(self._program(k, needed[k], taken[k], given[k]) for k in range(len(self.places)))

    def _needed(self, k: int) -> set[str]:
        """Its nodes, and the free ones that they read."""
        by_name, found = self.program.by_name, set()
        stack = [n for n, place in self.place.items() if place == k]
        stack += [n for n in self.program.effects if n in self.free]
        stack += [r.node for r in self.program.outputs if r.node in self.free]
        while stack:
            name = stack.pop()
            if name in found or self.place.get(name, k) != k:
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
                    if self.place.get(ref.node, k) != k:
                        found[ref] = self.place[ref.node]
                for control in node.controls:  # what is left of them are tokens
                    if self.place.get(control, k) != k:
                        found[Ref(control)] = self.place[control]
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
                nodes.append(Node(node.name, STAGE_INPUT, (), (), {}, node.outputs, node.scope, True))
            elif node.name in program.inputs:
                nodes.append(node)
        sent = [
            Node(SENT.format(ref.node, ref.index), STAGE_OUTPUT, (ref,), (), {}, (), self.places[k].name, True)
            for ref in given
        ]
        outputs, fetched = [], {}
        for i, ref in enumerate(program.outputs):
            source = self.place.get(ref.node, k)
            t = program.type_of(ref)
            if source != k:
                ref = Ref(FETCHED.format(i))
                if t.dtype in UNMOVABLE:
                    nodes.append(const_node(ref.node, np.array(b"", object)))
                else:
                    fetched[i] = source
                    nodes.append(Node(ref.node, STAGE_INPUT, (), (), {}, (t,), "", True))
            elif ref.node in self.place and t.dtype not in UNMOVABLE:
                sent.append(Node(FETCH_SENT.format(i), STAGE_OUTPUT, (ref,), (), {}, (), self.places[k].name, True))
            outputs.append(ref)
        effects = [n for n in program.effects if n in needed] + [n.name for n in sent]
        part = program.with_nodes((*nodes, *sent), outputs=tuple(outputs), effects=tuple(effects))
        variables = tuple(v for v in program.variables if v.node in needed)
        return Cut(replace(part, variables=variables), taken, {r: tuple(to) for r, to in given.items()}, fetched)


def _place_numbers(program: Program, places: Sequence[Place], free: Collection[str]) -> dict[str, int]:
    number = {stage: k for k, place in enumerate(places) for stage in place.stages}
    found = {}
    for node in program.nodes:
        if node.name not in free and not does_nothing(node):
            found[node.name] = number[stage_of(node.scope)]
    return found


def with_tokens(program: Program, places: Sequence[Place]) -> Program:
    """``program`` without NoOps, and with a small tensor to be sent in place of each control edge between places."""
    free = free_nodes(program)
    place = _place_numbers(program, places, free)
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
        mine = place.get(node.name)
        elsewhere = [c for c in controls if mine is not None and place.get(c, mine) != mine]
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


def edges_of(program: Program, cuts: Sequence[Cut], plan: Plan) -> tuple[Edge, ...]:
    """What travels between places in one step."""
    found = []
    for k, part in enumerate(cuts):
        for ref, source in part.taken.items():
            strategy = plan.strategies[""].get(ref.node)
            placement = strategy.outputs[ref.index] if strategy is not None else B
            found.append(Edge(ref, source, k, _crossing(part.program.type_of(ref), placement, plan.size)))
        for i, source in part.fetched.items():
            t = program.type_of(program.outputs[i])
            found.append(Edge(program.outputs[i], source, k, _crossing(t, plan.returned[""][i], plan.size)))
    return tuple(found)


def _crossing(t: TensorType, placement: Placement, size: int) -> int:
    """Bytes of a tensor that each rank of a group sends as it has it."""
    if not t.is_static:
        return 0
    return t.bytes if isinstance(placement, Split | Owner) else t.bytes * size


def plan_of_part(plan: Plan, part: Cut) -> Plan:
    """``plan`` for the program of one place."""
    base, returned = plan.strategies[""], plan.returned[""]
    fetched = {FETCHED.format(i): returned[i] for i in part.fetched}
    strategies: dict[str, Strategy] = {}
    produced: dict[Ref, Placement] = {}
    for node in part.program.nodes:
        if node.name in fetched:
            found = Strategy((), (fetched[node.name],), "fetched at another stage")
        elif node.op == STAGE_INPUT and node.name in base:
            found = Strategy((), base[node.name].outputs, "from another stage", base[node.name].once)
        elif node.op == STAGE_OUTPUT:
            (ref,) = node.inputs
            number = node.name.removeprefix(FETCH_SENT.format(""))
            wanted = returned[int(number)] if number != node.name else produced[ref]
            found = Strategy((wanted,), (), "to another stage", isinstance(wanted, Owner))
        else:
            found = base.get(node.name) or Strategy((), (B,) * len(node.outputs), "order between stages")
        strategies[node.name] = found
        produced.update(zip(node.refs(), found.outputs))
    outputs = tuple(
        B if FETCHED.format(i) == ref.node and i not in part.fetched else returned[i]
        for i, ref in enumerate(part.program.outputs)
    )
    read = [(r, p) for n in part.program.nodes for r, p in zip(n.inputs, strategies[n.name].inputs)]
    kept: set[str] = set()
    for ref, placement in (*read, *zip(part.program.outputs, outputs)):
        step = plan.reshard_of.get(("", ref, placement)) if placement != produced[ref] else None
        while step is not None and step.key not in kept:
            kept.add(step.key)
            step = plan.reshard_of.get(("", ref, step.source)) if step.source != produced[ref] else None
    return replace(
        plan,
        strategies={**plan.strategies, "": strategies},
        reshards=tuple(r for r in plan.reshards if r.graph or r.key in kept),
        returned={**plan.returned, "": outputs},
    )
