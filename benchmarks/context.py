"""Context parallel attention: peak bytes of each rank and bytes of each layer, beside their formulas.

    python benchmarks/context.py                predicted peaks, planned bytes: 1, 2, 4, 8 ranks
    python benchmarks/context.py --measure      beside them the peak of the rank that allocates most, in processes

One sequence is divided on every layer (``wh.split(context=1)``). With ``--heads`` fewer than ranks keys and values go
round; else parts of the sequence are given for heads. ``--sequence`` is that of all ranks together; ``--each`` that of
each rank, so that the whole grows with the ranks. ``--limit`` is ``memory.limit_bytes``: what does not fit is
refused. What is measured are pieces of 256 KiB and more: activations and scores should be as large.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

import whale as wh
from whale.errors import WhaleError
from whale.python import environment

OF_RANKS = "--of-ranks"  # what the processes of a run are told, which measure
STEPS = 3


def heads_bytes(ranks: int, tensor_bytes: int) -> int:
    """What a layer moves where parts of the sequence are given for heads: q, k, v and the result, and back.

    Eight all-to-alls of (p-1)/p T (Jacobs et al., "DeepSpeed Ulysses", 2023, section 3.2).
    """
    return 8 * (ranks - 1) * tensor_bytes // ranks


def ring_bytes(ranks: int, tensor_bytes: int) -> int:
    """What a layer moves where keys and values go round: both to all others, forward and backward, and their gradients.

    (p-1) 2T forward and (p-1) 4T backward (Liu, Zaharia and Abbeel, "Ring Attention", 2023).
    """
    return 6 * (ranks - 1) * tensor_bytes


class Model:
    """Causal attention with normalisations and residual sums.

    Args:
      shape: (rows, sequence, heads, size of a head).
      form: how the products are written: "matmul", "einsum", "dense" (flattened), "where" (a mask of infinities).
    """

    def __init__(
        self, function: Callable[..., Any], scope: Any, shape: tuple[int, int, int, int], layers: int = 1,
        form: str = "matmul", dtype: str = "float64",
    ):  # fmt: skip
        draw = np.random.default_rng(0)
        rows, length, heads, size = shape
        width = heads * size
        self.shape, self.dtype = (rows, length, width), dtype
        self.weights = [[tf.Variable(draw.normal(size=(width, width)) * width**-0.5, dtype=dtype, name=f"{kind}{i}")
                         for kind in "qkvo"] for i in range(layers)]  # fmt: skip
        self.scales = [tf.Variable(np.ones(width), dtype=dtype, name=f"scale{i}") for i in range(layers)]
        self.variables = [v for layer in self.weights for v in layer] + self.scales

        def product(x: tf.Tensor, w: tf.Variable) -> tf.Tensor:
            if form == "dense":
                return tf.reshape(tf.reshape(x, (-1, width)) @ w, (rows, length, width))
            return tf.einsum("bsf,fg->bsg", x, w)

        def parted(x: tf.Tensor) -> tf.Tensor:
            return tf.transpose(tf.reshape(x, (rows, length, heads, size)), (0, 2, 1, 3))

        def attention(x: tf.Tensor, q: tf.Variable, k: tf.Variable, v: tf.Variable, o: tf.Variable) -> tf.Tensor:
            query, key, value = parted(product(x, q)), parted(product(x, k)), parted(product(x, v))
            if form == "einsum":
                scores = tf.einsum("bhsd,bhtd->bhst", query, key) * size**-0.5
            else:
                scores = tf.matmul(query, key, transpose_b=True) / np.sqrt(size)
            place = tf.range(length)
            seen = place[:, None] >= place[None, :]
            if form == "where":
                scores = tf.where(seen, scores, tf.constant(-np.inf, dtype))
            else:
                scores += (1 - tf.cast(seen, dtype)) * tf.constant(-1e9, dtype)
            shares = tf.nn.softmax(scores)
            mixed = tf.einsum("bhst,bhtd->bhsd", shares, value) if form == "einsum" else tf.matmul(shares, value)
            return product(tf.reshape(tf.transpose(mixed, (0, 2, 1, 3)), (rows, length, width)), o)

        def loss(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            for weights, scale in zip(self.weights, self.scales):
                centred = x - tf.reduce_mean(x, -1, keepdims=True)
                normed = centred * tf.math.rsqrt(tf.reduce_mean(centred * centred, -1, keepdims=True) + 1e-5)
                x += attention(normed * scale, *weights)
            return tf.reduce_mean((x - y) ** 2)

        def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape, scope():
                found = loss(x, y)
            for v, slope in zip(self.variables, tape.gradient(found, self.variables)):
                v.assign_sub(0.1 * slope)
            return found

        self.step = function(step)

    @property
    def bytes(self) -> int:
        """Of an activation between layers."""
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize

    def batch(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and what they are compared with."""
        draw = np.random.default_rng(number)
        return draw.normal(size=self.shape).astype(self.dtype), draw.normal(size=self.shape).astype(self.dtype)


def main() -> None:
    """Prints the table, or what this run measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--each", type=int, default=0)
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument(
        "--form", default="where", help="where: a mask of infinities; matmul, einsum: one that is added"
    )
    parser.add_argument("--limit", type=int, default=0, help="memory.limit_bytes of a rank")
    parser.add_argument("--scores", type=int, help="memory.attention_scores_bytes: with more, in blocks of queries")
    parser.add_argument("--measure", action="store_true", help="run it, and ask TensorFlow's allocators")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument(OF_RANKS, action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.of_ranks:
        wh.init(_config(asked))
        _measured(asked, wh.size())
        return
    peaks = " ".join(f"{of:>9} {'x ranks':>8}" for of in ("peak MiB", *(["measured"] if asked.measure else [])))
    print(f"{'sequence':>8} {'ranks':>5} {peaks} {'MiB a layer':>12} {'formula':>9}  what")
    for ranks in asked.ranks:
        wh.init({"communication.in_process_ranks": ranks, **_config(asked)})
        try:
            print(_line(asked, ranks), flush=True)
        except WhaleError as refused:
            print(
                f"{asked.each * ranks or asked.sequence:8} {ranks:5} refused: {str(refused).splitlines()[0]}",
                flush=True,
            )
        finally:
            wh.shutdown()


def _config(asked: argparse.Namespace) -> dict[str, Any]:
    given = {"memory.limit_bytes": asked.limit or None, "memory.attention_scores_bytes": asked.scores}
    return {key: value for key, value in given.items() if value is not None}


def _model(asked: argparse.Namespace, ranks: int) -> Model:
    scope = partial(wh.split, context=1) if ranks > 1 else contextlib.nullcontext
    shape = 1, asked.each * ranks or asked.sequence, asked.heads, asked.size
    return Model(wh.function, scope, shape, asked.layers, asked.form, "float32")


def _line(asked: argparse.Namespace, ranks: int) -> str:
    from whale.ir.layout import Partial

    model = _model(asked, ranks)
    plan = wh.plan(model.step, *model.batch(0))
    peak = max(map(sum, zip(*plan.memory.values())))
    exchanged = [r for r in plan.reshards if not isinstance(r.source, Partial)]
    round_ = any(r.source == r.target for r in exchanged)
    moved = sum(r.bytes for r in exchanged) / asked.layers
    formula = (ring_bytes if round_ else heads_bytes)(ranks, model.bytes)
    what = "keys and values go round" if round_ else "heads for the sequence" if ranks > 1 else "one device"
    mib = 2**20
    peaks = [peak / mib, *([_of_processes(ranks)] if asked.measure else [])]
    each = " ".join(f"{n:9.1f} {n * ranks:8.1f}" for n in peaks)
    return f"{model.shape[1]:8} {ranks:5} {each} {moved / mib:12.2f} {formula / mib:9.2f}  {what}"


def _of_processes(ranks: int) -> float:
    """MiB that the rank with most of them had allocated at once, of a run of processes with the arguments of this one.

    Raises:
      CalledProcessError: it failed.
    """
    command = [sys.executable, "-m", "whale", "run", "-np", str(ranks), __file__, OF_RANKS, *sys.argv[1:]]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    found = [float(text) for text in re.findall(r"([\d.]+) MiB at most", done.stdout)]
    assert len(found) == ranks, done.stdout + done.stderr
    return max(found)


def _measured(asked: argparse.Namespace, ranks: int) -> None:
    from whale_ops.memory import read_memory, reset_peak

    model = _model(asked, ranks)
    for i in range(STEPS):
        model.step(*model.batch(i))
        if i == 0:
            reset_peak()  # of steps as they repeat: tracing and planning are over
    print(f"rank {wh.rank()} of {ranks}: {read_memory().peak_bytes / 2**20:.1f} MiB at most were allocated", flush=True)


if __name__ == "__main__":
    main()
