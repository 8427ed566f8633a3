"""``wh.annotate``: layers and variables of Keras and of tf.Module in scopes, by their names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from whale.errors import ConfigError, PlanError

X = np.random.default_rng(0).random((8, 6))
LAYERS = ("dense", "dense_1", "head")


class Linear(tf.Module):
    def __init__(self, rows: int, columns: int, name: str) -> None:
        super().__init__(name)
        with self.name_scope:
            self.kernel = tf.Variable(np.random.default_rng(columns).random((rows, columns)), name="kernel")
            self.bias = tf.Variable(np.zeros(columns), name="bias")

    @tf.Module.with_name_scope
    def __call__(self, x: Any) -> Any:
        return tf.tanh(tf.matmul(x, self.kernel) + self.bias)


class Modules(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [Linear(6, 8, LAYERS[0]), Linear(8, 8, LAYERS[1]), Linear(8, 1, LAYERS[2])]

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


def keras_model() -> Any:
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [layers.Input((6,)), *(layers.Dense(8, "tanh", name=n, dtype="float64") for n in LAYERS[:2])]
        + [layers.Dense(1, name=LAYERS[2], dtype="float64")]
    )


MODELS = pytest.mark.parametrize("make", [keras_model, Modules])


def trained(function: Any, make: Callable[[], Any]) -> tuple[Any, list[Any]]:
    tf.keras.utils.set_random_seed(3)
    model = make()

    @function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - 1.0) ** 2)
        slopes = tape.gradient(loss, model.trainable_variables)
        for variable, slope in zip(model.trainable_variables, slopes):
            variable.assign_sub(0.1 * slope)
        return loss

    losses = [float(step(X)) for _ in range(3)]
    return step, [losses, *(np.asarray(v).tolist() for v in model.trainable_variables)]


def same(one: list[Any], other: list[Any]) -> None:
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


@MODELS
def test_stages_by_layers(ranks: Callable[..., None], make: Callable[[], Any]) -> None:
    _, expected = trained(tf.function, make)
    ranks(2)
    wh.annotate({"dense": wh.stage(0), "dense_1": wh.stage(1), "he?d": wh.stage(1)})
    step, found = trained(wh.function, make)
    same(found, expected)
    plan = step.plan(X)
    assert [group.stages for group in plan.stage_groups] == [("stage_0",), ("stage_1",)]
    (program,) = {s.compiled.program.name: s.compiled.program for s in step._steps.values()}.values()
    products = [n.scope for n in program.nodes if n.op == "MatMul" and "gradient" not in n.name]
    assert products == ["stage_0", "stage_1", "stage_1"]


@MODELS
def test_splits_by_variables(ranks: Callable[..., None], make: Callable[[], Any]) -> None:
    _, expected = trained(tf.function, make)
    ranks(2)
    wh.annotate({"dense*/kernel": wh.split(dim=-1)})
    step, found = trained(wh.function, make)
    same(found, expected)
    cut = [str(p) for p in step.plan(X).variables.values()]
    assert cut == ["S(1)[4,4]", "S(1)[4,4]"]


def test_a_file_in_place_of_code(ranks: Callable[..., None], tmp_path: Path) -> None:
    _, expected = trained(tf.function, keras_model)
    file = tmp_path / "scopes.json"
    file.write_text(json.dumps({"dense": {"stage": 0}, "*1": {"stage": 1, "split": {"dim": -1}}, "head": {"stage": 1}}))
    ranks(2, **{"mesh.annotations": str(file)})
    step, found = trained(wh.function, keras_model)
    same(found, expected)
    assert len(step.plan(X).stage_groups) == 2


def test_fit_of_a_model_that_knows_nothing_of_it(ranks: Callable[..., None]) -> None:
    def history() -> Any:
        tf.keras.utils.set_random_seed(3)
        model = keras_model()
        model.compile("sgd", "mse")
        return model.fit(X, X[:, :1], batch_size=4, epochs=3, shuffle=False, verbose=0).history["loss"]

    expected = history()
    ranks(2)
    wh.annotate({"dense*": wh.split()})
    np.testing.assert_allclose(history(), expected, rtol=1e-6)


def test_a_pattern_that_matches_nothing(ranks: Callable[..., None]) -> None:
    ranks(2)
    wh.annotate({"dense": wh.split(), "dens_1/kernl": wh.split()})
    with pytest.raises(PlanError, match=r"matches no layer(.|\n)*'dens_1/kernl'(.|\n)*dense_1/kernel") as caught:
        trained(wh.function, keras_model)
    assert "'dense'" not in str(caught.value)


def test_what_is_no_annotation(ranks: Callable[..., None], tmp_path: Path) -> None:
    ranks(2)
    for wrong in ({"a": 1}, {"a": wh.pipeline(2)}, {"": wh.split()}):
        with pytest.raises(PlanError, match="is not a scope"):
            wh.annotate(wrong)
    with pytest.raises(PlanError, match="ranks that do not exist"):
        wh.annotate({"a": wh.split(devices=[7])})
    with pytest.raises(PlanError, match=r"only be used in wh\.annotate"), wh.stage(0):
        pass
    wh.shutdown()
    file = tmp_path / "scopes.json"
    for text in ("{", '{"a": {"splt": {}}}', '{"a": {"split": {"dims": 1}}}'):
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"annotations cannot be read(.|\n)*decoder/layers"):
            ranks(2, **{"mesh.annotations": str(file)})
        wh.shutdown()


def test_annotations_of_which_nothing_comes_are_told(
    ranks: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    ranks(2)
    wh.annotate({"head": wh.split(), "nothing_here": wh.split()})
    step = wh.function(keras_model())
    step(X)
    wh.shutdown()
    assert "the annotations 'nothing_here' matched no layer and no variable in any step" in capsys.readouterr().err
    wh.init({"communication.in_process_ranks": 2}, solo=True)
    with pytest.raises(PlanError, match="each rank of this run trains a program of its own"):
        wh.annotate({"head": wh.split()})
