"""One small program with some features, on eight ranks of this process, beside the same program on one device."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import tensorflow as tf

import whale as wh
from tests.combinations.features import RANKS, Feature, mesh_of
from whale.errors import WhaleError
from whale.runtime.run.start import check_replicas

ROWS, WIDTH, STEPS, RATE, MOMENTUM = 32, 8, 2, 0.5, 0.5  # numbers that float32 has as well
LAYERS = 8
Scopes = Callable[[int], Any]
Values = dict[str, np.ndarray]


class Net(tf.Module):
    """Eight layers; a loop, a branch or an attention in place of some of them."""

    def __init__(self, marks: frozenset[str], dtype: str) -> None:
        draw = np.random.default_rng(3)
        self.marks = marks
        shapes = [(WIDTH, WIDTH)] * LAYERS
        self.weights = [tf.Variable(draw.normal(size=s) * 0.4, dtype=dtype, name=f"w{i}") for i, s in enumerate(shapes)]
        self.slots = [tf.Variable(tf.zeros_like(w), trainable=False, name=f"m{i}") for i, w in enumerate(self.weights)]

    def layer(self, i: int, h: tf.Tensor) -> tf.Tensor:
        w = self.weights[i]
        if "loop" in self.marks and i == 1:
            turn = lambda n, s: (n + 1, tf.tanh(s @ w))  # noqa: E731
            return tf.while_loop(lambda n, s: n < 2, turn, (0, h))[1]
        if "branch" in self.marks and i == 3:
            return tf.cond(tf.reduce_sum(w) > 100.0, lambda: tf.nn.relu(h @ w), lambda: tf.tanh(h @ w))
        if "attention" in self.marks and i == 5:
            scores = tf.nn.softmax(tf.matmul(h @ w, h, transpose_b=True))
            return h + tf.matmul(scores, h)
        return tf.tanh(h @ w)

    def loss(self, x: tf.Tensor, y: tf.Tensor, scope: Scopes) -> tf.Tensor:
        h, loss = x, None
        for stage, layers in stages_of(self.marks):
            with stage():
                for i in layers:
                    with scope(i):
                        h = self.layer(i, h)
                    if "checkpoint" in self.marks and i % 2 and i < LAYERS - 1:
                        h = wh.checkpoint(h)
                if layers[-1] == LAYERS - 1:
                    loss = tf.reduce_mean((h - y) ** 2)
        return loss

    def update(self, x: tf.Tensor, y: tf.Tensor, scope: Scopes) -> tf.Tensor:
        """One step of gradient descent with momentum."""
        with tf.GradientTape() as tape:
            loss = self.loss(x, y, scope)
        for w, m, slope in zip(self.weights, self.slots, tape.gradient(loss, self.weights)):
            m.assign(MOMENTUM * m + slope)
            w.assign_sub(RATE * m)
        return loss


def batches(marks: frozenset[str], dtype: str) -> list[tuple[np.ndarray, np.ndarray]]:
    draw = np.random.default_rng(5)
    shape = (ROWS, 4, WIDTH) if "attention" in marks else (ROWS, WIDTH)
    return [(draw.normal(size=shape).astype(dtype), draw.normal(size=shape).astype(dtype)) for _ in range(STEPS)]


def stages_of(marks: frozenset[str]) -> list[tuple[Callable[[], Any], list[int]]]:
    """(scope, layers) of each stage; all layers in none where there are no stages."""
    if "stages" not in marks:
        return [(contextlib.nullcontext, list(range(LAYERS)))]
    devices = [(0, 1, 2, 3), (4, 5), (6, 7)] if "unequal" in marks else []
    count = len(devices) or (4 if marks & {"chunks", "four"} else 2)
    parts = [list(map(int, part)) for part in np.array_split(np.arange(LAYERS), count)]
    return [(partial(wh.stage, devices=devices[k]) if devices else wh.stage, part) for k, part in enumerate(parts)]


def scopes_of(marks: frozenset[str]) -> Scopes:
    """The split scope of each layer, if any."""

    @contextlib.contextmanager
    def scope(i: int) -> Any:
        with contextlib.ExitStack() as stack:
            if "tensor" in marks and i in (0, 2, 4, 6):
                stack.enter_context(wh.split())
            if "sequence" in marks and 4 <= i <= 6:
                stack.enter_context(wh.split(sequence=1))
            if "expert" in marks and i == 7:
                stack.enter_context(wh.split(axis="expert"))
            if "devices" in marks and i == 2 and "tensor" not in marks:
                stack.enter_context(wh.split(devices=[0, 1]))
            yield

    return scope


@cache
def alone(marks: frozenset[str], dtype: str) -> Values:
    """Losses and weights after some steps on one device."""
    net, losses = Net(marks, dtype), []
    step = tf.function(lambda x, y: net.update(x, y, lambda i: contextlib.nullcontext()))
    for x, y in batches(marks, dtype):
        losses.append(float(step(tf.constant(x), tf.constant(y))))
    return {"losses": np.array(losses), **{w.name: w.numpy() for w in net.weights}}


def spread(features: Sequence[Feature]) -> tuple[float, str]:
    """The largest difference from one device, and of what.

    Raises:
      WhaleError: the features are refused together.
      AssertionError: the plan divides nothing.
    """
    marks = frozenset(itertools.chain.from_iterable(f.marks for f in features))
    marks |= {"four"} if any(f.axes.get("stage") == 4 for f in features) else set()
    dtype = "float32" if any("communication.wire_dtype" in f.config for f in features) else "float64"
    config: dict[str, Any] = {"communication.transport": "in-process", "cluster.ranks": RANKS, "random": "global"}
    for feature in features:
        config.update(feature.config)
    config["mesh"] = mesh_of(features)
    programs = frozenset(marks & {"loop", "branch", "attention"})
    wanted = alone(programs, dtype)
    wh.init(config)
    try:
        found = _in_session(marks, dtype) if "session" in marks else _in_function(marks, dtype)
    finally:
        wh.shutdown()
    worst = {name: float(np.max(np.abs(found[name] - value))) for name, value in wanted.items()}
    where = max(worst, key=lambda name: worst[name])
    return worst[where], where


def _in_function(marks: frozenset[str], dtype: str) -> Values:
    net, scope, losses = Net(marks, dtype), scopes_of(marks), []
    data = batches(marks, dtype)
    step = wh.function(lambda x, y: net.update(x, y, scope))
    if "shard" in marks:
        rows = tf.data.Dataset.from_tensor_slices(tuple(np.concatenate(part) for part in zip(*data))).batch(ROWS)
        pairs: Any = wh.shard(rows)
    else:
        pairs = [(tf.constant(x), tf.constant(y)) for x, y in data]
    for number, (x, y) in enumerate(pairs):
        losses.append(float(step(x, y)))
        if number == 0 and "saved" in marks:
            with tempfile.TemporaryDirectory() as folder:
                path = tf.train.Checkpoint(net=net).save(f"{folder}/saved")
                tf.train.Checkpoint(net=net).restore(path)
    plan = next(iter(step._steps.values())).compiled.plan
    assert plan.logical_bytes > 0 or marks >= {"auto"}, "nothing is divided"
    check_replicas()
    return {"losses": np.array(losses), **{w.name: w.numpy() for w in net.weights}}


def _in_session(marks: frozenset[str], dtype: str) -> Values:
    data = batches(marks, dtype)
    with tf.Graph().as_default() as graph:
        net = Net(marks, dtype)
        x, y = (tf.compat.v1.placeholder(dtype, part.shape) for part in data[0])
        loss = net.loss(x, y, scopes_of(marks))
        train = tf.compat.v1.train.MomentumOptimizer(RATE, MOMENTUM).minimize(loss, var_list=net.weights)
        with wh.Session(graph=graph) as session:
            session.run(tf.compat.v1.global_variables_initializer())
            losses = [session.run([loss, train], {x: a, y: b})[0] for a, b in data]
            weights = dict(zip((w.name for w in net.weights), session.run(net.weights)))
    return {"losses": np.array(losses), **weights}


def outcome(features: Sequence[Feature]) -> tuple[str, str]:
    """("equal", figure), ("refused", why) or ("WRONG", what)."""
    limit = max(f.limit for f in features)
    try:
        error, where = spread(features)
    except WhaleError as refused:
        return "refused", str(refused)
    except Exception as wrong:
        return "WRONG", f"{type(wrong).__name__}: {str(wrong)[:300]}"
    return ("equal", f"{error:.1e}") if error <= limit else ("WRONG", f"{where} differs by {error:.1e}")
