"""Batch normalisation in simple ops: the fused kernels' numbers, and tf.nn.moments' in float64."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.capture.roundtrip import NORMALISED, rebuilt
from whale.capture.function import capture_function
from whale.errors import ProgramError
from whale.ir.program import Program
from whale.passes.normalize.decompose import decompose, is_composite

pytestmark = pytest.mark.core
_CASES = [
    ("FusedBatchNorm", "float32", 1.0),
    ("FusedBatchNormV2", "float32", 1.0),
    ("FusedBatchNormV2", "float16", 0.1),
    ("FusedBatchNormV3", "float32", 1.0),
    ("FusedBatchNormV3", "float32", 0.1),
    ("FusedBatchNormV3", "bfloat16", 1.0),
    ("FusedBatchNormV3", "float16", 0.25),
]
_EPSILON = 1e-3


def _step(op: str, dtype: str, share: float, layout: str = "NHWC", training: bool = True):
    """Forward and gradient of one batch normalisation."""

    def step(x, dy, scale, offset, mean, variance):
        x, dy = tf.cast(x, dtype), tf.cast(dy, dtype)
        options = {"epsilon": _EPSILON, "data_format": layout, "is_training": training}
        out = getattr(tf.raw_ops, op)(
            x=x, scale=scale, offset=offset, mean=mean, variance=variance, exponential_avg_factor=share, **options
        )
        third = {"reserve_space_3": out.reserve_space_3} if op.endswith("V3") else {}
        back = getattr(tf.raw_ops, op.replace("Norm", "NormGrad"))(
            y_backprop=dy, x=x, scale=scale, reserve_space_1=out.reserve_space_1,
            reserve_space_2=out.reserve_space_2, **third, **options,
        )  # fmt: skip
        return [out.y, out.batch_mean, out.batch_variance, back.x_backprop, back.scale_backprop, back.offset_backprop]

    return step


def _arguments(share: float, shape: tuple[int, ...] = (4, 3, 5, 6), channels: int = 6) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    empty = np.zeros(0, np.float32)
    running = [random.normal(size=channels), random.uniform(0.5, 2, channels)] if share != 1.0 else [empty, empty]
    x = random.normal(3.0, 2.0, shape)
    parts = [x, random.normal(size=shape), random.uniform(0.5, 2, channels), random.normal(size=channels), *running]
    return [a.astype(np.float32) for a in parts]


@pytest.mark.parametrize(("op", "dtype", "share"), _CASES)
def test_equals_the_fused_kernels(op: str, dtype: str, share: float) -> None:
    arguments = _arguments(share)
    step = _step(op, dtype, share)
    expected = tf.function(step)(*arguments)
    captured = capture_function(step, arguments)
    program = decompose(captured.program)
    assert not any("FusedBatchNorm" in n.op for n in program.nodes)
    found = captured.pack_outputs(rebuilt(captured, (*NORMALISED, decompose))(*arguments))
    # One rounding of the activations' own type, where they are narrower than float32.
    limit = {"float32": 1e-5, "bfloat16": 2**-7, "float16": 2**-10}
    for a, b in zip(expected, found):
        assert a.dtype == b.dtype
        bound = limit[a.dtype.name]
        np.testing.assert_allclose(tf.cast(a, tf.float32), tf.cast(b, tf.float32), rtol=bound, atol=bound)


def _with_dtype(program: Program, dtype: str) -> Program:
    """The program with every float32 as ``dtype``, which the fused kernels do not have."""
    from dataclasses import replace

    from whale.ir.values import DType, TensorType

    def attr(value: object) -> object:
        return DType(dtype) if isinstance(value, DType) and value == "float32" else value

    def kind(t: TensorType) -> TensorType:
        return replace(t, dtype=dtype) if t.dtype == "float32" else t

    return program.replace_nodes(
        tuple(
            replace(n, attrs={k: attr(v) for k, v in n.attrs.items()}, outputs=tuple(map(kind, n.outputs)))
            for n in program.nodes
        )
    )


@pytest.mark.parametrize("layout", ["NHWC", "NCHW", "NDHWC", "NCDHW"])
def test_equals_moments_in_float64(layout: str) -> None:
    channel, rank = layout.index("C"), len(layout)
    shape = tuple(6 if i == channel else size for i, size in enumerate((4, 3, 5, 2, 7)[:rank]))
    arguments = [a.astype(np.float64) for a in _arguments(1.0, shape)]
    specs = [tf.TensorSpec(a.shape, tf.float32) for a in arguments]
    captured = capture_function(_step("FusedBatchNormV3", "float32", 1.0, layout), specs)
    found = rebuilt(captured, (lambda p: decompose(_with_dtype(p, "float64")),))(*map(tf.constant, arguments))

    x, dy, scale, offset = map(tf.constant, arguments[:4])
    axes = [i for i in range(rank) if i != channel]
    wide = [6 if i == channel else 1 for i in range(rank)]
    with tf.GradientTape() as tape:
        tape.watch([x, scale, offset])
        mean, variance = tf.nn.moments(x, axes)
        y = tf.nn.batch_normalization(x, *(tf.reshape(t, wide) for t in (mean, variance, offset, scale)), _EPSILON)
    gradients = tape.gradient(y, [x, scale, offset], dy)
    count = x.shape.num_elements() / 6
    for a, b in zip([y, mean, variance * count / (count - 1), *gradients], found, strict=True):
        # epsilon is a float32 attribute, the reference's is a float64.
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


def test_channels_first_layouts_have_the_given_shapes() -> None:
    specs = [tf.TensorSpec(a.shape) for a in _arguments(1.0, (4, 6, 3, 5))]
    captured = capture_function(_step("FusedBatchNormV3", "float32", 1.0, "NCHW"), specs)
    program = decompose(captured.program)
    before = [captured.program.find_type(r) for r in captured.program.outputs]
    assert [program.find_type(r) for r in program.outputs] == before


def test_only_what_is_picked() -> None:
    def twice(*arguments):
        first, second = _step("FusedBatchNormV3", "float32", 1.0), _step("FusedBatchNormV3", "float32", 1.0)
        return first(*arguments)[:4] + second(*arguments)[:4]

    captured = capture_function(twice, _arguments(1.0))
    composite = [n.name for n in captured.program.nodes if is_composite(n)]
    assert len(composite) == 4
    kept = {"FusedBatchNormV3", "FusedBatchNormGradV3"}
    program = decompose(captured.program, lambda node: node.name not in kept)
    assert {n.name for n in program.nodes if is_composite(n)} == kept
    assert all(n.name.startswith(tuple(f"{c}/" for c in composite)) for n in program.nodes
               if n.name not in captured.program.by_name)  # fmt: skip


def test_a_pair_is_decomposed_together() -> None:
    captured = capture_function(_step("FusedBatchNormV3", "float32", 1.0), _arguments(1.0))
    with pytest.raises(ProgramError, match="together or not at all"):
        decompose(captured.program, lambda node: node.op == "FusedBatchNormV3")
    with pytest.raises(ProgramError, match="together or not at all"):
        decompose(captured.program, lambda node: node.op == "FusedBatchNormGradV3")


def test_inference_is_not_composite() -> None:
    captured = capture_function(_step("FusedBatchNormV3", "float32", 1.0, training=False), _arguments(0.5))
    assert decompose(captured.program) is captured.program or decompose(captured.program) == captured.program
    assert any(n.op == "FusedBatchNormV3" for n in decompose(captured.program).nodes)


def test_unknown_batch_is_refused() -> None:
    from dataclasses import replace

    from whale.ir.values import TensorType

    program = capture_function(_step("FusedBatchNormV3", "float32", 1.0), _arguments(1.0)).program
    loose = program.replace_nodes(
        tuple(
            replace(n, outputs=tuple(TensorType(t.dtype, (None, 3, 5, 6)) for t in n.outputs))
            if n.op == "Placeholder" and len(n.outputs[0].shape) == 4
            else n
            for n in program.nodes
        )
    )
    with pytest.raises(ProgramError, match="unknown size"):
        decompose(loose)
