"""Reads job files (YAML: a model by hyper-parameters, its parallel degrees, its software) and reports predictions.

A job file:

    model: {layers: 96, hidden: 12288, heads: 96, sequence: 2048, vocabulary: 51200}
    plan: {tensor: 8, stages: 16, data: 8, micro_batch: 1, batch: 1536, recompute: full}
    software: megatron-2022
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from cost_model.analytic.evaluate import likely_s, not_compared
from cost_model.analytic.layer_profile import Profile
from cost_model.analytic.predict import JobPrediction, predict
from cost_model.analytic.stacks import is_file, stack
from cost_model.analytic.transformer import Transformer
from cost_model.analytic.transformer_model import stack_of
from cost_model.cluster import yaml_files
from cost_model.cluster.cluster_file import Cluster
from cost_model.cluster.pools import Machines
from whale.ir.strategy import Degrees


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Represents a job file: a training job whose step time and memory are to be predicted.

    Attributes:
        model: the transformer.
        plan: its parallel degrees, batch and recompute; all stages are equal.
        software: name of a software stack (`stacks.stack`), or the path of a stack's YAML file.
    """

    model: Transformer
    plan: Degrees
    software: str = "megatron-2022"

    def predict(self, cluster: Cluster, profile: Profile | None = None) -> JobPrediction:
        """Predicts the job's step on a cluster (see `predict.predict`).

        Args:
            profile: measured layers to use instead of formulas, if any.

        Raises:
            PlanError: the plan does not fit the model.
            ClusterError: the cluster lacks devices, or there is no such software stack.
        """
        return predict(self.model, self.plan, stack(self.software), cluster, profile)


def read(path: str | Path, software: str | None = None) -> Job:
    """Reads a job file; ClusterError with line and key if it contains a mistake.

    Args:
        software: stack to use instead of the file's own.

    A stack's YAML file that the job file names is looked up relative to the job file.
    """
    found = yaml_files.YamlFile(yaml_files.read_text(path, "job file"), str(path), "job file").decode(Job)
    if software is None and is_file(found.software):
        software = str(Path(path).parent / found.software)
    return found if software is None else msgspec.structs.replace(found, software=software)


def report(job: Job, cluster: Cluster, found: JobPrediction) -> str:
    """Formats a prediction as text: the parts of the step time, throughput, and the memory of each different stage."""
    plan, model = job.plan, job.model
    useful = model.step_flops(plan.batch) / found.step_s / plan.ranks
    tokens = plan.batch * model.sequence
    lines = [
        f"{model.parameters / 1e9:.2f} billion parameters on {plan.ranks} devices of {cluster.name}",
        f"step       {_seconds(found.step_s)}  ({_likely(job, cluster, found)})",
        f"  kernels  {_part(found.compute_s, found)}",
        f"  waits    {_part(found.exposed_communication_s, found)} for communication that nothing hides",
        f"  bubble   {_part(found.bubble_s, found)}",
        f"  update   {_part(found.update_s, found)} gradient reduction and optimizer",
        f"speed      {tokens / found.step_s:,.0f} tokens/s, {useful / 1e12:.1f} TFLOP/s per device"
        f" ({useful / _mean_peak(job, cluster, found):.1%} of peak, recompute not counted)",
        "memory     GiB    parameters  gradients  optimizer  activations  other",
    ]
    first = 0
    for stage in range(1, len(found.stages) + 1):
        if stage < len(found.stages) and found.stages[stage] == found.stages[first]:
            continue
        one = found.stages[first]
        states = (one.parameters_bytes, one.gradients_bytes, one.optimizer_bytes, one.activations_bytes)
        columns = (one.total_bytes, *states, one.total_bytes - sum(states))
        name = f"stage {first}" if stage == first + 1 else f"stages {first}-{stage - 1}"
        widths = (6, 15, 11, 11, 13, 7)
        lines.append(f"  {name:9}" + "".join(f"{size / 2**30:{width}.1f}" for size, width in zip(columns, widths)))
        first = stage
    return "\n".join(lines + too_large(cluster, found))


def _likely(job: Job, cluster: Cluster, found: JobPrediction) -> str:
    one, machines = stack_of(stack(job.software), job.model), Machines(cluster)
    low_s, high_s = likely_s(one, found.strategy, machines, found.step_s)
    text = f"nine of ten measured steps are expected in {_seconds(low_s).strip()} to {_seconds(high_s).strip()}"
    if devices := not_compared(one, found.strategy, machines):
        kind = "of a model with experts " if job.model.experts else ""
        text += f"; no step {kind}under {one.name} on {', '.join(devices)} was compared with a prediction"
    return text


def _mean_peak(job: Job, cluster: Cluster, found: JobPrediction) -> float:
    """Returns the peak FLOP/s of the stages' devices, averaged over stages."""
    dtype, pools = stack(job.software).dtype, Machines(cluster).pools
    each = [
        sum(pools[part.pool].device.peak_flops_per_s(dtype) * pools[part.pool].entry.share for part in stage.parts)
        / len(stage.parts)
        for stage in found.strategy.stages
    ]
    return sum(each) / len(each)


def too_large(cluster: Cluster, found: JobPrediction) -> list[str]:
    """Returns one line for each stage and kind of device whose memory is too small, with the bytes that it lacks."""
    from whale.ir.plan_text import format_bytes  # loads NumPy, which a prediction does without

    lines, pools = [], Machines(cluster).pools
    for number, (stage, cost) in enumerate(zip(found.strategy.stages, found.evaluation.stages)):
        for part, held in zip(stage.parts, cost.memory):
            missing = held.total_bytes - pools[part.pool].memory_bytes
            if missing > 0:
                entry = pools[part.pool].entry
                lines.append(f"does not fit: stage {number} on {entry.type} lacks {format_bytes(missing)}")
    return lines


def _seconds(seconds: float) -> str:
    return f"{seconds:9.3f} s" if seconds >= 1 else f"{1e3 * seconds:8.2f} ms"


def _part(seconds: float, of: JobPrediction) -> str:
    return f"{_seconds(seconds)} {seconds / of.step_s:6.1%}"


def trace(found: JobPrediction) -> str:
    """Returns the simulated step in Chrome's trace format (JSON): one row per stage or stream, one event per pass."""
    tasks, times = found.tasks, found.timeline
    events = []
    for resource, held, start, end in zip(tasks.resource, tasks.held_bytes, times.start_s, times.end_s):
        name = "forward" if held > 0 else "backward" if held < 0 else "pass"
        event = {"name": name, "ph": "X", "pid": 0, "tid": resource, "ts": 1e6 * start, "dur": 1e6 * (end - start)}
        events.append(event)
    return json.dumps({"traceEvents": events})
