"""Draws a step measured by `whale run --trace` below the predicted one: what ranks did, and when they waited.

read        reads the events of a trace, also of one that the end of the run cut off
step_drawn  returns the step of median duration as a timeline of the page
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cost_model.graph.predict import Span
from whale.errors import PlanError
from whale.ir.plan_text import format_seconds
from whale.planner.report.page_parts import short, side_by_side

KINDS = ("the script's step", "waits for other ranks", "bytes move")
STEP, WAITS, MOVES = range(3)
FIRST = 2  # first calls of a step function, which compile or fill caches
Event = Mapping[str, Any]


def read(path: Path) -> list[Event]:
    """Reads the events of a trace file, one per line; incomplete lines, as at the end of an aborted run, are skipped.

    Raises:
      PlanError: the file is not a trace.
    """
    found = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            found.append(json.loads(line.strip("[], ")))
        except ValueError:
            continue
    if not any(isinstance(e, dict) and "ts" in e for e in found):
        raise PlanError(
            "the file is not a trace of a run",
            given=str(path),
            expected="what `whale run --trace FILE` wrote",
            action=f"whale run -np N --trace {path.name} train.py",
        )
    return found


def step_drawn(events: Sequence[Event], path: str, predicted_s: float) -> dict[str, Any]:
    """Returns the timeline of one measured step for the page.

    The step is the call of median duration, without the first ones, of the step function that took the most time.

    Args:
      path: path of the trace, for messages.
      predicted_s: the predicted seconds of a step.

    Raises:
      PlanError: no step of the trace was run by all of its ranks.
    """
    steps = _steps(events)
    ranks = sorted({rank for rank, _ in steps})
    whole: dict[str, dict[int, tuple[float, float]]] = defaultdict(dict)  # program -> call -> from, to, over all ranks
    for name in [name for rank, name in steps if rank == ranks[0]]:
        times = [steps[rank, name] for rank in ranks if (rank, name) in steps]
        if len(times) == len(ranks):
            program, _, call = name.rpartition(" ")
            whole[program][int(call)] = min(t[0] for t in times), max(t[1] for t in times)
    if not whole:
        raise PlanError(
            "no step of the trace was run by all ranks",
            given=path,
            expected="a trace of a run that got past its first step",
            action="trace a run of some steps",
        )
    program = max(whole, key=lambda p: sum(end - start for start, end in whole[p].values()))
    calls = whole[program]
    later = [c for c in calls if c >= min(calls) + FIRST] or list(calls)
    number = sorted(later, key=lambda c: calls[c][1] - calls[c][0])[len(later) // 2]
    begin_us, end_us = calls[number]
    took_s = (end_us - begin_us) / 1e6
    return {
        "title": "The same step, measured",
        "label": f"{program} {number}, the middle one by length of {len(later)} in the trace: {format_seconds(took_s)},"
        f" {took_s / predicted_s - 1:+.0%} of the predicted one; exchanges below each step, as ranks waited in them",
        "kinds": list(KINDS),
        "colours": ["--k", "--wait", "--c"],
        "rows": [{"name": f"rank {rank}", "where": ""} for rank in ranks],
        "tracks": [_track(events, rank, steps[rank, f"{program} {number}"], begin_us, end_us) for rank in ranks],
        "shown_s": short(took_s),
    }


def _steps(events: Sequence[Event]) -> dict[tuple[int, str], tuple[float, float]]:
    """Returns (begin, end) of each rank's steps in microseconds, by (rank, name of the step such as "train_step
    12").
    """
    begun: dict[tuple[int, int], list[tuple[str, float, str]]] = defaultdict(list)
    found = {}
    for e in events:
        if e.get("ph") == "B":
            begun[e["pid"], e["tid"]].append((e["name"], e["ts"], e.get("cat", "")))
        elif e.get("ph") == "E" and begun[e["pid"], e["tid"]]:
            name, start_us, kind = begun[e["pid"], e["tid"]].pop()
            if kind == "step" and name.rpartition(" ")[2].isdigit():
                found[e["pid"], name] = (start_us, e["ts"])
    return found


def _track(
    events: Sequence[Event], rank: int, step_us: tuple[float, float], begin_us: float, end_us: float
) -> list[tuple[int, float, float, str, int, int]]:
    """Returns the spans of one rank in a step: the step in the upper lane, its exchanges below.

    Args:
      step_us: the rank's own step, (begin, end) in microseconds.
      begin_us, end_us: the part of the trace to draw: the step on all ranks.

    Returns:
      (kind, start, end, text, lane, number of lanes) of each span.
    """
    spans = []
    for e in events:
        if e.get("ph") == "X" and e.get("pid") == rank and e.get("args", {}).get("key") is not None:
            start_us, stop_us = e["ts"], e["ts"] + e["dur"]
            if start_us < end_us and stop_us > begin_us and not str(e["args"]["key"]).startswith("host/whale/plan"):
                waits_s = e["args"].get("waiting_us", 0.0) / 1e6
                spans.append(Span(e["name"], e.get("cat", ""), start_us / 1e6, stop_us / 1e6, waits_s, True))
    placed, count = side_by_side(sorted(spans, key=lambda s: s.start_s))
    begin_s, whole = begin_us / 1e6, 1 + count

    def place_at(seconds: float) -> float:
        return short(min(max(0.0, seconds - begin_s), (end_us - begin_us) / 1e6))

    track = [(STEP, place_at(step_us[0] / 1e6), place_at(step_us[1] / 1e6), "", 0, whole)]
    for lane, span in placed:
        come_s = min(span.end_s, span.start_s + span.seconds)
        if span.seconds:
            track.append((WAITS, place_at(span.start_s), place_at(come_s), span.name, 1 + lane, whole))
        track.append((MOVES, place_at(come_s), place_at(span.end_s), span.name, 1 + lane, whole))
    return track
