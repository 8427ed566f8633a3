"""Turns the micro-batches of a rank's program into function calls: one function per phase, called per micro-batch.

Nodes computed before and after the micro-batches stay in the main graph. Sums over micro-batches are passed from call
to call; rows of all micro-batches are concatenated after the last call. Control edges keep the calls in order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from whale.errors import REPORT_FAULT, PlanError
from whale.ir.layout import find_identity
from whale.ir.ops import ALL_REDUCES, EXCHANGES, HOROVOD_ALL_REDUCE
from whale.ir.plan import Plan
from whale.ir.program import Node, Program, Ref, iterate_function_refs, make_const, sort_nodes
from whale.ir.values import DType, Func, Shape, TensorType, find_numpy_dtype
from whale.partition.pipeline.identical_microbatches import TIME, MicrobatchKind, find_kinds, give_own_bodies, may_carry

_LARGEST_COPIED_BYTES = 1 << 16  # larger constants are arguments, instead of being copied into each function
_ACCUMULATES = {"sum": "AddV2", "prod": "Mul", "max": "Maximum", "min": "Minimum"}
_ACCUMULATES_FLAGS = {"sum": "LogicalOr", "prod": "LogicalAnd", "max": "LogicalOr", "min": "LogicalAnd"}


@dataclass
class Function:
    """Holds the signature of the function of one phase, while ``Body`` builds it.

    An argument or result is a pair (kind, source), where the source is the tensor of the rank's program that it stands
    for.

    Attributes:
      name: name of the function.
      arguments: (kind, source) of each argument. Kinds: "index", the micro-batch's number (source None); "sum", what
        earlier micro-batches have accumulated; "handed", from another phase of the same micro-batch; "outer", from the
        main graph.
      results: (kind, source) of each result. Kinds: "value", equal in all micro-batches; "piece", rows to concatenate;
        "sum", what has been accumulated so far; "handed", for another phase of the same micro-batch.
      types: the types of the results.
      inputs: the types of the arguments.
      behind: nodes of the main graph for which every call has to wait (control edges).
    """

    name: str
    arguments: list[tuple[str, Any]] = field(default_factory=list)
    results: list[tuple[str, Any]] = field(default_factory=list)
    types: list[TensorType] = field(default_factory=list)
    inputs: list[TensorType] = field(default_factory=list)
    behind: list[str] = field(default_factory=list)  # nodes of the main graph that it has to wait for


class Body:
    """Builds the body of the function of one phase, for one kind of micro-batches.

    ``take`` adds the nodes that compute a tensor, ``add_result`` makes the function return one, and ``finish`` returns
    the body. Arguments are added as they turn out to be needed, and noted in ``function``.
    """

    def __init__(self, kind: MicrobatchKind, phase: str, function: Function, phase_of: Callable[[str], str | None]):
        self.kind, self.phase, self.function, self.phase_of = kind, phase, function, phase_of
        self.nodes: dict[str, Node] = {}
        self.passed: dict[tuple[str, Any], Ref] = {}
        self.inputs: list[str] = []
        self.outputs: list[Ref] = []

    def take(self, ref: Ref) -> Ref:
        """Returns the tensor ``ref`` inside the function.

        If this phase computes it, all nodes that it needs are added to the body; otherwise the function gets an
        argument for it.
        """
        stack = [ref.node] if self._is_here(ref.node) else []
        while stack:
            name = stack.pop()
            if name in self.nodes:
                continue
            node = self._place_node(self.kind.program.by_name[name])
            self.nodes[name] = node
            stack += [r.node for r in self.kind.program.by_name[name].inputs if self._is_here(r.node)]
            stack += [c for c in node.controls if c in self.kind.region]
        return self._place_ref(ref)

    def _is_here(self, name: str) -> bool:
        """Returns True if the node is computed inside this function: a node of this phase, or a small constant."""
        region = self.kind.region[name]
        if region == "free":
            node = self.kind.program.by_name[name]
            return node.op == "Const" and sum(t.bytes for t in node.outputs) <= _LARGEST_COPIED_BYTES
        return region == "each" and self.phase_of(name) in (self.phase, None)

    def _place_node(self, node: Node) -> Node:
        if node.name in self.kind.varying:
            return self._emit_varying(node)
        controls = []
        for c in node.controls:
            if self._is_here(c) and self.kind.region[c] == "each":
                controls.append(c)
            elif self.kind.region[c] == "outer" and not node.marks.recomputed:  # a recomputed node waits for a gradient
                self.function.behind.append(c)
        return replace(node, inputs=tuple(map(self._place_ref, node.inputs)), controls=tuple(controls))

    def _place_ref(self, ref: Ref) -> Ref:
        if self._is_here(ref.node):
            return ref
        what = "handed" if self.kind.region[ref.node] == "each" else "outer"
        return self._add_argument(what, ref, self.kind.program.find_type(ref))

    def _add_argument(self, what: str, of: Any, t: TensorType) -> Ref:
        if (what, of) not in self.passed:
            name = f"{TIME}/argument_{len(self.inputs)}"
            attrs = {"dtype": DType(t.dtype), "shape": Shape(t.shape)}
            self.nodes[name] = Node(name, "Placeholder", (), (), attrs, (t,))
            self.inputs.append(name)
            self.function.arguments.append((what, of))
            self.function.inputs.append(t)
            self.passed[what, of] = Ref(name)
        return self.passed[what, of]

    def _emit_varying(self, node: Node) -> Node:
        """Emits nodes that compute a constant from the micro-batch's number, for constants that grow with that
        number.
        """
        start, step = self.kind.varying[node.name]
        (t,) = node.outputs
        dtype, kind = find_numpy_dtype(t.dtype), {"T": DType(t.dtype)}
        number = self._add_argument("index", None, TensorType("int64", ()))
        names = [f"{node.name}/{x}" for x in ("number", "step", "moved", "start")]
        cast = {"SrcT": DType("int64"), "DstT": DType(t.dtype), "Truncate": False}
        self.nodes[names[0]] = Node(names[0], "Cast", (number,), (), cast, (TensorType(t.dtype, ()),))
        self.nodes[names[1]] = make_const(names[1], step.astype(dtype))
        self.nodes[names[2]] = Node(names[2], "Mul", (Ref(names[0]), Ref(names[1])), (), kind, (t,))
        self.nodes[names[3]] = make_const(names[3], start.astype(dtype))
        return Node(node.name, "AddV2", (Ref(names[2]), Ref(names[3])), (), kind, (t,), node.scope)

    def emit_accumulated(self, join: Ref, source: Ref) -> Ref:
        """Emits what has been accumulated after this micro-batch: the earlier micro-batches' value, reduced with this
        one's.

        Args:
          join: the result of the all-reduce over micro-batches; its node says which reduction it is.
          source: this micro-batch's contribution.
        """
        t = self.kind.program.find_type(source)
        reduction = self.kind.program.by_name[join.node].attrs["reduction"]
        mine = self.take(source)
        before = self._add_argument("sum", join, TensorType(t.dtype, None))
        name = f"{join.node}/and_before"
        if t.dtype == "bool":
            self.nodes[name] = Node(name, _ACCUMULATES_FLAGS[reduction], (before, mine), (), {}, (t,))
        else:
            attrs = {"T": DType(t.dtype)}
            self.nodes[name] = Node(name, _ACCUMULATES[reduction], (before, mine), (), attrs, (t,))
        return Ref(name)

    def add_result(self, what: str, of: Ref, value: Ref) -> None:
        """Makes the function return ``value``.

        Args:
          what: kind of the result (see ``Function``).
          of: the tensor of the rank's program that the result stands for; callers look results up by kind and tensor.
          value: the tensor inside the function.
        """
        self.function.results.append((what, of))
        self.function.types.append(self.nodes[value.node].outputs[value.index])
        self.outputs.append(value)

    def finish(self, effects: Iterable[str]) -> Program:
        """Returns the function's program, with the nodes ``effects``, which run for their side effects, and all their
        operands.
        """
        effects = tuple(effects)
        for name in effects:
            if name not in self.nodes:
                node = self.kind.program.by_name[name]
                self.nodes[name] = self._place_node(node)
                for ref in (*node.inputs, *map(Ref, self.nodes[name].controls)):
                    self.take(ref)
        nodes = sort_nodes(self.nodes)
        self.function.behind = list(dict.fromkeys(self.function.behind))
        return Program(self.function.name, nodes, tuple(self.inputs), outputs=tuple(self.outputs), effects=effects)


CALL = "WhaleCall"  # calls a function that must not be inlined
# Exchanges that join the parts of the micro-batches. All parts are on one rank, so Horovod is not involved.
_JOINS = (ALL_REDUCES - {HOROVOD_ALL_REDUCE}) | {"WhaleAllGather"}


@dataclass(frozen=True, slots=True)
class Call:
    """Represents one call of a phase's function, for one micro-batch.

    Attributes:
      phase: name of the phase, such as "F0"; "" without a pipeline schedule.
      micro_batch: number of the micro-batch.
    """

    phase: str
    micro_batch: int


def outline(
    program: Program,
    plan: Plan,
    each: Collection[str],
    calls: Sequence[Call] = (),
    phase: Mapping[str, str] = MappingProxyType({}),
) -> Program:
    """Moves the nodes of a rank's program that are computed for each micro-batch into functions, and emits their calls.

    Args:
      plan: the plan over the program's micro-batches (``whale.partition.pipeline.plan_microbatches.time_plan``).
      each: names of the nodes that are computed for each micro-batch.
      calls: the calls in their order, in which a phase follows the phases whose results it reads; (): one phase, called
        for the micro-batches in order.
      phase: node of ``each`` -> its phase; "" for nodes that are not listed.

    Raises:
      PlanError: the plan moves data between micro-batches other than by a sum or a gather.
    """
    if not each:
        return program
    order = tuple(calls) or tuple(Call("", i) for i in range(plan.size))
    return _Outliner(program, plan, frozenset(each), order, phase).run()


def find_phase(call: Node) -> str:
    """Returns the name of the phase that a call node runs."""
    return call.name.removeprefix(f"{TIME}/").rpartition("_")[0]


class _Outliner:
    def __init__(self, program: Program, plan: Plan, each: frozenset[str], order: tuple[Call, ...], phase: Mapping):
        self.program, self.plan, self.each, self.order, self.phases = program, plan, each, order, phase
        self.functions: dict[str, Program] = {}
        self.nodes: dict[str, Node] = {}
        self.moved: dict[Ref, Ref] = {}  # tensors of the program -> results of calls

    def run(self) -> Program:
        kinds = find_kinds(self.program, self.plan)
        for number, kind in enumerate(kinds):
            self._look(kind, number)
        first = kinds[0]
        wanted = self._list_wanted(first)
        made: dict[tuple[str, int], tuple[MicrobatchKind, Function]] = {}
        for number, kind in enumerate(kinds):
            for phase in dict.fromkeys(call.phase for call in self.order):
                function = self._make_function(kind, number, phase, wanted)
                made.update(((phase, i), (kind, function)) for i in kind.members)
        last = self._call(made, wanted)
        return self._main(first, last)

    def _look(self, kind: MicrobatchKind, number: int) -> None:
        """Assigns each node of one kind of micro-batch to a region, and finds the values reduced over all
        micro-batches.

        Regions are "each" (in the functions), "outer" (in the main graph), "join" (reductions over micro-batches) and
        "free" (constants, wherever they are read).
        """
        kind.program = give_own_bodies(kind.program, number)
        self.functions.update(kind.program.functions)
        behind: set[str] = set()  # reductions over micro-batches, and nodes that lowering added after them
        for node in kind.program.nodes:
            known = self.program.by_name.get(node.name)
            if node.name in self.each:
                kind.region[node.name] = "each"
            elif known is not None and node.op != "Const":
                kind.region[node.name] = "outer"
            elif node.op in EXCHANGES:
                if node.op not in _JOINS:
                    raise PlanError(
                        "results of micro-batches would have to be joined in a way that is not supported",
                        op=node.name,
                        given=node.op,
                        expected="a sum over the micro-batches, or a concatenation of their rows",
                        action=f"set pipeline.micro_batches=1; {REPORT_FAULT}",
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

    def _find_phase(self, kind: MicrobatchKind, name: str) -> str | None:
        """Returns the phase that computes a node of each micro-batch; None if any phase that reads it may compute
        it.
        """
        if name in self.each:
            return self.phases.get(name, "")
        node = kind.program.by_name[name]
        for ref in node.inputs:
            if kind.region[ref.node] == "each" and (found := self._find_phase(kind, ref.node)) is not None:
                return found
        return None

    def _list_wanted(self, kind: MicrobatchKind) -> list[Ref]:
        """Lists the tensors of micro-batches that the main graph reads: sums, concatenations, values equal in all of
        them.
        """
        found: dict[Ref, None] = {}
        for node in kind.program.nodes:
            if kind.region[node.name] == "outer":
                found.update((r, None) for r in node.inputs if kind.region[r.node] in ("each", "join"))
        found.update((r, None) for r in kind.program.outputs if kind.region[r.node] in ("each", "join"))
        return list(found)

    def _list_handed_on(self, kind: MicrobatchKind, phase: str) -> list[Ref]:
        """Lists the results of ``phase`` that other phases of the same micro-batch read."""
        found: dict[Ref, None] = {}
        for node in kind.program.nodes:
            reader = self._find_phase(kind, node.name) if kind.region[node.name] == "each" else None
            if reader is None or reader == phase:
                continue
            for ref in node.inputs:
                if kind.region[ref.node] == "each" and self._find_phase(kind, ref.node) == phase:
                    found[ref] = None
        return list(found)

    def _make_function(self, kind: MicrobatchKind, number: int, phase: str, wanted: Sequence[Ref]) -> Function:
        program = kind.program
        function = Function(f"micro_batch_{phase or 'step'}_{number}")
        body = Body(kind, phase, function, lambda name: self._find_phase(kind, name))
        for ref in wanted:
            source = kind.joins.get(ref.node, ref)
            if (self._find_phase(kind, source.node) or next(iter(self.order)).phase) != phase:
                continue
            if ref.node not in kind.joins:
                body.add_result("value", ref, body.take(ref))
            elif program.by_name[ref.node].op == "WhaleAllGather":
                body.add_result("piece", ref, body.take(source))
            else:
                body.add_result("sum", ref, body.emit_accumulated(ref, source))
        for ref in self._list_handed_on(kind, phase):
            body.add_result("handed", ref, body.take(ref))
        effects = [
            n for n in program.effects if kind.region[n] == "each" and self._find_phase(kind, n) in (phase, None)
        ]
        self.functions[body.function.name] = body.finish(effects)
        return body.function

    # -- calls

    def _call(self, made: Mapping[tuple[str, int], tuple[MicrobatchKind, Function]], wanted: Sequence[Ref]) -> str:
        """Emits the calls in their order, and returns the name of the last one.

        Args:
          made: (phase, micro-batch) -> the kind of the micro-batch, and the function to call.
          wanted: the tensors that the main graph reads.
        """
        sums: dict[Ref, Ref] = {}
        pieces: dict[Ref, dict[int, Ref]] = {}
        handed: dict[tuple[int, Ref], Ref] = {}
        attrs_of: dict[str, dict[str, Any]] = {}
        previous = ""
        for call in self.order:
            kind, function = made[call.phase, call.micro_batch]
            name = f"{TIME}/{call.phase or 'step'}_{call.micro_batch}"
            operands: list[Ref] = []
            for what, of in function.arguments:
                if what == "index":
                    operands.append(self._add_const(f"{TIME}/number_{call.micro_batch}", np.array(call.micro_batch)))
                elif what == "sum":
                    operands.append(sums[of] if of in sums else self._start(kind, of))
                elif what == "handed":
                    operands.append(handed[call.micro_batch, of])
                else:
                    operands.append(of)
            controls = [previous] if previous else []
            if function.name not in attrs_of:
                attrs_of[function.name] = {
                    "Tin": tuple(DType(t.dtype) for t in function.inputs),
                    "Tout": tuple(DType(t.dtype) for t in function.types),
                    "f": Func(function.name),
                    "shapes": tuple(Shape(t.shape) for t in function.types),
                }
            self.nodes[name] = Node(
                name, CALL, tuple(operands), tuple(dict.fromkeys(controls + function.behind)),
                attrs_of[function.name], tuple(function.types), "", True,
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

    def _start(self, kind: MicrobatchKind, ref: Ref) -> Ref:
        """Emits the value with which the accumulation of ``ref`` over micro-batches begins: the reduction's identity
        element, as a scalar.
        """
        node = kind.program.by_name[ref.node]
        dtype = node.outputs[0].dtype
        value = np.array(find_identity(node.attrs["reduction"], dtype), find_numpy_dtype(dtype))
        return self._add_const(f"{ref.node}/start", value)

    def _join(self, kind: MicrobatchKind, ref: Ref, pieces: Sequence[Ref]) -> None:
        """Emits the concatenation of ``pieces``, the rows of each micro-batch in order, in place of the all-gather
        ``ref``.
        """
        node = kind.program.by_name[ref.node]
        t = node.outputs[0]
        axis = self._add_const(f"{ref.node}/axis", np.array(node.attrs["axis"], np.int32))
        attrs = {"T": DType(t.dtype), "Tidx": DType("int32"), "N": len(pieces)}
        if len(pieces) == 1:
            self.moved[ref] = pieces[0]
            return
        self.nodes[ref.node] = Node(ref.node, "ConcatV2", (*pieces, axis), (), attrs, (t,))

    def _add_const(self, name: str, value: np.ndarray) -> Ref:
        self.nodes[name] = make_const(name, value)
        return Ref(name)

    # -- the main graph

    def _main(self, kind: MicrobatchKind, last: str) -> Program:
        program = kind.program
        ends = {call.phase: f"{TIME}/{call.phase or 'step'}_{call.micro_batch}" for call in self.order}

        def replace_ref(ref: Ref) -> Ref:
            return self.moved.get(ref, ref)

        def replace_controls(node: Node) -> tuple[str, ...]:
            found = dict[str, None]()
            for c in node.controls:
                if kind.region[c] == "each":
                    if node.marks.recomputed:
                        continue  # recomputed once for the whole batch, before any micro-batch's gradient
                    found[ends[self._find_phase(kind, c) or self.order[-1].phase]] = None
                elif kind.region[c] != "join":
                    found[c] = None
            return tuple(found)

        free = [n for n in program.nodes if kind.region[n.name] == "free"]
        for node in program.nodes:
            if kind.region[node.name] == "outer":
                self.nodes[node.name] = replace(
                    node, inputs=tuple(map(replace_ref, node.inputs)), controls=replace_controls(node)
                )
        outputs = tuple(map(replace_ref, program.outputs))
        read = {r.node for n in self.nodes.values() for r in n.inputs} | {r.node for r in outputs}
        read |= {c for n in self.nodes.values() for c in n.controls}
        self.nodes.update((n.name, n) for n in free if n.name in read or n.name in program.effects)
        effects = [n for n in program.effects if kind.region[n] in ("outer", "free")]
        functions = self._find_called_functions()
        return replace(
            program, nodes=sort_nodes(self.nodes), outputs=outputs, effects=(*effects, last), functions=functions
        )

    def _find_called_functions(self) -> dict[str, Program]:
        """Returns the functions that the main graph's nodes call or name in attributes, directly or through other
        functions.
        """
        found: dict[str, Program] = {}
        stack = [f.name for n in self.nodes.values() if may_carry(n) for _, f in iterate_function_refs(n)]
        while stack:
            name = stack.pop()
            if name not in found and name in self.functions:
                found[name] = self.functions[name]
                stack += [f.name for n in found[name].nodes if may_carry(n) for _, f in iterate_function_refs(n)]
        return found
