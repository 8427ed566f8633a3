"""Computes losses and top-k accuracy over very many classes, which ``wh.split`` shards.

The functions are plain TensorFlow. Under ``with wh.split():`` neither logits nor weights are gathered; ranks exchange
only features, labels, and a few numbers per row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from whale.errors import ProgramError

Margin = Callable[[tf.Tensor], tf.Tensor]


def arcface(
    features: tf.Tensor, weights: Any, labels: tf.Tensor,
    margin: float = 0.5, scale: float = 64.0, label_smoothing: float = 0.0,
) -> tf.Tensor:  # fmt: skip
    """Returns the additive angular margin loss of each row, [rows] (Deng et al., "ArcFace", 2019).

    Args:
      features: [rows, width], normalised here.
      weights: [width, classes], normalised here.
      labels: class indices, [rows].
      margin: angle in radians that is added to the angle between a row and its class.
      scale: factor on the cosines before the softmax.
      label_smoothing: share of the loss that is spread over all classes; 0: none.
    """
    return _compute_margin_loss(features, weights, labels, _make_angular_margin(margin), scale, label_smoothing)


def cosface(
    features: tf.Tensor, weights: Any, labels: tf.Tensor,
    margin: float = 0.35, scale: float = 64.0, label_smoothing: float = 0.0,
) -> tf.Tensor:  # fmt: skip
    """Returns the additive cosine margin loss of each row, [rows] (Wang et al., "CosFace", 2018).

    The arguments are those of ``arcface``, but ``margin`` is subtracted from the cosine.
    """
    return _compute_margin_loss(features, weights, labels, lambda near: near - margin, scale, label_smoothing)


def curricularface(
    features: tf.Tensor, weights: Any, labels: tf.Tensor, average: tf.Variable,
    margin: float = 0.5, scale: float = 64.0, momentum: float = 0.99,
) -> tf.Tensor:  # fmt: skip
    """Returns the CurricularFace loss of each row, [rows] (Huang et al., "CurricularFace", 2020).

    The weight of hard negatives grows during training. The arguments are those of ``arcface``, and:

    Args:
      average: a scalar, non-trainable variable, initially 0, which this function updates: the moving average of the
        cosine between rows and their classes.
      momentum: decay of this average.
    """
    near = _compute_cosine(features, weights)
    at = _find_places(labels)
    own = tf.gather_nd(near, at)
    target = _make_angular_margin(margin)(own)
    average.assign(momentum * average + (1 - momentum) * tf.reduce_mean(tf.stop_gradient(own)))
    hard = near > tf.stop_gradient(target)[:, None]
    logits = tf.where(hard, near * (tf.stop_gradient(tf.identity(average)) + near), near)
    logits = scale * tf.tensor_scatter_nd_update(logits, at, target)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)


def partial_fc(
    features: tf.Tensor, weights: Any, labels: tf.Tensor, sample: int, seed: Any,
    margin: float = 0.5, scale: float = 64.0, blocks: int = 8,
) -> tf.Tensor:  # fmt: skip
    """Returns the ArcFace loss of each row, [rows], over a sample of the classes.

    The sample consists of the classes of the batch, and of random ones that are drawn anew in each step. The classes
    are divided into ``blocks`` blocks, and the same number is sampled from each. Each rank samples from the blocks that
    it holds, so the sample depends on the seed only, not on the number of ranks. Source: An et al., "Partial FC", 2021.

    Args:
      features: [rows, width], normalised here.
      weights: [classes, width], or [blocks, classes per block, width]; normalised here.
      labels: class indices, [rows].
      sample: number of sampled classes in total; per block at least min(rows, classes per block).
      seed: two integers that differ in each step: ``[7, step]``.
      margin, scale: as for ``arcface``.
      blocks: number of blocks: a multiple of the number of ranks, and a divisor of the number of classes. Ignored if
        ``weights`` has a dimension of blocks.

    Raises:
      ProgramError: ``blocks`` does not divide the classes, or ``sample`` is too small to hold all classes of the batch.
    """
    table = tf.convert_to_tensor(weights)
    rows, width = features.shape[0], features.shape[-1]
    if table.shape.rank == 3:
        blocks = table.shape[0]
    else:
        _check(
            table.shape[0] % blocks == 0,
            f"{table.shape[0]} classes, blocks={blocks}",
            "blocks that divide the number of classes",
        )
        table = tf.reshape(table, [blocks, table.shape[0] // blocks, width])
    each, taken = table.shape[1], sample // blocks
    _check(
        rows is not None and min(rows, each) <= taken <= each,
        f"sample={sample} in {blocks} blocks of {each} classes, {rows} rows",
        f"sample from {blocks * min(rows or each, each)} to {blocks * each}",
    )
    drawn = tf.random.stateless_uniform([blocks, each], seed)
    ones = tf.ones([rows], drawn.dtype)
    wanted = tf.scatter_nd(tf.cast(labels, tf.int32)[:, None], ones, [blocks * each])
    wanted = tf.reshape(wanted, [blocks, each])
    chosen = tf.math.top_k(tf.where(wanted > 0, 2.0, drawn), taken, sorted=False).indices
    numbers = chosen + each * tf.range(blocks)[:, None]
    some = tf.nn.l2_normalize(tf.gather(table, chosen, batch_dims=1), -1)
    near = tf.einsum("rw,bcw->rbc", tf.nn.l2_normalize(features, -1), some)
    own = tf.equal(numbers[None], tf.cast(labels, tf.int32)[:, None, None])
    logits = scale * tf.where(own, _make_angular_margin(margin)(near), near)
    target = tf.reduce_sum(tf.where(own, logits, tf.zeros([], logits.dtype)), [1, 2])
    return tf.reduce_logsumexp(logits, [1, 2]) - target


def top_k_accuracy(logits: tf.Tensor, labels: tf.Tensor, k: int = 5) -> tf.Tensor:
    """Returns, for each row, 1 if its class is among the ``k`` largest logits, else 0, as ``tf.math.in_top_k`` does.

    Counts larger logits instead of sorting, so that sharded logits are not gathered.

    Args:
      logits: [rows, classes].
      labels: class indices, [rows].

    Returns:
      [rows], of the dtype of ``logits``.
    """
    own = tf.gather_nd(logits, _find_places(labels))
    above = tf.reduce_sum(tf.cast(logits > own[:, None], tf.int32), -1)
    return tf.cast(above < k, logits.dtype)


def _compute_margin_loss(
    features: tf.Tensor, weights: Any, labels: tf.Tensor, margin: Margin, scale: float, label_smoothing: float
) -> tf.Tensor:
    near = _compute_cosine(features, weights)
    at = _find_places(labels)
    target = margin(tf.gather_nd(near, at))
    logits = scale * tf.tensor_scatter_nd_update(near, at, target)
    loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    if label_smoothing:
        loss += label_smoothing * (scale * target - tf.reduce_mean(logits, -1))
    return loss


def _compute_cosine(features: tf.Tensor, weights: Any) -> tf.Tensor:
    """Returns the cosines [rows, classes] between features and weights.

    The product is divided by the norms of the weights, since a normalised copy of the weights would double their
    memory.
    """
    table = tf.convert_to_tensor(weights)
    norm = tf.maximum(_sum_squares(table), 1e-12)
    return tf.nn.l2_normalize(features, -1) @ table * tf.math.rsqrt(norm)


@tf.custom_gradient
def _sum_squares(table: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    """Returns the sum of squares of each column.

    Its custom gradient allocates one tensor of the size of ``table``, where TensorFlow's allocates three.
    """
    return tf.reduce_sum(tf.square(table), 0), lambda slope: 2.0 * slope * table


def _find_places(labels: tf.Tensor) -> tf.Tensor:
    """Returns, for ``tf.gather_nd``, the index (row, label) at which each row has the logit of its own class, [rows,
    2].
    """
    labels = tf.cast(labels, tf.int32)
    return tf.stack([tf.range(tf.shape(labels)[0]), labels], -1)


def _make_angular_margin(margin: float) -> Margin:
    """Returns a function from cos(angle) to cos(angle + margin).

    Where cos(angle + margin) would rise again, for angles near pi, it continues in a straight line, so that it is
    monotone.
    """
    cosine, sine, turn = math.cos(margin), math.sin(margin), math.cos(math.pi - margin)

    def move_angle(near: tf.Tensor) -> tf.Tensor:
        across = tf.sqrt(tf.maximum(1.0 - near**2, tf.keras.backend.epsilon()))
        return tf.where(near > turn, near * cosine - across * sine, near - margin * sine)

    return move_angle


def _check(good: bool, given: str, expected: str) -> None:
    if not good:
        raise ProgramError(
            "wh.losses.partial_fc cannot sample the classes with these arguments",
            given=given,
            expected=expected,
            action="change the arguments sample or blocks of wh.losses.partial_fc",
        )
