"""``wh.launch``: a function on every rank, and what each returned."""

from __future__ import annotations

import linecache
import os

import pytest

import whale as wh

pytestmark = pytest.mark.core


def test_each_rank_returns_something(capfd: pytest.CaptureFixture[str]) -> None:
    factor = 3

    def call(number: int, *, word: str) -> dict[str, object]:
        rank = int(os.environ["WHALE_RANK"])
        print("here")
        return {"value": factor * number + rank, "word": word}

    assert wh.launch(call, (5,), {"word": "a"}, np=2) == [{"value": 15 + rank, "word": "a"} for rank in range(2)]
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] here", "[1] here"]


def test_a_function_that_fails(capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise KeyError("nothing here")

    with pytest.raises(wh.ClusterError, match="the run of the function failed"):
        wh.launch(fail, np=1)
    assert "rank 0 failed: KeyError: 'nothing here'" in capfd.readouterr().err


def test_functions_bring_their_sources() -> None:
    """AutoGraph reads them, and a cell of a notebook has no file on the ranks."""
    cell = "def call(x):\n    def inner():\n        return x\n    import inspect\n    return inspect.getsource(inner)\n"
    name = "<a cell of a notebook>"
    linecache.cache[name] = (len(cell), None, cell.splitlines(keepends=True), name)
    scope = {"__name__": "__main__"}
    exec(compile(cell, name, "exec"), scope)
    assert wh.launch(scope["call"], (1,), np=1) == ["    def inner():\n        return x\n"]
