"""A GPT in float64, as one device trains it and as one rank of eight does; and the bytes that the ranks must move.

The vocabulary, the heads and the hidden units are divided over ``tensor``, the layers over ``stage``, the rows over
``data``.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import whale as wh

STEPS, RATE = 2, 0.1
MESH = wh.Mesh(stage=2, data=2, tensor=2)
# Schedule -> its name in the configuration, and how many stages the program has.
SCHEDULES = {"gpipe": ("gpipe", 2), "1f1b": ("1f1b", 2), "zb-h1": ("zb-h1", 2), "interleaved": ("1f1b", 4)}


@dataclass(frozen=True)
class Sizes:
    """Of a model and its batch; micro-batches are four."""

    rows: int = 16
    length: int = 16
    width: int = 32
    heads: int = 4
    words: int = 64
    layers: int = 4
    micro_batches: int = 4
    experts: int = 0  # of each layer, in the place of its feed-forward network


class Gpt:
    """A decoder with pre-normalised blocks, as a tf.Module would have it."""

    def __init__(self, sizes: Sizes):
        self.sizes, d = sizes, sizes.width
        values = np.random.default_rng(0)

        def weight(name: str, *shape: int) -> tf.Variable:
            return tf.Variable(values.standard_normal(shape) * 0.2, name=name)

        self.table = weight("table", sizes.words, d)
        self.positions = weight("positions", sizes.length, d)
        self.blocks = [
            {
                "norm": [tf.Variable(np.ones(d)), tf.Variable(np.zeros(d))],
                "query": weight("query", d, d),
                "key": weight("key", d, d),
                "value": weight("value", d, d),
                "out": weight("out", d, d),
                "norm_2": [tf.Variable(np.ones(d)), tf.Variable(np.zeros(d))],
                **(
                    {
                        "router": weight("router", d, sizes.experts),
                        "up": weight("up", sizes.experts, d, 4 * d),
                        "down": weight("down", sizes.experts, 4 * d, d),
                    }
                    if sizes.experts
                    else {"up": weight("up", d, 4 * d), "down": weight("down", 4 * d, d)}
                ),
            }
            for _ in range(sizes.layers)
        ]
        self.head = weight("head", d, sizes.words)

    @property
    def variables(self) -> list[tf.Variable]:
        """All weights, in a fixed order."""
        return [self.table, self.positions, *tf.nest.flatten(self.blocks), self.head]

    def loss(self, tokens: tf.Tensor, following: tf.Tensor, stages: int, stage: Any, split: Any) -> tf.Tensor:
        """Mean cross entropy; tokens and what follows them are int32 [rows, length]."""
        h: Any = None
        groups = np.array_split(np.arange(self.sizes.layers), stages)
        for group in groups:
            with stage():
                if group is groups[0]:
                    with split():
                        h = tf.gather(self.table, tokens)
                    h += self.positions
                for i in group:
                    h = self._block(h, self.blocks[i], split)
                if group is groups[-1]:
                    with split():
                        logits = h @ self.head
                        each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=following, logits=logits)
                    return tf.reduce_mean(each)
        raise AssertionError("no stages")

    def _block(self, h: tf.Tensor, w: dict[str, Any], split: Any) -> tf.Tensor:
        normed = _normed(h, *w["norm"])
        with split():
            rows, length, heads = tf.shape(h)[0], self.sizes.length, self.sizes.heads

            def of_heads(weight: tf.Variable) -> tf.Tensor:
                parts = tf.reshape(normed @ weight, [rows, length, heads, self.sizes.width // heads])
                return tf.transpose(parts, [0, 2, 1, 3])

            scores = tf.matmul(of_heads(w["query"]), of_heads(w["key"]), transpose_b=True)
            mask = np.triu(np.full((length, length), -1e9), 1)
            mixed = tf.matmul(tf.nn.softmax(scores * (self.sizes.width // heads) ** -0.5 + mask), of_heads(w["value"]))
            attended = tf.reshape(tf.transpose(mixed, [0, 2, 1, 3]), [rows, length, self.sizes.width]) @ w["out"]
        h += attended
        normed = _normed(h, *w["norm_2"])
        if self.sizes.experts:
            return h + self._apply_experts(normed, w)
        with split():
            moved = tf.nn.gelu(normed @ w["up"]) @ w["down"]
        return h + moved

    def _apply_experts(self, h: tf.Tensor, w: dict[str, Any]) -> tf.Tensor:
        """The expert of each token by its router; a row is a group, of which each expert has room for all tokens."""
        chances = tf.nn.softmax(h @ w["router"])
        one = tf.one_hot(tf.argmax(chances, -1), self.sizes.experts, dtype=h.dtype)  # [rows, length, experts]
        slot = tf.cast(tf.reduce_sum((tf.cumsum(one, 1) - 1) * one, -1), tf.int32)
        places = one[..., None] * tf.one_hot(slot, self.sizes.length, dtype=h.dtype)[:, :, None, :]
        sent = tf.einsum("rlec,rld->recd", places, h)
        applied = tf.einsum("rech,ehd->recd", tf.nn.gelu(tf.einsum("recd,edh->rech", sent, w["up"])), w["down"])
        return tf.einsum("rlec,recd->rld", places * (chances * one)[..., None], applied)


def _normed(h: tf.Tensor, scale: tf.Variable, shift: tf.Variable) -> tf.Tensor:
    mean, variance = tf.nn.moments(h, [-1], keepdims=True)
    return (h - mean) * tf.math.rsqrt(variance + 1e-5) * scale + shift


def trained(sizes: Sizes, stages: int, stage: Any, split: Any, function: Any) -> tuple[dict[str, np.ndarray], Any]:
    """Losses and weights after some steps of SGD, and the step."""
    model = Gpt(sizes)

    @function
    def step(tokens: tf.Tensor, following: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = model.loss(tokens, following, stages, stage, split)
        for variable, slope in zip(model.variables, tape.gradient(loss, model.variables)):
            variable.assign_sub(RATE * tf.convert_to_tensor(slope))
        return loss

    generator = np.random.default_rng(1)
    found = {}
    for i in range(STEPS):
        words = generator.integers(0, sizes.words, (sizes.rows, sizes.length + 1)).astype(np.int32)
        found[f"loss {i}"] = step(tf.constant(words[:, :-1]), tf.constant(words[:, 1:])).numpy()
    return found | {f"{i} {v.name}": v.numpy() for i, v in enumerate(model.variables)}, step


def formulas(sizes: Sizes, stages: int) -> dict[str, int]:
    """Logical bytes of a step, all ranks together, that the layers need on each axis.

    tensor: of each layer two sums forward and two backward (Megatron-LM, arXiv:1909.08053, section 3), one for the
    embedding, one for the slope of the head, and of the loss three numbers a token (largest logit, sum, own logit).
    data: one sum of each gradient, and the loss. stage: the activations and their slopes, at each border, and the loss
    for the ranks of the first stage.
    """
    tokens = sizes.rows * sizes.length
    activation = 8 * tokens * sizes.width
    of_layer = 8 * (12 * sizes.width**2 + 4 * sizes.width)
    ends = 8 * (2 * sizes.words + sizes.length) * sizes.width
    halves = MESH["tensor"]
    whole = 8 * (4 * sizes.width * sizes.layers + sizes.length * sizes.width)  # norms, positions: on each tensor rank
    gradients = sizes.layers * of_layer + ends + (halves - 1) * whole
    return {
        "tensor": 2 * (halves - 1) * (activation * (4 * sizes.layers + 2) + 3 * 8 * tokens),
        "data": 2 * (MESH["data"] - 1) * (gradients + 8 * halves),
        "stage": 2 * (stages - 1) * activation * halves + 8 * MESH["data"] * halves,
    }


def moved_by_axis(program: Any, rank: int) -> dict[str, int]:
    """This rank's part of the logical bytes of a step, by the axis along which they travel."""
    from cost_model.graph.traffic import exchange
    from whale.ir.ops import EXCHANGES
    from whale.ir.program import iterate_function_refs

    sizes = list(MESH.values())
    found: dict[str, int] = defaultdict(int)

    def count(graph: Any) -> None:
        for node in graph.nodes:
            if node.op in EXCHANGES:
                one = exchange(node, [graph.find_type(r) for r in node.inputs], rank, int(np.prod(sizes)))
                places = np.array(np.unravel_index(one.ranks, sizes))
                differ = [name for name, row in zip(MESH, places) if len(set(row)) > 1]
                found["+".join(differ)] += one.logical_bytes
            for _, function in iterate_function_refs(node):  # of a micro-batch
                count(program.functions[function.name])

    count(program)
    return dict(found)


def main() -> None:
    """One rank: ``gpt_on_ranks.py SCHEDULE FOLDER``."""

    schedule, folder = sys.argv[1:]
    sizes = Sizes()
    name, stages = SCHEDULES[schedule]
    wh.init({"mesh": MESH, "pipeline.schedule": name, "pipeline.micro_batches": sizes.micro_batches})
    found, step = trained(sizes, stages, wh.stage, wh.split, wh.function)
    compiled = next(iter(step._steps.values())).compiled
    rank = wh.rank()
    moved = moved_by_axis(compiled.ranks[0], rank)
    np.savez(Path(folder, f"rank{rank}.npz"), **found, **{f"moved {k}": np.int64(v) for k, v in moved.items()})
    wh.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    main()
