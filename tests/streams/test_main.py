"""The draw itself: one program that fails hides no other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.launcher.helpers import Launcher
from tests.streams import __main__ as draw

_FAILS, _DIFFERS, _UNABLE = 2, 5, 6


def _run(launcher: Launcher, kind: str, place: str, folder: Path, numbers: Sequence[int], timeout_s: float) -> None:
    """Stands in for programs, one of which ends its run on ranks, and another of which gives something else there."""
    for number in numbers:
        if place != "plain" and number == _FAILS:
            if place == "ranks":  # the other one was already done
                np.savez(folder / f"rank0_{number}.npz", loss=1.0)
            raise AssertionError("ValueError: of program 2")
        if place == "plain" and number != _UNABLE:
            np.savez(folder / f"plain_{number}.npz", loss=1.0)
        for rank in range(2 if place == "ranks" else place != "plain"):
            np.savez(folder / f"rank{rank}_{number}.npz", loss=2.0 if number == _DIFFERS else 1.0)


@pytest.mark.parametrize("kind", ["orders", "draws"])
def test_a_program_that_fails_on_ranks_is_named_and_the_others_are_compared(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(draw, "run", _run)
    assert draw.compare(kind, range(8)) == 2
    said = capsys.readouterr().out
    assert f"{kind} 2 on {draw.PLACES[kind][0]} failed:\nValueError: of program 2\n" in said
    assert f"{kind} 5 on {draw.PLACES[kind][-1]}: 1.0e+00 rank" in said
    assert f"{kind} 0 to 7: 7 programs, 2 wrong, worst 1.0e+00; on one device 0 are not the same twice, 1 do" in said
