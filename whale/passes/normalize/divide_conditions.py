"""Divides conditions under which variables of several pipeline stages are updated into a condition for each stage.

An optimizer that accumulates gradients or scales the loss updates all variables in the body of one branch node. A node
is in one stage, with the variables that it takes: that stage would hold the weights of all stages, and send them to
those that compute with them. ``divide_conditions`` finds the stage that each node of the body would have outside of it,
and replaces the branch node by one for each stage, with the same predicate. What a part computes and another one reads,
such as the norm of all gradients, is a result of the part; an alternative that does not compute it yields zeros, which
nobody reads.

Stages may wait for each other in both directions: for the norm, and then for what is scaled by it. So a stage has a
part for each level, where the level of a node is the largest number of changes of stage on a way to it.

Decision: 0217.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from whale.ir.ops import BRANCHES, READS, UPDATES
from whale.ir.program import Node, Program, Ref, find_called_functions, prune
from whale.ir.values import UNMOVABLE, DType, Func, Shape
from whale.passes.analysis.stages import does_nothing, find_stages, has_stages, stage_of
from whale.passes.normalize.unpack_optionals import make_nothing
from whale.sharding_rules.graph import list_called_functions

_Group = tuple[int, int]  # (level, number of the stage): what one part computes


def divide_conditions(program: Program) -> Program:
    """Replaces each branch node outside of ``wh.stage`` scopes that updates variables of several stages by a branch
    node for each stage.

    Every function must have one caller (see ``specialise``). A branch node stays if its parts would send each other a
    tensor without a static shape.
    """
    if not has_stages(program):
        return program
    asked = {n.name for n in program.nodes if not stage_of(n.scope) and _updates(n, program.functions)}
    if not asked:
        return program
    spread = _Spread(program, asked)
    stages = find_stages(replace(program, nodes=spread.nodes, outputs=spread.outputs))
    return _Division(program, stages).run(asked)


def _updates(node: Node, functions: Mapping[str, Program]) -> bool:
    """Returns True if a node is a branch in whose bodies variables are updated."""
    if node.op not in BRANCHES or not all(f.name in functions for f in list_called_functions(node)):
        return False
    bodies = [functions[f.name] for f in list_called_functions(node)]
    return any(n.op in UPDATES or _updates(n, functions) for body in bodies for n in body.nodes)


class _Spread:
    """Writes the bodies of branch nodes in the place of these nodes, so that stages are found for the nodes inside.

    Attributes:
      nodes: those of the program, and those of the bodies, whose names begin with the path of their branch node.
      outputs: the program's outputs among these nodes.
    """

    def __init__(self, program: Program, asked: Collection[str]) -> None:
        self._functions = program.functions
        self._made: list[Node] = []
        moved = self._add(program, "", {}, "", asked)
        self.nodes = tuple(self._made)
        self.outputs = tuple(moved.get(r, r) for r in program.outputs)

    def _add(
        self, graph: Program, prefix: str, given: Mapping[Ref, Ref], inside: str, asked: Collection[str]
    ) -> dict[Ref, Ref]:
        """Adds the nodes of ``graph``; returns what takes the place of its arguments and of branch nodes' results.

        Args:
          given: argument of the graph -> the tensor that it is.
          inside: the branch node around the graph; "": none.
          asked: the graph's branch nodes whose bodies are written out.
        """
        moved = dict(given)
        arguments = {ref.node for ref in given}
        for node in graph.nodes:
            if node.name in arguments:
                continue
            name = prefix + node.name
            inputs = tuple(moved.get(r) or Ref(prefix + r.node, r.index) for r in node.inputs)
            controls = tuple(prefix + c for c in node.controls if c not in arguments)
            # What has effects runs only if the branch is taken: no stage may do it for itself.
            controls += (inside,) if inside and node.stateful else ()
            if node.name not in asked:
                self._made.append(replace(node, name=name, inputs=inputs, controls=controls))
                continue
            self._made.append(Node(name, node.op, inputs[:1], controls, scope=node.scope, stateful=True))
            results = [[inputs[0]] for _ in node.outputs]
            for number, func in enumerate(list_called_functions(node)):
                body, path = self._functions[func.name], f"{name}/{number}/"
                found = self._add(
                    body, path, dict(zip(map(Ref, body.inputs), inputs[1:])), name, _list_asked(body, self._functions)
                )
                for refs, ref in zip(results, body.outputs):
                    refs.append(found.get(ref) or Ref(path + ref.node, ref.index))
            for i, (refs, kind) in enumerate(zip(results, node.outputs)):
                self._made.append(Node(f"{name}/whale_result_{i}", node.op, tuple(refs), outputs=(kind,)))
                moved[Ref(node.name, i)] = Ref(f"{name}/whale_result_{i}")
        return moved


def _list_asked(body: Program, functions: Mapping[str, Program]) -> set[str]:
    return {n.name for n in body.nodes if _updates(n, functions)}


class _CannotDivideError(Exception):
    """Tells that a branch node stays whole: its parts would send each other a tensor without a static shape."""


class _Body:
    """Represents an alternative of a branch node, whose own branch nodes are divided already.

    Attributes:
      graph: the body.
      group: node -> its group; arguments, NoOps, and what every part may compute for itself, have none.
      effects: the nodes that run for their effects, also where only another one's waiting for them says so.
    """

    def __init__(self, graph: Program, stages: Mapping[str, int]) -> None:
        """Finds the group of each node.

        Args:
          stages: node -> number of its stage.
        """
        self.graph = graph
        self.group: dict[str, _Group] = {}
        self._behind: dict[str, tuple[str, ...]] = dict.fromkeys(graph.inputs, ())
        for node in graph.nodes:
            if node.name in self._behind:
                continue
            if does_nothing(node):
                self._behind[node.name] = self.list_waits(node.controls)
                continue
            before = [*(r.node for r in node.inputs), *self.list_waits(node.controls)]
            known = [self.group[name] for name in before if name in self.group]
            at = stages.get(node.name, max(known)[1] if known else None)
            if at is not None:
                self.group[node.name] = (max((level + (stage != at) for level, stage in known), default=0), at)
        ends = {*self.list_waits(graph.effects)}
        needed = {n.name for n in prune(graph).nodes}
        self.effects = tuple(
            n.name for n in graph.nodes if n.name in ends or (n.name in needed and n.stateful and n.op not in READS)
        )

    def list_waits(self, names: Iterable[str]) -> tuple[str, ...]:
        """Returns the nodes that what waits for ``names`` waits for, with those behind NoOps in place of the NoOps."""
        return tuple(dict.fromkeys(n for name in names for n in self._behind.get(name, (name,))))

    def list_nodes(self, group: _Group) -> list[Node]:
        """Returns the nodes of a group."""
        return [n for n in self.graph.nodes if self.group.get(n.name) == group]

    def find_shared(self, refs: Iterable[Ref]) -> set[str]:
        """Returns the nodes without a group whose results are among ``refs``, or from which these are computed."""
        found: set[str] = set()
        waiting = [r.node for r in refs]
        while waiting:
            name = waiting.pop()
            if name not in found and name not in self.group:
                found.add(name)
                node = self.graph.by_name[name]
                waiting += [*(r.node for r in node.inputs), *self.list_waits(node.controls)]
        return found


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Refers to a tensor in an alternative of a branch node.

    Attributes:
      alternative: number of the alternative.
      ref: the tensor there.
    """

    alternative: int
    ref: Ref


@dataclass(frozen=True, slots=True)
class _Interface:
    """Describes what a part of a branch node takes and returns.

    Attributes:
      arguments: numbers of the whole node's arguments that it takes.
      taken: what it takes of other parts.
      returned: numbers of the whole node's results that it returns.
      given: what it returns for other parts.
    """

    arguments: tuple[int, ...]
    taken: tuple[_Tensor, ...]
    returned: tuple[int, ...]
    given: list[_Tensor]


class _Division:
    """Divides branch nodes of a program into parts."""

    def __init__(self, program: Program, stages: Mapping[str, str]) -> None:
        """Stores the program.

        Args:
          stages: node -> its stage; inside of branch nodes by the names that ``_Spread`` gives them.
        """
        self._program = program
        number = {stage: i for i, stage in enumerate(dict.fromkeys(stages.values()))}
        self._stages = {name: number[stage] for name, stage in stages.items()}
        self._functions = dict(program.functions)  # and those of the parts

    def run(self, asked: Collection[str]) -> Program:
        """Returns the program with its branch nodes ``asked`` divided."""
        graph, _ = self._divide_in(self._program, "", asked)
        return replace(graph, functions=find_called_functions(graph.nodes, self._functions))

    def _divide_in(self, graph: Program, prefix: str, asked: Collection[str]) -> tuple[Program, dict[str, int]]:
        """Divides the branch nodes ``asked`` of ``graph``.

        Args:
          prefix: what stands before the graph's names in those of the stages; "": it is the program's own graph.

        Returns:
          (the graph; node -> number of its stage).
        """
        nodes: dict[str, Node] = {}
        stages: dict[str, int] = {}
        moved: dict[Ref, Ref] = {}
        parts: dict[str, list[str]] = {}  # branch node -> what is in its place
        alone: dict[str, None] = {}  # nodes for which something no longer waits, so that they have to be effects
        for node in graph.nodes:
            if moved or parts:
                node = replace(node, inputs=tuple(moved.get(r, r) for r in node.inputs))
            path = prefix + node.name
            made = [(node, self._stages.get(path))]
            if node.name in asked:
                try:
                    made, results = self._divide(node, path)
                except _CannotDivideError:
                    if prefix:
                        raise  # the branch node around this one stays whole
                    results = node.list_refs()
                moved.update((old, new) for old, new in zip(node.list_refs(), results) if old != new)
            if len(made) > 1:
                parts[node.name] = [part.name for part, _ in made]
            for part, at in made:
                controls: dict[str, None] = {}
                for name in part.controls:
                    if name not in parts and len(made) == 1:
                        controls[name] = None
                    else:
                        for before in parts.get(name, [name]):
                            controls |= self._find_waits(part, before, nodes)
                            alone[before] = None
                nodes[part.name] = replace(part, controls=tuple(controls))
                if at is not None:
                    stages[part.name] = at
        if not parts:
            return graph, stages
        outputs = tuple(moved.get(r, r) for r in graph.outputs)
        whole = {part: name for name, made in parts.items() for part in made}
        needed = {n.name for n in prune(graph).nodes}
        effects = [e for name in graph.effects for e in parts.get(name, [name])]
        effects += [name for name in (*whole, *alone) if whole.get(name, name) in needed]
        ends = tuple(dict.fromkeys(effects))
        return graph.replace_nodes(tuple(nodes.values()), outputs=outputs, effects=ends), stages

    def _find_waits(self, node: Node, other: str, nodes: Mapping[str, Node]) -> dict[str, None]:
        """Returns what a node waits for that waited for ``other``: that one if both access a variable, or one of them
        does anything else; or else that in front of it for which this holds.
        """
        found: dict[str, None] = {}
        waiting, seen = [other], {other}
        while waiting:
            name = waiting.pop()
            if self._has_to_wait(node, nodes[name], nodes):
                found[name] = None
                continue
            before = nodes[name]
            # Reads whose values a branch node takes stood in its bodies.
            read = [r.node for r in before.inputs if nodes[r.node].op in READS]
            more = [n for n in (*before.controls, *read) if n not in seen]
            seen.update(more)
            waiting += more
        return found

    def _has_to_wait(self, node: Node, other: Node, nodes: Mapping[str, Node]) -> bool:
        """Returns False if two nodes access variables, do nothing else, and have no variable in common."""
        if not (self._only_accesses(node) and self._only_accesses(other)):
            return True
        return any(nodes[r.node].outputs[r.index].dtype == "resource" and r in other.inputs for r in node.inputs)

    def _only_accesses(self, node: Node) -> bool:
        """Returns True if a node reads and updates variables, and has no other effects."""
        if node.op not in BRANCHES:
            return node.op in READS or node.op in UPDATES
        bodies = [self._functions[f.name] for f in list_called_functions(node) if f.name in self._functions]
        return len(bodies) == len(list_called_functions(node)) and all(
            self._only_accesses(n) for body in bodies for n in body.nodes if n.stateful
        )

    def _divide(self, node: Node, path: str) -> tuple[list[tuple[Node, int | None]], tuple[Ref, ...]]:
        """Divides a branch node.

        Args:
          path: its name in those of the stages.

        Returns:
          (the parts, in order, each with its stage; what takes the place of the node's results).

        Raises:
          _CannotDivideError: see there.
        """
        bodies = []
        for number, func in enumerate(list_called_functions(node)):
            function, prefix = self._functions[func.name], f"{path}/{number}/"
            bodies.append(_Body(*self._divide_in(function, prefix, _list_asked(function, self._functions))))
        holding = {
            body.group[n.name][1]
            for body in bodies
            for n in body.graph.nodes
            if n.name in body.group and any(body.graph.find_type(r).dtype == "resource" for r in n.inputs)
        }
        if len(holding) < 2:
            return [(node, min(holding, default=None))], node.list_refs()
        returned = _find_returned(node, bodies)
        groups = sorted({*returned, *(g for body in bodies for g in body.group.values())})
        interfaces: dict[_Group, _Interface] = {}
        for group in groups:
            interfaces[group] = mine = _find_interface(group, bodies, returned)
            for tensor in mine.taken:
                given = interfaces[bodies[tensor.alternative].group[tensor.ref.node]].given
                given += [tensor] if tensor not in given else []
        made: list[tuple[Node, int | None]] = [
            (self._make_part(node, bodies, groups, group, interfaces), group[1]) for group in groups
        ]
        names = {group: part.name for group, (part, _) in zip(groups, made)}
        results = tuple(Ref(names[g], interfaces[g].returned.index(i)) for i, g in enumerate(returned))
        return made, results

    def _make_part(
        self,
        node: Node,
        bodies: Sequence[_Body],
        groups: Sequence[_Group],
        group: _Group,
        interfaces: Mapping[_Group, _Interface],
    ) -> Node:
        """Returns the branch node that computes what is in ``group``, and keeps its functions."""
        names = {g: f"{node.name}/whale_part_{i}" for i, g in enumerate(groups)}
        mine = interfaces[group]
        inputs = [node.inputs[0], *(node.inputs[1 + i] for i in mine.arguments)]
        for tensor in mine.taken:
            source = bodies[tensor.alternative].group[tensor.ref.node]
            there = interfaces[source]
            inputs.append(Ref(names[source], len(there.returned) + there.given.index(tensor)))
        types = [node.outputs[i] for i in mine.returned]
        types += [bodies[t.alternative].graph.find_type(t.ref) for t in mine.given]
        waits: dict[str, None] = {}
        functions: dict[str, Func] = {}
        for number, (body, func) in enumerate(zip(bodies, list_called_functions(node))):
            name = f"{func.name}/of/{names[group]}"
            self._functions[name] = _make_body(name, number, bodies, group, mine)
            functions[func.name] = replace(func, name=name)
            for n in body.list_nodes(group):
                before = (body.group.get(c, group) for c in body.list_waits(n.controls))
                waits.update((names[g], None) for g in before if g != group)
        attrs = {k: v for k, v in node.attrs.items() if k != "_read_only_resource_inputs"}
        attrs |= {k: functions[v.name] for k, v in attrs.items() if isinstance(v, Func)}
        attrs |= {k: tuple(functions[f.name] for f in v) for k, v in attrs.items() if k == "branches"}
        taken = [bodies[0].graph.find_type(Ref(bodies[0].graph.inputs[i])) for i in mine.arguments]
        taken += [bodies[t.alternative].graph.find_type(t.ref) for t in mine.taken]
        attrs |= {
            "Tin": tuple(DType(t.dtype) for t in taken),
            "Tout": tuple(DType(t.dtype) for t in types),
            "output_shapes": tuple(Shape(t.shape) for t in types),
        }
        controls = (*node.controls, *waits)
        return replace(
            node, name=names[group], inputs=tuple(inputs), controls=controls, attrs=attrs, outputs=tuple(types)
        )


def _find_returned(node: Node, bodies: Sequence[_Body]) -> list[_Group]:
    """Returns the group that returns each result of a branch node."""
    found = []
    for i in range(len(node.outputs)):
        known = [body.group[r.node] for body in bodies if (r := body.graph.outputs[i]).node in body.group]
        if known:
            stage = known[0][1]
            found.append((max(level + (at != stage) for level, at in known), stage))
        else:
            found.append(min(g for body in bodies for g in body.group.values()))
    return found


def _find_interface(group: _Group, bodies: Sequence[_Body], returned: Sequence[_Group]) -> _Interface:
    """Returns what the part for ``group`` takes and returns, but for what other parts read.

    Args:
      returned: the group that returns each of the whole node's results.

    Raises:
      _CannotDivideError: it takes a tensor without a static shape, or one that cannot be sent, from another part.
    """
    results = tuple(i for i, g in enumerate(returned) if g == group)
    arguments: set[int] = set()
    taken: dict[_Tensor, None] = {}
    for number, body in enumerate(bodies):
        read = [r for n in body.list_nodes(group) for r in n.inputs] + [body.graph.outputs[i] for i in results]
        waits = [Ref(c) for n in body.list_nodes(group) for c in body.list_waits(n.controls) if c not in body.group]
        shared = body.find_shared([*read, *waits])
        arguments.update(i for i, name in enumerate(body.graph.inputs) if name in shared)
        for ref in read:
            if body.group.get(ref.node, group) != group:
                kind = body.graph.find_type(ref)
                if not kind.is_static or kind.dtype in UNMOVABLE:
                    raise _CannotDivideError
                taken[_Tensor(number, ref)] = None
    return _Interface(tuple(sorted(arguments)), tuple(taken), results, [])


def _make_body(name: str, number: int, bodies: Sequence[_Body], group: _Group, mine: _Interface) -> Program:
    """Returns alternative ``number`` of the part that computes what is in ``group``.

    Args:
      name: of the function.
      mine: what the part takes and returns.
    """
    body = bodies[number]
    graph = body.graph
    own = body.list_nodes(group)
    results = [graph.outputs[i] for i in mine.returned]
    waits = {n.name: body.list_waits(n.controls) for n in graph.nodes}
    read = [r for n in own for r in n.inputs] + [Ref(c) for n in own for c in waits[n.name]]
    shared = body.find_shared([*read, *results])
    arguments = [graph.inputs[i] for i in mine.arguments]
    kept = {*(n.name for n in own), *(shared - {*graph.inputs})}
    nodes = [graph.by_name[argument] for argument in arguments]
    moved: dict[Ref, Ref] = {}
    for i, tensor in enumerate(mine.taken):
        kind = bodies[tensor.alternative].graph.find_type(tensor.ref)
        argument = f"whale_taken_{i}"
        attrs = {"dtype": DType(kind.dtype), "shape": Shape(kind.shape)}
        nodes.append(Node(argument, "Placeholder", attrs=attrs, outputs=(kind,)))
        arguments.append(argument)
        if tensor.alternative == number:
            moved[tensor.ref] = Ref(argument)
    for node in graph.nodes:
        if node.name in kept:
            inputs = tuple(moved.get(r, r) for r in node.inputs)
            nodes.append(replace(node, inputs=inputs, controls=tuple(c for c in waits[node.name] if c in kept)))
    outputs = [moved.get(r, r) for r in results]
    for i, tensor in enumerate(mine.given):
        if tensor.alternative == number:
            outputs.append(tensor.ref)
        else:
            nodes += make_nothing(f"whale_unused_{i}", bodies[tensor.alternative].graph.find_type(tensor.ref))
            outputs.append(Ref(nodes[-1].name))
    effects = tuple(n for n in body.effects if n in kept)
    return Program(name, tuple(nodes), tuple(arguments), (), tuple(outputs), effects)
