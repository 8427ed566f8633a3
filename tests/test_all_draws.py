"""The evening's draws: programs that are there, with arguments that they know, and nothing that fails unheard."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import all_draws
from tests.all_draws import DRAWS, Draw, Size


class _Parsed(BaseException):
    """Ends a program as soon as it knows what it was given."""


@pytest.mark.parametrize("draw", DRAWS, ids=lambda draw: " ".join(draw.command(Size(1))[1:]))
def test_programs_know_their_arguments(draw: Draw, monkeypatch: pytest.MonkeyPatch) -> None:
    _, name, *arguments = draw.command(Size(20261129, 0.5))
    parse = argparse.ArgumentParser.parse_args

    def stop(parser: argparse.ArgumentParser, *given: Any) -> None:
        raise _Parsed(parse(parser, *given))

    module = importlib.import_module(name)
    if hasattr(module, "__path__"):
        module = importlib.import_module(f"{name}.__main__")
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    with pytest.raises(_Parsed):
        module.main()


@pytest.mark.parametrize("program", ["oracle", "attack"])
def test_programs_that_are_told_nothing_say_so(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"tests.{program}"],
        cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "error: give --" in done.stderr


def test_another_day_draws_others_and_a_larger_size_more() -> None:
    for draw in DRAWS:
        some = draw.command(Size(7))
        assert some == draw.command(Size(7))
        if draw.arguments(Size(7)):
            assert some != draw.command(Size(8)), "a draw that is the same every day"
    assert [Size(7, times).part(4) for times in (1, 2, 4, 100)] == [(3, 4), (1, 2), (0, 1), (0, 1)]
    assert [Size(7, times).count(10) for times in (0.01, 1, 3)] == [1, 10, 30]


def test_a_draw_that_fails_is_heard_of_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    draws = (
        Draw("none", obstacle=lambda: "there is no such machine"),
        Draw("all_draws", lambda size: "--nothing-of-the-kind"),
        Draw("all_draws", lambda size: "--help"),
    )
    monkeypatch.setattr(all_draws, "DRAWS", draws)
    assert all_draws.main(["--seed", "3"]) == 1
    *_, left_out, failed, passed, last = capfd.readouterr().out.splitlines()
    assert left_out == "left out: there is no such machine  python -m tests.none"
    assert failed.endswith("s  FAILED, exit code 2  python -m tests.all_draws --nothing-of-the-kind")
    assert passed.endswith("s  passed  python -m tests.all_draws --help")
    assert last == "3 draws with seed 3, 1 failed, 1 left out"
