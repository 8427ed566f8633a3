"""A rank's program with its micro-batches rolled up: one function per phase, called once for each micro-batch.

What is computed before and after the micro-batches stays in the main graph; sums over them are carried from call to
call, rows that are wanted whole are joined after the last one. The calls are in one order, behind control edges.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from whale.errors import PlanError
from whale.ir.layout import Split, identity_value
from whale.ir.plan import Plan
from whale.ir.program import Node, Program, Ref, function_refs, topological
from whale.ir.values import DType, Func, Shape, Tensor, TensorType, numpy_dtype
from whale.lowering.local import localise

TIME = "whale/micro"
NO_INLINE = "_noinline"  # attribute of a call whose function stays one, instead of being copied into the caller
_LARGEST_COPIED_BYTES = 1 << 16  # constants above are passed, instead of being in every function that reads them
_ACCUMULATES = {"sum": "AddV2", "prod": "Mul", "max": "Maximum", "min": "Minimum"}
_ACCUMULATES_FLAGS = {"sum": "LogicalOr", "prod": "LogicalAnd", "max": "LogicalOr", "min": "LogicalAnd"}


@dataclass(frozen=True, slots=True)
class Call:
    """One phase of one micro-batch."""

    phase: str
    micro_batch: int


def roll(
    program: Program,
    plan: Plan,
    each: Collection[str],
    calls: Sequence[Call] = (),
    phase: Mapping[str, str] = MappingProxyType({}),
) -> Program:
    """``program`` (one rank's) with what its micro-batches compute in functions.

    Args:
      plan: over the program's micro-batches (``whale.passes.micro.time_plan``).
      each: nodes that are computed for each micro-batch.
      calls: their order; what a phase reads of another one has to be made before. Default: one phase, in order.
      phase: of each node of ``each``; "" where there is none.

    Raises:
      PlanError: the plan moves something between micro-batches that is neither a sum nor a gathering.
    """
    if not each:
        return program
    order = tuple(calls) or tuple(Call("", i) for i in range(plan.size))
    return _Roller(program, plan, frozenset(each), order, phase).run()


@dataclass
class _Kind:
    """Micro-batches that run the same functions.

    Attributes:
      members: their numbers.
      program: what the first of them runs.
      varying: constants that differ between them: their value at number 0, and what each number adds.
    """

    members: range
    program: Program
    varying: Mapping[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    joins: dict[str, Ref] = field(default_factory=dict)  # sums and gatherings -> what a micro-batch has of it
    region: dict[str, str] = field(default_factory=dict)  # node -> outer, each, join


@dataclass
class _Function:
    """What one phase runs: (what, of what) for each argument and result."""

    name: str
    arguments: list[tuple[str, Any]] = field(default_factory=list)
    results: list[tuple[str, Any]] = field(default_factory=list)
    types: list[TensorType] = field(default_factory=list)
    inputs: list[TensorType] = field(default_factory=list)
    behind: list[str] = field(default_factory=list)  # nodes of the main graph that it has to wait for


class _Roller:
    def __init__(self, program: Program, plan: Plan, each: frozenset[str], order: tuple[Call, ...], phase: Mapping):
        self.program, self.plan, self.each, self.order, self.phases = program, plan, each, order, phase
        self.locals: dict[int, Program] = {}
        self.functions: dict[str, Program] = {}
        self.nodes: dict[str, Node] = {}
        self.moved: dict[Ref, Ref] = {}  # tensors of the program -> results of calls

    def run(self) -> Program:
        kinds = [kind for run in self._runs() for kind in self._kinds(run)]
        for number, kind in enumerate(kinds):
            self._look(kind, number)
        first = kinds[0]
        wanted = self._wanted(first)
        made: dict[tuple[str, int], tuple[_Kind, _Function]] = {}
        for number, kind in enumerate(kinds):
            for phase in dict.fromkeys(call.phase for call in self.order):
                function = self._function(kind, number, phase, wanted)
                made.update(((phase, i), (kind, function)) for i in kind.members)
        last = self._call(made, wanted)
        return self._main(first, last)

    # -- which micro-batches are alike

    def _runs(self) -> list[range]:
        """Numbers in a row whose rows are as many."""
        cuts = {
            p.sizes for s in self.plan.strategies[""].values() for p in s.inputs + s.outputs if isinstance(p, Split)
        }
        starts = [i for i in range(self.plan.size) if i == 0 or any(c[i] != c[i - 1] for c in cuts)]
        return [range(a, b) for a, b in zip(starts, [*starts[1:], self.plan.size])]

    def _local(self, number: int) -> Program:
        if number not in self.locals:
            self.locals[number] = localise(self.program, self.plan, number, "", None, TIME)
        return self.locals[number]

    def _kinds(self, run: range) -> list[_Kind]:
        """Programs of numbers in a row; they differ in constants that grow by the number, or they are told apart."""
        first = self._local(run[0])
        if len(run) == 1:
            return [_Kind(run, first)]
        second = _differences(first, self._local(run[1]))
        last = _differences(first, self._local(run[-1]))
        if second is None:
            return [_Kind(run[:1], first), *self._kinds(run[1:])]
        varying: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for name, value in second.items():
            start = _value(first.by_name[name]).astype(np.int64)
            step = value.astype(np.int64) - start
            varying[name] = start - run[0] * step, step
        if last is None or last.keys() != second.keys() or any(
            not np.array_equal(_at(varying[name], run[-1], value.dtype), value) for name, value in last.items()
        ):  # fmt: skip
            return [_Kind(range(i, i + 1), self._local(i)) for i in run]
        return [_Kind(run, first, varying)]

    def _look(self, kind: _Kind, number: int) -> None:
        """Finds what is computed for each micro-batch, and what is made of all of them."""
        kind.program = _with_own_bodies(kind.program, number)
        self.functions.update(kind.program.functions)
        behind: set[str] = set()  # what lowering made of the sums and gatherings
        for node in kind.program.nodes:
            known = self.program.by_name.get(node.name)
            if node.name in self.each:
                kind.region[node.name] = "each"
            elif known is not None and node.op != "Const":
                kind.region[node.name] = "outer"
            elif node.op.startswith("Whale") and node.op != "WhaleCommunicator":
                if node.op not in ("WhaleAllReduce", "WhaleAllGather"):
                    raise PlanError(
                        "micro-batches cannot exchange rows",
                        op=node.name,
                        given=node.op,
                        expected="sums and gatherings",
                        action="report the program; `WHALE_DUMP=dir` writes it",
                    )
                kind.region[node.name] = "join"
                kind.joins[node.name] = node.inputs[1]
            elif known is not None or not node.inputs:
                kind.region[node.name] = "free"
            elif any(r.node in behind for r in node.inputs):
                kind.region[node.name] = "outer"
            else:
                kind.region[node.name] = "each"
            if kind.region[node.name] == "join" or (known is None and kind.region[node.name] == "outer"):
                behind.add(node.name)

    # -- functions

    def _phase(self, kind: _Kind, name: str) -> str | None:
        """The phase that computes a node of each micro-batch; None: whichever reads it."""
        if name in self.each:
            return self.phases.get(name, "")
        node = kind.program.by_name[name]
        for ref in node.inputs:
            if kind.region[ref.node] == "each" and (found := self._phase(kind, ref.node)) is not None:
                return found
        return None

    def _wanted(self, kind: _Kind) -> list[Ref]:
        """What the main graph reads of the micro-batches: sums, gatherings, values that are the same in each."""
        found: dict[Ref, None] = {}
        for node in kind.program.nodes:
            if kind.region[node.name] == "outer":
                found.update((r, None) for r in node.inputs if kind.region[r.node] in ("each", "join"))
        found.update((r, None) for r in kind.program.outputs if kind.region[r.node] in ("each", "join"))
        return list(found)

    def _handed_on(self, kind: _Kind, phase: str) -> list[Ref]:
        """What other phases read of ``phase``."""
        found: dict[Ref, None] = {}
        for node in kind.program.nodes:
            reader = self._phase(kind, node.name) if kind.region[node.name] == "each" else None
            if reader is None or reader == phase:
                continue
            for ref in node.inputs:
                if kind.region[ref.node] == "each" and self._phase(kind, ref.node) == phase:
                    found[ref] = None
        return list(found)

    def _function(self, kind: _Kind, number: int, phase: str, wanted: Sequence[Ref]) -> _Function:
        program = kind.program
        body = _Body(self, kind, phase, _Function(f"micro_batch_{phase or 'step'}_{number}"))
        for ref in wanted:
            source = kind.joins.get(ref.node, ref)
            if (self._phase(kind, source.node) or next(iter(self.order)).phase) != phase:
                continue
            if ref.node not in kind.joins:
                body.result("value", ref, body.take(ref))
            elif program.by_name[ref.node].op == "WhaleAllGather":
                body.result("piece", ref, body.take(source))
            else:
                body.result("sum", ref, body.accumulated(ref, source))
        for ref in self._handed_on(kind, phase):
            body.result("handed", ref, body.take(ref))
        effects = [n for n in program.effects if kind.region[n] == "each" and self._phase(kind, n) in (phase, None)]
        self.functions[body.function.name] = body.finish(effects)
        return body.function

    # -- calls

    def _call(self, made: Mapping[tuple[str, int], tuple[_Kind, _Function]], wanted: Sequence[Ref]) -> str:
        """The calls in their order; name of the last one."""
        sums: dict[Ref, Ref] = {}
        pieces: dict[Ref, dict[int, Ref]] = {}
        handed: dict[tuple[int, Ref], Ref] = {}
        previous = ""
        for call in self.order:
            kind, function = made[call.phase, call.micro_batch]
            name = f"{TIME}/{call.phase or 'step'}_{call.micro_batch}"
            operands: list[Ref] = []
            for what, of in function.arguments:
                if what == "index":
                    operands.append(self._const(f"{TIME}/number_{call.micro_batch}", np.array(call.micro_batch)))
                elif what == "sum":
                    operands.append(sums[of] if of in sums else self._start(kind, of))
                elif what == "handed":
                    operands.append(handed[call.micro_batch, of])
                else:
                    operands.append(of)
            controls = [previous] if previous else []
            attrs = {
                "Tin": tuple(DType(t.dtype) for t in function.inputs),
                "Tout": tuple(DType(t.dtype) for t in function.types),
                "f": Func(function.name),
                "config": "",
                "config_proto": b"",
                "executor_type": "",
                NO_INLINE: True,
            }
            self.nodes[name] = Node(
                name, "StatefulPartitionedCall", tuple(operands), tuple(dict.fromkeys(controls + function.behind)),
                attrs, tuple(function.types), "", True,
            )  # fmt: skip
            for i, (what, of) in enumerate(function.results):
                result = Ref(name, i)
                if what == "sum":
                    sums[of] = self.moved[of] = result
                elif what == "piece":
                    pieces.setdefault(of, {})[call.micro_batch] = result
                elif what == "handed":
                    handed[call.micro_batch, of] = result
                else:
                    self.moved[of] = result
            previous = name
        for ref, found in pieces.items():
            self._join(made[self.order[0].phase, 0][0], ref, [found[i] for i in sorted(found)])
        return previous

    def _start(self, kind: _Kind, ref: Ref) -> Ref:
        """What the first call adds to: a scalar that changes nothing."""
        node = kind.program.by_name[ref.node]
        dtype = node.outputs[0].dtype
        value = np.array(identity_value(node.attrs["reduction"], dtype), numpy_dtype(dtype))
        return self._const(f"{ref.node}/start", value)

    def _join(self, kind: _Kind, ref: Ref, pieces: Sequence[Ref]) -> None:
        """Rows of all micro-batches."""
        node = kind.program.by_name[ref.node]
        t = node.outputs[0]
        axis = self._const(f"{ref.node}/axis", np.array(node.attrs["axis"], np.int32))
        attrs = {"T": DType(t.dtype), "Tidx": DType("int32"), "N": len(pieces)}
        if len(pieces) == 1:
            self.moved[ref] = pieces[0]
            return
        self.nodes[ref.node] = Node(ref.node, "ConcatV2", (*pieces, axis), (), attrs, (t,))

    def _const(self, name: str, value: np.ndarray) -> Ref:
        self.nodes[name] = const_node(name, value)
        return Ref(name)

    # -- the main graph

    def _main(self, kind: _Kind, last: str) -> Program:
        program = kind.program
        ends = {call.phase: f"{TIME}/{call.phase or 'step'}_{call.micro_batch}" for call in self.order}

        def of_ref(ref: Ref) -> Ref:
            return self.moved.get(ref, ref)

        def of_controls(node: Node) -> tuple[str, ...]:
            found = dict[str, None]()
            for c in node.controls:
                if kind.region[c] == "each":
                    found[ends[self._phase(kind, c) or self.order[-1].phase]] = None
                elif kind.region[c] != "join":
                    found[c] = None
            return tuple(found)

        free = [n for n in program.nodes if kind.region[n.name] == "free"]
        for node in program.nodes:
            if kind.region[node.name] == "outer":
                self.nodes[node.name] = replace(
                    node, inputs=tuple(map(of_ref, node.inputs)), controls=of_controls(node)
                )
        outputs = tuple(map(of_ref, program.outputs))
        read = {r.node for n in self.nodes.values() for r in n.inputs} | {r.node for r in outputs}
        read |= {c for n in self.nodes.values() for c in n.controls}
        self.nodes.update((n.name, n) for n in free if n.name in read or n.name in program.effects)
        effects = [n for n in program.effects if kind.region[n] in ("outer", "free")]
        functions = self._called()
        return replace(
            program, nodes=topological(self.nodes), outputs=outputs, effects=(*effects, last), functions=functions
        )

    def _called(self) -> dict[str, Program]:
        """The functions that are called, or that other nodes carry."""
        found: dict[str, Program] = {}
        stack = [f.name for n in self.nodes.values() if _may_carry(n) for _, f in function_refs(n)]
        while stack:
            name = stack.pop()
            if name not in found and name in self.functions:
                found[name] = self.functions[name]
                stack += [f.name for n in found[name].nodes if _may_carry(n) for _, f in function_refs(n)]
        return found


class _Body:
    """One function in the making."""

    def __init__(self, roller: _Roller, kind: _Kind, phase: str, function: _Function):
        self.roller, self.kind, self.phase, self.function = roller, kind, phase, function
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
        return region == "each" and self.roller._phase(self.kind, name) in (self.phase, None)

    def _of(self, node: Node) -> Node:
        if node.name in self.kind.varying:
            return self._varying(node)
        controls = []
        for c in node.controls:
            if self._here(c) and self.kind.region[c] == "each":
                controls.append(c)
            elif self.kind.region[c] == "outer":
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
        self.function.results.append((what, of))
        self.function.types.append(self.nodes[value.node].outputs[value.index])
        self.outputs.append(value)

    def finish(self, effects: Iterable[str]) -> Program:
        effects = tuple(effects)
        for name in effects:
            if name not in self.nodes:
                node = self.kind.program.by_name[name]
                self.nodes[name] = self._of(node)
                for ref in node.inputs:
                    self.take(ref)
        nodes = topological(self.nodes)
        self.function.behind = list(dict.fromkeys(self.function.behind))
        return Program(self.function.name, nodes, tuple(self.inputs), outputs=tuple(self.outputs), effects=effects)


def const_node(name: str, value: np.ndarray) -> Node:
    tensor = Tensor.of(np.asarray(value))
    attrs = {"dtype": DType(tensor.dtype), "value": tensor}
    return Node(name, "Const", (), (), attrs, (TensorType(tensor.dtype, tensor.shape),))


def _at(varying: tuple[np.ndarray, np.ndarray], number: int, dtype: Any) -> np.ndarray:
    return (varying[0] + number * varying[1]).astype(dtype)


def _value(node: Node) -> np.ndarray:
    value: np.ndarray = node.attrs["value"].numpy()
    return value


def _differences(a: Program, b: Program) -> dict[str, np.ndarray] | None:
    """Integer constants of ``b`` that have another value in ``a``; None: the programs differ in more than that."""
    if len(a.nodes) != len(b.nodes) or a.effects != b.effects or a.functions.keys() != b.functions.keys():
        return None
    found: dict[str, np.ndarray] = {}
    for x, y in zip(a.nodes, b.nodes):
        if (x.name, x.op, x.inputs, x.controls, x.outputs) != (y.name, y.op, y.inputs, y.controls, y.outputs):
            return None
        if _same_attributes(x, y):
            continue
        if x.op != "Const" or not x.outputs[0].dtype.startswith(("int", "uint")):
            return None
        found[x.name] = _value(y)
    for name, body in a.functions.items():
        if body is not b.functions[name] and _differences(body, b.functions[name]) != {}:
            return None
    return found


def _same_attributes(x: Node, y: Node) -> bool:
    if x is y or x.attrs is y.attrs:
        return True
    # A kernel's own stream goes on from call to call: another seed for another micro-batch is not needed.
    mine, other = ({k: v for k, v in n.attrs.items() if k != "seed2"} for n in (x, y))
    return mine == other


def _may_carry(node: Node) -> bool:
    return any(
        isinstance(v, Func) or (isinstance(v, tuple) and v and isinstance(v[0], Func)) for v in node.attrs.values()
    )


def _with_own_bodies(program: Program, number: int) -> Program:
    """Loops and branches of one kind of micro-batches have bodies of their own."""
    if number == 0 or not program.functions:
        return program
    names = {name: f"{name}/micro_batch_{number}" for name in program.functions}

    def of_value(value: Any) -> Any:
        if isinstance(value, Func):
            return replace(value, name=names.get(value.name, value.name))
        return tuple(map(of_value, value)) if isinstance(value, tuple) else value

    def of_node(node: Node) -> Node:
        if not _may_carry(node):
            return node
        return replace(node, attrs={key: of_value(value) for key, value in node.attrs.items()})

    functions = {
        names[name]: replace(body, name=names[name], nodes=tuple(map(of_node, body.nodes)))
        for name, body in program.functions.items()
    }
    return replace(program, nodes=tuple(map(of_node, program.nodes)), functions=functions)
