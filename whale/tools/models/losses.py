"""Computes a described model's loss from a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from whale.runtime.scopes import enter_path, mark_held, mark_recomputed
from whale.tools.models import families as f

Weight = Callable[[str, Sequence[int]], tf.Tensor]
Scope = Callable[[], AbstractContextManager[None]]

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
    if isinstance(d, f.Bert):
        words = ((d.batch, d.predicted), "int32")
        return {"tokens": ((d.batch, d.sequence), "int32"), "positions": words, "labels": words}
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
    if isinstance(d, f.Bert):
        hidden = tf.gather(hidden, batch["positions"], batch_dims=1)
    flat = tf.reshape(hidden, (-1, d.hidden))
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


# Builds layers of TensorFlow's ops, on weights made elsewhere: eager variables, or those of a graph, which hold
# nothing.
def dense(weight: Weight, name: str, x: tf.Tensor, width: int) -> tf.Tensor:
    """Multiplies the last dimension of rows by a kernel, and adds a bias."""
    shape = x.shape.as_list()
    flat = tf.reshape(x, (-1, shape[-1])) if len(shape) > 2 else x
    flat = tf.nn.bias_add(
        tf.matmul(flat, weight(f"{name}/kernel", (shape[-1], width))), weight(f"{name}/bias", (width,))
    )
    return tf.reshape(flat, (*shape[:-1], width)) if len(shape) > 2 else flat


def norm(weight: Weight, name: str, x: tf.Tensor) -> tf.Tensor:
    """Applies layer normalisation, with scale and shift."""
    width = x.shape[-1]
    mean = tf.reduce_mean(x, -1, keepdims=True)
    centred = x - mean
    variance = tf.reduce_mean(tf.square(centred), -1, keepdims=True)
    return centred * tf.math.rsqrt(variance + 1e-5) * weight(f"{name}/scale", (width,)) + weight(
        f"{name}/shift", (width,)
    )


def attention(
    weight: Weight,
    name: str,
    x: tf.Tensor,
    heads: int,
    causal: bool = False,
    memory: tf.Tensor | None = None,
    core: Scope = nullcontext,
) -> tf.Tensor:
    """Computes multi-head attention; to the sequence ``memory``, if given. Its scores are computed under
    ``core``.
    """
    rows, length, width = x.shape.as_list()
    size = width // heads

    def split_heads(t: tf.Tensor, count: int) -> list[tf.Tensor]:
        # Head by head, as Megatron-LM's weights lie: whoever has a run of columns has whole heads.
        split = tf.reshape(t, (rows, t.shape[1], heads, count, size))
        return [tf.transpose(part, (0, 2, 1, 3)) for part in tf.unstack(split, axis=3)]

    if memory is None:
        query, key, value = split_heads(dense(weight, f"{name}/qkv", x, 3 * width), 3)
    else:
        (query,) = split_heads(dense(weight, f"{name}/q", x, width), 1)
        key, value = split_heads(dense(weight, f"{name}/kv", memory, 2 * width), 2)
    with core():
        scores = tf.matmul(query, key, transpose_b=True) * tf.constant(size**-0.5, x.dtype)
        if causal:
            scores += tf.constant(_mask(length), x.dtype)
        shares = tf.nn.softmax(scores)
    mixed = tf.matmul(shares, value)
    return dense(weight, f"{name}/out", tf.reshape(tf.transpose(mixed, (0, 2, 1, 3)), (rows, length, width)), width)


def _mask(length: int) -> list[list[float]]:
    return [[0.0 if column <= row else -1e4 for column in range(length)] for row in range(length)]


def feed_forward(
    weight: Weight, name: str, x: tf.Tensor, inner: int, activation: Callable[..., tf.Tensor]
) -> tf.Tensor:
    """Computes two products with an activation between."""
    return dense(weight, f"{name}/out", activation(dense(weight, f"{name}/in", x, inner)), x.shape[-1])


def experts(weight: Weight, name: str, x: tf.Tensor, inner: int, count: int, capacity: float) -> tf.Tensor:
    """Computes a mixture of experts with one expert per token (Switch Transformer); tokens beyond its capacity are
    dropped.
    """
    rows, length, width = x.shape.as_list()
    tokens = rows * length
    places = max(1, round(capacity * tokens / count))
    flat = tf.reshape(x, (tokens, width))
    gates = tf.nn.softmax(tf.matmul(flat, weight(f"{name}/gate", (width, count))))
    chosen = tf.one_hot(tf.argmax(gates, -1), count, dtype=x.dtype)
    position = tf.cast(tf.reduce_sum((tf.cumsum(chosen, exclusive=True)) * chosen, -1), tf.int32)
    sent = chosen[:, :, None] * tf.one_hot(position, places, dtype=x.dtype)[:, None, :]
    taken = tf.einsum("tec,td->ecd", sent, flat)
    hidden = tf.nn.gelu(tf.matmul(taken, weight(f"{name}/in", (count, width, inner))))
    made = tf.matmul(hidden, weight(f"{name}/out", (count, inner, width)))
    mixed = tf.einsum("tec,ecd->td", sent, made) * tf.reduce_sum(gates * chosen, -1, keepdims=True)
    return tf.reshape(mixed, (rows, length, width))


def convolution(weight: Weight, name: str, x: tf.Tensor, width: int, size: int, stride: int = 1) -> tf.Tensor:
    """Computes a convolution without bias, and the batch normalisation behind it."""
    kernel = weight(f"{name}/kernel", (size, size, x.shape[-1], width))
    x = tf.nn.conv2d(x, kernel, stride, "SAME")
    found = tf.compat.v1.nn.fused_batch_norm(
        x, weight(f"{name}/scale", (width,)), weight(f"{name}/shift", (width,)), epsilon=1e-5, is_training=True
    )
    return found[0]


def bottleneck(weight: Weight, name: str, x: tf.Tensor, width: int, stride: int) -> tf.Tensor:
    """Computes three convolutions, and adds their input."""
    kept = x
    if x.shape[-1] != 4 * width or stride > 1:
        kept = convolution(weight, f"{name}/kept", x, 4 * width, 1, stride)
    y = tf.nn.relu(convolution(weight, f"{name}/1", x, width, 1))
    y = tf.nn.relu(convolution(weight, f"{name}/2", y, width, 3, stride))
    return tf.nn.relu(convolution(weight, f"{name}/3", y, 4 * width, 1) + kept)
