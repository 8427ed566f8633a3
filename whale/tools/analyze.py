"""Runs one rank of `whale show --analyze`: runs a script under a saved plan for some steps, and measures them.

    whale run -np N -m whale.tools.analyze FOLDER STEPS PROFILE SCRIPT [ARGUMENTS...]

Each rank writes `rank<N>.json` into the folder; rank 0 also writes `prediction.json`, for the program that ran.
"""

from __future__ import annotations

import re
import runpy
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import tensorflow as tf

import whale_ops.memory
from cost_model.graph.machine_profile import read
from cost_model.graph.predict import measure_union_s
from whale.errors import CommError, PlanError, ProgramError
from whale.ir.ops import CALLS
from whale.ir.plan import Plan
from whale.ir.program import Program
from whale.passes.settings import PlanSettings
from whale.planner.graph_search.plan_prediction import Planned, predict_plan
from whale.planner.report.analysis import MeasuredRank, PredictedRank, PredictedStep
from whale.runtime.context import measure_run, require_current
from whale.runtime.start import shutdown
from whale.tools.run_as_main import as_main

WARM, PROFILED = 5, 3
_KERNEL = re.compile(r"([\w./\-]+):(_?[A-Za-z]\w*)")  # a node and its op, as TensorFlow's executor names its events
_NO_KERNELS = ("Whale", *CALLS)


class _Done(BaseException):
    """Raised to end the script once its steps are measured; a BaseException, so that handlers of the script do not
    catch it.
    """


class _Meter:
    """Measures the steps of the program that the saved plan is for; the runtime calls its methods during the run.

    The first `WARM` steps are not timed, the next `steps_wanted` are, and `PROFILED` more run under TensorFlow's
    profiler; then `_Done` ends the script.

    Attributes:
        steps_wanted: number of steps to time.
        seen: the program with its plan, once it has been compiled; None before.
        taken: seconds of each timed step.
        calls: number of steps so far, those that are not timed included.
        moving_s: seconds of exchanges per step, each from the arrival of its last participant.
        busy_s: seconds per step in which at least one kernel ran.
        peak_bytes: peak of TensorFlow's allocator; None: it keeps no statistics.
        kernels: seconds of kernels per step, by operation.
    """

    def __init__(self, steps: int) -> None:
        self.steps_wanted = steps
        self.seen: Planned | None = None
        self.taken: list[float] = []
        self.calls = 0
        self.counted_s = self.moving_s = self.busy_s = 0.0
        self.peak_bytes: int | None = None
        self.kernels: defaultdict[str, float] = defaultdict(float)

    def note_plan(self, program: Program, plan: Plan, settings: PlanSettings) -> None:
        saved = require_current().planning.saved
        if saved is not None and plan.fingerprint == saved.plan.fingerprint:
            self.seen = Planned(program, plan, settings)

    def measure_steps(self, call: Callable[..., Any], plan: Plan) -> Callable[..., Any]:
        saved = require_current().planning.saved
        if saved is None or plan.fingerprint != saved.plan.fingerprint:
            return call
        return lambda *args: self._step(call, args)

    def _step(self, call: Callable[..., Any], args: Sequence[Any]) -> Any:
        self.calls += 1
        number = self.calls - WARM
        if number == 1:
            _try(whale_ops.memory.reset_peak)
            self.counted_s = _moving_s()
        if number == self.steps_wanted + 1:
            self._end()
        if number <= self.steps_wanted:
            start_s = time.perf_counter()
            result = call(*args)
            if tf.executing_eagerly():  # a session returns only when its results are computed
                tf.test.experimental.sync_devices()
            if number > 0:
                self.taken.append(time.perf_counter() - start_s)
            return result
        self._profile(call, args)
        raise _Done

    def _end(self) -> None:
        """Records memory and exchanges after the last timed step."""
        self.moving_s = (_moving_s() - self.counted_s) / len(self.taken)
        held = _try(whale_ops.memory.read_memory)
        self.peak_bytes = held.peak_bytes if held is not None else None

    def _profile(self, call: Callable[..., Any], args: Sequence[Any]) -> None:
        """Runs `PROFILED` more steps under TensorFlow's profiler, to time kernels; on a GPU it does nothing."""
        if tf.config.list_logical_devices("GPU"):
            return  # its host events are launches, not kernels
        options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=3)
        with tempfile.TemporaryDirectory() as folder:
            tf.profiler.experimental.start(folder, options)
            for _ in range(PROFILED):
                call(*args)
            tf.profiler.experimental.stop()
            for path in Path(folder).rglob("*.xplane.pb"):
                self._take(path.read_bytes())

    def _take(self, data: bytes) -> None:
        from tensorflow.tsl.profiler.protobuf.xplane_pb2 import XSpace

        space = XSpace()
        space.ParseFromString(data)
        ran: list[tuple[float, float]] = []
        for plane in space.planes:
            names = {number: entry.name for number, entry in plane.event_metadata.items()}
            for line in plane.lines:
                for event in line.events:
                    found = _KERNEL.fullmatch(names[event.metadata_id])
                    if found and not found[2].startswith(_NO_KERNELS):
                        start_s = line.timestamp_ns * 1e-9 + event.offset_ps * 1e-12
                        ran.append((start_s, start_s + event.duration_ps * 1e-12))
                        self.kernels[found[1]] += event.duration_ps * 1e-12 / PROFILED
        self.busy_s += measure_union_s(ran) / PROFILED


def _try(call: Callable[[], Any]) -> Any:
    """Returns the result of `call`, or None if TensorFlow's allocator keeps no statistics."""
    try:
        return call()
    except CommError:
        return None


def _moving_s() -> float:
    """Returns the seconds of all exchanges of this rank so far, each from the arrival of its last participant."""
    found = [c for comm in require_current().comms for c in comm.counters()]
    return float(sum(c.seconds - c.waiting_seconds for c in found))


def _predict(planned: Planned, profile: str) -> PredictedStep:
    table = read(profile)
    found = predict_plan(planned, table, whale_ops.memory.COUNTED_FROM_BYTES, with_timelines=True)
    ranks = []
    for ran, timeline in zip(found.ranks, found.timelines):
        kernels: defaultdict[str, float] = defaultdict(float)
        for span in timeline.spans:
            if not span.exchange:
                kernels[span.name] += span.seconds
        busy_s = timeline.busy_s(exchange=False)
        ranks.append(PredictedRank(ran.compute_s, busy_s, ran.exchange_s, ran.peak_bytes, dict(kernels)))
    stages = [""] * len(ranks)
    for group in planned.plan.stage_groups:
        for rank in group.ranks:
            stages[rank] = group.name
    return PredictedStep(f"{table.host} as `whale profile` measured it", found.step_s, ranks, stages)


def main() -> None:
    """Runs the script, and writes this rank's measurements.

    Raises:
      ProgramError: the script ended before enough steps were measured.
    """
    folder, steps, profile, script, *args = sys.argv[1:]
    meter = _Meter(int(steps))
    try:
        with as_main(script, args), measure_run(meter):
            runpy.run_path(script, run_name="__main__")
    except _Done:
        pass
    else:
        raise ProgramError(
            "the script ended before enough of its steps could be measured",
            given=f"{meter.calls} steps of the plan's program",
            expected=f"{WARM + meter.steps_wanted + 1} steps",
            action="let the script train for more steps, or give a smaller --steps",
        )
    rank = require_current().rank
    if require_current().size > 1 and len(require_current().ranks) > 1:
        raise PlanError(
            "ranks that share one process cannot be measured separately",
            given=f"ranks {', '.join(map(str, require_current().ranks))} in one process",
            expected="one process per rank",
            action="do not set the in-process transport, and start the ranks with `whale run`",
        )
    shutdown()
    if meter.seen is None:
        raise ProgramError(
            "the step of the saved plan did not run",
            given=script,
            expected="the script calls the step that was planned",
            action="plan the script again: `whale plan -o FILE " + script + "`",
        )
    seen = meter.seen.plan.program
    kernels = dict(meter.kernels)
    found = MeasuredRank(rank, seen, meter.taken, kernels, meter.busy_s, meter.moving_s, meter.peak_bytes)
    (Path(folder) / f"rank{rank}.json").write_bytes(msgspec.json.encode(found))
    if rank == 0:
        (Path(folder) / "prediction.json").write_bytes(msgspec.json.encode(_predict(meter.seen, profile)))


if __name__ == "__main__":
    main()
