"""`whale simulate`: job files, what is printed, the trace, and a job that does not fit."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cost_model.analytic import job
from cost_model.analytic import layer_profile as profile
from cost_model.analytic.job import Job
from cost_model.cluster import cluster_file
from whale.cli import main
from whale.errors import ClusterError

SELENE = Path(job.__file__).parents[1] / "validation" / "clusters" / "selene.yaml"
GPT3 = """\
model: {layers: 96, hidden: 12288, heads: 96, sequence: 2048, vocabulary: 51200}
plan: {tensor: 8, stages: 16, data: 8, micro_batch: 1, batch: 1536, recompute: full}
"""


def simulate(folder: Path, text: str, *arguments: str) -> int:
    (folder / "job.yaml").write_text(text)
    return main(["simulate", str(folder / "job.yaml"), "--cluster", str(SELENE), *arguments])


def test_a_job_is_predicted_and_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.json"
    assert simulate(tmp_path, GPT3, "--trace", str(trace)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "174.62 billion parameters on 1024 devices of selene"
    parts = [float(re.search(r"([\d.]+)%", line)[1]) for line in lines[2:6]]
    assert sum(parts) == pytest.approx(100, abs=0.5)
    assert lines[-1].lstrip().startswith("stage 15")
    events = json.loads(trace.read_text())["traceEvents"]
    assert len(events) == 16 * 192 * 2
    assert {event["name"] for event in events} == {"forward", "backward"}
    step_us = 1e6 * float(re.search(r"([\d.]+) s", lines[1])[1])
    assert 0.9 * step_us < max(event["ts"] + event["dur"] for event in events) <= step_us


def test_another_stack_takes_the_place_of_the_jobs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("name: mine\nbase: megatron-2022\nstep_ms: 60000\n")
    steps = []
    for options in ((), ("--stack", "megatron-2022"), ("--stack", str(mine))):
        assert simulate(tmp_path, GPT3, *options) == 0
        line = capsys.readouterr().out.splitlines()[1]
        steps.append(float(re.search(r"([\d.]+) s", line)[1]))
        assert ("no step under mine on a100-sxm-80gb was compared" in line) == (str(mine) in options)
    assert steps[0] == steps[1] and steps[2] == pytest.approx(steps[0] + 60, abs=0.02)
    assert simulate(tmp_path, GPT3, "--stack", "megatron-2023") == 2
    assert "expected: megatron-202" in capsys.readouterr().err


def test_a_job_that_does_not_fit_says_where_and_by_how_much(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(tmp_path, GPT3.replace("stages: 16", "stages: 2")) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"does not fit: stage 1 on a100-sxm-80gb lacks \d+\.\d GiB", last)


def test_sharded_jobs_have_one_kind_of_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = """\
model: {layers: 32, hidden: 4096, heads: 32, sequence: 2048, vocabulary: 50368}
plan: {data: 16, micro_batch: 4, batch: 128, zero: 3}
software: composer-bf16
"""
    assert simulate(tmp_path, text) == 0
    assert capsys.readouterr().out.splitlines()[-1].lstrip().startswith("stage 0 ")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("hidden:", "hiden:", "job.yaml:1, key model.hiden: object contains unknown field `hiden`\n  expected: hidden"),
        ("layers: 96", "layers: many", "job.yaml:1, key model.layers: this has to be a whole number"),
        ("recompute: full", "recompute: some", "job.yaml:2, key plan.recompute: invalid enum value 'some'"),
        ("data: 8", "data: -8", "job.yaml:2, key plan.data: this has to be a whole number >= 1"),
        ("data: 8", "data: 7", "the global batch is not a multiple"),
        ("batch: 1536", "batch: 8000000000", "more micro-batches in a step than a schedule"),
        ("model:", "software: megatron-2020\nmodel:", "there is no such software stack"),
        ("plan:", "plans:", "unknown field `plans`|missing required field `plan`"),
    ],
)
def test_mistakes(tmp_path: Path, old: str, new: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(tmp_path, GPT3.replace(old, new)) == 2
    assert re.search(message, capsys.readouterr().err)


PROFILE = """\
layers:
  - {device: A100, tensor: 8, micro_batch: 1, forward_s: 0.004, backward_s: 0.012, update_s: 0.001, memory_gb: 0.1}
  - {device: a100, tensor: 4, micro_batch: 1, forward_s: 0.008, backward_s: 0.024}
"""


def test_measured_layers_take_the_place_of_formulas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "profile.yaml").write_text(PROFILE)
    assert simulate(tmp_path, GPT3, "--profile", str(tmp_path / "profile.yaml")) == 0
    assert capsys.readouterr().out.startswith("174.62 billion parameters")
    machines, task = cluster_file.read(SELENE), job.read(tmp_path / "job.yaml")
    plain, measured = task.predict(machines), task.predict(machines, profile.read(tmp_path / "profile.yaml"))
    # 6 layers of 16 ms per micro-batch and stage, the busiest with the logits; the first stage holds 16 micro-batches.
    assert 192 * 6 * 0.016 < measured.compute_s < 1.1 * 192 * 6 * 0.016
    assert measured.stages[0].activations_bytes - plain.stages[0].activations_bytes == pytest.approx(
        16 * 6 * (0.1e9 - 2 * 2048 * 12288)
    )
    assert measured.timeline.total_s != plain.timeline.total_s


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "tensor: 8",
            "tensor: 2",
            "no measurement that the plan needs\n  given: a100-sxm-80gb, 8 tensor-parallel ranks",
        ),
        (
            "device: A100",
            "device: A10O",
            "profile.yaml:2, key layers\\[0\\].device: the hardware catalogue has no such device",
        ),
        (
            "forward_s: 0.004",
            "forward_s: 0",
            "profile.yaml:2, key layers\\[0\\].forward_s: this has to be a number > 0.0",
        ),
        ("memory_gb: 0.1", "memory_gb: -1", "layers\\[0\\].memory_gb: this has to be a number >= 0.0"),
    ],
)
def test_mistakes_in_profiles(
    tmp_path: Path, old: str, new: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "profile.yaml").write_text(PROFILE.replace(old, new))
    assert simulate(tmp_path, GPT3, "--profile", str(tmp_path / "profile.yaml")) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_missing_file() -> None:
    with pytest.raises(ClusterError, match="the job file cannot be read"):
        job.read("nowhere.yaml")
    assert Job.__struct_fields__ == ("model", "plan", "software")
