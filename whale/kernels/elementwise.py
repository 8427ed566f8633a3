"""Fuses elementwise arithmetic into single operations (WhaleElementwise), which pass over memory once instead of many
times.

The nodes of a group have results of one shape, or are sums of such results, and are connected. No path may lead out of
a group and back into it: nodes have levels, which rise where a path leaves a group, and a group's nodes have one level.
All nodes of a group come after the same communication ops, so that none of these waits for another one that it did not
wait for before.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from operator import is_
from typing import NamedTuple

from whale.ir.marks import Marks
from whale.ir.ops import EXCHANGES, FOLDS, RANDOM, READS, UPDATES
from whale.ir.program import Node, Program, Ref, iterate_function_refs, remove_unread
from whale.ir.values import DType, Shape, TensorType, require_static_shape
from whale.kernels.choices import ALL, Choices
from whale.kernels.xla import change_other_graphs
from whale.passes.elementwise.code import (
    MOST_OF_A_KIND,
    READS_PRODUCERS,
    REPEATS,
    SUMS,
    Instructions,
    Value,
    emit_instructions,
    find_broadcast_kind,
    find_elementwise_type,
    find_sum_type,
    place_instructions,
)
from whale.passes.elementwise.units import join_places, list_predecessors, replace_by_operations

ELEMENTWISE = "WhaleElementwise"
_COPYING = FOLDS | {"Mean"}  # reductions, which are copies if they are over no dimension
_KINDS = "vsrc"  # tensors, scalars, rows, columns: the order of an operation's operands

# Stateful operations that never wait for other ranks or threads.
_QUIET = READS | UPDATES | RANDOM | {"VarHandleOp", "Placeholder"}


def fuse_elementwise(program: Program, choices: Choices = ALL) -> Program:
    """Fuses the elementwise arithmetic of one rank's program and its functions into as few operations as possible.

    Args:
      choices: substitutions that measured slower are left out.
    """
    return change_other_graphs(program, lambda graph: _fuse_graph(graph, choices))


def list_operations(program: Program) -> tuple[Program, list[tuple[Node, list[str]]]]:
    """Returns the simplified graph before fusion, and the operations that ``fuse_elementwise`` would create, each with
    the names of the nodes that it replaces.
    """
    program = move_repeats_last(_simplify(program))
    made = [(group, _make_operation(program, group)) for group in _find_groups(program)]
    return program, [(found[0], [node.name for node in group.nodes]) for group, found in made if found is not None]


def _simplify(program: Program) -> Program:
    """Simplifies patterns in gradients built by TensorFlow, so that more nodes can be fused.

    Reductions over no dimension become copies, and constants no longer wait for arithmetic.
    """

    def simplify_node(node: Node) -> Node:
        if node.op in _COPYING and (axes := program.const(node.inputs[1])) is not None and not axes.size:
            kind = node.outputs[0]
            return replace(node, op="Identity", inputs=node.inputs[:1], attrs={"T": DType(kind.dtype)})
        if node.op != "Const" or not node.controls or node.marks.recomputed:
            return node
        controls = tuple(c for c in node.controls if find_elementwise_type(program, program.by_name[c]) is None)
        return node if controls == node.controls else replace(node, controls=controls)

    nodes = tuple(map(simplify_node, program.nodes))
    unchanged = all(map(is_, nodes, program.nodes))
    return program if unchanged else program.replace_nodes(nodes)  # which would find what it knows of its nodes again


def _fuse_graph(program: Program, choices: Choices) -> Program:
    program = move_repeats_last(_simplify(program))
    moved: dict[Ref, Ref] = {}
    made: dict[str, Node] = {}  # replaced node -> the operation
    for group in _find_groups(program):
        found = _make_operation(program, group)
        if found is None or not choices.takes("elementwise", program, found[0]):
            continue
        node, results = found
        made.update({one.name: node for one in group.nodes})
        moved.update({ref: Ref(node.name, k) for k, ref in enumerate(results)})
    return replace_by_operations(program, made, moved)


def _make_operation(program: Program, group: Group) -> tuple[Node, list[Ref]] | None:
    """Returns the operation that replaces a group, and the tensors that its results replace, in order.

    Returns None if the group has more operands, results or temporary values than the operation's text can name, or a
    sum of a broadcast operand.
    """
    whole, nodes = group
    name = f"{nodes[-1].name}/{ELEMENTWISE}"
    names = {node.name for node in nodes}
    fetched = {ref.node for ref in program.outputs}
    code = Instructions()
    values: dict[Ref, Value] = {}
    operands: dict[str, list[Ref]] = {kind: [] for kind in _KINDS}

    def find_operand(ref: Ref) -> Value:
        if ref not in values:
            kind = find_broadcast_kind(program.find_type(ref), whole)
            values[ref] = Value(kind, len(operands[kind]))
            operands[kind].append(ref)
        return values[ref]

    sums: list[Ref] = []
    for node in nodes:
        value = values[Ref(node.name)] = emit_instructions(node, code, find_operand)
        if value.kind == "=" and code.steps[value.number][0] in SUMS:
            sums.append(Ref(node.name))
    # The kernel sums only tensors of the group's shape, not operands that are broadcast to it.
    if any(op in SUMS and one.kind not in ("v", "=") for op, read in code.steps for one in read):
        return None
    results = [
        ref
        for ref in (Ref(node.name) for node in nodes if Ref(node.name) not in sums)
        if ref.node in fetched or any(reader.name not in names for reader, _ in program.consumers.get(ref, ()))
    ]
    lines = place_instructions(tuple(code.steps), (), tuple([values[ref] for ref in results]))
    named = (*operands.values(), results, sums)
    if not (results or sums) or lines is None or any(len(refs) > MOST_OF_A_KIND for refs in named):
        return None
    sum_types = [program.find_type(ref) for ref in sums]
    inputs = tuple(ref for kind in _KINDS for ref in operands[kind])
    controls = tuple(dict.fromkeys(c for node in nodes for c in node.controls if c not in names))
    attrs = {
        "T": DType(whole.dtype),
        "program": lines,
        "shape": Shape(require_static_shape(whole)),
        "N": len(inputs),
        "R": len(results),
        "sum_shapes": tuple([Shape(require_static_shape(one)) for one in sum_types]),
        "S": len(sums),
    }
    marks = Marks(recomputed=nodes[0].marks.recomputed)
    outputs = (*[whole] * len(results), *sum_types)
    return Node(name, ELEMENTWISE, inputs, controls, attrs, outputs, nodes[-1].scope, False, marks), results + sums


class _Repeat(NamedTuple):
    """Represents a node that repeats a tensor (Tile, BroadcastTo), with the type of its operand."""

    node: Node
    given: TensorType


def move_repeats_last(program: Program) -> Program:
    """Moves arithmetic on repeated rows, columns or scalars before the repetition, where it is computed once.

    For example, the gradient of a mean repeats a row to a whole tensor first, and divides it by a number then.
    """
    repeats: dict[Ref, _Repeat] = {}  # result of a repetition -> the repetition
    nodes: list[Node] = []
    for node in program.nodes:
        if node.op in REPEATS:
            # With control inputs it is left alone: arithmetic moved before it would have to wait for them too.
            if not node.controls and _is_movable(program, node):
                repeats[Ref(node.name)] = _Repeat(node, program.find_type(node.inputs[0]))
        elif not repeats.keys().isdisjoint(node.inputs) and _is_movable(program, node):
            if (repeat := _find_common_repeat(program, node, repeats)) is not None:
                given = tuple([repeats[ref].node.inputs[0] if ref in repeats else ref for ref in node.inputs])
                once = replace(node, name=f"{node.name}/whale_once", inputs=given, outputs=(repeat.given,))
                again = (Ref(once.name), *repeat.node.inputs[1:])
                nodes.append(once)
                node = replace(repeat.node, name=node.name, inputs=again, controls=())
                repeats[Ref(node.name)] = _Repeat(node, repeat.given)
        nodes.append(node)
    if len(nodes) == len(program.nodes):
        return program
    return remove_unread(program.replace_nodes(tuple(nodes)), {ref.node for ref in repeats})


def _is_movable(program: Program, node: Node) -> bool:
    return not node.marks.recomputed and find_elementwise_type(program, node) is not None


def _find_common_repeat(program: Program, node: Node, repeats: dict[Ref, _Repeat]) -> _Repeat | None:
    """Returns the repetition (Tile or BroadcastTo) that can be done after ``node`` instead of before it; None if there
    is none.

    There is one if all operands of ``node`` but scalars are repeated from the same type to the shape of its result.

    Args:
      repeats: result of a repeating node -> the repetition.
    """
    found = [repeats[ref] for ref in node.inputs if ref in repeats]
    if not found or any((one.given, one.node.outputs) != (found[0].given, node.outputs) for one in found):
        return None
    rank = len(found[0].given.shape or ())
    if node.op == "BiasAdd" and rank < 2:
        return None  # BiasAdd needs an operand of rank 2 or more
    others = [program.find_type(ref) for ref in node.inputs if ref not in repeats]
    return found[0] if all(t.elements == 1 and len(t.shape or ()) <= rank for t in others) else None


class _Place(NamedTuple):
    """Represents a key that is equal for nodes that may be fused into one operation.

    Attributes:
      type: type of the node's result, or of the tensor that it sums.
      recomputed: whether the node recomputes an activation to save memory.
      level: the largest number of edges out of groups on a path to the node, which keeps paths from coming back into a
        group (see the module's text).
      met: bit set of the communication ops, and other nodes that may wait for other ranks, which come before the node.
    """

    type: TensorType
    recomputed: bool
    level: int
    met: int


class Group(NamedTuple):
    """Represents a group of nodes to fuse.

    Attributes:
      type: type of the tensors that the nodes compute, or sum, element by element.
      nodes: in the program's order.
    """

    type: TensorType
    nodes: list[Node]


def _find_groups(program: Program) -> list[Group]:
    """Returns the groups of nodes to fuse; a group has two nodes or more, or a sum."""
    types: dict[str, TensorType] = {}
    sums: set[str] = set()
    # Results by op, attributes and types, which are the same objects in thousands of nodes.
    alike: dict[tuple[object, ...], TensorType | None] = {}
    by_name = program.by_name
    for node in program.nodes:
        if node.op in READS_PRODUCERS:
            kind = find_elementwise_type(program, node)
        else:
            key = (node.op, node.marks.on_host, id(node.attrs), *map(id, node.outputs),
                   *[id(by_name[name].outputs[i]) for name, i in node.inputs])  # fmt: skip
            if key not in alike:
                alike[key] = find_elementwise_type(program, node)
            kind = alike[key]
        if kind is None and (kind := find_sum_type(program, node)) is not None:
            sums.add(node.name)
        if kind is not None:
            types[node.name] = kind
    places = _find_places(program, types, sums)
    _move_to_readers(program, places, sums)
    together = _join_groups(program, places)
    return [Group(places[g[0].name].type, g) for g in together if len(g) > 1 or g[0].name in sums]


def _find_places(program: Program, types: Mapping[str, TensorType], sums: Collection[str]) -> dict[str, _Place]:
    """Returns the place of each node that may be fused: the group with the lowest level that it can join.

    ``_move_to_readers`` may move nodes to later groups afterwards.

    Args:
      types: name of each node that may be fused -> type of the tensor that it computes or sums.
      sums: names of those nodes that are sums.
    """
    levels: dict[str, int] = {}
    met: dict[str, int] = {}
    places: dict[str, _Place] = {}
    bits = 0
    synchronizes: dict[tuple[str, bool, int], bool] = {}  # by what decides it, which most nodes share
    for node in program.nodes:
        kind, recomputed = types.get(node.name), node.marks.recomputed
        level = after = 0
        before = list_predecessors(node) if node.inputs or node.controls else ()
        known = [name for name in dict.fromkeys(before) if name in levels] if before else ()
        for name in known:
            after |= met[name]
        for name in known:
            place = places.get(name)
            # An edge out of a group raises the level. So does any edge from a sum, which is known only at the end.
            left = place is not None and (
                (place.type is not kind and place.type != kind)
                or place.recomputed != recomputed
                or place.met != after
                or name in sums
            )
            level = max(level, levels[name] + left)
        if kind is not None:
            places[node.name] = _Place(kind, recomputed, level, after)
        given = (node.op, node.stateful, id(node.attrs))
        meets = synchronizes.get(given)
        if meets is None:
            meets = synchronizes[given] = may_synchronize(node)
        if meets:
            after |= 1 << bits
            bits += 1
        levels[node.name], met[node.name] = level, after
    return places


def may_synchronize(node: Node) -> bool:
    """Returns True if other ranks or threads may have to act before the node ends: it communicates, is stateful, or
    calls a function.
    """
    return (
        node.op in EXCHANGES
        or (node.stateful and node.op not in _QUIET)
        or any(True for _ in iterate_function_refs(node))
    )


def _move_to_readers(program: Program, places: dict[str, _Place], sums: Collection[str]) -> None:
    """Moves each node whose readers all have one later place to that place, so that its result need not be stored.

    A node is not moved if two or more operands as large as its result would have to be stored instead.

    Args:
      places: node -> its place; changed in place.
      sums: names of the nodes that are sums, which stay.
    """
    needed = {ref.node for ref in program.outputs}.union(program.effects)
    waited_for = {name for node in program.nodes for name in node.controls}
    for node in reversed(program.nodes):
        place = places.get(node.name)
        if place is None or node.name in needed or node.name in waited_for or node.name in sums:
            continue
        readers = {places.get(reader.name) for reader, _ in program.consumers.get(Ref(node.name), ())}
        (to, *others) = readers or {None}
        if others or to is None or to == place or (to.type, to.recomputed) != (place.type, place.recomputed):
            continue
        whole = {ref for ref in node.inputs if program.find_type(ref).shape == place.type.shape}
        if len(whole) <= 1:
            places[node.name] = to


def _join_groups(program: Program, places: Mapping[str, _Place]) -> list[list[Node]]:
    """Joins connected nodes of equal places to groups; a group too large for an operation's text is split in the
    program's order.
    """
    top = join_places(program, places, _Place.__eq__)
    whole: dict[str, list[Node]] = {}
    for node in program.nodes:
        if node.name in places:
            whole.setdefault(top(node.name), []).append(node)
    groups: list[list[Node]] = []
    for nodes in whole.values():
        groups.append([])
        names: set[str] = set()
        read: set[Ref] = set()
        for node in nodes:
            more = [ref for ref in node.inputs if ref.node not in names]
            if groups[-1] and (len(read.union(more)) > MOST_OF_A_KIND or len(names) == MOST_OF_A_KIND):
                groups.append([])
                names, read, more = set(), set(), list(node.inputs)
            groups[-1].append(node)
            names.add(node.name)
            read.update(more)
    return groups
