"""Folds shape arithmetic: integer and boolean constants, in NumPy, without TensorFlow.

Never folded: stateful ops (a random op whose operands are constant still draws), floating-point values, and anything
of more than 4096 elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from whale.ir.ops import ASKS_SHAPE, VIEWS
from whale.ir.program import Node, Program, Ref, make_const, prune
from whale.ir.values import DType, TensorType, find_numpy_dtype
from whale.passes.normalize.folding.arithmetic import EVALUATORS
from whale.passes.normalize.folding.lists import refine_lists
from whale.passes.normalize.folding.loops import refine_loops
from whale.passes.normalize.folding.shapes import STATIC_SHAPE, STATIC_SHAPES, refine

LARGEST_ELEMENTS = 4096
_FOLDED = frozenset(
    {"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"}
)  # fmt: skip
# The value of these is the size of something unknown in places; each place is followed on its own.
_PARTIAL = VIEWS | {"Cast", "StridedSlice", "Slice", "Pack", "ConcatV2", "GatherV2"}
_UNKNOWN = np.iinfo(np.int64).min


def fold(program: Program) -> Program:
    """Folds shape chains of ``program`` to constants, splits IdentityN into one Identity per output, and removes dead
    nodes.

    Output types that a folded operand makes known (Reshape, Fill, Slice, ...) are refined. Bodies of functions are
    folded too.
    """
    folded = refine_loops(_fold_until_settled(program), _fold_until_settled)
    return prune(replace(folded, functions={name: prune(body) for name, body in folded.functions.items()}))


def _fold_until_settled(program: Program) -> Program:
    """Folds ``program`` until the contents of its lists give no new types."""
    folded = _fold_all(program)
    while (better := refine_lists(folded)) is not folded:
        folded = _fold_all(better)
    return folded


def _fold_all(program: Program) -> Program:
    functions = {name: _fold_graph(body) for name, body in program.functions.items()}
    return replace(_fold_graph(program), functions=functions)


def _fold_graph(program: Program) -> Program:
    folder = _Folder(program)
    with np.errstate(over="ignore"):  # integers wrap, as in the kernels
        for node in program.nodes:
            folder.visit(node)
    moved = folder.moved
    if not folder.changed:
        return program
    # Renamed operands may be read by a control edge: the node that went keeps its name, so controls stay valid.
    return replace(
        program,
        nodes=tuple(folder.nodes),
        outputs=tuple(moved.get(r, r) for r in program.outputs),
    )


class _Folder:
    """One walk over a graph in topological order."""

    def __init__(self, program: Program) -> None:
        self.nodes: list[Node] = []
        self.taken: set[str] | None = None
        self.program = program
        self.moved: dict[Ref, Ref] = {}
        self.values: dict[Ref, np.ndarray | _Lazy] = {}
        self.partial: dict[Ref, np.ndarray] = {}
        self.types: dict[Ref, TensorType] = {}
        self.loose: set[Ref] = set()
        self.changed = False
        for node in program.nodes:
            for i, kind in enumerate(node.outputs):
                if not kind.is_static:
                    self.loose.add(Ref(node.name, i))

    def visit(self, node: Node) -> None:
        """Adds ``node`` to the result, folded if possible."""
        moved = self.moved
        if moved and node.inputs:
            inputs = tuple([moved.get(r, r) for r in node.inputs])
            if inputs != node.inputs:
                node = replace(node, inputs=inputs)
                self.changed = True
        op = node.op
        if op == "Const":
            self._remember(node)
            self.nodes.append(node)
            return
        if op == "IdentityN":
            self._split(node)
            return
        if node.stateful:
            self.nodes.append(node)
            return
        if self.loose and (op in STATIC_SHAPE or op in STATIC_SHAPES) and any(not t.is_static for t in node.outputs):
            better = refine(node, self._type_of, self._find_known)
            if better != node.outputs:
                node = replace(node, outputs=better)
                for i, kind in enumerate(better):
                    self.types[Ref(node.name, i)] = kind
                self.changed = True
        if op in ASKS_SHAPE:
            self._settle(node, self._shape_values(node))
        elif op in EVALUATORS and node.outputs and node.outputs[0].dtype in _FOLDED:
            self._settle(node, self._evaluate(node))
        else:
            self.nodes.append(node)

    def _remember(self, node: Node) -> None:
        kind = node.outputs[0]
        if kind.dtype in _FOLDED and kind.elements <= LARGEST_ELEMENTS:
            self.values[Ref(node.name)] = _Lazy(node)  # decoded only when an op asks for it

    def _value(self, ref: Ref) -> np.ndarray | None:
        value = self.values.get(ref)
        if isinstance(value, _Lazy):
            value = self.values[ref] = value.node.attrs["value"].numpy()
        return value

    def _find_known(self, ref: Ref) -> np.ndarray | None:
        """Returns the value of ``ref`` with _UNKNOWN for elements that are not known; None if no element is known."""
        value = self._value(ref)
        return value if value is not None else self.partial.get(ref)

    def _type_of(self, ref: Ref) -> TensorType:
        found = self.types.get(ref)
        return found if found is not None else self.program.find_type(ref)

    def _split(self, node: Node) -> None:
        """Replaces IdentityN by one Identity per tensor, so that no tensor waits for the others."""
        names = []
        for i, (source, kind) in enumerate(zip(node.inputs, node.outputs)):
            name = self._fresh(f"{node.name}/{i}")
            names.append(name)
            attrs = {"T": DType(kind.dtype)}
            self.moved[Ref(node.name, i)] = Ref(name)
            self.types[Ref(name)] = kind
            part = Node(name, "Identity", (source,), node.controls, attrs, (kind,), node.scope)
            if kind.dtype in _FOLDED:
                self._settle(part, self._evaluate(part))
            else:
                self.nodes.append(part)
        # Whatever waits for the whole op still can.
        self.nodes.append(Node(node.name, "NoOp", (), tuple(names), scope=node.scope))
        self.changed = True

    def _shape_values(self, node: Node) -> list[np.ndarray | None]:
        results: list[np.ndarray | None] = []
        for i, source in enumerate(node.inputs):
            kind = self._type_of(source)
            out = node.outputs[i]
            if kind.shape is None:
                results.append(None)
            elif node.op == "Rank":
                results.append(np.asarray(len(kind.shape), find_numpy_dtype(out.dtype)))
            elif None not in kind.shape:
                value = kind.elements if node.op == "Size" else kind.shape
                results.append(np.asarray(value, find_numpy_dtype(out.dtype)))
            else:
                results.append(None)
                if node.op != "Size":
                    dims = [_UNKNOWN if d is None else d for d in kind.shape]
                    self.partial[Ref(node.name, i)] = np.array(dims, np.int64)
        return results

    def _evaluate(self, node: Node) -> list[np.ndarray | None]:
        values = [self._value(r) for r in node.inputs]
        whole = _complete(values)
        if whole is not None and all(t.elements <= LARGEST_ELEMENTS for t in node.outputs):
            results = [_as_type(v, t) for v, t in zip(_run(node, whole), node.outputs)]
            return [v if v is not None and v.size <= LARGEST_ELEMENTS else None for v in results]
        if node.op in _PARTIAL and self.partial:
            known = _complete([self._find_known(r) for r in node.inputs])
            if known is None:
                return [None] * len(node.outputs)
            # Operands that steer the op (bounds, axes, shapes) must be known themselves.
            steering = _list_steering_operands(node.op, len(values))
            if any(values[i] is None for i in steering):
                return [None] * len(node.outputs)
            wide = replace(node, outputs=tuple(TensorType("int64", t.shape) for t in node.outputs))
            operands = [k.astype(np.int64) if i not in steering else k for i, k in enumerate(known)]
            result = _run(wide, operands)[0]
            if result is None:
                return [None]
            if (result == _UNKNOWN).any():
                self.partial[Ref(node.name)] = result
                return [None]
            return [_as_type(result, node.outputs[0])]
        return [None] * len(node.outputs)

    def _settle(self, node: Node, results: list[np.ndarray | None]) -> None:
        """Replaces the known outputs of ``node`` by constants."""
        if len(results) == 1:
            if results[0] is None:
                self.nodes.append(node)
            else:
                self._constant(node.name, results[0], node)
            return
        self.nodes.append(node)
        for i, value in enumerate(results):
            if value is not None:
                name = self._fresh(f"{node.name}/{i}")
                self._constant(name, value, node, i)
                self.moved[Ref(node.name, i)] = Ref(name)

    def _constant(self, name: str, value: np.ndarray, node: Node, i: int = 0) -> None:
        made = make_const(name, value, node.outputs[i].dtype, node.controls, node.scope)
        self.nodes.append(made)
        self.values[Ref(name)] = value
        self.types[Ref(name)] = made.outputs[0]
        self.changed = True

    def _fresh(self, name: str) -> str:
        if self.taken is None:
            self.taken = {n.name for n in self.program.nodes}
        unique, n = name, 1
        while unique in self.taken:
            unique, n = f"{name}_{n}", n + 1
        self.taken.add(unique)
        return unique


class _Lazy:
    """A constant whose value is computed when first needed."""

    __slots__ = ("node",)

    def __init__(self, node: Node) -> None:
        self.node = node


def _complete(values: Sequence[np.ndarray | None]) -> list[np.ndarray] | None:
    """Returns ``values`` if none is missing, else None."""
    found = [v for v in values if v is not None]
    return found if len(found) == len(values) else None


def _run(node: Node, values: Sequence[np.ndarray]) -> tuple[Any, ...]:
    """Evaluates ``node``; yields nothing if its operands do not fit: TensorFlow reports that if the node ever runs."""
    try:
        return EVALUATORS[node.op](node, values)
    except (IndexError, ValueError):
        return (None,) * len(node.outputs)


def _list_steering_operands(op: str, count: int) -> list[int]:
    """Returns the numbers of the operands that say how an op rearranges sizes (indices, axes); the others are the
    sizes.
    """
    data = {"Pack": count, "ConcatV2": count - 1}.get(op, 1)
    return list(range(data, count))


def _as_type(value: Any, kind: TensorType) -> np.ndarray | None:
    return None if value is None else np.asarray(value, find_numpy_dtype(kind.dtype))
