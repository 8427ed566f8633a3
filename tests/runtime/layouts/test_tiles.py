"""Variables that lie over several axes of a mesh: steps, initial values, reading, checkpoints under other meshes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh

ROWS, WIDTH, CLASSES = 12, 10, 14  # of which no axis divides all evenly
Start = Callable[..., None]
SETTINGS: dict[str, dict[str, Any]] = {
    "both axes": {"mesh": wh.Mesh(data=3, tensor=2)},
    "both axes, zero 1": {"mesh": wh.Mesh(data=3, tensor=2), "memory.zero": 1, "memory.zero_min_bytes": 0},
    "tensor, zero 1": {"mesh": wh.Mesh(data=3, tensor=2), "memory.zero": 1, "memory.zero_min_bytes": 0},
    "tensor, zero 3": {"mesh": wh.Mesh(data=2, tensor=3), "memory.zero": 3, "memory.zero_min_bytes": 0},
    "tensor first, zero 3": {"mesh": wh.Mesh(tensor=2, data=3), "memory.zero": 3, "memory.zero_min_bytes": 0},
    "micro-batches, zero 3": {
        "mesh": wh.Mesh(data=2, tensor=2), "memory.zero": 3, "memory.zero_min_bytes": 0, "pipeline.micro_batches": 3
    },
}  # fmt: skip


class Net(tf.Module):
    """Two layers and momentum; the second layer under a split scope."""

    def __init__(self, function: Any, scope: Callable[[], Any]) -> None:
        draw = np.random.default_rng(3)
        self.weights = [tf.Variable(draw.normal(size=s), name=f"w{s[1]}") for s in ((WIDTH, WIDTH), (WIDTH, CLASSES))]
        self.slots = [tf.Variable(tf.zeros_like(w), trainable=False, name=f"m{w.shape[1]}") for w in self.weights]
        self.scope = scope
        self.step = function(self._step)

    def _step(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            h = tf.tanh(x @ self.weights[0])
            with self.scope():
                logits = h @ self.weights[1]
            loss = tf.reduce_mean((logits - y) ** 2)
        for w, m, slope in zip(self.weights, self.slots, tape.gradient(loss, self.weights)):
            m.assign(0.5 * m + slope)
            w.assign_sub(0.1 * m)
        return loss

    def train(self, seed: int) -> float:
        draw = np.random.default_rng(seed)
        return float(self.step(draw.normal(size=(ROWS, WIDTH)), draw.normal(size=(ROWS, CLASSES))))

    def values(self) -> list[np.ndarray]:
        return [v.numpy() for v in (*self.weights, *self.slots)]


def scope_of(name: str) -> Callable[[], Any]:
    return (lambda: wh.split(axis=("data", "tensor"))) if name.startswith("both") else wh.split


def story(net: Net) -> list[Any]:
    return [net.train(1), net.train(2), *net.values()]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_step_is_that_of_one_device(ranks: Start, name: str) -> None:
    wanted = story(Net(tf.function, contextlib.nullcontext))
    count = 4 if "micro" in name else 6
    ranks(count, **SETTINGS[name])
    net = Net(wh.function, scope_of(name))
    for found, value in zip(story(net), wanted, strict=True):
        np.testing.assert_allclose(found, value, rtol=1e-12, atol=1e-14)
    state = net.slots[1]._whale_parts
    assert state.tiles.count == count and set(state.tiles.axes) == {"data", "tensor"}
    held = [int(np.prod(state.find_rank_part(rank).shape)) for rank in range(count)]
    assert sum(held) == WIDTH * CLASSES and max(held) <= 1.5 * WIDTH * CLASSES / count


def test_checkpoints_load_under_another_mesh(ranks: Start, tmp_path: Path) -> None:
    ranks(6, **SETTINGS["both axes, zero 1"])
    net = Net(wh.function, scope_of("both"))
    net.train(1)
    path = wh.CheckpointManager(tf.train.Checkpoint(net=net), tmp_path, 2).save()
    wanted = net.values()
    wh.shutdown()
    plain = Net(tf.function, contextlib.nullcontext)
    tf.train.Checkpoint(net=plain).restore(path).assert_consumed()
    for value, expected in zip(plain.values(), wanted, strict=True):
        np.testing.assert_array_equal(value, expected)
    after: list[Any] = [plain.train(2), *plain.values()]
    ranks(6, **SETTINGS["tensor, zero 3"])
    other = Net(wh.function, wh.split)
    other.train(7)  # variables lie split already
    wh.CheckpointManager(tf.train.Checkpoint(net=other), tmp_path, 2).restore(path)
    found_there: list[Any] = [other.train(2), *other.values()]
    for found, expected in zip(found_there, after, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)


def test_initial_values_are_made_tile_by_tile(ranks: Start) -> None:
    def made() -> list[tf.Variable]:
        tf.keras.utils.set_random_seed(5)
        layer = tf.keras.layers.Dense(301, use_bias=False, dtype="float64")
        layer.build((None, 203))
        return [getattr(layer.kernel, "value", layer.kernel)]

    (wanted,) = (w.numpy() for w in made())
    ranks(6, mesh=wh.Mesh(data=3, tensor=2))
    with wh.split(axis=("data", "tensor")):
        (kernel,) = made()

    @wh.function
    def product(x: tf.Tensor) -> tf.Tensor:
        with wh.split(axis=("data", "tensor")):
            return x @ kernel

    product(np.ones((6, 203)))
    parts = kernel._whale_parts
    assert parts.tiles.count == 6 and max(p.shape.num_elements() for p in parts._parts.values()) < 203 * 301 / 5
    np.testing.assert_array_equal(kernel.numpy(), wanted)
