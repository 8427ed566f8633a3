"""Finds the nodes that update variables element by element, groups them into units, and replaces units by operations.

A unit becomes a part of one operation: writes of variables, and the arithmetic around them on tensors of the variable's
shape, scalars, and long rows of its last sizes. No path may lead out of a unit and back into it. To ensure that, nodes
have levels, which rise where a path leaves a unit, and all nodes of a unit have the same level. Units of one level do
not wait for each other either, so that any of them may run together. Other fusions use the same functions to group and
replace nodes.

A path may also lead out of a unit by an exchange, through another rank, and back by another exchange, and no edge of
the rank's own program shows it: a send and a receive between stages, or collectives to which a rank without rows gives
only zeros. So each node has bounds, the exchanges that it may wait for (``Bounds``), and nodes become one operation
only if these are equal: no exchange then waits for another one that it did not wait for before, on any rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from whale.ir.ops import ASSIGNS, EXCHANGES, FUSED_UPDATE, IDENTITIES, MEETINGS, READS
from whale.ir.program import COMPILED, Node, Program, Ref, iterate_calls, rewire
from whale.ir.values import TensorType, require_static_shape
from whale.passes.elementwise.code import ADDED_FROM_LEFT, BINARY, DTYPES, UNARY, UNARY_OF_DOUBLES

_ARITHMETIC = frozenset((*UNARY, *UNARY_OF_DOUBLES, *BINARY, *IDENTITIES, "AddN"))
_WAITING = EXCHANGES | MEETINGS
_HANDED_ON = IDENTITIES | {"ReadVariableOp"}
LARGE_BYTES = 1 << 20  # smaller variables are in the cache, where repeating a row for them costs little
LONG = 512  # least number of elements of a row: the kernel works in blocks of as many
_Place = TypeVar("_Place")


@dataclass(frozen=True, slots=True)
class Accesses:
    """Holds the reads and writes of each variable, to find out which reads see which value.

    Control edges order a variable's writes and all other accesses, so the program's order of nodes is a valid one, and
    a variable's value at a node is identified by the number of writes before it (its version).

    Attributes:
      handle: node that reads or writes one variable -> the variable's handle node.
      version: the same node -> version of the variable after this node: the number of writes up to and including it.
      seen: handles of variables whose every access is known; handles that are arguments of the program, or are passed
        on to other nodes, are not among them.
    """

    handle: dict[str, str]
    version: dict[str, int]
    seen: frozenset[str]


def find_accesses(program: Program, arguments: Collection[str] = ()) -> Accesses:
    """Finds the accesses to variables in the main graph of ``program``; a call with a handle counts as a write.

    Args:
      arguments: inputs of ``program`` that are handles of variables, each of another one, if it is a function.
    """
    handles = dict.fromkeys([*(v.node for v in program.variables), *arguments], 0)
    handle: dict[str, str] = {}
    version: dict[str, int] = {}
    leaked: set[str] = set()
    refs = {Ref(name) for name in handles}
    for node in program.nodes:
        if refs.isdisjoint(node.inputs):
            continue
        found = [name for name, _ in node.inputs if name in handles]
        taken = dict.fromkeys(found)
        if any(t.dtype in ("resource", "variant") for t in node.outputs):
            leaked.update(taken)
        for name in taken:
            handles[name] += node.op not in READS
        first = found[0]
        if len(taken) == 1 and node.inputs[0].node == first:
            handle[node.name], version[node.name] = first, handles[first]
    return Accesses(handle, version, frozenset(handles.keys() - leaked - ({*program.inputs} - {*arguments})))


def is_read(node: Node, found: Accesses) -> bool:
    """Returns True if ``node`` reads the whole value of a variable whose every access is known, so that its updates may
    be fused.
    """
    return node.op == "ReadVariableOp" and found.handle.get(node.name, "") in found.seen


@dataclass(frozen=True, slots=True)
class Unit:
    """Represents a group of nodes that update variables of one shape.

    Attributes:
      nodes: in the program's order.
      level: units of one level do not wait for each other.
      type: dtype and shape of all its tensors but scalars and rows.
      bounds: the exchanges that its nodes may wait for (see ``Bounds``). Only units with the same ones may run
        together.
    """

    nodes: tuple[Node, ...]
    level: int
    type: TensorType
    bounds: int = 0


def find_units(program: Program, found: Accesses, collapsed: bool = True) -> list[Unit]:
    """Returns the units of the main graph of ``program``, in the order of their first nodes.

    Args:
      collapsed: an operation that updates one variable already (``whale.passes.normalize.collapse_updates``) is a unit
        of its own; False: it is in none.
    """
    types = _find_updating_nodes(program, found)
    if collapsed and FUSED_UPDATE in program.ops:
        for node in program.nodes:
            if node.op == FUSED_UPDATE and len(node.attrs["shapes"]) == 1:
                # A new object: types are compared by identity, so that this node joins no other unit.
                types[node.name] = TensorType(str(node.attrs["T"]), node.attrs["shapes"][0].dims)
    if not types:
        return []
    found_levels, bounds = _find_levels(program, types), find_bounds(program).join(program, types)
    levels = {name: found_levels.get(name, 0) for name in types}
    places = {name: (kind, levels[name], bounds.get(name, 0)) for name, kind in types.items()}
    top = join_places(program, places, lambda one, other: one[0] is other[0] and one[1:] == other[1:])
    units: dict[str, list[Node]] = {}
    for node in program.nodes:
        if node.name in types:
            units.setdefault(top(node.name), []).append(node)
    return [
        Unit(tuple(nodes), levels[nodes[0].name], types[nodes[0].name], bounds.get(nodes[0].name, 0))
        for nodes in units.values()
        if any(n.op in ASSIGNS or n.op == FUSED_UPDATE for n in nodes)
    ]


def is_row(given: TensorType, whole: TensorType) -> bool:
    """Returns True if an operand is a long row of a large tensor ``whole`` (its last sizes), which would be costly to
    repeat.
    """
    sizes, own = require_static_shape(whole), require_static_shape(given)
    while own and own[0] == 1:
        own = own[1:]
    large = whole.bytes >= LARGE_BYTES and LONG <= given.elements < whole.elements
    return large and own == sizes[len(sizes) - len(own) :]


def _find_updating_nodes(program: Program, found: Accesses) -> dict[str, TensorType]:
    """Returns the names of the nodes that belong to updates, each with the type of the tensors that it handles.

    These are writes of variables, nodes computed from them or assigned by them, and nodes that only these read. Equal
    types are the same object.
    """
    writes = [
        node
        for node in program.nodes
        if node.op in ASSIGNS
        and found.handle.get(node.name) in found.seen
        and _is_fitting(program.find_type(node.inputs[1]))
    ]
    if not writes:
        return {}
    by_name, consumers = program.by_name, program.consumers
    returned = {ref.node for ref in program.outputs}
    known: dict[TensorType, TensorType] = {}  # makes equal types the same object, so that they compare by identity
    simple: dict[str, TensorType] = {}
    # Results by op, attributes and types, which are the same objects in thousands of nodes: most updates are alike.
    alike: dict[tuple[object, ...], TensorType | None] = {}
    for node in program.nodes:
        op = node.op
        if op in _ARITHMETIC:
            met = (op, id(node.attrs), id(node.outputs), *[id(by_name[name].outputs[i]) for name, i in node.inputs])
            if met not in alike:
                kind = None if node.attrs.get(COMPILED) else _find_arithmetic_type(program, node)
                alike[met] = kind and known.setdefault(kind, kind)
            kind = alike[met]
        elif op == "ReadVariableOp" and is_read(node, found) and _is_fitting(node.outputs[0]):
            kind = known.setdefault(node.outputs[0], node.outputs[0])
        else:
            continue
        if kind is not None:
            simple[node.name] = kind
    types: dict[str, TensorType] = {}
    for node in writes:
        value = node.inputs[1]
        kind = known.setdefault(program.find_type(value), program.find_type(value))
        arithmetic = simple.get(value.node) is kind and by_name[value.node].op not in _HANDED_ON
        # An assignment without arithmetic is left out: TensorFlow takes over the tensor without a copy.
        if node.op != "AssignVariableOp" or arithmetic:
            types[node.name] = kind
            if node.op == "AssignVariableOp":
                types[value.node] = kind
    if not types:
        return {}
    candidates = [(by_name[name], kind) for name, kind in simple.items() if name not in types]
    for node, kind in candidates:
        if node.op == "ReadVariableOp":
            handle = found.handle[node.name]
            written = any(c in types and found.handle.get(c) == handle for c in node.controls)
            if written and all(simple.get(c.name) is kind for c, _ in consumers.get(node.list_refs()[0], ())):
                types[node.name] = kind
        else:
            for name, _ in node.inputs:
                if types.get(name) is kind:
                    types[node.name] = kind
                    break
    for node, kind in reversed(candidates):
        if node.name in types or node.name in returned:
            continue
        readers = consumers.get(Ref(node.name), ())
        for reader, _ in readers:
            if types.get(reader.name) is not kind:
                break
        else:
            if readers:
                types[node.name] = kind
    return types


def _is_fitting(kind: TensorType) -> bool:
    return kind.dtype in DTYPES and kind.is_static and bool(kind.shape)


def _find_arithmetic_type(program: Program, node: Node) -> TensorType | None:
    """Returns the type of the result of elementwise arithmetic; None if a unit cannot contain the node."""
    if len(node.outputs) != 1 or not _is_fitting(node.outputs[0]):
        return None
    kind = node.outputs[0]
    if node.op in UNARY_OF_DOUBLES and kind.dtype != "float64":
        return None
    operands = [program.find_type(ref) for ref in node.inputs]
    if any(t.dtype != kind.dtype or not t.is_static for t in operands) or len(operands) > ADDED_FROM_LEFT:
        return None
    whole = sum(t.shape == kind.shape for t in operands)
    if node.op in BINARY:
        fit = whole and all(t.shape == kind.shape or t.elements == 1 or is_row(t, kind) for t in operands)
        return kind if fit else None
    return kind if whole == len(operands) else None


def _find_levels(program: Program, types: Mapping[str, TensorType]) -> dict[str, int]:
    levels: dict[str, int] = {}  # the levels of nodes that are not of level 0
    of_level_0 = levels.keys().isdisjoint
    for node in program.nodes:
        before = [name for name, _ in node.inputs] if node.inputs else []
        if node.controls:
            before += node.controls
        if types.keys().isdisjoint(before) and of_level_0(before):
            continue
        kind, level = types.get(node.name), 0
        for name in before:
            reached = levels.get(name, 0)
            if reached >= level:
                # An edge out of a unit (to a node that is in none, or has another type) raises the level.
                left = types.get(name)
                level = reached + (left is not None and left is not kind)
        if level:
            levels[node.name] = level
    return levels


@dataclass(frozen=True, slots=True)
class Bounds:
    """Holds which exchanges the nodes of a rank's main graph may wait for, so that no ranks wait in a cycle.

    Bounds never shrink along an edge of the graph, nor may they along an edge that a pass adds. Then no exchange waits
    for more exchanges than before.

    Attributes:
      own: an exchange -> its bit.
      of: a node that exchanges wait for -> the bit set of the exchanges that all of them wait for anyway. Other nodes
        may wait for any exchange.
    """

    own: Mapping[str, int]
    of: Mapping[str, int]

    def allow(self, before: str, after: str) -> bool:
        """Returns True if an edge may be added from one node to another."""
        most = self.of.get(after)
        return most is None or (before in self.of and not (self.of[before] | self.own.get(before, 0)) & ~most)

    def join(self, program: Program, joining: Collection[str]) -> dict[str, int]:
        """Returns bounds for nodes that may become parts of operations; they do only where these are equal.

        A node that no exchange waits for has -1, every exchange, or the bounds of the nodes of ``joining`` that it
        reads, if exchanges wait for these, so that both may become one operation.
        """
        found: dict[str, int] = {}
        for node in program.nodes if self.own else ():
            if node.name not in joining:
                continue
            bound = self.of.get(node.name)
            if bound is None:
                before, bound = list_predecessors(node), -1
                if any(found.get(name, -1) != -1 for name in before):
                    bound = 0
                    for name in before:
                        bound |= found.get(name, self.of.get(name, -1)) | self.own.get(name, 0)
            found[node.name] = bound
        return found


def find_bounds(program: Program) -> Bounds:
    """Finds the bounds of the nodes of the main graph of a rank's program."""
    exchanging = _find_exchanging(program)
    waits: dict[str, int] = {}  # the exchanges that a node waits for
    own: dict[str, int] = {}
    for node in program.nodes if exchanging else ():
        before = 0
        for name in list_predecessors(node) if node.inputs or node.controls else ():
            before |= waits[name] | own.get(name, 0)
        waits[node.name] = before
        if node.name in exchanging:
            own[node.name] = 1 << len(own)
    of: dict[str, int] = {}
    for node in reversed(program.nodes) if exchanging else ():
        bound = waits[node.name] if node.name in own else of.get(node.name)
        if bound is not None:
            of[node.name] = bound
            for name in list_predecessors(node):
                of[name] = of.get(name, -1) & bound
    return Bounds(own, of)


def _find_exchanging(program: Program) -> set[str]:
    """Returns the nodes of the main graph that wait for other ranks, themselves or in a function that they run."""
    graphs = program.functions
    known: dict[str, bool] = {}

    def runs(name: str) -> bool:
        if name not in known:
            known[name] = False
            known[name] = name in graphs and bool(find_waiting(graphs[name]))
        return known[name]

    def find_waiting(graph: Program) -> set[str]:
        found = {node.name for node in graph.nodes if node.op in _WAITING}
        if graphs:
            found.update([node.name for node, func in iterate_calls(graph.nodes) if runs(func.name)])
        return found

    return find_waiting(program)


def list_predecessors(node: Node) -> Iterable[str]:
    """Returns the names of the nodes that ``node`` waits for: producers of its operands, and control inputs."""
    return (*[name for name, _ in node.inputs], *node.controls)


def join_places(
    program: Program, places: Mapping[str, _Place], alike: Callable[[_Place, _Place], bool]
) -> Callable[[str], str]:
    """Groups connected nodes of like places, by union-find; returns a function that maps the name of a node to the name
    of its group.

    Two nodes are in one group if one waits for the other and ``alike`` returns True for their places.

    Args:
      places: name of each node to group -> its place, a key of the calling pass.
      alike: a function that compares two places.
    """
    parent = {name: name for name in places}

    def find_root(name: str) -> str:
        while parent[name] != name:
            parent[name] = name = parent[parent[name]]
        return name

    for node in program.nodes:
        own = places.get(node.name)
        if own is None:
            continue
        before = [name for name, _ in node.inputs]
        if node.controls:
            before += node.controls
        for name in before:
            other = places.get(name)
            if other is not None and alike(other, own):
                parent[find_root(node.name)] = find_root(name)
    return find_root


def replace_by_operations(program: Program, made: Mapping[str, Node], moved: dict[Ref, Ref]) -> Program:
    """Replaces groups of nodes of ``program`` by one new node each, which stands where the last node of its group
    stood.

    Args:
      made: name of a replaced node -> the new node; nodes of one group map to the same one.
      moved: tensor of a replaced node -> the new node's output that readers take instead. Replaced nodes that it does
          not list are added to it, with the first output of the new node.
    """
    if not made:
        return program
    last = {made[n.name].name: n.name for n in program.nodes if n.name in made}
    nodes: dict[str, Node] = {}
    for old in program.nodes:
        node = made.get(old.name, old)
        if node is old or last[node.name] == old.name:
            nodes[node.name] = node
    for name, node in made.items():
        moved.setdefault(Ref(name), Ref(node.name))
    return rewire(program, nodes, moved)
