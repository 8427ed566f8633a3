"""Decomposes batch normalisation into simple ops whose moments can be reduced over ranks (SyncBatchNorm).

Formulas: Ioffe and Szegedy, "Batch Normalization" (ICML 2015), sections 3 and 3.1, with what TensorFlow's fused kernels
add: the batch variance that is returned has Bessel's correction, and ``exponential_avg_factor`` mixes in the running
values. Statistics of each rank's own rows are in ``whale.passes.propagation.local_statistics``.
"""

from __future__ import annotations

import numpy as np

from whale.errors import ProgramError
from whale.ir.ops import BATCH_NORM_GRADIENTS, BATCH_NORMS
from whale.ir.program import Node, Program, Ref
from whale.ir.values import DType, require_static_shape
from whale.passes.normalize.emitter import NodeEmitter


def sync_batch_norm(program: Program, node: Node, nodes: dict[str, Node], taken: set[str]) -> list[Ref]:
    """Writes a batch normalisation, or its gradient, in simple ops; returns the tensors that replace its outputs, in
    order.

    Args:
      nodes: the simple ops are added to this mapping, by name.
      taken: names that are in use; new names are added.

    Raises:
      ProgramError: the shape of the normalised tensor is unknown.
    """
    emit = _Emitter(program, node, nodes, taken)
    return _forward(emit) if node.op in BATCH_NORMS else _backward(emit)


class _Emitter(NodeEmitter):
    """Adds the simple nodes of one batch normalisation; knows shape and channel dimension of the normalised tensor."""

    def __init__(self, program: Program, node: Node, nodes: dict[str, Node], taken: set[str]) -> None:
        super().__init__(program, node, nodes, taken)
        kind = self.type_of(node.inputs[0 if node.op in BATCH_NORMS else 1])
        if not kind.is_static:
            raise ProgramError(
                "batch normalisation over a batch of unknown size cannot be divided over ranks",
                op=node.name,
                given=f"shape {kind.shape}",
                expected="a static size for every dimension",
                action="call the step with inputs of static shapes (batch with drop_remainder=True)",
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
        """Adds the reduction ``op`` over all dimensions but the channels; the result has shape [channels]."""
        return self.reduce_over(suffix, op, source, self.axes, keep=False)

    def spread(self, suffix: str, vector: Ref) -> Ref:
        """Reshapes a [channels] vector so that it broadcasts over the activations."""
        if self.last:
            return vector
        shape = self.const(f"{suffix}/shape", np.array(self.wide, np.int32))
        return self.add(suffix, "Reshape", (vector, shape), self.wide, Tshape=DType("int32"))

    def rest(self, start: int) -> list[Ref]:
        """Adds empty tensors for the outputs from number ``start`` on, which only fused kernels use."""
        return [self.const(f"unused_{i}", np.zeros(0, np.float32)) for i in range(start, len(self.node.outputs))]


def _forward(emit: _Emitter) -> list[Ref]:
    """Adds the forward nodes; returns (y, batch or running mean, batch or running variance, reserve spaces 1 and 2:
    mean and variance of the batch, ...).
    """
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
            _mix(emit, name, new, old, share)
            for name, new, old in zip(("mean", "variance"), running, node.inputs[3:5], strict=True)
        ]
    return [y, *running, mean, variance, *emit.rest(5)]


def _reciprocal_deviation(emit: _Emitter, variance: Ref) -> Ref:
    padded = emit.binary("variance_epsilon", "AddV2", variance, emit.scalar("epsilon", emit.epsilon))
    return emit.add("reciprocal_deviation", "Rsqrt", (padded,), (emit.channels,))


def _mix(emit: _Emitter, name: str, new: Ref, old: Ref, share: float) -> Ref:
    """Computes a running value, ``share * new + (1 - share) * old``."""
    a = emit.binary(f"{name}_new", "Mul", new, emit.scalar(f"{name}_share", share))
    b = emit.binary(f"{name}_old", "Mul", old, emit.scalar(f"{name}_rest", 1.0 - share))
    return emit.binary(f"{name}_running", "AddV2", a, b)


def _backward(emit: _Emitter) -> list[Ref]:
    """Adds the gradient nodes; returns the gradients for (x, scale, offset, ...).

    With c = x - mean, r = 1/sqrt(variance + epsilon) and means over all but the channels: dscale = r sum(dy c), doffset
    = sum(dy), dx = scale r (dy - mean(dy) - c r^2 mean(dy c)).
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
