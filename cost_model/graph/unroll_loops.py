"""Unrolls the loops of a program for simulation: copies the nodes of a body once for each iteration.

A list of tensors consists of references, as in TensorFlow: its items stay where the bodies have produced them, and live
until their last reader. So the time and memory of loops follow from the same simulation as those of other nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

import numpy as np

from cost_model.kernels.loop_counts import evaluate, find_function
from whale.errors import PlanError
from whale.ir.marks import NO_MARKS
from whale.ir.ops import BRANCHES, HAS_BODIES, IDENTITIES, LISTS, LOOPS
from whale.ir.program import Node, Program, Ref, make_const
from whale.ir.values import DType, TensorType

MOST_NODES = 100_000
# Rows that begin at a multiple of it are taken from a tensor without a copy (Eigen's EIGEN_MAX_ALIGN_BYTES).
ALIGNED_BYTES = 64
PARALLEL_TURNS = 10  # iterations that TensorFlow lets overlap, unless the loop says otherwise
_CONSTANT = frozenset("Const Fill".split())
_PASSED_ON = IDENTITIES | {"IdentityN"}  # ops whose result k is their operand k


@dataclass(frozen=True, slots=True, eq=False)
class _List:
    """Represents the items of a TensorList; None for items that were not set, which read as zeros."""

    items: tuple[Ref | None, ...]


_Value = Ref | _List


class _NotFollowed(Exception):
    """Raised, with the reason, if a loop or branch cannot be unrolled."""


@dataclass(slots=True)
class _Graph:
    """Represents a graph (the program, or a loop's body in one iteration) while its nodes are copied.

    Attributes:
        program: the graph's nodes.
        values: for each of its tensors, the unrolled program's tensor, or the list of its items.
        waited: node -> the nodes that replace it as a control input.
        prefix: prefix of the names of the copied nodes; "" for the program itself.
        after: control inputs of copied nodes that have no operands in this graph.
    """

    program: Program
    values: dict[Ref, _Value]
    waited: dict[str, tuple[str, ...]] = field(default_factory=dict)
    prefix: str = ""
    after: tuple[str, ...] = ()


def unroll(program: Program, strict: bool = True) -> Program:
    """Returns ``program`` with its loops unrolled; the same object if it has no functions.

    Args:
        strict: whether branches, and loops that cannot be unrolled, raise; if not, branches stay, and a program with
            such a loop is returned unchanged.

    Raises:
        PlanError: a trip count or branch is known only at run time, or there are too many nodes to simulate.
    """
    if not any(node.op in HAS_BODIES for node in program.nodes):
        return program
    try:
        return _Unroller(program, strict).run()
    except _NotFollowed:
        return program


class _Unroller:
    def __init__(self, program: Program, strict: bool) -> None:
        self.program, self.strict = program, strict
        self.nodes: list[Node] = []
        self.types: dict[Ref, TensorType] = {}
        self.known: dict[Ref, int] = {}
        self.constants: dict[str, Ref] = {}
        self.same: set[_Value] = set()

    def run(self) -> Program:
        graph = _Graph(self.program, {})
        self._write(graph)
        outputs = []
        for ref in self.program.outputs:
            value = graph.values[ref]
            assert isinstance(value, Ref), "a step hands out tensors"
            outputs.append(value)
        effects = [name for effect in self.program.effects for name in graph.waited[effect]]
        return self.program.replace_nodes(
            tuple(self.nodes), outputs=tuple(outputs), effects=tuple(dict.fromkeys(effects))
        )

    def _write(self, graph: _Graph) -> None:
        for node in graph.program.nodes:
            if Ref(node.name) in graph.values:
                continue  # an argument
            try:
                self._node(graph, node)
            except _NotFollowed as reason:
                if graph.prefix or not self.strict:
                    raise
                _refuse(node, str(reason))

    def _node(self, graph: _Graph, node: Node) -> None:
        given = [graph.values[ref] for ref in node.inputs]
        if node.op in LOOPS:
            self._loop(graph, node, given)
        elif node.op in BRANCHES and self.strict:
            raise _NotFollowed(f"the condition of {node.op} depends on data that are known only at run time")
        elif node.op in LISTS:
            graph.values[Ref(node.name)] = self._list(graph, node, given)
            graph.waited.setdefault(node.name, self._name_producers(graph.values[Ref(node.name)]))
        elif node.op in _PASSED_ON and (graph.prefix or any(isinstance(one, _List) for one in given)):
            for k, one in enumerate(given):
                graph.values[Ref(node.name, k)] = one
            graph.waited[node.name] = tuple(name for one in given for name in self._name_producers(one))
        elif node.op in ("AddN", "ZerosLike") and any(isinstance(one, _List) for one in given):
            self._on_items(graph, node, given)
        elif graph.prefix and node.op in _CONSTANT and all(one in self.same for one in given):
            self._constant(graph, node, given)
        else:
            self._keep(graph, node)

    def _keep(self, graph: _Graph, node: Node) -> None:
        """Copies a node that needs no special treatment."""
        operands = []
        for ref in node.inputs:
            value = graph.values[ref]
            if isinstance(value, _List):
                raise _NotFollowed(
                    f"{node.op} takes a list of tensors (TensorList), and can be unrolled only for tensors"
                )
            operands.append(value)
        self._add(graph, node, operands)
        for k in range(len(node.outputs)):
            graph.values[Ref(node.name, k)] = Ref(graph.prefix + node.name, k)

    def _add(self, graph: _Graph, node: Node, operands: Sequence[Ref], name: str = "") -> Ref:
        """Adds a copy of a node, with its control inputs; returns its first result."""
        made = graph.prefix + (name or node.name)
        controls = [name for control in node.controls for name in graph.waited[control]]
        if graph.prefix and not any(ref.node.startswith(graph.prefix) for ref in operands):
            controls += graph.after
        new = replace(node, name=made, inputs=tuple(operands), controls=tuple(dict.fromkeys(controls)))
        self.nodes.append(new)
        for k, t in enumerate(new.outputs):
            self.types[Ref(made, k)] = t
        graph.waited[node.name] = (made,)
        evaluate(new, self.known)
        return Ref(made)

    def _constant(self, graph: _Graph, node: Node, given: Sequence[_Value]) -> None:
        """Adds a node that has the same value in every iteration only once, as TensorFlow's constant folding does."""
        key = f"{graph.program.name}/{node.name}"
        if key not in self.constants:
            alone = replace(graph, after=(), waited={})
            operands = [one for one in given if isinstance(one, Ref)]
            self.constants[key] = self._add(alone, replace(node, controls=()), operands)
            self.same.add(self.constants[key])
        graph.values[Ref(node.name)] = self.constants[key]
        graph.waited[node.name] = (self.constants[key].node,)

    def _loop(self, graph: _Graph, node: Node, state: list[_Value]) -> None:
        condition, body = (find_function(node, key, self.program.functions) for key in ("cond", "body"))
        if condition is None or body is None:
            raise _NotFollowed(f"the program lacks the function that is the condition or the body of {node.op}")
        overlap = int(node.attrs.get("parallel_iterations", PARALLEL_TURNS)) or PARALLEL_TURNS
        before = tuple(name for control in node.controls for name in graph.waited[control]) + graph.after
        ends: list[tuple[str, ...]] = []
        while True:
            turn = len(ends)
            prefix = f"{graph.prefix}{node.name}/{turn}/"
            asked = self._inside(
                condition, state, f"{prefix}cond/", ends[turn - overlap] if turn >= overlap else before
            )
            test = asked.values[condition.outputs[0]]
            goes_on = self.known.get(test) if isinstance(test, Ref) else None
            if goes_on is None:
                raise _NotFollowed(
                    f"the number of iterations of {node.op} depends on data that are known only at run time"
                )
            assert isinstance(test, Ref)
            if not goes_on:
                break
            if len(self.nodes) > MOST_NODES:
                raise _NotFollowed(
                    f"{node.op}, with all its iterations written out, has more than {MOST_NODES} operations"
                )
            inside = self._inside(body, state, prefix, (test.node,))
            state = [inside.values[ref] for ref in body.outputs]
            ends.append(tuple(dict.fromkeys(one.node for one in state if isinstance(one, Ref))))
        for k, one in enumerate(state):
            graph.values[Ref(node.name, k)] = one
        graph.waited[node.name] = (test.node, *(ends[-1] if ends else ()))

    def _inside(self, program: Program, state: Sequence[_Value], prefix: str, after: tuple[str, ...]) -> _Graph:
        values = {Ref(name): one for name, one in zip(program.inputs, state)}
        waited = {name: self._name_producers(one) for name, one in zip(program.inputs, state)}
        graph = _Graph(program, values, waited, prefix, after)
        self._write(graph)
        return graph

    def _name_producers(self, value: _Value) -> tuple[str, ...]:
        return (value.node,) if isinstance(value, Ref) else ()

    def _on_items(self, graph: _Graph, node: Node, given: Sequence[_Value]) -> None:
        """Replaces a sum of lists, or a list of zeros, by nodes for each item."""
        lists = [one for one in given if isinstance(one, _List)]
        if len(lists) < len(given) or len({len(one.items) for one in lists}) != 1:
            raise _NotFollowed(f"{node.op} takes lists of tensors of unequal lengths")
        made: list[Ref | None] = []
        for i, items in enumerate(zip(*(one.items for one in lists))):
            found = [item for item in items if item is not None]
            if node.op == "ZerosLike" or not found:
                made.append(None)
            elif len(found) == 1:
                made.append(found[0])
            else:
                part = replace(node, outputs=(self.types[found[0]],), attrs={**node.attrs, "N": len(found)})
                made.append(self._add(graph, part, found, f"{node.name}/{i}"))
        graph.values[Ref(node.name)] = _List(tuple(made))
        graph.waited.setdefault(node.name, ())

    def _list(self, graph: _Graph, node: Node, given: Sequence[_Value]) -> _Value:
        """Returns the result of a TensorList op; of TensorListPopBack, also records the item that it returns."""
        if node.op == "EmptyTensorList":
            return _List(())
        if node.op == "TensorListReserve":
            return _List((None,) * self._number(node, given[1]))
        if node.op == "TensorListFromTensor":
            return self._cut(graph, node, given[0])
        if not isinstance(given[0], _List):
            raise _NotFollowed(f"{node.op} reads a list of tensors that this program does not create")
        items = given[0].items
        if node.op == "TensorListPushBack":
            return _List((*items, self._append_item(graph, node, given[1])))
        if node.op == "TensorListPopBack" and items:
            graph.values[Ref(node.name, 1)] = self._take_item(graph, node, items[-1], node.outputs[1])
            return _List(items[:-1])
        if node.op == "TensorListSetItem":
            at = self._index(node, given[1], items)
            return _List((*items[:at], self._append_item(graph, node, given[2]), *items[at + 1 :]))
        if node.op == "TensorListGetItem":
            return self._take_item(graph, node, items[self._index(node, given[1], items)], node.outputs[0])
        if node.op == "TensorListResize":
            length = self._number(node, given[1])
            return _List((*items, *[None] * length)[:length])
        if node.op == "TensorListLength":
            return self._add(graph, make_const(node.name, np.array(len(items), np.int32)), ())
        if node.op == "TensorListElementShape":
            return self._element_shape(graph, node, items)
        if node.op == "TensorListStack" and items:
            return self._stack(graph, node, items)
        raise _NotFollowed(f"{node.op}, an op on lists of tensors, cannot be unrolled")

    def _element_shape(self, graph: _Graph, node: Node, items: Sequence[Ref | None]) -> Ref:
        shapes = (self.types[one].shape for one in items if one is not None)
        shape = next((one for one in shapes if one is not None), None)
        if shape is None:
            raise _NotFollowed(f"{node.op} reads a list of which no item has a known shape")
        sizes = np.array([-1 if size is None else size for size in shape], node.outputs[0].dtype)
        return self._add(graph, make_const(node.name, sizes), ())

    def _number(self, node: Node, value: _Value) -> int:
        found = self.known.get(value) if isinstance(value, Ref) else None
        if found is None:
            raise _NotFollowed(
                f"the index or length that {node.op} reads depends on data that are known only at run time"
            )
        return found

    def _index(self, node: Node, value: _Value, items: Sequence[Ref | None]) -> int:
        at = self._number(node, value)
        if not 0 <= at < len(items):
            raise _NotFollowed(f"{node.op} uses index {at} in a list of {len(items)} items")
        return at

    def _append_item(self, graph: _Graph, node: Node, item: _Value) -> Ref:
        """Adds a node for an item that is put into a list; its result shares the item's memory."""
        if isinstance(item, _List):
            raise _NotFollowed(f"{node.op} puts a list into a list")
        return self._move_item(graph, node, item)

    def _move_item(self, graph: _Graph, node: Node, item: Ref) -> Ref:
        found = self._add(graph, replace(node, outputs=(self.types[item],)), (item,))
        if item in self.known:
            self.known[found] = self.known[item]
        return found

    def _take_item(self, graph: _Graph, node: Node, item: Ref | None, kind: TensorType) -> Ref:
        """Adds a node for an item that is taken from a list; zeros if the item was not set."""
        if item is None:
            return self._zeros(graph, node, kind, node.name)
        return self._move_item(graph, node, item)

    def _zeros(self, graph: _Graph, node: Node, kind: TensorType, name: str) -> Ref:
        return self._add(graph, replace(node, op="Fill", outputs=(kind,), attrs={}, marks=NO_MARKS), (), name)

    def _cut(self, graph: _Graph, node: Node, whole: _Value) -> _List:
        if not isinstance(whole, Ref) or not self.types[whole].is_static or not self.types[whole].shape:
            raise _NotFollowed(f"{node.op} makes a list from a tensor whose shape is not fully known")
        t = self.types[whole]
        assert t.shape is not None and t.shape[0] is not None
        kind = TensorType(t.dtype, t.shape[1:])
        op = "DeepCopy" if kind.bytes % ALIGNED_BYTES else "Identity"
        part = replace(node, op=op, attrs={}, outputs=(kind,), marks=NO_MARKS)
        return _List(tuple(self._add(graph, part, (whole,), f"{node.name}/{i}") for i in range(t.shape[0])))

    def _stack(self, graph: _Graph, node: Node, items: Sequence[Ref | None]) -> Ref:
        t = node.outputs[0]
        shape = next((self.types[one].shape for one in items if one is not None), None) or (t.shape or (None,))[1:]
        kind = TensorType(t.dtype, shape)
        refs = [
            self._zeros(graph, node, kind, f"{node.name}/zeros{i}") if one is None else one
            for i, one in enumerate(items)
        ]
        whole = TensorType(t.dtype, (len(items), *shape))
        attrs = {"axis": 0, "N": len(items), "T": DType(t.dtype)}
        return self._add(
            graph,
            replace(node, op="Pack", outputs=(whole,), attrs=attrs, marks=NO_MARKS),
            refs,
        )


def _refuse(node: Node, reason: str) -> NoReturn:
    branch = node.op in BRANCHES
    raise PlanError(
        f"the cost model cannot predict the time and memory of this {'branch' if branch else 'loop'}",
        op=node.name,
        given=reason,
        expected="a program without branches"
        if branch
        else "a loop that counts from a constant to a constant, with lists of known length",
        action="compute both sides and choose with tf.where"
        if branch
        else "give sequences a fixed length, and loops a fixed number of iterations; or measure the step by running it",
    )
