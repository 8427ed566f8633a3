"""Measures substitutions: both sides compute the same, and one that loses is not taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from whale.ir.plan import plan_from_json
from whale.ir.plan_text import format_plan
from whale.ir.program import Program
from whale.ir.text import format_program, parse_program
from whale.kernels.choices import Substitution
from whale.kernels.substitute import list_substitutions, substitute_kernels
from whale.passes.settings import FuseSettings, PlanSettings
from whale.runtime.compile import kernel_choices
from whale.runtime.compile.measured_call import compile_whole_step

pytestmark = pytest.mark.core
KINDS = {"convolutions", "products", "einsums", "nn", "updates", "elementwise"}
WHOLE = PlanSettings(1, fuse=FuseSettings.all_on())


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    yield
    wh.shutdown()


def make_step() -> tuple[Any, tuple[tf.Tensor, ...]]:
    """A step with something of each kind, and its batch."""
    tf.keras.utils.set_random_seed(1)
    filters, weights = (tf.Variable(0.1 * tf.random.normal(shape)) for shape in ((1, 1, 4, 8), (8, 6)))

    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            made = tf.nn.conv2d(images, filters, 1, "SAME")
            rows = tf.reshape(made, [-1, 9, 8])
            scores = tf.nn.softmax(tf.matmul(rows, rows, transpose_b=True) * 0.5)
            logits = tf.reduce_sum(tf.matmul(tf.matmul(scores, rows), weights), 1)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        for variable, gradient in zip((filters, weights), tape.gradient(loss, (filters, weights))):
            variable.assign_sub(0.1 * gradient + 0.01 * variable)
        return loss

    draw = np.random.default_rng(0)
    images, labels = draw.normal(size=(5, 3, 3, 4)), draw.integers(6, size=5)
    return wh.function(step), (tf.constant(images, tf.float32), tf.constant(labels, tf.int32))


def compiled(cache: Path | str = "") -> Program:
    """The step's program on one rank, as it runs."""
    wh.init({"communication.in_process_ranks": 1, "mesh.plan_cache": str(cache)})
    step, batch = make_step()
    step(*batch)
    return step._step(batch, {}).compiled.ranks[0]


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[Program]:
    """The programs that runs would measure."""
    found: list[Program] = []
    monkeypatch.setattr(
        kernel_choices.MachineKernels, "note_program", lambda self, program, settings: found.append(program)
    )
    return found


def kinds(found: list[Substitution]) -> set[str]:
    return {one.name.partition(" ")[0] for one in found}


def ops(program: Program, but: set[str]) -> Counter[str]:
    return Counter(n.op for n in program.nodes if n.op not in but)


def test_both_sides_compute_the_same(noted: list[Program], tmp_path: Path) -> None:
    compiled(tmp_path)
    found = list(list_substitutions(noted[0], WHOLE))
    assert kinds(found) == KINDS and len({one.name for one in found}) == len(found)
    for one in found:
        before, after = (compile_whole_step(parse_program(format_program(p))) for p in one[1:])
        for ours, theirs in zip(after() or (), before() or ()):  # of the same random values
            np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-6, err_msg=one.name)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_what_loses_is_left_as_it_is(noted: list[Program], tmp_path: Path, kind: str) -> None:
    compiled(tmp_path)
    (program,) = noted
    names = tuple(sorted(one.name for one in list_substitutions(program, WHOLE) if one.name.startswith(kind + " ")))
    (left,) = substitute_kernels([program], WHOLE.but(fuse__declined=names))
    (without,) = substitute_kernels([program], WHOLE.but(**{f"fuse__{kind}": False}))
    simplified = {"Identity", "Sum"}  # what `elementwise` does before it fuses
    assert ops(left, simplified) == ops(without, simplified)


def test_a_later_run_has_what_the_first_one_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures nothing in runs under ten seconds, later within a budget, and the rest in the next run that ends."""
    calls: list[str] = []

    def measure(one: Substitution) -> tuple[float, float]:
        calls.append(one.name)
        return (1e-3, 2e-3) if one.name.startswith("nn ") else (2e-3, 1e-3)

    monkeypatch.setattr(kernel_choices, "_measure", measure)
    program = compiled(tmp_path)
    assert "WhaleSparseCrossEntropy" in {n.op for n in program.nodes}
    wh.shutdown()
    assert not calls, "of a run so short"

    monkeypatch.setattr(kernel_choices, "LEAST_RUN_S", 0.0)
    monkeypatch.setattr(kernel_choices, "MOST_S", 0.0)
    compiled(tmp_path)
    wh.shutdown()
    assert not calls, "without time"
    monkeypatch.setattr(kernel_choices, "MOST_S", 5.0)
    for _ in range(2):
        wh.init({"communication.in_process_ranks": 1, "mesh.plan_cache": str(tmp_path)})
        step, batch = make_step()
        step(*batch)
        wh.shutdown()
    assert kinds([Substitution(name, program, program) for name in calls]) >= KINDS - {"padding"}
    assert len(calls) == len(set(calls)), "each once"

    wh.init({"communication.in_process_ranks": 1, "mesh.plan_cache": str(tmp_path)})
    step, batch = make_step()
    plan = step.plan(*batch)
    assert "WhaleSparseCrossEntropy" not in {n.op for n in step._step(batch, {}).compiled.ranks[0].nodes}
    assert [name.partition(" ")[0] for name in plan.declined] == ["nn"] and plan_from_json(plan.to_json()) == plan
    assert "where Whale's measured slower: 1 of nn" in format_plan(plan)
