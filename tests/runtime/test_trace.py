"""The trace of one process: its steps, what they are made of, and the ranks' operations beside them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from tests.traces import only, pieces
from whale.distributed.trace import find_path
from whale.errors import ConfigError
from whale.started import ProcessPlace

pytestmark = pytest.mark.core
X = np.arange(24, dtype=np.float32).reshape(8, 3)


def read(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.glob("trace*.json")
    return json.loads(path.read_text())


def fails() -> None:
    raise ValueError("empty batch")


def test_steps_contain_their_operations_on_every_rank(ranks: Callable[..., None], tmp_path: Path) -> None:
    ranks(2, **{"debug.trace": str(tmp_path / "trace.json")})
    w = tf.Variable(tf.ones([3, 2]))

    @wh.function
    def train(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.matmul(x, w) - 1))
        w.assign_sub(0.1 * tape.gradient(loss, w))
        return loss

    for x in wh.shard(tf.data.Dataset.from_tensors(tf.constant(X)).repeat(3)):
        train(x)
    with pytest.raises(ValueError, match="empty batch"):
        wh.function(fails)()
    wh.shutdown()
    events = read(tmp_path)
    for rank in range(2):
        found = pieces(events, rank)
        assert only(found, "process_name").arguments["name"].startswith(f"rank {rank} (")
        steps = [piece for piece in found if piece.category == "step"]
        assert [(s.name, s.arguments["number"]) for s in steps] == [("train 0", 0), ("train 1", 1), ("train 2", 2)]
        for number, step in enumerate(steps):
            inside = [p for p in found if p.category == "AllReduce" and p.within(step)]
            assert inside and {p.arguments["call"] for p in inside} == {number}
        compilation = only(found, "compile train")
        for phase in ("capture", "normalise", "plan", "partition", "functions"):
            first = next(piece for piece in found if piece.name == phase)
            assert first.category == "compile" and first.within(compilation)
        assert len([piece for piece in found if piece.name == "next batch"]) == 4  # the last one finds the end
        assert only(found, "compile fails").arguments["error"].startswith("ValueError: in user code")
        assert only(found, "end").phase == "i"


def test_session_runs_are_steps(ranks: Callable[..., None], tmp_path: Path) -> None:
    ranks(2, **{"debug.trace": str(tmp_path / "trace.json")})
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [8, 3], name="x")
        total = tf.reduce_sum(x, name="total")
        with wh.Session() as session:
            for _ in range(2):
                assert session.run(total, {x: X}) == X.sum()
    wh.shutdown()
    found = pieces(read(tmp_path), 1)
    assert [piece.name for piece in found if piece.category == "step"] == ["total:0 0", "total:0 1"]
    assert only(found, "plan").within(only(found, "compile run"))


def test_a_trace_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "trace.json"
    with pytest.raises(ConfigError, match="the trace cannot be written") as caught:
        wh.init({"debug.trace": str(path)})
    assert caught.value.facts["given"] == f"debug.trace = {str(path)!r} (code)"


def test_each_process_has_a_file_of_its_own() -> None:
    several = ProcessPlace(rank=3, size=4, local_rank=1, local_size=2, launcher="PMI")
    alone = ProcessPlace(rank=0, size=1, local_rank=0, local_size=1, launcher="none")
    assert find_path("a/t.json", several, 1) == Path("a/t.rank3.json")
    assert find_path("a/t.json", alone, 1) == Path("a/t.json")
    assert find_path("a/t", several, 2) == Path("a/t.rank3.run2")
