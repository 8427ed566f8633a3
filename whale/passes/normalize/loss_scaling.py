"""Makes a step whose gradients overflow change no variable (mixed precision in float16 with loss scaling).

Tracing has scaled the loss and marked the unscaled gradients (``whale.capture.loss_scaling``). This pass adds ordinary
nodes that compute one flag from all of them: whether every gradient is finite. Propagation finds that the flag is
reduced over ranks, so all ranks get the same, after the last micro-batch. If it is False, assignments assign the old
value and additions add zero. This applies to updates that depend on a gradient, to counters that only these read (an
optimizer's `iterations`), and to counters that wait for them (a global step). Statistics of the forward pass are
updated in every step. An optimizer op that is one node, such as ResourceApplyAdam, gets operands with which it changes
nothing.

Decision: 0029.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from whale.errors import PlanError
from whale.ir.ops import ADDS, ASSIGNS, READS
from whale.ir.program import Node, Program, Ref, make_const, sort_nodes
from whale.ir.values import DType, TensorType, find_numpy_dtype

_ASSIGNED = "AssignVariableOp"
# Optimizer ops -> values of operands, by number, with which the op changes nothing.
_NEUTRAL: dict[str, dict[int, float]] = {
    "ResourceApplyGradientDescent": {2: 0},
    "ResourceApplyProximalGradientDescent": {1: 0, 4: 0},
    "ResourceSparseApplyProximalGradientDescent": {1: 0, 4: 0},
    "ResourceApplyMomentum": {2: 0, 3: 0, 4: 1},
    "ResourceSparseApplyMomentum": {2: 0, 3: 0, 5: 1},
    "ResourceApplyAdam": {5: 0, 6: 1, 7: 1, 9: 0},
    "ResourceApplyAdamWithAmsgrad": {6: 0, 7: 1, 8: 1, 10: 0},
    "ResourceApplyAdaMax": {4: 0, 5: 1, 6: 1, 8: 0},
    "ResourceApplyAdagrad": {2: 0, 3: 0},
    "ResourceSparseApplyAdagrad": {2: 0, 3: 0},
    "ResourceApplyAdagradV2": {2: 0, 4: 0},
    "ResourceSparseApplyAdagradV2": {2: 0, 4: 0},
    "ResourceApplyAdadelta": {3: 0, 4: 1, 6: 0},
    "ResourceSparseApplyAdadelta": {3: 0, 4: 1, 6: 0},
    "ResourceApplyPowerSign": {2: 0, 5: 1, 6: 0},
    "ResourceApplyAddSign": {2: 0, 5: 1, 6: 0},
    "ResourceScatterAdd": {2: 0},
    "ResourceScatterSub": {2: 0},
}
_FLAG = TensorType("bool", ())
_NAME = "whale/all_finite"


def skip_overflow(program: Program) -> Program:
    """Rewrites the updates of ``program`` so that they change nothing in a step in which a gradient is not finite.

    Programs without unscaled gradients are returned unchanged.

    Raises:
      PlanError: an update is an op that cannot be skipped, or gradients are computed inside loops or branches.
    """
    for body in program.functions.values():
        inside = next((n for n in body.nodes if n.marks.unscaled), None)
        if inside is not None:
            raise PlanError(
                "gradients are computed inside a loop or branch, where loss scaling cannot skip a step that overflows",
                op=inside.name,
                given='precision.compute_dtype="float16"',
                expected="the tape outside of loops, branches and functions that are compiled on their own",
                action='compute gradients outside, or set precision.compute_dtype="bfloat16"',
            )
    gradients = [n for n in program.nodes if n.marks.unscaled]
    if not gradients or f"{_NAME}/0" in program.by_name:  # none, or done before
        return program
    return _Skipper(program, gradients).run()


class _Skipper:
    def __init__(self, program: Program, gradients: list[Node]):
        self.program, self.gradients = program, gradients
        self.nodes: dict[str, Node] = {}

    def run(self) -> Program:
        behind = self._find_dependents({n.name for n in self.gradients})
        skipped = behind | self._counters(behind)
        skipped |= self._steps(skipped)
        answer = self._answer()
        for node in self.program.nodes:
            inputs = tuple(answer if self.program.by_name[r.node].marks.all_finite else r for r in node.inputs)
            node = replace(node, inputs=inputs)
            if node.name in skipped and self._updates(node):
                node = self._skip(node, answer)
            self.nodes[node.name] = node
        asked = {n.name for n in self.program.nodes if n.marks.all_finite}
        outputs = tuple(answer if r.node in asked else r for r in self.program.outputs)
        return replace(self.program.replace_nodes(sort_nodes(self.nodes)), outputs=outputs)

    def _updates(self, node: Node) -> bool:
        handles = [r for r in node.inputs if r.node in self.program.variable_of]
        return bool(handles) and node.op not in READS

    def _find_dependents(self, names: Collection[str]) -> set[str]:
        """Returns the nodes that depend on ``names``: by operands, or by reading a variable after its update."""
        found = set(names)
        for node in self.program.nodes:
            is_read_after = node.op == "ReadVariableOp" and not found.isdisjoint(node.controls)
            if is_read_after or not found.isdisjoint(r.node for r in node.inputs):
                found.add(node.name)
        return found

    def _counters(self, behind: Collection[str]) -> set[str]:
        """Returns updates of counters such as an optimizer's `iterations`, which are skipped with the gradients'
        updates.

        They depend on neither gradients nor inputs of the step, and an update that does depend on gradients reads their
        variable.

        Args:
          behind: names of the nodes that depend on gradients.
        """
        before = {n.name for n in self.gradients}
        for node in reversed(self.program.nodes):
            if node.name in before:
                before.update(r.node for r in node.inputs)
        for_updates: set[str] = set()  # nodes that lead to a gradient's update, but not to a gradient
        fed = set(self.program.inputs)
        for node in reversed(self.program.nodes):
            readers = [r for ref in node.list_refs() for r, _ in self.program.consumers.get(ref, ())]
            if any(r.name in for_updates or r.name in behind for r in readers if r.name not in before):
                for_updates.add(node.name)
        for node in self.program.nodes:
            if any(r.node in fed for r in node.inputs):
                fed.add(node.name)
        told = self._find_dependents({n.name for n in self.program.nodes if n.marks.all_finite})
        read = {
            n.inputs[0].node for n in self.program.nodes if n.op == "ReadVariableOp" and n.name in for_updates
        }  # fmt: skip
        return {
            n.name
            for n in self.program.nodes
            if n.op in ASSIGNS
            and n.name not in behind
            and n.inputs[0].node in read
            and n.inputs[1].node not in fed
            and n.name not in told
        }

    def _steps(self, skipped: Collection[str]) -> set[str]:
        """Returns updates of step counters such as a global step: integer additions that wait for a skipped update."""
        done = {n.name for n in self.program.nodes if n.name in skipped and self._updates(n)}
        for node in self.program.nodes:
            if node.op in ("NoOp", "Const") and not done.isdisjoint(node.controls):
                done.add(node.name)
        return {
            n.name
            for n in self.program.nodes
            if n.op in ADDS
            and np.issubdtype(find_numpy_dtype(self.program.find_type(n.inputs[1]).dtype), np.integer)
            and (n.inputs[1].node in done or not done.isdisjoint(n.controls))
        }

    def _answer(self) -> Ref:
        """Adds nodes that compute whether all gradients are finite; returns the result, a boolean scalar."""
        each: list[Ref] = []
        for i, node in enumerate(self.gradients):
            t = node.outputs[0]
            base = f"{_NAME}/{i}"
            self._add(Node(base, "IsFinite", (Ref(node.name),), (), {"T": DType(t.dtype)}, (replace(t, dtype="bool"),)))
            axes = self._const(f"{base}/axes", np.arange(len(t.shape or ()), dtype=np.int32))
            attrs = {"keep_dims": False, "Tidx": DType("int32")}
            self._add(Node(f"{base}/all", "All", (Ref(base), axes), (), attrs, (_FLAG,)))
            each.append(Ref(f"{base}/all"))
        found = each[0]
        for i, one in enumerate(each[1:]):
            self._add(Node(f"{_NAME}/and_{i}", "LogicalAnd", (found, one), (), {}, (_FLAG,)))
            found = Ref(f"{_NAME}/and_{i}")
        return found

    def _skip(self, node: Node, answer: Ref) -> Node:
        if node.op in _NEUTRAL:
            return self._changing_nothing(node, answer)
        if node.op not in ADDS and node.op != _ASSIGNED:
            raise PlanError(
                "an optimizer's operation cannot be skipped when gradients overflow in float16",
                op=f"{node.name} ({node.op})",
                given='precision.compute_dtype="float16"',
                expected="updates by assign, assign_add and assign_sub, as of the optimizers of Keras 3, or gradient "
                "descent, momentum, Adam, Adagrad or Adadelta of TensorFlow 1",
                action='use such an optimizer, or set precision.compute_dtype="bfloat16"',
            )
        handle, value = node.inputs
        t = self.program.find_type(value)
        if node.op in ADDS:
            other = self._const(f"{node.name}/whale_nothing", np.zeros((), find_numpy_dtype(t.dtype)))
        else:
            # Read the old value where the assignment itself would run: after earlier assignments.
            name = f"{node.name}/whale_before"
            attrs = {"dtype": DType(t.dtype)}
            self._add(Node(name, "ReadVariableOp", (handle,), node.controls, attrs, (t,), node.scope, True))
            other = Ref(name)
        name = f"{node.name}/whale_unless"
        self._add(Node(name, "SelectV2", (answer, value, other), (), {"T": DType(t.dtype)}, (t,), node.scope))
        return replace(node, inputs=(handle, Ref(name)))

    def _changing_nothing(self, node: Node, answer: Ref) -> Node:
        inputs = list(node.inputs)
        for number, neutral in _NEUTRAL[node.op].items():
            t = self.program.find_type(inputs[number])
            other = self._const(f"{node.name}/whale_neutral_{number}", np.full((), neutral, find_numpy_dtype(t.dtype)))
            name = f"{node.name}/whale_unless_{number}"
            attrs = {"T": DType(t.dtype)}
            self._add(Node(name, "SelectV2", (answer, inputs[number], other), (), attrs, (t,), node.scope))
            inputs[number] = Ref(name)
        return replace(node, inputs=tuple(inputs))

    def _const(self, name: str, value: np.ndarray) -> Ref:
        return self._add(make_const(name, value))

    def _add(self, node: Node) -> Ref:
        self.nodes[node.name] = node
        return Ref(node.name)
