"""Training that Whale does not see, with several ranks in one process: a notebook hears of it after the cell."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import tensorflow as tf

import whale as wh

Start = Callable[..., None]


class _Notebook(ModuleType):
    """Stands for IPython: a shell whose events are called after each cell."""

    def __init__(self) -> None:
        super().__init__("IPython")
        self.after_cell: list[Callable[[object], None]] = []

    def get_ipython(self) -> _Notebook:
        return self

    @property
    def events(self) -> _Notebook:
        return self

    def register(self, event: str, call: Callable[[object], None]) -> None:
        assert event == "post_run_cell"
        self.after_cell.append(call)

    def unregister(self, event: str, call: Callable[[object], None]) -> None:
        self.after_cell.remove(call)

    def end_cell(self) -> None:
        for call in self.after_cell:
            call(None)


def _train(function: Callable[..., Callable[..., tf.Tensor]]) -> None:
    w = tf.Variable([2.0])

    @function
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(x * w)
        w.assign_sub(tape.gradient(loss, w))
        return loss

    step(tf.ones([4, 1]))


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> _Notebook:
    found = _Notebook()
    monkeypatch.setitem(sys.modules, "IPython", found)
    return found


def test_a_plain_step_is_told_once(ranks: Start, notebook: _Notebook, capsys: pytest.CaptureFixture[str]) -> None:
    ranks(2)
    notebook.end_cell()
    assert "distributed nothing" not in capsys.readouterr().err
    _train(tf.function)
    notebook.end_cell()
    told = capsys.readouterr().err
    assert "whale: Whale has distributed nothing: one device has trained, and the 2 ranks" in told
    assert "  trained: the tf.function `step`, called at test_unsynchronized_training.py:" in told
    notebook.end_cell()
    wh.shutdown()
    assert "distributed nothing" not in capsys.readouterr().err and not notebook.after_cell


def test_a_script_is_told_at_its_end(ranks: Start, capsys: pytest.CaptureFixture[str]) -> None:
    ranks(2)
    _train(tf.function)
    wh.shutdown()
    assert "distributed nothing" in capsys.readouterr().err


def test_a_step_of_whales_is_not(ranks: Start, notebook: _Notebook, capsys: pytest.CaptureFixture[str]) -> None:
    ranks(2)
    _train(wh.function)
    notebook.end_cell()
    wh.shutdown()
    assert "distributed nothing" not in capsys.readouterr().err
