"""Builds layers of TensorFlow's ops, on weights made elsewhere: eager variables, or those of a graph, which hold
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import tensorflow as tf

Weight = Callable[[str, Sequence[int]], tf.Tensor]
Scope = Callable[[], AbstractContextManager[None]]


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
    """Computes multi-head attention; to another sequence where ``memory`` is given. Its scores are computed under
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
    """Computes a mixture of experts with one expert a token (Switch Transformer); tokens beyond its capacity are left
    out.
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
