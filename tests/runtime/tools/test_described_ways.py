"""Described models of one large layer: planned each way, and what is predicted is what ranks move and hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import whale as wh
from benchmarks.giant.measure import counted
from cost_model.captured.machine import cluster_machine
from cost_model.captured.predict import predict_ranks
from tests.cost_model.test_captured import LAB
from whale.cli import main
from whale.errors import PlanError
from whale.runtime.described import families as f
from whale.runtime.described import models
from whale.runtime.described.program import _step
from whale.runtime.tools.described_ways import read, ways

DLRM = "dlrm:tables=3,rows=60000,factors=8,batch=64"
CLASSIFIER = "classifier:classes=200000,features=16,inputs=8,batch=64"
LAYERS = [
    f.Dlrm(tables=3, rows=60000, factors=8, batch=64),
    f.Classifier(classes=200000, features=16, inputs=8, batch=64),
]


@pytest.mark.parametrize("text, described", [*zip((DLRM, CLASSIFIER), LAYERS)], ids=["dlrm", "classifier"])
def test_the_large_layer_is_sharded(text: str, described: f.Dlrm | f.Classifier, ranks: Callable[..., None]) -> None:
    assert read(text) == described
    found = {way.name.partition(" ")[0]: way for way in ways(read(text), LAB)}
    large, rows = found["tables" if text == DLRM else "classes"], found["data"]
    assert large.planned.plan.ranks == len(large.predicted.ranks) == 4 and large.lacking < 0
    assert large.predicted.peak_bytes < 0.8 * rows.predicted.peak_bytes
    assert text == DLRM or large.planned.plan.logical_bytes < rows.planned.plan.logical_bytes / 100
    # As a step of the same model that ranks run.
    ranks(4)
    step, batch = trained(large_of(described))
    step(*batch)
    before = counted()
    step(*batch)
    moved, plan = counted() - before, wh.plan(step, *batch)
    assert plan.logical_bytes == large.planned.plan.logical_bytes
    # Of a table each rank asks once for an id.
    assert moved <= plan.logical_bytes if text == DLRM else moved == plan.logical_bytes
    ran = predict_ranks(step._step(tuple(batch), {}).compiled.ranks, cluster_machine(LAB))
    assert large.predicted.peak_bytes == pytest.approx(ran.peak_bytes, rel=0.02)


def large_of(described: f.Dlrm | f.Classifier) -> f.Dlrm | f.Classifier:
    """The description whose large layer is sharded."""
    return type(described)(
        **{n: getattr(described, n) for n in described.__struct_fields__ if n != "split"}, split=True
    )


def trained(d: Any) -> tuple[Any, list[tf.Tensor]]:
    """A user's step of a description, and a batch."""
    made: dict[str, Any] = {}

    def variable(name: str, shape: Sequence[int], dtype: str) -> tf.Variable:
        with tf.init_scope():
            return tf.Variable(tf.zeros(shape, dtype), trainable=False, name=name)

    def step(*tensors: tf.Tensor) -> tf.Tensor:
        return _step(d, dict(zip(models.inputs(d), tensors)), made, variable)[0]

    batch = [tf.ones(shape, dtype) for shape, dtype in models.inputs(d).values()]
    return wh.function(step), batch


def test_the_verb_says_what_each_way_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lab, plan = tmp_path / "lab.yaml", tmp_path / "plan.json"
    lab.write_text("name: lab\nhosts: [{name: a, devices: [{type: t4, count: 2}]}]\n")
    assert main(["plan", "--describe", CLASSIFIER, "--cluster", str(lab), "-o", str(plan)]) == 0
    said = capsys.readouterr().out
    assert "classes sharded" in said and "data parallel" in said and "Predicted on lab" in said and plan.exists()
    for wrong in ("classifier:classes=0,batch=4", "dlrm:tables=2,batch=4", f"{DLRM},split=1"):
        with pytest.raises(PlanError):
            read(wrong)
