"""The logger ``whale``: lines as before, a rank in each record, levels by key and variable."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import tensorflow as tf

import whale as wh
from whale.log import log, set_level


@pytest.fixture
def records() -> Iterator[list[logging.LogRecord]]:
    """What a handler of the user's gets."""
    found: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = found.append  # type: ignore
    log.addHandler(handler)
    yield found
    log.removeHandler(handler)
    set_level("info")


def test_debug_says_what_is_compiled_and_records_have_ranks(
    ranks: Callable[..., None],
    records: list[logging.LogRecord],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WHALE_DEBUG_LOG", "debug")
    ranks(2)
    weight = tf.Variable(tf.ones((3, 2)))

    @wh.function
    def step(x: tf.Tensor) -> None:
        weight.assign_sub(tf.matmul(x, tf.matmul(x, weight), transpose_a=True))

    step(tf.ones((4, 3)))
    said = capsys.readouterr().err
    assert "whale: rank 0 of 2 takes part (none)\n" in said
    assert "whale: `step` (program 0 of the run) is compiled for 2 ranks in " in said
    assert {(r.name, r.rank) for r in records} == {("whale", 0)}  # type: ignore[attr-defined]


def test_a_level_leaves_out_what_is_below(
    ranks: Callable[..., None], records: list[logging.LogRecord], capsys: pytest.CaptureFixture[str]
) -> None:
    ranks(2, **{"debug.log": "error"})
    log.warning("not shown")
    log.error("shown\n  next: as it is")
    assert capsys.readouterr().err == "whale: shown\n  next: as it is\n"
    assert [r.levelname for r in records] == ["ERROR"]


def test_a_rank_is_the_launchers_and_no_other_handler_repeats_a_line() -> None:
    lines = "import logging; logging.basicConfig(); from whale.log import log\n"
    lines += "log.addHandler(handler := logging.StreamHandler()); handler.setFormatter(logging.Formatter('%(rank)d'))\n"
    lines += "log.info('hello')"
    environment = {**os.environ, "WHALE_RANK": "3", "WHALE_SIZE": "4", "WHALE_DEBUG_LOG": "info"}
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, env=environment, check=False)
    assert done.stderr.splitlines() == ["whale: hello", "3"]


def test_a_wrong_level_is_refused(ranks: Callable[..., None]) -> None:
    with pytest.raises(wh.ConfigError, match=r"wrong value.*'debug\.log'"):
        ranks(1, **{"debug.log": "loud"})
