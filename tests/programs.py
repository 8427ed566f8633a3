"""Programs written by hand, without TensorFlow: a builder that works out types by running NumPy kernels on zeros."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tests.numpy_kernels import run_kernel
from whale.ir.fingerprint import compute_fingerprint
from whale.ir.layout import Placement, shard
from whale.ir.plan import BatchInput, Plan
from whale.ir.program import Node, Program, Ref, Variable
from whale.ir.values import DType, Func, Shape, Tensor, TensorType, find_numpy_dtype
from whale.passes.propagation.graph_layout import GraphLayout
from whale.passes.propagation.partial_sums import reduce_partial_sums
from whale.passes.propagation.propagate import propagate
from whale.passes.resharding.fuse_all_reduces import fuse_all_reduces
from whale.passes.resharding.reshards import explicit_reshards
from whale.passes.verify.check import check


class Builder:
    """Collects nodes; every method that makes one returns its first output."""

    def __init__(self, name: str = "step", dtype: str = "float64"):
        self.name, self.dtype = name, dtype
        self.nodes: list[Node] = []
        self.inputs: list[str] = []
        self.variables: list[Variable] = []
        self.functions: dict[str, Program] = {}
        self.types: dict[Ref, TensorType] = {}
        self.values: dict[Ref, np.ndarray] = {}
        self.scope = ""

    def node(self, op: str, inputs: Sequence[Ref], outputs: Sequence[TensorType], name: str = "",
             controls: Sequence[str] = (), stateful: bool = False, **attrs: Any) -> Ref:  # fmt: skip
        """A node whose output types are given."""
        name = name or f"{op}_{len(self.nodes)}"
        node = Node(name, op, tuple(inputs), tuple(controls), attrs, tuple(outputs), self.scope, stateful)
        self.nodes.append(node)
        self.types.update(zip(node.list_refs(), node.outputs))
        return Ref(name)

    def op(self, op: str, *inputs: Ref, name: str = "", controls: Sequence[str] = (), **attrs: Any) -> Ref:
        """A stateless node; its output types are those that its kernel gives for zeros."""
        zeros = [self._stand_in(r) for r in inputs]
        with np.errstate(all="ignore"):
            results = run_kernel(op, attrs, zeros)
        outputs = [TensorType("string" if r.dtype == object else r.dtype.name, r.shape) for r in results]
        return self.node(op, inputs, outputs, name, controls, **attrs)

    def _stand_in(self, ref: Ref) -> np.ndarray:
        t = self.types[ref]
        return self.values[ref] if ref in self.values else np.zeros(t.shape or (), find_numpy_dtype(t.dtype))

    def input(self, name: str, shape: Sequence[int | None], dtype: str = "") -> Ref:
        t = TensorType(dtype or self.dtype, tuple(shape))
        self.inputs.append(name)
        return self.node("Placeholder", (), (t,), name, dtype=DType(t.dtype), shape=Shape(t.shape))

    def const(self, value: object, dtype: str = "", name: str = "") -> Ref:
        array = np.array(value, find_numpy_dtype(dtype or self.dtype))
        t = TensorType(array.dtype.name, array.shape)
        ref = self.node("Const", (), (t,), name, dtype=DType(t.dtype), value=Tensor.from_numpy(array))
        self.values[ref] = array
        return ref

    def ints(self, *values: int) -> Ref:
        return self.const(list(values), "int32")

    def variable(self, name: str, shape: Sequence[int], dtype: str = "") -> Ref:
        """A variable's handle."""
        t = TensorType(dtype or self.dtype, tuple(shape))
        self.variables.append(Variable(name, name + ":0", t, self.scope))
        return self.node("VarHandleOp", (), (TensorType("resource", ()),), name, stateful=True,
                         dtype=DType(t.dtype), shape=Shape(t.shape))  # fmt: skip

    def held(self, handle: Ref) -> TensorType:
        return next(v.type for v in self.variables if v.node == handle.node)

    def read(self, handle: Ref, controls: Sequence[str] = (), name: str = "") -> Ref:
        t = self.held(handle)
        return self.node("ReadVariableOp", (handle,), (t,), name, controls, stateful=True, dtype=DType(t.dtype))

    def update(self, op: str, handle: Ref, *operands: Ref, controls: Sequence[str] = (), name: str = "") -> str:
        """A node that changes a variable; returns its name, for controls and effects."""
        t = self.held(handle)
        return self.node(op, (handle, *operands), (), name, controls, stateful=True, T=DType(t.dtype)).node

    # -- the ops that programs use most

    def matmul(self, x: Ref, y: Ref, a: bool = False, b: bool = False, name: str = "") -> Ref:
        return self.op("MatMul", x, y, name=name, transpose_a=a, transpose_b=b, T=DType(self.dtype))

    def reduce(self, op: str, x: Ref, *axes: int, keep: bool = False, name: str = "") -> Ref:
        return self.op(op, x, self.ints(*axes), name=name, keep_dims=keep, T=DType(self.dtype), Tidx=DType("int32"))

    def reshape(self, x: Ref, *shape: int) -> Ref:
        return self.op("Reshape", x, self.ints(*shape), T=DType(self.dtype))

    def transpose(self, x: Ref, *order: int) -> Ref:
        return self.op("Transpose", x, self.ints(*order), T=DType(self.dtype))

    def concat(self, axis: int, *xs: Ref) -> Ref:
        return self.op("ConcatV2", *xs, self.const(axis, "int32"), N=len(xs), T=DType(self.dtype))

    def loop(self, cond: Program, body: Program, *state: Ref, name: str = "loop") -> Ref:
        self.functions |= {cond.name: cond, body.name: body}
        types = [self.types[r] for r in state]
        return self.node("StatelessWhile", state, types, name, cond=Func(cond.name), body=Func(body.name),
                         output_shapes=tuple(Shape(t.shape) for t in types), parallel_iterations=10)  # fmt: skip

    def branch(self, predicate: Ref, then: Program, other: Program, *args: Ref, name: str = "branch") -> Ref:
        self.functions |= {then.name: then, other.name: other}
        types = [then.find_type(r) for r in then.outputs]
        return self.node("StatelessIf", (predicate, *args), types, name, then_branch=Func(then.name),
                         else_branch=Func(other.name), output_shapes=tuple(Shape(t.shape) for t in types))  # fmt: skip

    def build(self, outputs: Sequence[Ref] = (), effects: Sequence[str] = ()) -> Program:
        return Program(self.name, tuple(self.nodes), tuple(self.inputs), tuple(self.variables), tuple(outputs),
                       tuple(effects), dict(self.functions))  # fmt: skip


def body(name: str, *shapes: Sequence[int], dtype: str = "float64") -> tuple[Builder, list[Ref]]:
    """A builder for a function body, and its arguments."""
    b = Builder(name, dtype)
    return b, [b.input(f"{name}_arg{i}", shape) for i, shape in enumerate(shapes)]


def mlp(rows: int = 8, features: int = 4, hidden: int = 6, classes: int = 3, dtype: str = "float64") -> Program:
    """Two layers, mean squared error, backward pass, SGD: updates come after every read."""
    b = Builder("mlp", dtype)
    x, y = b.input("x", (rows, features)), b.input("y", (rows, classes))
    shapes = {"w1": (features, hidden), "b1": (hidden,), "w2": (hidden, classes), "b2": (classes,)}
    handles = [b.variable(name, shape) for name, shape in shapes.items()]
    w1, b1, w2, b2 = (b.read(h, name=f"{h.node}/read") for h in handles)
    h = b.op("BiasAdd", b.matmul(x, w1, name="layer1"), b1, name="bias1")
    act = b.op("Relu", h, name="relu")
    out = b.op("BiasAdd", b.matmul(act, w2, name="layer2"), b2, name="bias2")
    diff = b.op("Sub", out, y, name="difference")
    loss = b.reduce("Mean", b.op("Square", diff, name="square"), 0, 1, name="loss")
    # backward
    d_out = b.op("Mul", diff, b.const(2.0 / (rows * classes)), name="d_out")
    d_w2, d_b2 = b.matmul(act, d_out, a=True, name="d_w2"), b.op("BiasAddGrad", d_out, name="d_b2")
    d_h = b.op("ReluGrad", b.matmul(d_out, w2, b=True, name="d_act"), h, name="d_h")
    d_w1, d_b1 = b.matmul(x, d_h, a=True, name="d_w1"), b.op("BiasAddGrad", d_h, name="d_b1")
    rate = b.const(0.1, name="rate")
    reads = [f"{h.node}/read" for h in handles]
    updates = [
        b.update("ResourceApplyGradientDescent", handle, rate, grad, controls=[read], name=f"sgd_{handle.node}")
        for handle, grad, read in zip(handles, (d_w1, d_b1, d_w2, d_b2), reads)
    ]
    return b.build([loss], updates)


def layouts_of(
    program: Program, size: int, placed: Mapping[str, Placement], reduced: bool = True
) -> dict[str, GraphLayout]:
    """What propagation, and then the placing of reductions, decide when the inputs are sliced as ``placed`` says."""
    layouts = propagate(program, size, placed)
    if not reduced:
        return layouts
    return {g: reduce_partial_sums(program if g == "" else program.functions[g], x, size) for g, x in layouts.items()}


def plan_of(program: Program, layouts: Mapping[str, GraphLayout], size: int, placed: Mapping[str, Placement],
            group_bytes: int = 1 << 20) -> Plan:  # fmt: skip
    """The checked plan with these layouts."""
    reshards = fuse_all_reduces(program, layouts, explicit_reshards(program, layouts, size), group_bytes)
    plan = Plan(
        program.name, compute_fingerprint(program), size, tuple(f"rank {i}" for i in range(size)),
        batch_inputs=tuple(BatchInput(n, p, "test") for n, p in placed.items()),
        strategies={g: x.strategies for g, x in layouts.items()},
        returned={g: x.outputs for g, x in layouts.items()}, reshards=reshards,
    )  # fmt: skip
    check(program, plan)
    return plan


def planned(program: Program, *sizes: int, group_bytes: int = 1 << 20, **placed: Placement) -> Plan:
    """The plan for ``len(sizes)`` ranks; every input, or those in ``placed``, divided by rows as ``sizes`` says."""
    inputs: dict[str, Placement] = (
        {}
        if len(sizes) == 1
        else placed
        or {
            n: shard(0, sizes)
            for n in program.inputs
            if program.by_name[n].outputs[0].shape[:1] == (sum(sizes),)  # type: ignore[index]
        }
    )
    return plan_of(program, layouts_of(program, len(sizes), inputs), len(sizes), inputs, group_bytes)
