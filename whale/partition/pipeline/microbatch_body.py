"""The function that computes one phase of a micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from whale.ir.program import RECOMPUTED, Node, Program, Ref, const_node, topological
from whale.ir.values import DType, Shape, TensorType, numpy_dtype
from whale.partition.pipeline.identical_microbatches import TIME, Kind

_LARGEST_COPIED_BYTES = 1 << 16  # constants above are passed, instead of being in every function that reads them
_ACCUMULATES = {"sum": "AddV2", "prod": "Mul", "max": "Maximum", "min": "Minimum"}
_ACCUMULATES_FLAGS = {"sum": "LogicalOr", "prod": "LogicalAnd", "max": "LogicalOr", "min": "LogicalAnd"}


@dataclass
class Function:
    """What one phase runs: (what, of what) for each argument and result."""

    name: str
    arguments: list[tuple[str, Any]] = field(default_factory=list)
    results: list[tuple[str, Any]] = field(default_factory=list)
    types: list[TensorType] = field(default_factory=list)
    inputs: list[TensorType] = field(default_factory=list)
    behind: list[str] = field(default_factory=list)  # nodes of the main graph that it has to wait for


class Body:
    """One function in the making."""

    def __init__(self, kind: Kind, phase: str, function: Function, phase_of: Callable[[str], str | None]):
        self.kind, self.phase, self.function, self.phase_of = kind, phase, function, phase_of
        self.nodes: dict[str, Node] = {}
        self.passed: dict[tuple[str, Any], Ref] = {}
        self.inputs: list[str] = []
        self.outputs: list[Ref] = []

    def take(self, ref: Ref) -> Ref:
        """``ref`` inside: computed here, or passed in."""
        stack = [ref.node] if self._here(ref.node) else []
        while stack:
            name = stack.pop()
            if name in self.nodes:
                continue
            node = self._of(self.kind.program.by_name[name])
            self.nodes[name] = node
            stack += [r.node for r in self.kind.program.by_name[name].inputs if self._here(r.node)]
            stack += [c for c in node.controls if c in self.kind.region]
        return self._inside(ref)

    def _here(self, name: str) -> bool:
        """Whether a node is computed in this function."""
        region = self.kind.region[name]
        if region == "free":
            node = self.kind.program.by_name[name]
            return node.op == "Const" and sum(t.bytes for t in node.outputs) <= _LARGEST_COPIED_BYTES
        return region == "each" and self.phase_of(name) in (self.phase, None)

    def _of(self, node: Node) -> Node:
        if node.name in self.kind.varying:
            return self._varying(node)
        controls = []
        for c in node.controls:
            if self._here(c) and self.kind.region[c] == "each":
                controls.append(c)
            elif self.kind.region[c] == "outer" and RECOMPUTED not in node.attrs:  # that gradient comes after all
                self.function.behind.append(c)
        return replace(node, inputs=tuple(map(self._inside, node.inputs)), controls=tuple(controls))

    def _inside(self, ref: Ref) -> Ref:
        if self._here(ref.node):
            return ref
        what = "handed" if self.kind.region[ref.node] == "each" else "outer"
        return self._argument(what, ref, self.kind.program.type_of(ref))

    def _argument(self, what: str, of: Any, t: TensorType) -> Ref:
        if (what, of) not in self.passed:
            name = f"{TIME}/argument_{len(self.inputs)}"
            attrs = {"dtype": DType(t.dtype), "shape": Shape(t.shape)}
            self.nodes[name] = Node(name, "Placeholder", (), (), attrs, (t,))
            self.inputs.append(name)
            self.function.arguments.append((what, of))
            self.function.inputs.append(t)
            self.passed[what, of] = Ref(name)
        return self.passed[what, of]

    def _varying(self, node: Node) -> Node:
        """A constant that grows with the number of the micro-batch."""
        start, step = self.kind.varying[node.name]
        (t,) = node.outputs
        dtype, kind = numpy_dtype(t.dtype), {"T": DType(t.dtype)}
        number = self._argument("index", None, TensorType("int64", ()))
        names = [f"{node.name}/{x}" for x in ("number", "step", "moved", "start")]
        cast = {"SrcT": DType("int64"), "DstT": DType(t.dtype), "Truncate": False}
        self.nodes[names[0]] = Node(names[0], "Cast", (number,), (), cast, (TensorType(t.dtype, ()),))
        self.nodes[names[1]] = const_node(names[1], step.astype(dtype))
        self.nodes[names[2]] = Node(names[2], "Mul", (Ref(names[0]), Ref(names[1])), (), kind, (t,))
        self.nodes[names[3]] = const_node(names[3], start.astype(dtype))
        return Node(node.name, "AddV2", (Ref(names[2]), Ref(names[3])), (), kind, (t,), node.scope)

    def accumulated(self, join: Ref, source: Ref) -> Ref:
        """What the micro-batches before have made of ``join``, and this one's part."""
        t = self.kind.program.type_of(source)
        reduction = self.kind.program.by_name[join.node].attrs["reduction"]
        mine = self.take(source)
        before = self._argument("sum", join, TensorType(t.dtype, None))
        name = f"{join.node}/and_before"
        if t.dtype == "bool":
            self.nodes[name] = Node(name, _ACCUMULATES_FLAGS[reduction], (before, mine), (), {}, (t,))
        else:
            attrs = {"T": DType(t.dtype)}
            self.nodes[name] = Node(name, _ACCUMULATES[reduction], (before, mine), (), attrs, (t,))
        return Ref(name)

    def result(self, what: str, of: Ref, value: Ref) -> None:
        """The function returns ``value``: ``what`` and ``of`` say what it is to the caller."""
        self.function.results.append((what, of))
        self.function.types.append(self.nodes[value.node].outputs[value.index])
        self.outputs.append(value)

    def finish(self, effects: Iterable[str]) -> Program:
        """The function's body, with those nodes that run for what they do, and all that they read."""
        effects = tuple(effects)
        for name in effects:
            if name not in self.nodes:
                node = self.kind.program.by_name[name]
                self.nodes[name] = self._of(node)
                for ref in (*node.inputs, *map(Ref, self.nodes[name].controls)):
                    self.take(ref)
        nodes = topological(self.nodes)
        self.function.behind = list(dict.fromkeys(self.function.behind))
        return Program(self.function.name, nodes, tuple(self.inputs), outputs=tuple(self.outputs), effects=effects)
