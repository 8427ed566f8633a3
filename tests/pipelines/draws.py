"""Random trainings: layers in random stages, what optimizers and losses have beside them, batches, and a resume.

Where ``tests.pipelines.matrix`` names every layout with two optimizers, a draw combines what users combine: Keras's
optimizers with clipping, moving averages, accumulation and loss scales; losses with masks; branches and loops between
layers; batches of several sizes; unequal shares; ZeRO, recomputation, micro-batches; and training that goes on from a
checkpoint under another plan. Each is compared with the same training on one device, in float64.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import tensorflow as tf

import whale as wh

WIDTH, CLASSES, RATE = 6, 5, 0.05
KINDS = ("dense", "dense", "residual", "norm", "loop", "branch", "noise", "gather")
Scope = Callable[[], Any]
Values = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Plan:
    """Describes how a training, or a part of it, is spread.

    Attributes:
      ranks: how many there are.
      stages: the layer with which each stage begins; (): no stages.
      devices: ranks of each stage; empty: as Whale shares them out.
      split: layers under ``wh.split``.
      config: further keys.
    """

    ranks: int
    stages: tuple[int, ...] = ()
    devices: tuple[tuple[int, ...], ...] = ()
    split: tuple[int, ...] = ()
    config: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        parts = [f"{self.ranks} ranks"]
        parts += [f"stages at {list(self.stages)}"] if self.stages else []
        parts += [f"on {list(map(list, self.devices))}"] if self.devices else []
        parts += [f"split {list(self.split)}"] if self.split else []
        return " ".join([*parts, *(f"{key}={value}" for key, value in self.config)])


@dataclass(frozen=True, slots=True)
class Training:
    """Describes one training that is compared with one device.

    Attributes:
      layers: the kind of each layer.
      loss: see ``Net.loss``.
      optimizer: its class and arguments.
      extras: what the step does beside (see ``make_step``).
      rows: of each step's batch.
      plans: those of the steps before the resume, and after it; one: no resume.
    """

    seed: int
    layers: tuple[str, ...]
    loss: str
    optimizer: tuple[str, tuple[tuple[str, Any], ...]]
    extras: frozenset[str]
    rows: tuple[int, ...]
    plans: tuple[Plan, ...] = field(default_factory=tuple)

    def __str__(self) -> str:
        name, arguments = self.optimizer
        given = ", ".join(f"{key}={value}" for key, value in arguments)
        return (
            f"{self.seed}: {'/'.join(self.layers)}; {self.loss}; {name}({given}); {'+'.join(sorted(self.extras))}; "
            f"rows {list(self.rows)}; {' THEN '.join(map(str, self.plans))}"
        )


def draw_training(seed: int) -> Training:
    """Returns the training that follows from ``seed``."""
    draw = random.Random(seed)
    layers = tuple(draw.choice(KINDS) for _ in range(draw.randint(2, 5)))
    rows = draw.choice([(16, 16, 16, 16), (16, 16, 7, 16), (12, 12, 12, 5), (8, 8, 3, 8), (16, 16, 16, 1)])
    extras = frozenset(
        name
        for name, likelihood in {
            "global norm": 0.25,
            "average": 0.25,
            "accumulated": 0.2,
            "scaled": 0.2,
            "rows": 0.5,
            "norm": 0.4,
            "slopes": 0.3,
            "metric": 0.3,
            "late rate": 0.2,
        }.items()
        if draw.random() < likelihood
    )
    loss = draw.choice(["mean", "masked", "sum", "classes", "mean + side", "mean + decay"])
    plans = [_draw_plan(draw, len(layers), rows[0])]
    if draw.random() < 0.35:
        plans.append(_draw_plan(draw, len(layers), rows[0]))
    return Training(seed, layers, loss, _draw_optimizer(draw, extras), extras, rows, tuple(plans))


def _draw_optimizer(draw: random.Random, extras: frozenset[str]) -> tuple[str, tuple[tuple[str, Any], ...]]:
    name = draw.choice(["SGD", "SGD", "Adam", "Adam", "AdamW", "RMSprop", "Adagrad", "Lion"])
    given: dict[str, Any] = {} if name in ("SGD", "Lion") else {"epsilon": 1e-3}
    if name == "SGD":
        given |= draw.choice([{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}])
    if name == "Adam" and draw.random() < 0.3:
        given["amsgrad"] = True
    given |= draw.choice([{}, {}, {"clipnorm": 0.05}, {"global_clipnorm": 0.1}, {"clipvalue": 0.01}])
    given |= draw.choice([{}, {}, {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2}])
    given |= draw.choice([{}, {}, {}, {"weight_decay": 0.02}]) if name != "AdamW" else {"weight_decay": 0.02}
    if "accumulated" not in extras:
        given |= draw.choice([{}, {}, {}, {"gradient_accumulation_steps": 2}])
    if "scaled" not in extras:
        given |= draw.choice([{}, {}, {}, {"loss_scale_factor": 64.0}])
    return name, tuple(given.items())


def _draw_plan(draw: random.Random, layers: int, rows: int) -> Plan:
    ranks = draw.choice([1, 2, 2, 3, 4, 4, 6])
    stages: tuple[int, ...] = ()
    devices: tuple[tuple[int, ...], ...] = ()
    if draw.random() < 0.7:
        stages = (0, *sorted(draw.sample(range(1, layers), min(layers - 1, draw.choice([1, 1, 1, 2, 3])))))
        if ranks >= len(stages) and draw.random() < 0.3:
            marks = [0, *sorted(draw.sample(range(1, ranks), len(stages) - 1)), ranks]
            devices = tuple(tuple(range(a, b)) for a, b in itertools.pairwise(marks))
    split = tuple(i for i in range(layers) if draw.random() < 0.3) if ranks > 1 and draw.random() < 0.35 else ()
    config: dict[str, Any] = {}
    if draw.random() < 0.6 and (ranks >= len(stages) or len(stages) % ranks == 0):
        config["pipeline.micro_batches"] = draw.choice([2, 2, 3, 4, 7])
        config["pipeline.schedule"] = draw.choice(["1f1b", "1f1b", "gpipe", "zb-h1"]) if stages else "1f1b"
    if draw.random() < 0.4:
        config["memory.zero"] = draw.choice([1, 2, 3])
        config["memory.zero_min_bytes"] = 0
    if draw.random() < 0.25:
        config["memory.recompute"] = "auto"
    if draw.random() < 0.4 and ranks > 1:
        some = draw.choices(range(rows + 1), k=ranks - 1)
        marks = sorted(draw.sample(range(1, rows), ranks - 1) if stages and draw.random() < 0.7 else some)
        config["batch.shares"] = tuple(b - a for a, b in itertools.pairwise([0, *marks, rows]))
    if split and ranks in (4, 6) and not stages and draw.random() < 0.5:
        config["mesh"] = wh.Mesh(data=ranks // 2, tensor=2)
    return Plan(ranks, stages, devices, split, tuple(config.items()))


class Net(tf.Module):
    """Holds the layers, and computes their loss."""

    def __init__(self, training: Training) -> None:
        values = np.random.default_rng(training.seed)
        self.training, self.weights = training, []

        def variable(name: str, *shape: int) -> tf.Variable:
            made = tf.Variable(np.asarray(values.standard_normal(shape) * 0.4), name=name)
            self.weights.append(made)
            return made

        self.table = variable("table", 9, WIDTH) if "gather" in training.layers else None
        self.kernels = [variable(f"kernel{i}", WIDTH, WIDTH) for i in range(len(training.layers))]
        self.biases = [variable(f"bias{i}", WIDTH) for i in range(len(training.layers))]
        self.gates = [variable(f"gate{i}") for i in range(len(training.layers))]  # branches read these numbers
        self.head = variable("head", WIDTH, CLASSES)

    def layer(self, i: int, h: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
        w, b = self.kernels[i], self.biases[i]
        kind = self.training.layers[i]
        if kind == "residual":
            return h + tf.tanh(h @ w + b)
        if kind == "norm":
            mean, variance = tf.nn.moments(h, [-1], keepdims=True)
            return tf.tanh(((h - mean) * tf.math.rsqrt(variance + 0.1)) @ w + b)
        if kind == "loop":
            turn = lambda n, s: (n + 1, tf.tanh(s @ w + b))  # noqa: E731
            return tf.while_loop(lambda n, s: n < 2, turn, (0, h))[1]
        if kind == "branch":
            positive = tf.reduce_sum(w) > 0.0
            return tf.cond(positive, lambda: tf.nn.softplus(h @ w + b), lambda: tf.tanh(h @ w) * self.gates[i] + b)
        if kind == "noise":
            kept = tf.random.stateless_uniform(tf.shape(h), [i, number], dtype=tf.float64) > 0.2
            return tf.tanh(h @ w + b) * tf.cast(kept, tf.float64) / 0.8
        if kind == "gather":
            ids = tf.cast(tf.math.floormod(tf.floor(h[:, 0] * 7.0), 9.0), tf.int32)
            return tf.tanh(h @ w + b) + tf.gather(tf.convert_to_tensor(self.table), ids)
        return tf.tanh(h @ w + b)

    def loss(
        self, x: tf.Tensor, y: tf.Tensor, number: tf.Tensor, stages: Sequence[int], stage: Scope, splits: Sequence[int]
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns (the loss, the last layer's rows)."""
        h, side, kind = x, tf.constant(0.0, tf.float64), self.training.loss
        bounds = [*stages, len(self.kernels)] if stages else [0, len(self.kernels)]
        for first, last in itertools.pairwise(bounds):
            with stage() if stages else contextlib.nullcontext():
                for i in range(first, last):
                    with wh.split() if i in splits else contextlib.nullcontext():
                        h = self.layer(i, h, number)
                    side = 0.1 * tf.reduce_mean(h**2) if i == 0 else side
                if last == len(self.kernels):
                    rows = h @ self.head
                    return self._of_rows(rows, y, kind) + (side if "side" in kind else 0.0), rows
        raise AssertionError("no layer")

    def _of_rows(self, rows: tf.Tensor, y: tf.Tensor, kind: str) -> tf.Tensor:
        if kind == "classes":
            found = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=tf.argmax(y, 1), logits=rows)
            return tf.reduce_mean(found)
        each = tf.reduce_sum((rows - y) ** 2, 1)
        if kind == "masked":
            mask = tf.cast(y[:, 0] > -0.5, tf.float64)
            return tf.reduce_sum(each * mask) / tf.maximum(tf.reduce_sum(mask), 1.0)
        if kind == "sum":
            return tf.reduce_sum(each) / 16.0
        decay = 0.01 * tf.add_n([tf.nn.l2_loss(w) for w in self.weights]) if "decay" in kind else 0.0
        return tf.reduce_mean(each) + decay


class Trained(tf.Module):
    """Holds a model, its optimizer, and the variables that the step has beside them."""

    def __init__(self, training: Training) -> None:
        name, given = training.optimizer
        self.net = Net(training)
        self.optimizer = getattr(tf.keras.optimizers, name)(RATE if name == "SGD" else RATE / 5, **dict(given))
        if "scaled" in training.extras:
            inner, scaled = self.optimizer, tf.keras.mixed_precision.LossScaleOptimizer
            self.optimizer = scaled(inner, initial_scale=1024.0, dynamic_growth_steps=2)
        self.optimizer.build(self.net.weights)
        self.number = tf.Variable(0, dtype=tf.int32, trainable=False, name="number")
        self.sums: list[tf.Variable] = []
        self.averages: list[tf.Variable] = []
        if "accumulated" in training.extras:
            self.sums = [tf.Variable(tf.zeros_like(w), trainable=False) for w in self.net.weights]
        if "average" in training.extras:
            self.averages = [tf.Variable(w, trainable=False) for w in self.net.weights]

    @property
    def variables_of_all(self) -> list[Any]:
        return [*self.net.weights, *self.optimizer.variables, self.number, *self.sums, *self.averages]


def make_step(it: Trained, training: Training, stages: Sequence[int], stage: Scope, splits: Sequence[int]) -> Any:
    """Returns the step, as a plain function of x and y that returns results by name."""
    net, optimizer, extras = it.net, it.optimizer, training.extras

    def step(x: tf.Tensor, y: tf.Tensor) -> dict[str, tf.Tensor]:
        number = it.number.assign_add(1)
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss, rows = net.loss(x, y, number, stages, stage, splits)
            of_tape = optimizer.scale_loss(loss)
        found = {"loss": loss}
        slopes, of_x = tape.gradient(of_tape, (net.weights, x))
        slopes = [tf.convert_to_tensor(tf.zeros_like(w) if s is None else s) for s, w in zip(slopes, net.weights)]
        if "global norm" in extras:
            slopes, found["norm"] = tf.clip_by_global_norm(slopes, 0.3)
        elif "norm" in extras:
            found["norm"] = tf.linalg.global_norm(slopes)
        if "late rate" in extras:
            optimizer_of(optimizer).learning_rate.assign(RATE / tf.cast(number, tf.float64))
        if it.sums:
            for total, slope in zip(it.sums, slopes):
                total.assign_add(slope)

            def apply() -> None:
                optimizer.apply_gradients(zip([0.5 * total for total in it.sums], net.weights))
                for total in it.sums:
                    total.assign(tf.zeros_like(total))

            tf.cond(number % 2 == 0, apply, lambda: None)
        else:
            optimizer.apply_gradients(zip(slopes, net.weights))
        for average, weight in zip(it.averages, net.weights):
            average.assign(0.75 * average + 0.25 * weight)
        more = {
            "rows": lambda: rows,
            "slopes": lambda: of_x,
            "metric": lambda: tf.math.reduce_variance(rows) + tf.reduce_max(tf.abs(rows)),
        }
        return found | {name: make() for name, make in more.items() if name in extras}

    return step


def optimizer_of(optimizer: Any) -> Any:
    """Returns the optimizer inside one that scales losses."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def batches(training: Training) -> Iterator[tuple[tf.Tensor, tf.Tensor]]:
    values = np.random.default_rng(training.seed + 1)
    for rows in training.rows:
        yield tf.constant(values.standard_normal((rows, WIDTH))), tf.constant(values.standard_normal((rows, CLASSES)))


def _values_of(it: Trained) -> Values:
    return {f"variable {i} {v.name}": tf.convert_to_tensor(v).numpy() for i, v in enumerate(it.variables_of_all)}


def train_on_one_device(training: Training) -> Values:
    """Returns all results and variables of the training without Whale."""
    it = Trained(training)
    step = tf.function(make_step(it, training, (), contextlib.nullcontext, ()))
    found = {f"{i}/{k}": v.numpy() for i, b in enumerate(batches(training)) for k, v in step(*b).items()}
    return found | _values_of(it)


def train_spread(training: Training) -> Values:
    """Returns the same under the training's plans; the second plan goes on from the checkpoint of the first."""
    found: Values = {}
    every, half = list(enumerate(batches(training))), len(training.rows) // 2
    parts = [every] if len(training.plans) == 1 else [every[:half], every[half:]]
    with tempfile.TemporaryDirectory(prefix="whale-draws-") as folder:
        for number, (plan, part) in enumerate(zip(training.plans, parts, strict=True)):
            config = {"batch.norm_statistics": "batch", "batch.random": "global", **dict(plan.config)}
            wh.init(wh.Config({"communication.in_process_ranks": plan.ranks, **config}))
            try:
                it = Trained(replace(training, seed=training.seed + number) if number else training)
                step = wh.function(make_step(it, training, plan.stages, _stages_on(plan.devices), plan.split))
                manager = wh.CheckpointManager(tf.train.Checkpoint(it=it, vars=it.variables_of_all), folder, 1)
                if number:
                    manager.restore(manager.latest_checkpoint)
                found |= {f"{i}/{k}": v.numpy() for i, b in part for k, v in step(*b).items()}
                if number + 1 < len(training.plans):
                    manager.save()
                else:
                    found |= _values_of(it)
            finally:
                wh.shutdown()
    return found


def _stages_on(devices: Sequence[Sequence[int]]) -> Scope:
    order = itertools.cycle(devices)
    return (lambda: wh.stage(devices=next(order))) if devices else wh.stage


def difference_of(training: Training) -> tuple[float, str]:
    """max|difference| / max(max|value|, learning rate) over all results and variables, and which has it."""
    wanted, found = train_on_one_device(training), train_spread(training)
    assert list(found) == list(wanted)
    worst, where = 0.0, ""
    for name, value in wanted.items():
        assert found[name].shape == value.shape, name
        if value.size:
            error = float(np.max(np.abs(np.float64(found[name]) - value)) / max(np.max(np.abs(value)), RATE))
            worst, where = max((worst, where), (np.inf if np.isnan(error) else error, name))
    return worst, where
