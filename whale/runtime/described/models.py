"""Computes a description's loss: what a training step of its family computes from a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import tensorflow as tf

from whale.runtime.described import families as f
from whale.runtime.described.layers import (
    Scope,
    Weight,
    attention,
    bottleneck,
    convolution,
    dense,
    experts,
    feed_forward,
    norm,
)
from whale.runtime.run.scopes import enter_path, mark_held, mark_recomputed

Batch = Mapping[str, tf.Tensor]


def list_inputs(d: f.Description) -> dict[str, tuple[tuple[int, ...], str]]:
    """Returns name -> (shape, dtype) of the batch's tensors."""
    if isinstance(d, f.Vit | f.Resnet):
        return {"images": ((d.batch, d.image, d.image, 3), d.dtype), "labels": ((d.batch,), "int32")}
    if isinstance(d, f.Dlrm):
        return {"dense": ((d.batch, d.dense), d.dtype), "ids": ((d.batch, d.tables), "int32"),
                "labels": ((d.batch,), "int32")}  # fmt: skip
    if isinstance(d, f.Classifier):
        return {"features": ((d.batch, d.inputs), d.dtype), "labels": ((d.batch,), "int32")}
    names = ("tokens", "labels", "source") if isinstance(d, f.T5) else ("tokens", "labels")
    return dict.fromkeys(names, ((d.batch, d.sequence), "int32"))


def compute_loss(d: f.Description, weight: Weight, batch: Batch) -> tf.Tensor:
    """Computes the mean loss of the batch."""
    scope = "split_0(sequence=1)" if d.sequence_parallel else "split_0"
    with enter_path(scope) if d.tensor_parallel else nullcontext():
        return _compute_loss(d, weight, batch)


def _compute_loss(d: f.Description, weight: Weight, batch: Batch) -> tf.Tensor:
    if isinstance(d, f.Resnet):
        return _compute_mean(_resnet(d, weight, batch["images"]), batch["labels"])
    if isinstance(d, f.Vit):
        return _compute_mean(_vit(d, weight, batch["images"]), batch["labels"])
    if isinstance(d, f.Dlrm):
        return _compute_mean(_dlrm(d, weight, batch["dense"], batch["ids"]), batch["labels"])
    if isinstance(d, f.Classifier):
        hidden = tf.tanh(dense(weight, "features", batch["features"], d.features))
        with enter_path("split_0") if d.split else nullcontext():
            return _compute_mean(hidden @ weight("classes", (d.features, d.classes)), batch["labels"])
    table = weight("embedding", (d.vocabulary, d.hidden))
    memory = None
    if isinstance(d, f.T5):
        memory = _apply_layers(d, weight, "encoder", _embed(d, weight, table, batch["source"]), False, tf.nn.relu)
    hidden = _embed(d, weight, table, batch["tokens"])
    activation = tf.nn.relu if isinstance(d, f.T5) else tf.nn.gelu
    hidden = _apply_layers(d, weight, "layers", hidden, not isinstance(d, f.Bert), activation, memory)
    flat = tf.reshape(hidden, (d.batch * d.sequence, d.hidden))
    return _compute_mean(tf.matmul(flat, table, transpose_b=True), tf.reshape(batch["labels"], (-1,)))


def _compute_mean(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    logits = tf.cast(logits, tf.float32) if logits.dtype.size < 4 else logits
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))


def _embed(d: Any, weight: Weight, table: tf.Tensor, tokens: tf.Tensor) -> tf.Tensor:
    return tf.gather(table, tokens) + weight("positions", (d.sequence, d.hidden))


def _apply_layers(
    d: Any,
    weight: Weight,
    name: str,
    x: tf.Tensor,
    causal: bool,
    activation: Callable[..., tf.Tensor],
    memory: tf.Tensor | None = None,
) -> tf.Tensor:
    core: Scope = mark_recomputed if d.recompute == "selective" else nullcontext
    for i in range(d.layers):
        at = f"{name}/{i}"
        if d.recompute == "full":
            x = mark_held(x)
        x = x + attention(weight, f"{at}/attention", norm(weight, f"{at}/norm1", x), d.heads, causal, core=core)
        if memory is not None:
            x = x + attention(weight, f"{at}/cross", norm(weight, f"{at}/norm3", x), d.heads, memory=memory, core=core)
        normed = norm(weight, f"{at}/norm2", x)
        if isinstance(d, f.Moe):
            x = x + experts(weight, f"{at}/experts", normed, d.inner, d.experts, d.capacity)
        else:
            x = x + feed_forward(weight, f"{at}/feed_forward", normed, d.inner, activation)
    return norm(weight, f"{name}/norm", x)


def _vit(d: f.Vit, weight: Weight, images: tf.Tensor) -> tf.Tensor:
    kernel = weight("patches/kernel", (d.patch, d.patch, 3, d.hidden))
    patches = tf.nn.conv2d(images, kernel, d.patch, "VALID")
    count = (d.image // d.patch) ** 2
    x = tf.reshape(patches, (d.batch, count, d.hidden)) + weight("positions", (count, d.hidden))
    x = _apply_layers(d, weight, "layers", x, False, tf.nn.gelu)
    return dense(weight, "head", tf.reduce_mean(x, 1), d.classes)


def _resnet(d: f.Resnet, weight: Weight, images: tf.Tensor) -> tf.Tensor:
    x = tf.nn.relu(convolution(weight, "stem", images, d.width, 7, 2))
    x = tf.nn.max_pool2d(x, 3, 2, "SAME")
    for group, blocks in enumerate(d.blocks):
        for block in range(blocks):
            stride = 2 if group and not block else 1
            x = bottleneck(weight, f"group{group}/{block}", x, d.width << group, stride)
    return dense(weight, "head", tf.reduce_mean(x, (1, 2)), d.classes)


def _perceptron(weight: Weight, name: str, x: tf.Tensor, widths: Sequence[int]) -> tf.Tensor:
    for i, width in enumerate(widths):
        x = tf.nn.relu(dense(weight, f"{name}/{i}", x, width))
    return x


def _dlrm(d: f.Dlrm, weight: Weight, features: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    bottom = _perceptron(weight, "bottom", features, [*d.bottom, d.factors])
    with enter_path("split_0(dim=0)") if d.split else nullcontext():
        rows = [tf.gather(weight(f"table{i}", (d.rows, d.factors)), ids[:, i]) for i in range(d.tables)]
    stacked = tf.stack([bottom, *rows], 1)
    products = tf.reshape(tf.matmul(stacked, stacked, transpose_b=True), (d.batch, (d.tables + 1) ** 2))
    return dense(weight, "head", _perceptron(weight, "top", tf.concat([bottom, products], 1), d.top), 2)
