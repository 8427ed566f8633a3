"""A plan drawn: its simulated timeline as a Chrome trace, and one self-contained page."""

from __future__ import annotations

import json

from .planfile import PlanFile


def trace(plan: PlanFile) -> str:
    """The timeline for ui.perfetto.dev or chrome://tracing: a row per stage, an event per pass, microseconds."""
    _, machines, found = plan.evaluate()
    events: list[dict[str, object]] = []
    for index, stage in enumerate(plan.spread.stages):
        where = ", ".join(f"{p.ranks} {machines.pools[p.pool].name}" for p in stage.parts)
        name = {"name": f"stage {index}: {stage.count} layers on {where}"}
        events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": index, "args": name})
    tasks, times = found.tasks, found.timeline
    for resource, held, start, end in zip(tasks.resource, tasks.held_bytes, times.start_s, times.end_s):
        name_of = "forward" if held > 0 else "backward"
        events.append(
            {"name": name_of, "ph": "X", "pid": 0, "tid": resource, "ts": 1e6 * start, "dur": 1e6 * (end - start)}
        )
    total_s = times.total_s
    for index, cost in enumerate(found.stages):
        for what, start, length in (
            ("reduce", times.total_s, cost.reduce_s),
            ("update", total_s + found.reduce_s, cost.update_s),
        ):
            if length:
                events.append({"name": what, "ph": "X", "pid": 0, "tid": index, "ts": 1e6 * start, "dur": 1e6 * length})
    return json.dumps({"traceEvents": events})
