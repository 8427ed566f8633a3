"""What the tutorials say is run: scripts on two ranks of this process, and the commands that start no processes."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import whale as wh
from whale.cli import main

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "tutorials"
PAGES = sorted(path.name for path in FOLDER.glob("*.md"))
_BLOCK = re.compile(r'^```(python|yaml|console|text)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
HERE = {"plan", "show", "explain", "diff", "check", "html", "trace", "cluster"}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")  # lines with the path of this folder are not broken
    yield
    wh.shutdown()


def _script(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as given:
        given.setenv("WHALE_COMMUNICATION_IN_PROCESS_RANKS", "2")
        given.setattr(sys, "argv", [path])
        runpy.run_path(path, run_name="__main__")
        wh.shutdown()


def _command(line: str) -> None:
    words = shlex.split(line)
    assert words[:1] in (["whale"], ["python"]), line
    if words[0] == "whale" and words[1] in HERE:
        assert main(words[1:]) == 0, line
    else:  # it starts processes: the script is run below, or is an example, which tests/test_examples.py runs
        script = next(word for word in words if word.endswith(".py"))
        assert Path(script).exists() or (FOLDER.parents[1] / script).exists(), line


# It searches plans for thousands of devices.
_LONG = {"plan_a_cluster.md": pytest.mark.long}


def _find_unsaid(shown: str, said: str) -> list[str]:
    """Returns the lines of a page that a command did not print; `...` stands for anything."""
    lines = [re.escape(line).replace(r"\.\.\.", ".*") for line in shown.splitlines()]
    return [line for line in lines if not re.search(f"^{line}$", said, re.MULTILINE)]


def test_a_line_that_was_not_printed_is_found() -> None:
    assert _find_unsaid("one\n...\n a ... c", "one\n a b c") == [] and _find_unsaid("on", "one") == ["on"]


@pytest.mark.parametrize("page", [pytest.param(page, marks=_LONG.get(page, ())) for page in PAGES])
def test_blocks_run(page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    all_here, told = True, ""
    for number, (kind, title, text) in enumerate(_BLOCK.findall((FOLDER / page).read_text())):
        if kind == "console":
            for line in text.splitlines():
                assert line.startswith("$ "), line
                _command(line[2:])
            all_here = any(line.split()[2] in HERE for line in text.splitlines())
            continue
        if kind == "text":
            told += capsys.readouterr().out
            assert not all_here or _find_unsaid(text, told) == []
            continue
        name = title or f"block{number}.py"
        Path(name).write_text(text)
        if kind == "python":
            _script(name, monkeypatch)
    told += capsys.readouterr().out
    losses = [float(one) for one in re.findall(r"step \d+  loss (\S+)", told)]
    assert losses == sorted(losses, reverse=True)


def test_pages_are_in_the_navigation() -> None:
    navigation = (FOLDER.parents[1] / "mkdocs.yml").read_text()
    pages = {str(path.relative_to(FOLDER.parent)) for path in FOLDER.parent.rglob("*.md")}
    missing = {page for page in pages if page not in navigation and not page.startswith("decisions/0")}
    assert missing == set()
