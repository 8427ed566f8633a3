"""Cuts a program into the parts that stage groups run, and finds the tensors sent between groups.

A plan is made for the whole program over a mesh like a group's; groups with other meshes have plans of their own. Each
group then runs its own nodes under its plan. A tensor from another group arrives in the layout of its producer, from
the rank of the same coordinates; between different meshes, as ``whale.ir.crossing`` says.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from whale.ir.plan import STAGE_INPUT, STAGE_OUTPUT, StageGroup
from whale.ir.program import Node, Program, Ref, make_const
from whale.ir.values import UNMOVABLE, TensorType
from whale.passes.analysis.stages import does_nothing, free_nodes, stage_of


@dataclass(frozen=True, slots=True)
class Cut:
    """Represents the part of a program that one stage group runs.

    Attributes:
      program: the part. A tensor of another group is an output of a ``WhaleStageInput`` node with its producer's name.
      taken: tensor received from another group -> number of that group.
      given: tensor sent to other groups -> numbers of these groups.
      fetched: number of an output of the program that comes from another group -> number of that group.
    """

    program: Program
    taken: Mapping[Ref, int]
    given: Mapping[Ref, tuple[int, ...]]
    fetched: Mapping[int, int]

    @property
    def keys(self) -> frozenset[str]:
        """Returns the names of the tensors that the group receives from other groups, as used in the keys of sends and
        receives.
        """
        return frozenset([*map(str, self.taken), *(FETCH_KEY.format(i) for i in self.fetched)])


FETCHED = "whale/fetched_{}"  # name of the node for output number {} of the program, if another group computes it
FETCH_KEY = "fetched {}"


def cut(program: Program, groups: Sequence[StageGroup]) -> tuple[Cut, ...]:
    """Cuts a program into one part for each stage group.

    Args:
      program: the program with a stage for each node (see ``assign_stages``) and composite ops decomposed.
    """
    return _Cutter(program, groups).run()


class _Cutter:
    def __init__(self, program: Program, groups: Sequence[StageGroup]):
        self.groups = groups
        program = drop_waits(program)
        self.free = free_nodes(program)
        self.group_of = _group_numbers(program, groups, self.free)
        self.program = self._with_tokens(program)

    def _with_tokens(self, program: Program) -> Program:
        """Replaces each control edge between groups by a data edge: a small constant that is sent in its place."""
        nodes: list[Node] = []
        tokens: dict[str, str] = {}
        for node in program.nodes:
            mine = self.group_of.get(node.name)
            elsewhere = [c for c in node.controls if mine is not None and self.group_of.get(c, mine) != mine]
            for name in elsewhere:
                if name not in tokens:
                    tokens[name] = f"{name}/whale_token"
                    self.group_of[tokens[name]] = self.group_of[name]
                    token = make_const(tokens[name], np.zeros((), np.int32))
                    nodes.append(replace(token, controls=(name,), scope=program.by_name[name].scope))
            if elsewhere:
                node = replace(node, controls=tuple(tokens[c] if c in elsewhere else c for c in node.controls))
            nodes.append(node)
        return program.replace_nodes(tuple(nodes)) if tokens else program

    def run(self) -> tuple[Cut, ...]:
        needed = [self._find_needed(k) for k in range(len(self.groups))]
        taken = self._find_taken(needed)
        given: list[dict[Ref, list[int]]] = [{} for _ in self.groups]
        for k, refs in enumerate(taken):
            for ref, source in refs.items():
                given[source].setdefault(ref, []).append(k)
        return tuple(self._program(k, needed[k], taken[k], given[k]) for k in range(len(self.groups)))

    def _find_needed(self, k: int) -> set[str]:
        """Returns the names of the nodes of group ``k``, and of the free nodes that these read."""
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

    def _find_taken(self, needed: Sequence[Collection[str]]) -> list[dict[Ref, int]]:
        """Returns, for each group, the tensors that it reads from other groups -> number of the producing group.

        Args:
          needed: the result of ``_find_needed`` for each group.
        """
        found: list[dict[Ref, int]] = [{} for _ in needed]
        for node in self.program.nodes:
            # The only control edges between groups that are left are to tokens.
            read = [r for r in (*node.inputs, *map(Ref, node.controls)) if r.node in self.group_of]
            if not read:
                continue
            for k, names in enumerate(needed):
                if node.name in names:
                    found[k].update((r, self.group_of[r.node]) for r in read if self.group_of[r.node] != k)
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
                nodes.append(_input(node.name, node.outputs, source, [str(r) for r in node.list_refs()], node.scope))
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
            t = program.find_type(ref)
            if source != k:
                ref = Ref(FETCHED.format(i))
                if t.dtype in UNMOVABLE:
                    nodes.append(make_const(ref.node, np.array(b"", object)))
                else:
                    fetched[i] = source
                    nodes.append(_input(ref.node, (t,), source, [FETCH_KEY.format(i)], ""))
            elif ref.node in self.group_of and t.dtype not in UNMOVABLE:
                key = FETCH_KEY.format(i)
                sent += [self._output(f"whale/fetch_sent_{i}/to_{to}", ref, k, to, key) for to in others]
            outputs.append(ref)
        effects = [n for n in program.effects if n in needed] + [n.name for n in sent]
        part = program.replace_nodes((*nodes, *sent), outputs=tuple(outputs), effects=tuple(effects))
        variables = tuple(v for v in program.variables if v.node in needed)
        return Cut(replace(part, variables=variables), taken, {r: tuple(to) for r, to in given.items()}, fetched)

    def _output(self, name: str, ref: Ref, k: int, target: int, key: str) -> Node:
        attrs = {"target": target, "key": key}
        return Node(name, STAGE_OUTPUT, (ref,), (), attrs, (), self.groups[k].name, True)


def _input(name: str, outputs: tuple[TensorType, ...], source: int, keys: Sequence[str], scope: str) -> Node:
    return Node(name, STAGE_INPUT, (), (), {"source": source, "keys": tuple(keys)}, outputs, scope, True)


def _group_numbers(program: Program, groups: Sequence[StageGroup], free: Collection[str]) -> dict[str, int]:
    number = {stage: k for k, group in enumerate(groups) for stage in group.stages}
    mine = (n for n in program.nodes if n.name not in free and not does_nothing(n))
    return {n.name: number[stage_of(n.scope)] for n in mine}


def drop_waits(program: Program) -> Program:
    """Removes NoOps from ``program``: what waited for a NoOp then waits for the NoOp's predecessors.

    A NoOp that is fetched also goes; its predecessors then run as effects of the program.
    """
    behind: dict[str, tuple[str, ...]] = {}  # NoOp -> the nodes that it waits for

    def resolve(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(n for name in names for n in behind.get(name, (name,))))

    nodes: list[Node] = []
    last = {r.node for r in program.outputs} - {c for n in program.nodes for c in n.controls}
    last -= {r.node for n in program.nodes for r in n.inputs}
    alone: list[str] = []
    for node in program.nodes:
        controls = resolve(node.controls) if node.controls else ()
        if node.name in last and not node.stateful:
            alone += controls
            controls = ()
        if does_nothing(node):
            behind[node.name] = controls
        else:
            nodes.append(node if controls == node.controls else replace(node, controls=controls))
    return program.replace_nodes(tuple(nodes), effects=resolve((*program.effects, *alone)))
