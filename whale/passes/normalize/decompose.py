"""Decomposes composite ops into simple ones that have a distributed form: batch normalisation over a batch that is
divided, softmax, its losses and the search for an extremum over classes that are split (whale.passes.normalize.softmax,
whale.passes.normalize.arg_extremum).

Formulas: Ioffe and Szegedy, "Batch Normalization" (ICML 2015), sections 3 and 3.1, with what TensorFlow's fused
kernels add: the batch variance that is returned has Bessel's correction, and ``exponential_avg_factor`` mixes in the
running values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from whale.errors import ProgramError
from whale.ir.ops import BATCH_NORM_GRADIENTS, BATCH_NORMS
from whale.ir.program import Node, Program, Ref, remove_unread, sort_nodes
from whale.ir.values import DType, require_static_shape
from whale.passes.normalize.arg_extremum import arg_extremum, is_arg_extremum
from whale.passes.normalize.emitter import NodeEmitter
from whale.passes.normalize.softmax import is_softmax, softmax


def is_composite(node: Node) -> bool:
    """Tells whether ``node`` is a batch normalisation with the statistics of the batch, or its gradient."""
    if node.op not in BATCH_NORMS and node.op not in BATCH_NORM_GRADIENTS:
        return False
    return node.attrs.get("is_training", True) is not False  # where the attribute is absent, it is its default


def has_split_form(program: Program, node: Node) -> bool:
    """Tells whether ``decompose`` has a form of the node in which the dimension that it searches or sums can be
    split.
    """
    return is_softmax(node) or is_arg_extremum(program, node)


def decompose(program: Program, predicate: Callable[[Node], bool] = lambda node: True) -> Program:
    """Writes the composite nodes of ``program`` that ``predicate`` picks in simple ops, called ``<name>/...``.

    A gradient reads mean and variance from its forward node's reserve spaces: both are decomposed, or neither.
    Bodies of functions are decomposed too.

    Raises:
      ProgramError: a picked node's shape is unknown, or only one of a forward node and its gradient is picked.
    """
    functions = {name: _decompose_graph(body, predicate) for name, body in program.functions.items()}
    return replace(_decompose_graph(program, predicate), functions=functions)


def _decompose_graph(program: Program, predicate: Callable[[Node], bool]) -> Program:
    chosen = {n.name for n in program.nodes if predicate(n) and (is_composite(n) or has_split_form(program, n))}
    if not chosen:
        return program
    taken = set(program.by_name)
    moved: dict[Ref, Ref] = {}
    nodes: dict[str, Node] = {}
    for node in program.nodes:
        if node.op in BATCH_NORM_GRADIENTS:
            _check_pair(program, node, chosen)
        inputs = tuple([moved.get(r, r) for r in node.inputs])
        if inputs != node.inputs:
            node = replace(node, inputs=inputs)
        if node.name not in chosen:
            nodes[node.name] = node
            continue
        if not is_composite(node):
            write = softmax if is_softmax(node) else arg_extremum
            results = write(NodeEmitter(program, node, nodes, taken))
        else:
            emit = _Emitter(program, node, nodes, taken)
            results = _forward(emit) if node.op in BATCH_NORMS else _backward(emit)
        moved.update({Ref(node.name, i): r for i, r in enumerate(results)})
        # Whatever waits for the whole op still can.
        done = tuple(dict.fromkeys(r.node for r in results))
        nodes[node.name] = Node(node.name, "NoOp", (), done, scope=node.scope)
    return remove_unread(
        replace(
            program,
            nodes=sort_nodes(nodes),
            outputs=tuple(moved.get(r, r) for r in program.outputs),
        ),
        chosen,
    )


def _check_pair(program: Program, gradient: Node, chosen: set[str]) -> None:
    # Reserve space 1 is the fourth operand; what reaches a gradient through a loop's state has no forward node here.
    forward = program.by_name.get(gradient.inputs[3].node)
    if forward is None or forward.op not in BATCH_NORMS:
        return
    if (forward.name in chosen) != (gradient.name in chosen):
        raise ProgramError(
            "batch normalisation and its gradient are decomposed together or not at all",
            op=gradient.name,
            given=f"only {forward.name if forward.name in chosen else gradient.name} is picked",
            expected=f"{forward.name} and {gradient.name}",
            action="let the predicate answer the same for both",
        )


class _Emitter(NodeEmitter):
    """Adds the simple nodes of one batch normalisation, ``x`` being the tensor that is normalised."""

    def __init__(self, program: Program, node: Node, nodes: dict[str, Node], taken: set[str]) -> None:
        super().__init__(program, node, nodes, taken)
        kind = self.type_of(node.inputs[0 if node.op in BATCH_NORMS else 1])
        if not kind.is_static:
            raise ProgramError(
                "batch normalisation over a batch of unknown size cannot be divided",
                op=node.name,
                given=f"shape {kind.shape}",
                expected="a size for every dimension",
                action="give the step inputs of static shapes",
            )
        shape = require_static_shape(kind)
        layout = node.attrs.get("data_format") or "NHWC"
        channel = layout.index("C")
        self.axes = tuple(i for i in range(len(shape)) if i != channel)
        self.channels = shape[channel]
        self.count = int(np.prod([shape[i] for i in self.axes], dtype=np.int64))
        self.last = channel == len(shape) - 1
        self.wide = tuple(d if i == channel else 1 for i, d in enumerate(shape))
        # Statistics, scale and offset are at least float32, whatever the activations are.
        self.dtype = self.type_of(node.inputs[2 if node.op in BATCH_NORM_GRADIENTS else 1]).dtype
        self.epsilon = node.attrs.get("epsilon", 1e-4)

    def reduce(self, suffix: str, op: str, source: Ref) -> Ref:
        """Adds ``op`` over all but the channels: [channels]."""
        return self.reduce_over(suffix, op, source, self.axes, keep=False)

    def spread(self, suffix: str, vector: Ref) -> Ref:
        """Reshapes a [channels] vector so that it broadcasts over the activations."""
        if self.last:
            return vector
        shape = self.const(f"{suffix}/shape", np.array(self.wide, np.int32))
        return self.add(suffix, "Reshape", (vector, shape), self.wide, Tshape=DType("int32"))

    def rest(self, start: int) -> list[Ref]:
        """Adds empty tensors for the outputs that only the fused kernels use."""
        return [self.const(f"unused_{i}", np.zeros(0, np.float32)) for i in range(start, len(self.node.outputs))]


def _forward(emit: _Emitter) -> list[Ref]:
    """Returns (y, batch mean, batch variance, reserve spaces 1 and 2: mean and variance of the batch, ...)."""
    node = emit.node
    x, scale, offset = node.inputs[:3]
    kind = emit.type_of(x).dtype
    x = emit.cast("x", x, emit.dtype)
    mean = emit.reduce("mean", "Mean", x)
    wide_mean = emit.spread("mean_wide", mean)
    square = emit.binary("squared_difference", "SquaredDifference", x, wide_mean)
    variance = emit.reduce("variance", "Mean", square)
    factor = emit.binary("scale_over_deviation", "Mul", _reciprocal_deviation(emit, variance), scale)
    centered = emit.binary("centered", "Sub", x, wide_mean)
    scaled = emit.binary("scaled", "Mul", centered, emit.spread("factor_wide", factor))
    y = emit.binary("shifted", "AddV2", scaled, emit.spread("offset_wide", offset))
    y = emit.cast("y", y, kind)
    correction = emit.scalar("bessel", emit.count / max(emit.count - 1, 1))
    corrected = emit.binary("variance_unbiased", "Mul", variance, correction)
    share = node.attrs.get("exponential_avg_factor", 1.0)
    running = [mean, corrected]
    if share != 1.0:
        running = [
            _mixed(emit, name, new, old, share)
            for name, new, old in zip(("mean", "variance"), running, node.inputs[3:5], strict=True)
        ]
    return [y, *running, mean, variance, *emit.rest(5)]


def _reciprocal_deviation(emit: _Emitter, variance: Ref) -> Ref:
    padded = emit.binary("variance_epsilon", "AddV2", variance, emit.scalar("epsilon", emit.epsilon))
    return emit.add("reciprocal_deviation", "Rsqrt", (padded,), (emit.channels,))


def _mixed(emit: _Emitter, name: str, new: Ref, old: Ref, share: float) -> Ref:
    """Computes ``share * new + (1 - share) * old``."""
    a = emit.binary(f"{name}_new", "Mul", new, emit.scalar(f"{name}_share", share))
    b = emit.binary(f"{name}_old", "Mul", old, emit.scalar(f"{name}_rest", 1.0 - share))
    return emit.binary(f"{name}_running", "AddV2", a, b)


def _backward(emit: _Emitter) -> list[Ref]:
    """Returns the gradients for (x, scale, offset, ...).

    With c = x - mean, r = 1/sqrt(variance + epsilon) and means over all but the channels:
    dscale = r sum(dy c), doffset = sum(dy), dx = scale r (dy - mean(dy) - c r^2 mean(dy c)).
    """
    node = emit.node
    dy, x, scale, mean, variance = node.inputs[:5]
    kind = emit.type_of(x).dtype
    dy, x = emit.cast("dy", dy, emit.dtype), emit.cast("x", x, emit.dtype)
    r = _reciprocal_deviation(emit, variance)
    centered = emit.binary("centered", "Sub", x, emit.spread("mean_wide", mean))
    product = emit.binary("product", "Mul", dy, centered)
    sum_dy = emit.reduce("sum_dy", "Sum", dy)
    sum_product = emit.reduce("sum_product", "Sum", product)
    dscale = emit.binary("dscale", "Mul", sum_product, r)
    inverse = emit.scalar("inverse_count", 1.0 / emit.count)
    mean_dy = emit.binary("mean_dy", "Mul", sum_dy, inverse)
    slope = emit.binary("mean_product", "Mul", sum_product, inverse)
    slope = emit.binary("slope", "Mul", slope, emit.add("square", "Square", (r,), (emit.channels,)))
    drift = emit.binary("drift", "Mul", centered, emit.spread("slope_wide", slope))
    rest = emit.binary("less_mean", "Sub", dy, emit.spread("mean_dy_wide", mean_dy))
    rest = emit.binary("less_drift", "Sub", rest, drift)
    factor = emit.spread("factor_wide", emit.binary("factor", "Mul", scale, r))
    dx = emit.cast("dx", emit.binary("dx_wide", "Mul", rest, factor), kind)
    return [dx, dscale, sum_dy, *emit.rest(3)]
