"""Infers the contents of TensorLists through loops and branches: shapes of items, and constant values of small integer
items.

A list created before its batch was known allows items of any size; the items pushed to it tell the size. The gradient
of a loop reads the shapes that the loop pushed, one per iteration: if all of them are the same constant, the value read
is that constant. The analysis is a fixpoint over the lattice: no item < one item < an item with unknown sizes or value
< an item of unknown rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from whale.ir.ops import HAS_BODIES, IDENTITIES, LIST_PUTS, LIST_STACKS, LOOPS
from whale.ir.program import Node, Program, Ref, make_const
from whale.ir.values import Dims, Func, Tensor, TensorType


class _Item(NamedTuple):
    """Represents what all items of a list have in common.

    Attributes:
      shape: their shape; None: of unknown rank.
      value: their value if it is the same constant; else None.
    """

    shape: Dims | None = None
    value: Tensor | None = None


_ANY = _Item()
_LARGEST_ELEMENTS = 64  # of a constant item that is followed, such as a shape

_SAME = IDENTITIES | {"TensorListResize", "TensorListPopBack", "ZerosLike"}
_ITEM_OUTPUT = {"TensorListGetItem": 0, "TensorListPopBack": 1}
_INTEGERS = frozenset({"int32", "int64"})


def refine_lists(program: Program) -> Program:
    """Refines the output types of reads from TensorLists by the types of the items that were pushed.

    Functions are refined too. Returns ``program`` itself if no type changes.
    """
    graphs = {"": program, **program.functions}
    if not any(_reads_loosely(n) for graph in graphs.values() for n in graph.nodes):
        return program
    elements = _Elements(graphs).solve()
    changed = {name: _refine(graph, name, elements) for name, graph in graphs.items()}
    if all(changed[name] is graphs[name] for name in graphs):
        return program
    main = changed.pop("")
    return replace(main, functions=changed)


def _reads_loosely(node: Node) -> bool:
    """Returns True if ``node`` reads from a list and its result is not fully known: a size is missing, or it is an
    integer vector whose value might be a constant.
    """
    if node.op not in _ITEM_OUTPUT and node.op not in LIST_STACKS:
        return False
    kind = node.outputs[_ITEM_OUTPUT.get(node.op, 0)]
    return not kind.is_static or (node.op == "TensorListPopBack" and kind.dtype in _INTEGERS)


def _join(a: _Item | None, b: _Item | None) -> _Item | None:
    """Returns what two items have in common, the least element of the lattice above both; None stands for the empty
    list.
    """
    if a is None or b is None:
        return b if a is None else a
    if a.shape is None or b.shape is None or len(a.shape) != len(b.shape):
        return _ANY
    shape = tuple(x if x == y else None for x, y in zip(a.shape, b.shape))
    return _Item(shape, a.value if a.value == b.value else None)


class _Elements:
    """Computes the items that each list of each graph may hold."""

    def __init__(self, graphs: Mapping[str, Program]) -> None:
        self.graphs = graphs
        self.known: dict[tuple[str, Ref], _Item] = {}
        self.changed = False

    def solve(self) -> dict[tuple[str, Ref], _Item]:
        """Computes what is known of the items of each list, {(graph, list): item}: visits all nodes again and again
        until nothing changes (the least fixpoint). That ends, since each change takes away one of the finitely many
        facts that are known of an item.
        """
        self.changed = True
        while self.changed:
            self.changed = False
            for name, graph in self.graphs.items():
                for node in graph.nodes:
                    self._visit(name, graph, node)
        return self.known

    def _find_item(self, graph: str, ref: Ref) -> _Item | None:
        return self.known.get((graph, ref))

    def _raise(self, graph: str, ref: Ref, item: _Item | None) -> None:
        own = self._find_item(graph, ref)
        joined = _join(own, item)
        if joined is not None and joined != own:
            self.known[graph, ref] = joined
            self.changed = True

    def _visit(self, name: str, graph: Program, node: Node) -> None:
        lists = [i for i, t in enumerate(node.outputs) if t.dtype == "variant"]
        called = _list_called(node, self.graphs)
        if called:
            self._call(name, node, called)
        elif not lists or node.op in ("EmptyTensorList", "TensorListReserve", "Placeholder"):
            return
        elif node.op == "TensorListFromTensor":
            shape = graph.find_type(node.inputs[0]).shape
            self._raise(name, Ref(node.name), _Item(shape[1:]) if shape else _ANY)
        elif node.op in LIST_PUTS:
            self._raise(name, Ref(node.name), self._find_item(name, node.inputs[0]))
            self._raise(name, Ref(node.name), _put(graph, node))
        elif node.op in _SAME:
            self._raise(name, Ref(node.name), self._find_item(name, node.inputs[0]))
        else:
            for i in lists:
                self._raise(name, Ref(node.name, i), _ANY)

    def _call(self, name: str, node: Node, called: list[str]) -> None:
        loop = node.op in LOOPS
        arguments = node.inputs if loop else node.inputs[1:]
        for function in called:
            body = self.graphs[function]
            for argument, given in zip(body.inputs, arguments):
                self._raise(function, Ref(argument), self._find_item(name, given))
            if loop and len(body.outputs) != len(node.outputs):
                continue  # the condition
            for i, result in enumerate(body.outputs):
                if node.outputs[i].dtype == "variant":
                    self._raise(name, Ref(node.name, i), self._find_item(function, result))
                    if loop:
                        self._raise(name, Ref(node.name, i), self._find_item(name, node.inputs[i]))
                        for other in called:
                            self._raise(other, Ref(self.graphs[other].inputs[i]), self._find_item(function, result))


def _put(graph: Program, node: Node) -> _Item:
    ref = node.inputs[-1]
    source = graph.by_name[ref.node]
    kind = source.outputs[ref.index]
    # Items of a reserved list are zeros until they are set, so that only pushed items have a known value.
    known = node.op == "TensorListPushBack" and source.op == "Const" and kind.dtype in _INTEGERS
    return _Item(kind.shape, source.attrs["value"] if known and kind.elements <= _LARGEST_ELEMENTS else None)


def _list_called(node: Node, graphs: Mapping[str, Program]) -> list[str]:
    if node.op not in HAS_BODIES:
        return []
    found = []
    for key in ("cond", "body") if node.op in LOOPS else ("then_branch", "else_branch", "branches"):
        value = node.attrs.get(key)
        for func in value if isinstance(value, tuple) else (value,):
            if isinstance(func, Func) and func.name in graphs:
                found.append(func.name)
    return found


def _refine(graph: Program, name: str, items: Mapping[tuple[str, Ref], _Item]) -> Program:
    nodes: list[Node] = []
    moved: dict[Ref, Ref] = {}
    taken: set[str] = set()
    changed = False
    for node in graph.nodes:
        if moved and any(r in moved for r in node.inputs):
            node = replace(node, inputs=tuple(moved.get(r, r) for r in node.inputs))
        item = items.get((name, node.inputs[0])) if _reads_loosely(node) else None
        if item is not None and item.shape is not None:
            better = _output_types(node, item.shape)
            if better != node.outputs:
                node = replace(node, outputs=better)
                changed = True
            if item.value is not None and Ref(node.name, 1) in graph.consumers:
                taken = taken or set(graph.by_name)
                nodes.append(_constant(f"{node.name}/item", item.value, node, taken))
                moved[Ref(node.name, 1)] = Ref(nodes[-1].name)
                changed = True
        nodes.append(node)
    if not changed:
        return graph
    return graph.replace_nodes(tuple(nodes), outputs=tuple(moved.get(r, r) for r in graph.outputs))


def _constant(name: str, value: Tensor, read: Node, taken: set[str]) -> Node:
    while name in taken:
        name += "_"
    taken.add(name)
    return make_const(name, value, scope=read.scope)


def _output_types(node: Node, item: Dims) -> tuple[TensorType, ...]:
    at = _ITEM_OUTPUT.get(node.op, 0)
    own = node.outputs[at]
    told = item
    if node.op in LIST_STACKS:
        told = ((own.shape[0] if own.shape else None), *item)
    if own.shape is not None:
        if len(own.shape) != len(told):
            return node.outputs
        told = tuple(b if a is None else a for a, b in zip(own.shape, told))
    return (*node.outputs[:at], TensorType(own.dtype, told), *node.outputs[at + 1 :])
