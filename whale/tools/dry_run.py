"""Plans steps in one process, for any number of ranks: ``wh.plan`` and `whale plan script`."""

from __future__ import annotations

import math
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from cost_model.cluster.allocation import read_named_cluster
from cost_model.cluster.cluster_file import Cluster
from cost_model.cluster.discover import discover_local
from cost_model.graph.machine_profile import MachineProfile, default_path, read
from cost_model.kernels.interval import OWN_RUNS, compute_interval_s
from whale.capture.function import capture_function
from whale.cgroup import cpu_quota
from whale.distributed.gpus import describe_processor_operations
from whale.errors import ClusterError, PlanError, ProgramError, WhaleError
from whale.ir.plan import Plan, strategy_of
from whale.ir.plan_text import fit, format_bytes, format_step
from whale.ir.prediction import Prediction
from whale.ir.program import Program
from whale.kernels.substitute import REWRITE
from whale.partition.lower import PARTITION, add_memory, lower_shown_ranks, make_any_plan
from whale.passes.memory.step_bytes import nccl_memory
from whale.passes.pass_manager import NORMALIZE, PLAN, make_plan, normalise
from whale.passes.plan_builder import expand
from whale.passes.resharding.on_devices import DEVICE_BACKENDS, host_lines
from whale.passes.run_passes import PassLog, PassObserver
from whale.passes.settings import PlanSettings
from whale.passes.verify.explain import explain_matches
from whale.planner.graph_search.plan_prediction import (
    Planned,
    as_carried,
    keep_prediction,
    machine,
    predict_on,
    predict_plan,
    rank_programs,
)
from whale.planner.graph_search.predict import complete
from whale.planner.graph_search.strategies import trains
from whale.planner.report import planfile
from whale.planner.report.draw_captured import Drawn
from whale.planner.report.plan_graph import StepPlan, add_step
from whale.planner.report.planfile import PlanFile
from whale.planner.report.show import show, terminal_width
from whale.planner.report.sliders import make_captured_sliders
from whale.runtime.compile.memory_plan import options_text, refusal_of_plan
from whale.runtime.compile.settings import settings_of
from whale.runtime.context import DryRun, find_running, process
from whale.runtime.loss_scale import find_loss_scale
from whale.runtime.start import plan_only
from whale.runtime.variables.external_updates import ExternalUpdates
from whale.tools.plan_model import plan_again
from whale.tools.run_as_main import as_main, failures_told, locate, make_relative
from whale.tools.what_if import compare, read_what_if

_MOST = 5
UNMEASURED = "this machine by a catalogue's figures, since it was not measured (run `whale profile`)"


def plan(fn: Any, *args: Any, ranks: int | None = None, **kwargs: Any) -> StepPlan:
    """Plans a step for ``ranks`` ranks in this process alone, and trains nothing.

    Args:
      fn: a Python function, a tf.function or a wh.function.
      args, kwargs: the arguments of ``fn``; tf.TensorSpec with static shapes (of the global batch) may stand for
          tensors.
      ranks: number of ranks; None: the ranks of this run, or 1 before ``wh.init``.

    Returns:
      the plan; its ``graph()`` gives a networkx graph of the step's operations and their layouts.

    Raises:
      CaptureError: the step cannot be captured.
      PlanError: the batch cannot be split as asked.
    """
    settings, scale = PlanSettings(size=ranks or 1), None
    if (run := find_running()) is not None:
        scale = find_loss_scale(run)
        settings = settings_of(run).but(size=ranks or run.size)
    marked = bool(settings.memory.recompute)
    captured = capture_function(getattr(fn, "__wrapped__", fn), args, kwargs, mark_gradients=marked, loss_scale=scale)
    program = normalise(captured.program, settings)
    found = make_any_plan(program, settings)
    found = replace(found, strategy=complete(strategy_of(found), settings))
    found = add_memory(found, lower_shown_ranks(program, found, settings), settings)
    return add_step(found, expand(program, found.expanded, settings))


@dataclass(frozen=True)
class PredictionTarget:
    """Names the machine for which a plan's step time is predicted.

    If neither a profile nor a cluster is given, it is the default profile of `whale profile`, if that file exists.

    Attributes:
      profile: path of a file written by `whale profile`.
      cluster: path of a cluster file, or "local" for this machine.
      network: type of network between the hosts of this job, if the cluster is "local".
    """

    profile: str | None = None
    cluster: str | None = None  # or local, this machine
    network: str | None = None  # between the hosts of this job, where the cluster is local

    def read(self) -> MachineProfile | Cluster:
        """Reads the machine's figures from the cluster file or the profile.

        Raises:
          ClusterError: the file cannot be read, or none was named and this machine has not been measured.
        """
        return self.machines() or read(self.profile or default_path())

    def read_or_discover(self, ranks: int) -> MachineProfile | Cluster:
        """Reads the machine's figures; if no file was named and this machine was not measured, takes catalogue figures
        for it.

        Args:
          ranks: number of ranks that share this machine's devices in the latter case.

        Raises:
          ClusterError: the file cannot be read.
        """
        if self.profile is None and self.cluster is None and not default_path().exists():
            return _share_devices(discover_local(cpu_quota()), ranks)
        return self.read()

    def machines(self) -> Cluster | None:
        """Returns the cluster, or None if no cluster is named.

        Raises:
          ClusterError: the cluster file cannot be read.
        """
        return None if self.cluster is None else read_named_cluster(self.cluster, self.network, cpu_quota())

    def devices(self) -> int:
        """Returns the number of devices in the cluster file, the default number of ranks; 0: no cluster file is named.

        Raises:
          ClusterError: the cluster file cannot be read.
        """
        on = self.machines()
        return on.device_count if on is not None and self.cluster != "local" else 0

    def predict(self, planned: Planned) -> tuple[Prediction | None, str]:
        """Predicts a plan's step; returns (the prediction, "") or (None, a line that says why there is none).

        Raises:
          ClusterError: a file that was named cannot be read, or does not fit the plan.
          PlanError: a file was named, and the program's step time cannot be predicted.
        """
        if (on := self.machines()) is not None:
            return predict_on(planned, on), ""
        path = Path(self.profile) if self.profile is not None else default_path()
        if self.profile is None and not path.exists():
            return None, "No predicted time: this machine has not been measured (run `whale profile`)\n"
        try:
            return predict_on(planned, read(path)), ""
        except WhaleError as error:
            if self.profile is not None:
                raise
            return None, f"No predicted time: {error}\n"

    def check_memory(self, planned: Planned) -> None:
        """Checks that a step fits into the devices of the cluster, or into ``memory.limit_bytes`` if that is set.

        Raises:
          PlanError: the step does not fit.
        """
        plan, settings = planned.plan, planned.settings
        if not plan.memory:
            return
        ranks = len(next(iter(plan.memory.values())))
        limits: Sequence[float] = [settings.memory.limit_bytes or math.inf] * ranks
        on = self.machines()
        if on is not None and not settings.memory.limit_bytes:
            limits = machine(on, settings.size).memory_bytes
        memory = plan.memory
        if settings.exchange.backend == "nccl" and (programs := rank_programs(planned)[:ranks]):
            beside = [nccl_memory(one, rank, settings).get("NCCL", 0) for rank, one in enumerate(programs)]
            memory = {**memory, "NCCL": tuple(beside)}
        totals = [sum(sizes) for sizes in zip(*memory.values())]
        if any(total > limit for total, limit in zip(totals, limits)):
            # `options_text` normalises the program again, which does not change a normalised program.
            beside_host = on is not None and on.kinds == {"gpu"}
            options = options_text(settings, limits, planned.program, None, beside_host)
            raise refusal_of_plan(plan.program, memory, limits, options)


def _share_devices(local: Cluster, ranks: int) -> Cluster:
    """Returns this machine as a cluster with a device for each rank; with more ranks than devices, ranks share devices
    equally.
    """
    parts = -(-ranks // local.device_count)
    (host,) = local.hosts
    devices = [
        msgspec.structs.replace(
            entry, count=entry.count * parts, share=entry.share / parts, memory_gb=entry.device.memory_gb / parts
        )
        for entry in host.devices
    ]
    return msgspec.structs.replace(local, name=UNMEASURED, hosts=[msgspec.structs.replace(host, devices=devices)])


def main(
    script: str,
    args: Sequence[str],
    ranks: int | None,
    out: str | None = None,
    prediction: PredictionTarget = PredictionTarget(),
    is_model: bool = False,
    explain: str | None = None,
    fixed: Sequence[str] = (),
    found: Callable[[], None] = lambda: None,
    verbose: bool = False,
) -> int:
    """Prints the plan of a script's first step that takes a batch, and its prediction: `whale plan SCRIPT`.

    Args:
      args: the script's arguments.
      ranks: number of ranks; None: the number of devices in the cluster file, else 2.
      out: file to write the plan to, as JSON.
      prediction: the machine to predict for.
      is_model: ``script`` is a model file (see whale.tools.models).
      explain: name or pattern of operations whose layouts are explained.
      fixed: choices PATTERN.split=N, each of which is compared with the plan (see whale.tools.what_if).
      found: called when the plan is complete, before it is printed.
      verbose: also print how long each pass took and what it changed.

    Raises:
      ClusterError: the script or a file does not exist.
      PlanError: a choice cannot be read, or the plan does not fit.
      ProgramError: the script ended without a step that takes a batch.
    """
    asked, ranks = [read_what_if(text) for text in fixed], ranks or prediction.devices() or 2
    passes = PassLog() if verbose else None
    if is_model:
        planned = _describe(script, ranks, passes)
    else:
        planned = first_step(script, args, ranks, on=prediction.machines(), passes=passes)
    predicted, why = prediction.predict(planned)
    plan = planfile.from_program(
        replace(planned.plan, predicted=predicted), prediction.machines() if prediction.devices() else None
    )
    found()
    if out is not None:
        planfile.save(msgspec.structs.replace(plan, script=make_relative(plan.script, out) if plan.script else ()), out)
    width = terminal_width()
    sys.stdout.write(show(plan, width) + "\n")
    if planned.settings.exchange.backend in DEVICE_BACKENDS:
        programs = rank_programs(planned)
        memory = nccl_memory(programs[0], 0, planned.settings)
        taken = [f"{name} takes some {format_bytes(size)} of the first rank's GPU" for name, size in memory.items()]
        lines = [*host_lines(programs), *taken, *describe_processor_operations(programs)]
        sys.stdout.write("\n".join([*fit(lines, width), ""]))
    sys.stdout.write(why)
    if passes is not None:
        sys.stdout.write("\n".join(["", *fit(passes.lines((NORMALIZE, PLAN, PARTITION, REWRITE)), width)]) + "\n")
    if explain is not None:
        expanded = expand(planned.program, planned.plan.expanded, planned.settings)
        sys.stdout.write("\n".join(["", *fit(explain_matches(expanded, planned.plan, explain), width)]) + "\n")
    if asked:
        sys.stdout.write("\n")
    for one in asked:
        text = compare(planned, one, prediction.read() if predicted else None)
        sys.stdout.write("\n".join(fit(text.splitlines(), width)) + "\n")
    prediction.check_memory(planned)
    return 0


def capture_again(plan: PlanFile, path: str) -> Planned:
    """Captures the step of a saved plan again, from its script or its description; the result has the saved plan.

    Args:
      path: path of the plan file.

    Raises:
      ClusterError: the script does not exist here.
      PlanError: the plan names no script, or the program has changed since.
      ProgramError: the script ends without the plan's step.
    """
    if plan.description:
        return plan_again(plan, path)
    if not plan.script:
        raise PlanError(
            "the plan names no script that could be captured again",
            given=path,
            expected="a plan that `whale plan -o FILE train.py` wrote",
            action="plan the script again with `whale plan -o FILE train.py`",
        )
    script = locate(plan.script, path)
    return first_step(script[0], script[1:], plan.strategy.ranks, os.path.abspath(path))


def replay(plan: PlanFile, path: str, prediction: PredictionTarget, with_sliders: bool = False) -> Drawn:
    """Captures a saved plan's step again and simulates it, to draw it.

    Args:
      path: path of the plan file.
      prediction: the machine to simulate; if it names none, the plan's own cluster, or this machine.
      with_sliders: also simulate faster and slower exchanges and ranks.

    Raises:
      ClusterError: the script does not exist here, or a file cannot be read.
      PlanError: the program has changed since.
    """
    planned, ranks = capture_again(plan, path), plan.strategy.ranks
    own = plan.cluster if prediction.profile is None and prediction.cluster is None else None
    on = own or prediction.read_or_discover(ranks)
    alone = planned.settings.but(
        size=1,
        devices=(),
        batch__shares=(),
        batch__local={},
        mesh=(),
        zero__level=0,
        time__micro_batches=1,
    )
    alone_plan = make_plan(planned.program, alone)
    programs = rank_programs(planned)
    found = predict_plan(planned, on, with_timelines=True, programs=programs)
    alone_s = predict_plan(Planned(planned.program, alone_plan, alone), on).step_s
    here = machine(on, ranks)
    name = on.name if isinstance(on, Cluster) else f"{on.host} as `whale profile` measured it"
    slowest = max(range(ranks), key=lambda rank: found.ranks[rank].end_s)
    sliders = make_captured_sliders(as_carried(programs, planned.settings), here, slowest) if with_sliders else None
    likely_s = None if isinstance(on, Cluster) else compute_interval_s(found.step_s, OWN_RUNS)
    return Drawn(planned.plan, planned.program, found, alone_s, here.memory_bytes, name, sliders, likely_s)


def simulate_file(model: str, ranks: int, measured: str) -> tuple[str, bool]:
    """Predicts the step of a model file on a machine that `whale profile` measured: `whale simulate --measured`.

    Args:
      model: path of the model file.
      measured: path of the profile.

    Returns:
      (text with the prediction, whether the step fits into memory).

    Raises:
      ClusterError: a file cannot be read.
    """
    table = read(measured)
    planned = _describe(model, ranks)
    found = predict_plan(planned, table)
    text = (
        "\n".join(format_step(keep_prediction(found, f"{table.host} as `whale profile` measured it", measured=True)))
        + "\n"
    )
    limits = machine(table, ranks).memory_bytes
    fits = True
    for rank, (ran, limit) in enumerate(zip(found.ranks, limits)):
        if ran.peak_bytes > limit:
            fits = False
            text += f"does not fit: rank {rank} lacks {format_bytes(ran.peak_bytes - limit)}\n"
    return text, fits


def _describe(path: str, ranks: int, passes: PassLog | None = None) -> Planned:
    from whale.tools import models

    description = models.read_description(path)
    settings = PlanSettings(size=ranks).but(memory__recompute="" if description.recompute == "none" else "marked")
    watched = settings.but(observer=PassObserver("", passes))
    program = normalise(models.capture_program(description), watched)
    plan = make_any_plan(program, watched)
    return Planned(
        program, plan, settings, tuple(lower_shown_ranks(program, plan, watched)) if passes is not None else ()
    )


def first_step(
    script: str,
    args: Sequence[str],
    ranks: int,
    saved: str = "",
    on: Cluster | None = None,
    passes: PassLog | None = None,
) -> Planned:
    """Runs ``script`` up to its first step that takes a batch, plans that step for ``ranks`` ranks, and stops there.

    Programs without a batch (initial values, restoring) run on one rank, so that the script gets to its step.

    Args:
      args: the script's arguments.
      saved: path of a plan file to use instead of planning the step.
      on: the devices that ``auto_parallel`` plans for; None: ranks are as fast as this process.
      passes: records how long each pass over the step took and what it changed.

    Raises:
      ClusterError: the script does not exist.
      ProgramError: the script failed, or ended without a step that takes a batch.
    """
    if not Path(script).is_file():
        raise ClusterError(
            "the script does not exist", given=script, expected="a Python file", action="correct the path"
        )
    planned: list[Planned] = []
    seen: dict[str, None] = {}

    def stop(plan: Plan, program: Program, settings: PlanSettings, ranks: Sequence[Program]) -> None:
        # Under auto_parallel the plan may be to replicate the whole step, so that no input is a divided batch.
        if plan.batch_inputs or (plan.searched and trains(program)):
            plan = replace(plan, script=(os.path.abspath(script), *args))
            planned.append(Planned(program, plan, settings.but(observer=PassObserver()), tuple(ranks)))
            raise _Planned
        seen[program.name] = None

    runs, outside, dry = process.runs, ExternalUpdates(), DryRun(ranks, stop, saved, on, passes)
    try:
        with as_main(script, args), plan_only(dry), suppress(_Planned), failures_told(script):
            runpy.run_path(script, run_name="__main__")
    finally:
        outside.take_back()
    if not planned:
        raise _nothing_to_plan(script, process.runs > runs, outside, list(seen))
    return planned[0]


def _nothing_to_plan(script: str, started: bool, outside: ExternalUpdates, seen: Sequence[str]) -> ProgramError:
    """Creates the error for a script that ended without a step to plan.

    Args:
      started: whether the script called ``wh.init``.
      outside: training that the script did outside of Whale.
      seen: names of the programs that it ran, none of which takes a batch.
    """
    facts, action = {"given": script}, "check that the script calls its step when started alone"
    if outside.trained:
        facts["trained without Whale"] = "; ".join(list(outside.trained)[:_MOST])
        action = (
            "replace tf.function by wh.function, or tf.Session by wh.Session, where the script trains without Whale"
        )
    if seen:
        facts["without a batch"] = ", ".join(seen[:_MOST])
    if not started:
        facts["given"] += ", which does not call wh.init()"
        action = "put `import whale as wh; wh.init()` at the beginning of the script"
    if "whale.horovod" in sys.modules:
        action = "start it with `whale run`: the ranks of a Horovod script run their own programs, which have no plan"
    return ProgramError(
        "the script ended before it ran a step that takes a batch",
        **facts,
        expected="after wh.init(), Keras' fit, a call of a wh.function, or a wh.Session.run, with a batch",
        action=action,
    )


class _Planned(BaseException):
    """Raised to end the script once its plan is known; a BaseException, so that handlers of the script do not
    catch it.
    """
