"""`whale why`: where the time of a trace went, and what is said to do about the three things that cost most."""

from __future__ import annotations

from typing import Any

import pytest

from whale.errors import PlanError
from whale.planner.report import bottlenecks
from whale.planner.report.bottlenecks import divide_time, format_costs, list_costs

Events = list[dict[str, Any]]


class Run:
    """A trace, written as the ranks' clocks go on; times in milliseconds."""

    def __init__(self, ranks: int, starts_ms: float = 0.0) -> None:
        self.events: Events = []
        self.now_ms = [starts_ms] * ranks
        self.calls = 0

    def inside(self, rank: int, name: str, kind: str, takes_ms: float) -> None:
        self._event(rank, name, "B", kind)
        self.now_ms[rank] += takes_ms
        self._event(rank, name, "E")

    def step(
        self, computes_ms: list[float], moves_ms: float = 1.0, kind: str = "AllReduce", program: str = "train_step"
    ) -> None:
        """A step of all ranks: each computes, then they meet in an exchange, whose bytes take a time to move."""
        number = sum(e["ph"] == "B" and e["name"].startswith(program) and e["pid"] == 0 for e in self.events)
        arrived = [now + own for now, own in zip(self.now_ms, computes_ms)]
        end_ms = max(arrived) + moves_ms
        for rank, come_ms in enumerate(arrived):
            self._event(rank, f"{program} {number}", "B", "step")
            name = kind if kind != "Send" or rank == arrived.index(max(arrived)) else "Recv"
            args = {
                "key": "0:g",
                "call": self.calls,
                "wire_bytes": 1 << 20,
                "waiting_us": 1e3 * (max(arrived) - come_ms),
            }
            self.events.append(
                {"name": f"{name} 0:g", "cat": name, "ph": "X", "pid": rank, "tid": 100, "ts": 1e3 * come_ms,
                 "dur": 1e3 * (end_ms - come_ms), "args": args}
            )  # fmt: skip
            self.now_ms[rank] = end_ms
            self._event(rank, f"{program} {number}", "E")
        self.calls += 1

    def _event(self, rank: int, name: str, phase: str, kind: str = "") -> None:
        self.events.append(
            {"name": name, "ph": phase, "pid": rank, "tid": 1, "ts": 1e3 * self.now_ms[rank], "cat": kind}
        )


def _begun(ranks: int) -> Run:
    """Two seconds of imports, half a second of `wh.init`, a compilation, two first calls."""
    run = Run(ranks, 2000.0)
    for rank in range(ranks):
        run.inside(rank, "wh.init", "init", 500.0)
        run.inside(rank, "compile train_step", "compile", 300.0)
    run.step([100.0] * ranks)
    run.step([20.0] * ranks)
    return run


def test_the_kinds_add_up_to_each_rank_s_time() -> None:
    run = _begun(2)
    for _ in range(10):
        for rank, waits_ms in enumerate((3.0, 0.0)):
            run.inside(rank, "next batch", "input", waits_ms)
            run.now_ms[rank] += 2.0  # the script
        run.step([20.0, 40.0])
    ranks = divide_time(run.events)
    for time in ranks.values():
        assert sum(time.kinds_s.values()) == pytest.approx(time.end_s)
    first, second = (ranks[rank].kinds_s for rank in (0, 1))
    wanted = {"before": 2.0, "init": 0.5, "compile": 0.3, "input": 0.03, "moves": 0.01, "script": 0.02, "waits": 0.17}
    assert {kind: first[kind] for kind in wanted} == pytest.approx(wanted)
    assert first["first"] == pytest.approx(0.122) and first["computes"] == pytest.approx(0.2)
    assert "waits" not in second
    assert ranks[0].blamed_s == {1: pytest.approx(0.17)}


def test_the_three_largest_costs_are_named_with_what_to_do() -> None:
    run = _begun(2)
    for _ in range(100):
        run.step([20.0, 50.0])
    text = format_costs(run.events, "out.json", 100)
    head, *costs = text.split("\n\n")
    assert head.splitlines()[0].startswith("out.json: 2 ranks, 8.0") and "train_step: 102 calls, 51.0 ms each" in head
    assert [cost[:2] for cost in costs[:3]] == ["1.", "2.", "3."] and costs[3].startswith("All else takes ")
    assert "steps compute" in costs[0] and "before wh.init" in costs[1]
    assert costs[2].startswith(
        "3. 1.50 s (19%): the ranks wait for rank 1 (100% of all waits), which computes 50.0 ms a call,"
    )
    assert "batch.shares" in costs[2] and all("   next: " in cost for cost in costs[:3])
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(
    "kind, words", [("input", "whose batches take 30.0 ms a call"), ("", "whose script takes 30.0 ms")]
)
def test_what_holds_a_rank_up_beside_its_steps(kind: str, words: str) -> None:
    run = _begun(3)
    for _ in range(50):
        run.inside(2, "next batch", kind, 30.0) if kind else run.now_ms.__setitem__(2, run.now_ms[2] + 30.0)
        run.step([20.0] * 3)
    (waits,) = [cost for cost in list_costs(divide_time(run.events)) if "wait for rank" in cost.what]
    assert waits.what.startswith("the ranks wait for rank 2") and words in waits.what
    assert waits.seconds == pytest.approx(2 / 3 * 1.5)  # a rank's, in the mean of all: rank 2 itself waits for nobody


def test_ranks_that_wait_for_each_other_in_turn() -> None:
    run = _begun(2)
    for number in range(40):
        run.step([20.0, 40.0] if number % 2 else [40.0, 20.0])
    (waits,) = [
        cost for cost in list_costs(divide_time(run.events)) if "wait" in cost.what and "batch" not in cost.what
    ]
    assert "in turn" in waits.what and "whale doctor" in waits.action


def test_a_pipeline_s_bubble_and_bytes_that_move() -> None:
    run = _begun(2)
    for _ in range(40):
        run.step([20.0, 90.0], kind="Send")
        run.step([1.0, 1.0], moves_ms=30.0)
    costs = {cost.what.partition(":")[0]: cost for cost in list_costs(divide_time(run.events))}
    assert "pipeline.micro_batches" in costs["stages wait for each other's tensors"].action
    moves = costs["bytes move between the ranks"]
    assert "1.0 MiB a call from each" in moves.what and "communication.wire_dtype" in moves.action


def test_a_step_that_is_compiled_for_every_batch() -> None:
    run = _begun(1)
    for _ in range(5):
        run.inside(0, "compile train_step", "compile", 1000.0)
        run.step([20.0])
    worst = list_costs(divide_time(run.events))[0]
    assert worst.what == "steps are compiled, train_step 6 times" and "drop_remainder" in worst.action


def test_a_script_with_steps_of_its_own() -> None:
    """Reads the trace of a script for Horovod, which has exchanges and no steps."""
    run = Run(2, 1000.0)
    for rank in range(2):
        run.inside(rank, "wh.init", "init", 500.0)
    for _ in range(20):
        run.step([10.0, 40.0], moves_ms=2.0)
    for rank in range(2):
        run.inside(rank, "wh.shutdown", "end", 100.0)
    run.events = [event for event in run.events if event["cat"] != "step" and "train_step" not in event["name"]]
    ranks = divide_time(run.events)
    assert {kind: ranks[0].kinds_s[kind] for kind in ("waits", "moves", "script")} == pytest.approx(
        {"waits": 0.6, "moves": 0.04, "script": 0.2}
    )
    costs = {cost.what.partition(" (")[0]: cost for cost in list_costs(ranks)}
    assert "whose script takes 800.0 ms in all, the others 200.0 ms" in costs["the ranks wait for rank 1"].what


def test_what_comes_before_the_first_step_is_no_time_between_steps() -> None:
    run = Run(2, 2000.0)
    for rank in range(2):
        run.inside(rank, "wh.init", "init", 500.0)
        run.now_ms[rank] += 4000.0  # the model is built
        run.inside(rank, "compile train_step", "compile", 300.0)
    for _ in range(10):
        run.step([20.0, 20.0])
        run.now_ms = [now + 3.0 for now in run.now_ms]
    kinds_s = divide_time(run.events)[0].kinds_s
    assert kinds_s["setup"] == pytest.approx(4.0) and kinds_s["script"] == pytest.approx(9 * 0.003)
    assert "1. 4.00 s (57%): between wh.init and the first step" in format_costs(run.events, "out.json", 80)


def test_a_script_with_steps_of_its_own_is_told_by_its_exchanges() -> None:
    run = Run(2)
    for rank in range(2):
        run.inside(rank, "wh.init", "init", 500.0)
    for _ in range(8):
        run.step([20.0, 15.0])
    for rank in range(2):
        run.inside(rank, "wh.shutdown", "end", 1.0)
    run.events = [event for event in run.events if event["name"].startswith(("wh.", "AllReduce"))]
    said = format_costs(run.events, "out.json", 80)
    assert "It exchanged '0:g' 8 times, once in 21.0 ms (median)." in said
    assert "the script: its own steps" in said and "every\n     tenth step" not in said


def test_a_trace_that_was_cut_off_in_a_step() -> None:
    run = _begun(2)
    run.step([20.0, 20.0])
    run._event(0, "train_step 3", "B", "step")
    run.now_ms[0] += 500.0
    run._event(0, "rank 1 was killed by SIGKILL", "i")
    ranks = divide_time(run.events)
    assert ranks[0].end_s == pytest.approx(run.now_ms[0] / 1e3) and ranks[0].kinds_s["computes"] > 0.5
    with pytest.raises(PlanError, match="the trace contains no events of the run's ranks"):
        format_costs([{"name": "rank 1 failed", "ph": "i", "pid": 1, "tid": 1, "ts": 1.0}], "out.json", 80)
    assert "The script called no step function of Whale" in bottlenecks.format_costs(run.events[:2], "out.json", 80)
