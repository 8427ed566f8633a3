"""``wh.launch``: a function on every rank, and what each returned."""

from __future__ import annotations

import linecache
import os
import signal
import threading
from collections.abc import Callable

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


def test_in_a_thread_signals_stay_the_programs(capfd: pytest.CaptureFixture[str]) -> None:
    """Launches in a thread, as Ray Tune calls a trial."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]
    found: list[object] = []

    def fail() -> None:
        raise KeyError("nothing here")

    def run(function: Callable[[], object]) -> None:
        try:
            found.append(wh.launch(function, np=2))
        except wh.ClusterError as error:
            found.append(str(error))
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)] == before

    for function in (lambda: int(os.environ["WHALE_RANK"]), fail):
        thread = threading.Thread(target=run, args=(function,))
        thread.start()
        thread.join(60)
    assert found[0] == [0, 1] and "exit code 1" in str(found[1])


def test_a_function_that_fails(capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise KeyError("nothing here")

    with pytest.raises(wh.ClusterError, match="to call the function has failed"):
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
