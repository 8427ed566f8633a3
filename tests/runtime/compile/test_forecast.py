"""Steps that take far longer than predicted are said, once, and what was chosen is forgotten."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from whale.runtime.compile import forecast
from whale.runtime.compile.forecast import FIRST, STEPS, StepForecast


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """``clock(s)``: so many seconds go by."""
    now_s = [0.0]
    monkeypatch.setattr(forecast.time, "perf_counter", lambda: now_s[0])

    def go_by(seconds: float) -> None:
        now_s[0] += seconds

    return go_by


@pytest.mark.parametrize(("step_s", "said"), [(0.9, False), (2.5, True)])
def test_steps_far_from_their_prediction_are_said_once(
    clock: Callable[[float], None], capsys: pytest.CaptureFixture[str], step_s: float, said: bool
) -> None:
    forgotten: list[str] = []
    foreseen = StepForecast(3, 0.5, None, lambda: forgotten.append("chosen"))
    step = foreseen.watch_steps(clock, "train", 3)
    assert foreseen.watch_steps(clock, "evaluate", 4) is clock
    for number in range(FIRST + 2 * STEPS):
        step(60.0 if number in (0, FIRST + 2) else step_s)  # the first one compiles, and one is disturbed
    err = capsys.readouterr().err
    assert err.count("steps of `train` take 2500 ms, where 500 ms were predicted") == said == len(forgotten), err
