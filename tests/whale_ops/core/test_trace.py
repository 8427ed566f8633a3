"""What the core writes of its operations, on in-process ranks; no TensorFlow."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest

from tests.whale_ops import harness
from tests.whale_ops.harness import TIMEOUT_S, ranks, read_trace
from whale.errors import CommError

pytestmark = pytest.mark.core


def test_a_trace_holds_operations_while_it_is_on(tmp_path: Path) -> None:
    with ranks(2) as communicators, open(tmp_path / "trace", "wb") as file:
        harness.all_reduce("before", [np.ones(3)] * 2).run(communicators)
        communicators[1].trace_start(file.fileno())
        for _ in range(2):
            harness.all_reduce('traced "x"', [np.ones(3)] * 2).run(communicators)
        communicators[1].trace_stop()
        harness.all_reduce("after", [np.ones(3)] * 2).run(communicators)
    track, *events = read_trace(tmp_path / "trace")
    assert (track["ph"], track["args"]["name"]) == ("M", "communication 0")
    operations = [event for event in events if event["cat"] == "AllReduce"]
    assert [event["args"]["call"] for event in operations] == [0, 1]
    for event in operations:
        arguments = event["args"]
        assert (event["name"], arguments["key"], event["pid"]) == ('AllReduce traced "x"', 'traced "x"', 1)
        assert arguments["algorithm"] and arguments["logical_bytes"] == arguments["wire_bytes"] == 24
        assert arguments["waiting_us"] + arguments["moving_us"] == pytest.approx(event["dur"], abs=0.01)


def test_the_trace_tells_waiting_from_moving(tmp_path: Path) -> None:
    late_s = 0.5
    with ranks(2) as communicators, open(tmp_path / "trace", "wb") as file:
        for communicator in communicators:
            communicator.trace_start(file.fileno())
        operation = harness.all_reduce("late", [np.ones(1000)] * 2)
        first = operation.start(communicators[0])
        time.sleep(late_s)
        second = operation.start(communicators[1])
        first.wait(TIMEOUT_S)
        second.wait(TIMEOUT_S)
        counted = [communicator.counters()[0] for communicator in communicators]
    of = {event["pid"]: event for event in read_trace(tmp_path / "trace") if event.get("cat") == "AllReduce"}
    waiting = [event for event in read_trace(tmp_path / "trace") if event["name"] == "waiting" and event["pid"] == 0]
    assert of[0]["args"]["waiting_us"] >= late_s * 1e6
    assert of[1]["args"]["waiting_us"] < of[0]["args"]["waiting_us"]
    assert [(w["ts"], w["dur"]) for w in waiting] == [(of[0]["ts"], of[0]["args"]["waiting_us"])]
    for rank, counter in enumerate(counted):
        assert counter.waiting_seconds == pytest.approx(of[rank]["args"]["waiting_us"] * 1e-6, abs=1e-8)


def test_operations_that_overlap_are_on_tracks_of_their_own(tmp_path: Path) -> None:
    with ranks(2) as communicators, open(tmp_path / "trace", "wb") as file:
        communicators[0].trace_start(file.fileno())
        operations = [harness.all_reduce(f"k{i}", [np.ones(10)] * 2) for i in range(5)]
        pending = [operation.start(communicators[0]) for operation in operations]
        pending += [operation.start(communicators[1]) for operation in operations]
        for operation in pending:
            operation.wait(TIMEOUT_S)
    events = [event for event in read_trace(tmp_path / "trace") if event.get("cat") == "AllReduce"]
    assert len({event["tid"] for event in events}) == 5


def test_a_failed_operation_is_traced_with_its_error(tmp_path: Path) -> None:
    with ranks(2) as communicators, open(tmp_path / "trace", "wb") as file:
        communicators[0].trace_start(file.fileno())
        pending = harness.all_reduce("lost", [np.ones(10)] * 2).start(communicators[0])
        communicators[0].lose(1, "was killed\nby é" + "é" * 1000)
        with pytest.raises(CommError):
            pending.wait(TIMEOUT_S)
        assert communicators[0].counters() == []
    (event,) = [event for event in read_trace(tmp_path / "trace") if event.get("cat") == "AllReduce"]
    assert event["args"]["error"].startswith("rank 1 was killed\nby éé") and event["args"]["error"].endswith("é...")
    assert event["args"]["moving_us"] == 0


def test_a_trace_never_waits_for_a_full_pipe() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with ranks(2) as communicators, open(reader, "rb") as pipe:
        communicators[0].trace_start(writer)
        for i in range(500):  # far more than the pipe holds
            harness.all_reduce(f"k{i}", [np.ones(1)] * 2).run(communicators)
        text = os.read(reader, 1 << 20).decode()
        harness.all_reduce("next", [np.ones(1)] * 2).run(communicators)
        communicators[0].trace_stop()
        os.close(writer)
        text += pipe.read().decode()
    events = json.loads(f"[{text.rstrip().rstrip(',')}]")
    keys = [event["args"]["key"] for event in events if event.get("cat") == "AllReduce"]
    (lost,) = [int(event["name"].split()[0]) for event in events if "lost" in event["name"]]
    assert keys[-1] == "next" and len(keys) + lost == 501 and lost > 0
