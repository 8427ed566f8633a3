"""How long ranks are measured: for a moment, and longer only as long as they seem to differ."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from cost_model.graph.machine import Link
from tests.programs import Builder
from whale.runtime.compile import microbenchmark

EQUAL, UNLIKE = [(10e9, 20e9), (10.2e9, 20.5e9)], [(10e9, 20e9), (20e9, 40e9)]


@pytest.mark.parametrize(
    ("said", "asked", "found"),
    [
        ([EQUAL], 1, [10e9, 10e9]),
        ([UNLIKE, EQUAL, EQUAL], 3, [10e9, 10e9]),
        ([UNLIKE, EQUAL, UNLIKE, EQUAL, EQUAL, EQUAL], 4, [10e9, 10e9]),  # one round may be lucky, or unlucky
        ([UNLIKE] * 6, 6, [10e9, 20e9]),
    ],
)
def test_rounds(monkeypatch: pytest.MonkeyPatch, said: list[Any], asked: int, found: list[float]) -> None:
    heard: list[str] = []

    def together(context: object, what: str, measured: object, seconds: float) -> list[tuple[float, float]]:
        heard.append(what)
        return list(said[len(heard) - 1])

    monkeypatch.setattr(microbenchmark, "_together", together)
    monkeypatch.setattr(microbenchmark, "_link", lambda context, through: Link(1e-4, 1e9))
    config = {"communication.backend": ""}
    b = Builder()
    program = b.build([b.input("x", (2,))])
    rates = []
    for rank in range(2):
        heard.clear()
        context: Any = SimpleNamespace(has_other_processes=True, planned_size=2, rank=rank, config=config)
        rates.append(microbenchmark.measure_rates(context, False, program))
        assert heard == ["first", *(f"again/{n}" for n in range(asked - 1))]
    assert [one.flops_per_s for one in rates[0]] == pytest.approx(found)
    assert rates[0] == rates[1]  # the ranks that help to search predict as the first one does


def test_the_scripts_random_numbers_are_left_alone() -> None:
    b = Builder()
    for measure in (
        lambda: microbenchmark.measured_calls(b.build([b.input("x", (2,))])),
        lambda: microbenchmark._measured_chains("float32")(0.0),
    ):
        tf.random.set_seed(3)
        expected = tf.random.uniform([2]).numpy().tolist()
        tf.random.set_seed(3)
        measure()
        assert tf.random.uniform([2]).numpy().tolist() == expected
