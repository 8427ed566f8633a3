"""Partitions a program over one mesh axis, as GSPMD does: every rank runs the same program on its shards (SPMD).

A rank's program has local shapes, local constants, and communication ops where a tensor changes its placement. The
module needs no TensorFlow.

Coordinates of an axis often run the same program but for values of constants. Then one program is made and used for all
of them (``is_surely_identical``, ``is_alike``).

Decisions: 0012, 0013.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from whale.errors import REPORT_FAULT, PlanError
from whale.ir.emitter import Emitter
from whale.ir.layout import (
    FIRST,
    LEGEND,
    B,
    Partial,
    PerRank,
    Placement,
    RankZero,
    Replicate,
    Shard,
    Strategy,
    local_shape,
)
from whale.ir.marks import Marks
from whale.ir.ops import EXCHANGES, HAS_BODIES, LOOPS
from whale.ir.plan import STAGE_INPUT, STAGE_OUTPUT, Plan
from whale.ir.program import Node, Program, Ref, Variable, sort_nodes
from whale.ir.values import UNMOVABLE, Dims, DType, Shape, TensorType, find_numpy_dtype, require_static_shape
from whale.partition.embedding import RowExchanges, emit_sums, find_sums, remove_owner_mark
from whale.partition.resharding import emit_fused, emit_reshard, find_fused_result, is_joint
from whale.partition.ring_attention import emit_attention
from whale.sharding_rules import find_rule
from whale.sharding_rules.base import UNCHANGED, Local, Window, replace_per_rank
from whale.sharding_rules.embedding import SUMS_BY_ID, is_owned
from whale.sharding_rules.empty import find_known_outputs
from whale.sharding_rules.graph import is_list_op, is_recreatable, list_called_functions, make_op_view
from whale.sharding_rules.nn.attention import RINGS

_ENDS = frozenset({"Placeholder", STAGE_INPUT, STAGE_OUTPUT})  # where tensors, or shards, enter and leave the program
_WHOLE = frozenset({Replicate})
_OTHERWISE = HAS_BODIES | RINGS | {SUMS_BY_ID}  # ranks run other nodes in their place, even if all is replicated
_TIME_STREAM = 1566083941  # odd, so that it has an inverse (L'Ecuyer, "Tables of linear congruential generators", 1999)


def partition_for_rank(
    program: Program, plan: Plan, rank: int, comm: str, what: str | None, prefix: str = "whale"
) -> Program:
    """Creates the program of ``rank``: local shapes and constants, and communication ops where a placement changes.

    Args:
      program: the program for which ``plan`` was made, with composite ops decomposed.
      plan: the plan of one mesh axis.
      rank: the rank's coordinate on that axis.
      comm: name of the communicator (see whale_ops).
      what: description of the program, for the error if ranks run different programs; None: this is not checked.
      prefix: start of the names of added nodes.

    Raises:
      PlanError: the plan lacks a strategy or a reshard.
    """
    functions: dict[str, Program] = {}
    talks: set[str] = set()
    for name, body in _sort_callees_first(program):
        lowered, communicates = _RankPartitioner(body, name, plan, rank, comm, talks, prefix).run(None)
        functions[name] = lowered
        if communicates:
            talks.add(name)
    bodies = {node.attrs["body"].name for node in program.nodes if node.op in RINGS}
    for name, body in program.functions.items():  # unchanged if called only by ops of the first rank, or by none
        if name not in bodies:
            functions.setdefault(name, body)
    lowered, _ = _RankPartitioner(program, "", plan, rank, comm, talks, prefix).run(what)
    return replace(lowered, functions=functions)


def _sort_callees_first(program: Program) -> list[tuple[str, Program]]:
    order: list[str] = []

    def visit(body: Program) -> None:
        for node in body.nodes:
            if node.op in HAS_BODIES:
                for func in list_called_functions(node):
                    if func.name in program.functions and func.name not in order:
                        visit(program.functions[func.name])
                        order.append(func.name)

    visit(program)
    return [(name, program.functions[name]) for name in order]


class _RankPartitioner:
    """Partitions one graph, the program or a function, for one rank."""

    def __init__(
        self, program: Program, graph: str, plan: Plan, rank: int, comm: str, talks: set[str], prefix: str = "whale"
    ):
        if graph not in plan.strategies:
            # Only ops that run on the first rank call this function, so it is not changed.
            strategies: Mapping[str, Strategy] = {
                n.name: Strategy((B,) * len(n.inputs), (B,) * len(n.outputs), "called from the first rank")
                for n in program.nodes
            }
        else:
            strategies = plan.strategies[graph]
        self.program, self.graph, self.plan, self.rank, self.talks = program, graph, plan, rank, talks
        self.strategies = strategies
        self.emitter = Emitter(rank, plan.size, comm, prefix)
        self.rows = RowExchanges(self.emitter, program, strategies, plan, graph)
        self.local: dict[tuple[Ref, Placement], Ref | None] = {}
        self.whole: set[Ref] = set()  # results of nodes with only replicated operands and results; not in ``local``
        self.grouped: dict[int, list[Ref | None]] = {}
        # What nodes of a kind have in common, by the identity of what decides it: program and plan keep these objects.
        self.local_types: dict[tuple[int, Placement], TensorType] = {}
        self.local_outputs: dict[tuple[int, int], tuple[TensorType, ...]] = {}
        self.edits: dict[tuple[int, int], Local] = {}
        self.remade: list[Strategy] = []  # strategies that the plan does not keep

    def run(self, what: str | None) -> tuple[Program, bool]:
        for node in self.program.nodes:
            self._partition_node(node)
        outputs = tuple(self._find_output(r, i) for i, r in enumerate(self.program.outputs))
        self._emit_groups()
        self.rows.finish()
        self._take_part()
        self._scatter_in_time()
        effects = [n for n in self.program.effects if n in self.emitter.nodes]
        effects += self._list_unread(outputs, effects)
        if what is not None and self.plan.size > 1:
            effects.append(emit_check(self.emitter, self.plan.fingerprint, what))
        nodes = tuple(map(remove_owner_mark, sort_nodes(self.emitter.nodes)))
        communicates = self.emitter.communicates
        held = [v for v in self.program.variables if v.node in self.emitter.nodes]
        variables = tuple(_find_variable_part(v, self.strategies[v.node], self.rank) for v in held)
        result = Program(self.program.name, nodes, self.program.inputs, variables, outputs, tuple(effects))
        return result, communicates

    def _find_local_shape(self, t: TensorType, placement: Placement) -> Dims | None:
        return local_shape(t.shape, placement, self.rank)

    def _scatter_in_time(self) -> None:
        """Adds control edges that make the gather of a weight wait for the reduce-scatters of earlier gradients.

        They concern weights that are gathered only where they are used. Without these edges, whole gradients pile up in
        memory if products are faster than communication. An edge always goes forward in the program's order, which is
        equal on all ranks, so that no rank waits in a cycle.
        """
        position = {node.name: i for i, node in enumerate(self.program.nodes)}
        paced = [n for n in self.program.nodes if n.op == "Identity" and n.controls and n.marks.gathered_at_use]
        scattered = sorted(
            (position[r.ref.node], found.node)
            for r in (self.plan.reshards if paced else ())
            if r.graph == self.graph and isinstance(r.source, Partial) and isinstance(r.target, Shard)
            if (found := self.local.get((r.ref, r.target))) is not None
        )
        for node in sorted(paced, key=lambda n: position[n.controls[0]]):
            before = [name for at, name in scattered if at < position[node.controls[0]]]
            scattered = scattered[len(before) :]
            lowered = self.emitter.nodes.get(node.name)
            if lowered is not None and before:
                self.emitter.nodes[node.name] = replace(lowered, controls=(*lowered.controls, *before))

    def _take_part(self) -> None:
        """Emits collectives whose results this rank does not read, but other ranks do.

        That happens if this rank's shard is empty, or if the reader runs on the first rank only.
        """
        for r in self.plan.reshards:
            if r.graph == self.graph and r.group < 0 and (r.ref, r.target) not in self.local and is_joint(r):
                if self.program.find_type(r.ref).dtype not in UNMOVABLE:
                    self.get(r.ref, r.target)

    def _list_unread(self, outputs: tuple[Ref, ...], effects: Sequence[str]) -> list[str]:
        """Lists the communication nodes on which no executed node depends; they have to run, since other ranks take
        part.
        """
        # Results of a body may not be read by its caller, so they keep nothing alive there.
        read = [r.node for r in outputs if self.graph == ""]
        return list_unread_communication(self.emitter.nodes, read, effects, self._has_communication)

    def _has_communication(self, node: Node) -> bool:
        """Returns True if the node is a loop or branch with communication inside."""
        if node.op not in HAS_BODIES:
            return False
        return any(func.name in self.talks for func in list_called_functions(node))

    # -- tensors

    def get(self, ref: Ref, wanted: Placement) -> Ref | None:
        """Returns the tensor ``ref`` in placement ``wanted`` on this rank; emits its reshard if there is none yet.

        The result is None if this rank does not hold the tensor in that placement.
        """
        if type(wanted) is Replicate and ref in self.whole:
            return ref
        key = (ref, wanted)
        if key in self.local:
            return self.local[key]
        r = self.plan.reshard_of.get((self.graph, ref, wanted))
        if r is None:
            raise PlanError(
                "the plan lacks a reshard, a change of a tensor's placement",
                op=str(ref),
                given=f"a tensor that is read in placement {wanted}",
                notation=LEGEND,
                expected="an operation that yields the tensor in this placement, or a reshard to it",
                action="make the plan again with `whale plan`",
            )
        producer = self.program.by_name[ref.node]
        t = producer.outputs[ref.index]
        found: Ref | None
        if t.dtype in UNMOVABLE and wanted != FIRST:
            found = self._recreate(producer, ref, wanted)
        elif r.group >= 0:
            found = find_fused_result(self.emitter.prefix, r, self.plan.place_in_group[r.group, r.key])
        else:
            found = emit_reshard(self.emitter, r, t, lambda: self.get(ref, r.source))
        self.local[key] = found
        return found

    def _recreate(self, producer: Node, ref: Ref, wanted: Placement) -> Ref:
        """Emits the producer of an empty TensorList a second time, for elements in placement ``wanted``: a list cannot
        be resharded.
        """
        if not is_recreatable(self.program, ref):
            t = producer.outputs[ref.index]
            raise PlanError(
                "a tensor of a type that cannot be sent would have to be sent to other ranks",
                op=str(ref),
                given=f"the result of {producer.op} ({t.dtype}), which is read in placement {wanted}",
                notation=LEGEND,
                expected="the placement in which the operation yields the tensor",
                action=REPORT_FAULT,
            )
        strategy = Strategy((B,) * len(producer.inputs), (wanted,) * len(producer.outputs), "made anew")
        self.remade.append(strategy)
        name = f"{producer.name}/as_{''.join(c if c.isalnum() else '_' for c in str(wanted))}"
        self._emit(producer, strategy, name)
        return Ref(name, ref.index)

    def _emit_groups(self) -> None:
        done: set[int] = set()
        for r in self.plan.reshards:
            if r.graph != self.graph or r.group < 0 or r.group in done:
                continue
            done.add(r.group)
            members = self.plan.groups[r.group]
            sources = [self.get(m.ref, m.source) for m in members]
            types = [self.program.find_type(m.ref) for m in members]
            name = f"{self.emitter.prefix}/group_{r.group}"
            emit_fused(self.emitter, name, members, [s for s in sources if s is not None], types)

    def _find_output(self, ref: Ref, i: int) -> Ref:
        returned = self.plan.returned.get(self.graph)
        wanted = returned[i] if returned is not None else B
        found = self.get(ref, wanted)
        if found is None:
            t = self.program.find_type(ref)
            if t.dtype != "string":
                raise PlanError(
                    "the step returns a value that only the first rank has, and that cannot be sent to other ranks",
                    op=str(ref),
                    given=str(t),
                    expected="a tensor of numbers or of strings",
                    action="do not return it from the step, or run in one process",
                )
            found = self.emitter.const(f"whale/absent_{i}", np.array(b"", object))
        return found

    # -- nodes

    def _partition_node(self, node: Node) -> None:
        strategy = self.strategies[node.name]
        if _is_plain(strategy) and node.op not in _OTHERWISE:  # most nodes, such as those of optimizers
            if self.whole.issuperset(node.inputs) and not any(map(self._is_absent, node.controls)):
                self.emitter.nodes[node.name] = node
            else:
                self._emit(node, strategy, node.name)
            self.whole.update(node.list_refs())
            return
        for ref, placement in zip(node.list_refs(), strategy.outputs):
            self.local[(ref, placement)] = ref
        if strategy.once and self.rank != 0:
            for ref, placement in zip(node.list_refs(), strategy.outputs):
                self.local[(ref, placement)] = None
            return
        if node.op in RINGS:
            self._go_round(node, strategy)
        else:
            self._emit(node, strategy, node.name)

    def _go_round(self, node: Node, strategy: Strategy) -> None:
        """Emits an attention op whose keys and values are sent around the ring of ranks."""
        operands = [self.get(ref, placement) for ref, placement in zip(node.inputs, strategy.inputs)]
        types = [self._find_local_type(self.program.find_type(r), p) for r, p in zip(node.inputs, strategy.inputs)]
        body = self.program.functions[node.attrs["body"].name]
        found = emit_attention(self.emitter, node, body, strategy, [r for r in operands if r is not None], types)
        self.local.update({(Ref(node.name, i), p): found[i] for i, p in enumerate(strategy.outputs)})

    def _emit(self, node: Node, strategy: Strategy, name: str) -> None:
        e = self.emitter
        if node.op == SUMS_BY_ID:
            self.local[Ref(node.name, 1), strategy.outputs[1]] = Ref(find_sums(e, node.name))
        spread = any(type(p) is Shard or type(p) is Partial for p in strategy.inputs + strategy.outputs)
        if not spread and name == node.name and node.op != SUMS_BY_ID and self._is_unchanged(node, strategy):
            e.nodes[name] = node
            return
        control_flow = node.op in HAS_BODIES
        edit: Local = UNCHANGED
        handle = self.program.variable_of.get(node.name)
        if spread and not control_flow and node.op not in _ENDS and not is_list_op(node) and handle is None:
            rule = find_rule(node.op)
            kind = (self.program.kind_of[node.name], id(strategy))
            if kind not in self.edits:
                op = make_op_view(self.program, node, self.plan.size)
                if not node.stateful:
                    known = find_known_outputs(op, strategy, self.rank, self.plan.micro_batches > 1)
                    values = [value for value in known if value is not None]
                    if values and len(values) == len(known):
                        self._emit_constants(node, strategy, values)
                        return
                assert rule is not None, node.op
                self.edits[kind] = rule.local_op(op, _replace_per_rank(strategy), self.rank)
            edit = self.edits[kind]
        inputs = []
        for i, (ref, placement) in enumerate(zip(node.inputs, strategy.inputs)):
            if i in edit.consts:
                inputs.append(e.const(f"{name}/whale_operand_{i}", edit.consts[i]))
                continue
            found = self.get(ref, placement)
            assert found is not None, (node.name, ref, placement)
            if i in edit.added:
                operand = f"{name}/{e.prefix}_operand_{i}"  # with a prefix, as micro-batches change the seed once more
                t = self.program.find_type(ref)
                both = (
                    found,
                    e.const(f"{operand}/added", compute_rank_seed(edit.added[i], self.plan.microbatched)),
                )
                found = e.add(operand, "AddV2", both, {"T": DType(t.dtype)}, (t,))
            if i in edit.moved:
                operand = f"{name}/{e.prefix}_from_first_{i}"
                t = self._find_local_type(self.program.find_type(ref), placement)
                both = (found, e.const(f"{operand}/offset", edit.moved[i]))
                found = e.add(operand, "AddV2", both, {"T": DType(t.dtype)}, (t,))
            if i in edit.at_most:
                operand = f"{name}/{e.prefix}_at_most_{i}"
                both = (found, e.const(f"{operand}/limit", edit.at_most[i]))
                t = self.program.find_type(ref)
                found = e.add(operand, "Minimum", both, {"T": DType(t.dtype)}, (t,))
            inputs.append(found)
        inside = None
        if edit.window is not None:
            types = [self._find_local_type(self.program.find_type(r), p) for r, p in zip(node.inputs, strategy.inputs)]
            inside = emit_window(e, f"{name}/{e.prefix}_window", edit.window, inputs, types)
        outputs = self.local_outputs.get((id(node.outputs), id(strategy)))
        if outputs is None:
            outputs = tuple([self._find_local_type(t, p) for t, p in zip(node.outputs, strategy.outputs)])
            self.local_outputs[id(node.outputs), id(strategy)] = outputs
        if node.marks.owned_rows and is_owned(make_op_view(self.program, node, self.plan.size), strategy):
            outputs = node.outputs  # the number of rows is unknown until the run
        attrs = {**node.attrs, **edit.attrs} if edit.attrs else node.attrs
        if edit.seeds:
            moved = {k: compute_moved_seed(attrs.get(k, 0), by, self.plan.microbatched) for k, by in edit.seeds.items()}
            attrs = {**attrs, **moved}
        if node.op == "Placeholder" and spread and handle is None:
            attrs = {**attrs, "shape": Shape(outputs[0].shape)}
        if node.op == "VarHandleOp" and spread and handle is not None:
            attrs = {**attrs, "shape": Shape(self._find_local_shape(handle.type, strategy.outputs[0]))}
        op_type = edit.op or node.op
        if control_flow and not strategy.once:
            attrs, op_type = self._partition_control_flow(node, outputs, attrs)
        controls = tuple(c for c in node.controls if not self._is_absent(c))
        marks = node.marks if edit.blocks is None else node.marks.replace_marks(blocks=edit.blocks)
        lowered = Node(name, op_type, tuple(inputs), controls, attrs, outputs, node.scope, node.stateful, marks)
        if edit.route is not None:
            assert rule is not None
            moved_bytes = rule.count_exchanged_bytes(make_op_view(self.program, node, self.plan.size), strategy)
            self.rows.emit(node, edit.route, lowered, self.get, moved_bytes)
        elif node.op == SUMS_BY_ID:
            types = [self._find_local_type(self.program.find_type(r), p) for r, p in zip(node.inputs, strategy.inputs)]
            emit_sums(e, name, inputs[0], inputs[1], types[0], types[1])
        elif inside is not None and edit.window is not None and edit.window.masked == -1:
            found_in = replace(lowered, name=f"{name}/{e.prefix}_found")
            e.nodes[found_in.name] = found_in
            indices = types[edit.window.indices]
            if edit.window.column is not None:
                indices = TensorType(indices.dtype, require_static_shape(indices)[:-1])
            emit_zeroed(e, name, edit.window, Ref(found_in.name), outputs[0], inside, indices)
        elif edit.divide_by is not None:
            e.apply_after(lowered, "whale_sum", "RealDiv", "whale_count", np.array(edit.divide_by))
        elif edit.plus is not None:
            e.apply_after(lowered, "whale_here", "AddV2", "whale_elsewhere", edit.plus)
        else:
            e.nodes[name] = lowered

    def _is_unchanged(self, node: Node, strategy: Strategy) -> bool:
        """Returns True if this rank runs the node with the same operands and control edges as in the program."""
        if node.op in HAS_BODIES or any(map(self._is_absent, node.controls)):
            return False
        return all(self.get(r, p) == r for r, p in zip(node.inputs, strategy.inputs))

    def _is_absent(self, name: str) -> bool:
        return self.rank != 0 and self.strategies[name].once

    def _emit_constants(self, node: Node, strategy: Strategy, values: Sequence[np.ndarray]) -> None:
        """Replaces a node whose shard is empty on this rank by constants, since many kernels fail on zero rows."""
        for i, (ref, value) in enumerate(zip(node.list_refs(), values)):
            name = node.name if i == 0 else f"{node.name}/whale_output_{i}"
            const = self.emitter.const(name, value)
            self.local[(ref, strategy.outputs[i])] = const
        controls = tuple(c for c in node.controls if not self._is_absent(c))
        if controls:
            self.emitter.nodes[node.name] = replace(self.emitter.nodes[node.name], controls=controls)

    def _find_local_type(self, t: TensorType, placement: Placement) -> TensorType:
        if t.dtype in UNMOVABLE or type(placement) is not Shard:
            return t  # the placement of a list concerns its elements, not its own type
        found = self.local_types.get((id(t), placement))
        if found is None:
            found = TensorType(t.dtype, local_shape(t.shape, placement, self.rank))
            self.local_types[id(t), placement] = found
        return found

    def _partition_control_flow(
        self, node: Node, outputs: tuple[TensorType, ...], attrs: Mapping[str, Any]
    ) -> tuple[dict[str, Any], str]:
        changed = dict(attrs)
        changed["output_shapes"] = tuple(Shape(t.shape) for t in outputs)
        if self._has_communication(node):
            # Communication makes it stateful, and iterations must reach it in one order on all ranks.
            self.emitter.communicates = True
            if node.op in LOOPS:
                changed["parallel_iterations"] = 1
            return changed, node.op.removeprefix("Stateless")
        return changed, node.op


def _is_plain(strategy: Strategy) -> bool:
    """Returns True if all operands and results are replicated, and the node is not limited to the first rank."""
    return not strategy.once and _WHOLE.issuperset(map(type, strategy.inputs + strategy.outputs))


def _find_variable_part(variable: Variable, strategy: Strategy, rank: int) -> Variable:
    """Returns the variable with the type of the part that ``rank`` holds."""
    (placement,) = strategy.outputs
    if type(placement) is not Shard:
        return variable
    return replace(variable, type=TensorType(variable.type.dtype, local_shape(variable.type.shape, placement, rank)))


def _replace_per_rank(strategy: Strategy) -> Strategy:
    """Replaces per-rank placements by replicated ones, since to one rank its own value is a whole tensor."""
    if PerRank not in map(type, strategy.inputs + strategy.outputs):
        return strategy
    inputs, outputs = map(replace_per_rank, strategy.inputs), map(replace_per_rank, strategy.outputs)
    return replace(strategy, inputs=tuple(inputs), outputs=tuple(outputs))


def list_unread_communication(
    nodes: Mapping[str, Node],
    read: Sequence[str],
    effects: Sequence[str] = (),
    talks: Callable[[Node], bool] = lambda node: False,
) -> list[str]:
    """Lists communication nodes on which none of the nodes ``read`` and ``effects`` depends. They must run, as other
    ranks wait for them.

    Args:
      nodes: the nodes of the graph by name.
      read: names of nodes whose results are used.
      effects: names of nodes that run for their side effects.
      talks: returns True if a node is a loop or branch with communication inside. Such a node is listed unless it is in
        ``effects``, even if its result is read: TensorFlow runs the effects inside only if some node waits for the
        whole loop or branch.
    """
    live: set[str] = set()

    def mark(stack: list[str]) -> None:
        while stack:
            name = stack.pop()
            if name not in live:
                live.add(name)
                node = nodes[name]
                stack.extend([before for before, _ in node.inputs if before not in live])
                stack.extend(node.controls)

    mark([*read, *effects])
    added = []
    for name in reversed([n for n, node in nodes.items() if node.op in EXCHANGES or talks(node)]):
        if name not in live:
            added.append(name)
            mark([name])
        elif name not in effects and talks(nodes[name]):
            added.append(name)
    return added


def emit_check(e: Emitter, fingerprint: str, what: str) -> str:
    """Emits the node that raises an error if ranks run different programs, and returns its name."""
    attrs = {"key": "whale/check", "fingerprint": fingerprint, "what": what, "ranks": ()}
    return e.add("whale/check", "WhaleCheck", (e.communicator(),), attrs, (), stateful=True).node


def compute_moved_seed(seed: int, by: int, microbatched: bool) -> int:
    """Returns the 31-bit seed of a rank's random stream: ``seed`` plus ``by``; never 0, which would mean no seed.

    Args:
      by: number of the stream, which differs between ranks.
      microbatched: True if ``by`` numbers micro-batches, whose streams must differ from those of ranks.
    """
    return (seed + by * (_TIME_STREAM if microbatched else 1)) & 0x7FFFFFFF or 1


def compute_rank_seed(value: np.ndarray, microbatched: bool) -> np.ndarray:
    """Returns the number to add to a seed operand for a rank's random stream; the counterpart of ``compute_moved_seed``
    for seeds that are tensors.

    Args:
      value: number of the stream, in the dtype of the seed.
      microbatched: True if ``value`` numbers micro-batches, whose streams must differ from those of ranks.
    """
    with np.errstate(over="ignore"):
        return value * np.array(_TIME_STREAM, value.dtype) if microbatched else value


def emit_window(e: Emitter, name: str, window: Window, inputs: list[Ref], types: Sequence[TensorType]) -> Ref:
    """Replaces the indices in ``inputs`` by indices into this rank's shard, and zeroes the masked operand elsewhere.

    Args:
      window: which operand has the indices, and which indices this rank holds.
      inputs: the node's operands on this rank, changed in place.
      types: the types of these operands.

    Returns:
      a bool tensor that tells for each index whether it is in this rank's shard.
    """
    source, t = inputs[window.indices], types[window.indices]
    if window.column is not None:
        return _emit_column_window(e, name, window, inputs, types)
    kind = {"T": DType(t.dtype)}

    def emit_number(suffix: str, value: int) -> Ref:
        return e.const(f"{name}/{suffix}", np.array(value, find_numpy_dtype(t.dtype)))

    moved = e.add(f"{name}/from_first", "Sub", (source, emit_number("offset", window.offset)), kind, (t,))
    near = e.add(f"{name}/not_above", "Minimum", (moved, emit_number("last", window.size - 1)), kind, (t,))
    near = e.add(f"{name}/not_below", "Maximum", (near, emit_number("first", 0)), kind, (t,))
    flags = (TensorType("bool", t.shape),)
    inside = e.add(f"{name}/inside", "Equal", (moved, near), {**kind, "incompatible_shape_error": True}, flags)
    if window.masked is None:
        near = e.add(f"{name}/or_none", "SelectV2", (inside, moved, emit_number("none", -1)), kind, (t,))
    inputs[window.indices] = near
    if window.masked is not None and window.masked >= 0:
        at = window.masked
        inputs[at] = emit_zeroed(e, f"{name}/values", window, inputs[at], types[at], inside, t)
    return inside


def _emit_column_window(e: Emitter, name: str, window: Window, inputs: list[Ref], types: Sequence[TensorType]) -> Ref:
    """Does what ``emit_window`` does, for indices whose last dimension is a position in several dimensions, one of them
    sharded.

    Rows of the operand ``window.rows`` are dropped if their index is on another rank. With ``window.old``, elements
    whose index is on another rank are replaced by the old value at the index, so that the update changes nothing.
    """
    source, t = inputs[window.indices], types[window.indices]
    shape = require_static_shape(t)
    *lead, columns = shape
    one = TensorType(t.dtype, tuple(lead))
    begin, end, at = [0] * len(lead) + [window.column], [*lead, (window.column or 0) + 1], np.int32
    bounds = [e.const(f"{name}/{n}", np.array(v, at)) for n, v in (("begin", begin), ("end", end))]
    strides = e.const(f"{name}/strides", np.ones(len(shape), at))
    masks = {"begin_mask": 0, "end_mask": 0, "ellipsis_mask": 0, "new_axis_mask": 0}
    attrs = {"T": DType(t.dtype), "Index": DType("int32"), **masks, "shrink_axis_mask": 1 << len(lead)}
    column = e.add(f"{name}/column", "StridedSlice", (source, *bounds, strides), attrs, (one,))
    seen, kinds = [column], [one]
    inner = replace(window, indices=0, column=None, rows=None, masked=-1)
    inside = emit_window(e, f"{name}/of_column", inner, seen, kinds)
    # The change of this column is added to it; the other columns stay.
    kind = {"T": DType(t.dtype)}
    change = e.add(f"{name}/change", "Sub", (seen[0], column), kind, (one,))
    change = e.reshape(f"{name}/changes", change, t.dtype, (*lead, 1))
    only = e.const(f"{name}/only", np.eye(columns, dtype=find_numpy_dtype(t.dtype))[window.column])
    spread = e.add(f"{name}/by_column", "Mul", (change, only), kind, (t,))
    local = e.add(f"{name}/local", "AddV2", (source, spread), kind, (t,))
    inputs[window.indices] = local
    if (masked := window.masked) is not None and masked >= 0:
        values = types[masked]
        if window.old is None:
            inputs[masked] = emit_zeroed(e, f"{name}/values", window, inputs[masked], values, inside, one)
        else:
            attrs = {"Tparams": DType(values.dtype), "Tindices": DType(t.dtype)}
            old, marks = (inputs[window.old], local), Marks(blocks=window.blocks)
            there = e.add(f"{name}/there", "GatherNd", old, attrs, (values,), marks=marks)
            operands = (inside, inputs[masked], there)
            inputs[masked] = e.add(f"{name}/values", "SelectV2", operands, {"T": DType(values.dtype)}, (values,))
    if window.rows is None:
        return inside
    count = math.prod(lead)
    flags = e.reshape(f"{name}/flags", inside, "bool", (count,))
    own = e.add(f"{name}/own", "Where", (flags,), {"T": DType("bool")}, (TensorType("int64", (None, 1)),))
    for operand in (window.indices, window.rows):
        t = types[operand]
        rest = require_static_shape(t)[len(lead) :]
        flat = e.reshape(f"{name}/flat_{operand}", inputs[operand], t.dtype, (count, *rest))
        found = (TensorType(t.dtype, (None, *rest)),)
        attrs = {"Tparams": DType(t.dtype), "Tindices": DType("int64")}
        inputs[operand] = e.add(f"{name}/own_{operand}", "GatherNd", (flat, own), attrs, found)
    return inside


def emit_zeroed(
    e: Emitter, name: str, window: Window, values: Ref, t: TensorType, inside: Ref, indices: TensorType
) -> Ref:
    """Emits ``values`` with zeros where the index is in another rank's shard.

    Args:
      t: the type of ``values``.
      inside: the result of ``emit_window``.
      indices: the type of the indices.
    """
    flags = require_static_shape(indices)
    shape = (1,) * window.at + flags + (1,) * (len(require_static_shape(t)) - window.at - len(flags))
    flag = inside if shape == flags else e.reshape(f"{name}/whale_inside", inside, "bool", shape)
    zero = e.const(f"{name}/whale_zero", np.zeros((), find_numpy_dtype(t.dtype)))
    return e.add(name, "SelectV2", (flag, values, zero), {"T": DType(t.dtype)}, (t,))


def is_surely_identical(program: Program, plan: Plan) -> bool:
    """Returns True if the plan alone shows that every coordinate gets the same nodes and types from
    ``partition_for_rank``.

    That is the case if all have shards of equal size and none has nodes of its own. If the result is False, the lowered
    programs may still be alike; ``is_alike`` compares them.

    Args:
      program: the program for which ``plan`` was made, with composite ops decomposed.
    """
    placements: set[Placement] = set()
    for graph, strategies in plan.strategies.items():
        for node in (program.functions[graph] if graph else program).nodes:
            strategy = strategies[node.name]
            rule = find_rule(node.op)
            streams = rule is not None and rule.local_stream and any(isinstance(p, Shard) for p in strategy.outputs)
            if strategy.once or streams or node.op in RINGS:
                return False
            placements.update(strategy.inputs, strategy.outputs)
    for r in plan.reshards:
        placements.update((r.source, r.target))
        added = isinstance(r.source, Replicate) and isinstance(r.target, Partial)  # coordinates but the first get zeros
        if added or (isinstance(r.source, Shard) and isinstance(r.target, Shard) and r.source.dim == r.target.dim):
            return False
    return all(_is_even(p) for p in placements)


def _is_even(p: Placement) -> bool:
    if isinstance(p, Shard):
        return p.smallest == p.largest and p.without_halo is p
    return not isinstance(p, (RankZero, PerRank))


def is_alike(one: Program, other: Program) -> bool:
    """Returns True if two lowered programs have the same nodes and types, and differ at most in values of constants."""
    if one.functions.keys() != other.functions.keys() or len(one.nodes) != len(other.nodes):
        return False
    if [v.type for v in one.variables] != [v.type for v in other.variables]:
        return False  # an earlier axis cuts a variable unevenly
    same = all(
        a.name == b.name
        and a.op == b.op
        and a.inputs == b.inputs
        and a.controls == b.controls
        and a.outputs == b.outputs
        and a.scope == b.scope
        for a, b in zip(one.nodes, other.nodes)
    )
    return same and one.outputs == other.outputs and all(
        is_alike(body, other.functions[name]) for name, body in one.functions.items()
    )  # fmt: skip
