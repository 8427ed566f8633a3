"""A script's step runs under a plan that was saved; what its run measures stands beside what was predicted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from cost_model.cluster.cluster_file import Cluster, DeviceEntry, HostEntry
from cost_model.cluster.discover import find_gpu
from cost_model.graph.machine_profile import write
from tests.cost_model.test_captured import TABLE
from tests.oracle.metric import difference, limit
from tests.passes.autoshard.test_divide import scoped
from tests.programs import mlp, planned
from tests.runtime.compile.test_auto import THIN_LINK, Deep, double, speed
from whale.cli import main
from whale.distributed.device_exchange import OwnGpu
from whale.errors import PlanError
from whale.ir.fingerprint import compute_fingerprint
from whale.ir.mesh import Axis
from whale.ir.plan import Plan, load_plan
from whale.partition.mesh import plan_program
from whale.passes.pass_manager import make_plan
from whale.passes.settings import PlanSettings
from whale.passes.verify.check import check
from whale.planner.graph_search import search
from whale.planner.report import analysis, planfile, show
from whale.runtime import context
from whale.runtime.compile import auto
from whale.runtime.context import DryRun
from whale.runtime.saved_plan import SavedPlan, warn_of_other_devices
from whale.runtime.start import plan_only
from whale.tools import analyze, dry_run

__all__ = ["double", "speed"]


def saved(path: Path, step: Callable[[], None], **config: Any) -> Plan:
    """What a dry run of two ranks plans for a step, written to a file."""
    plans: list[Plan] = []
    with plan_only(DryRun(2, lambda plan, *_: plans.append(plan))):
        wh.init(config)
        step()
    plans[0].save(path)
    return plans[0]


def fresh() -> Deep:
    """The same program each time: Keras numbers the names of its layers."""
    tf.keras.backend.clear_session()
    return Deep(wh.function)


def one_step() -> None:
    deep = fresh()
    deep.step(*deep.batch(0))


def test_other_gpus_than_a_plan_was_made_for_are_named(caplog: pytest.LogCaptureFixture) -> None:
    v100, a100 = "Tesla V100-SXM2-16GB", "NVIDIA A100-SXM4-80GB"

    def gpu(name: str) -> OwnGpu:
        return OwnGpu("1", name, 1, 8)

    def warned(*names: str) -> str:
        caplog.clear()
        warn_of_other_devices(cluster, [gpu(one) for one in names])
        return caplog.text

    entries = [DeviceEntry(find_gpu(name).name, 1) for name in (a100, v100)]
    cluster = Cluster("two", [HostEntry("h", entries)])
    assert warned(a100, v100) == "" and warned("of some day", v100) == ""
    swapped = warned(v100, a100)
    assert "rank 0 has" in swapped and "rank 1 has" in swapped and "in another order" in swapped
    assert "nvidia-smi" in swapped
    other = warned(v100, v100)
    assert "rank 0 has" in other and "rank 1" not in other and "another order" not in other
    warn_of_other_devices(None, [gpu(a100)])


def test_a_step_runs_under_a_saved_plan_and_others_are_planned(ranks: Callable[..., None], tmp_path: Path) -> None:
    expected = Deep().train()
    path = tmp_path / "plan.json"
    plan = saved(path, one_step)
    assert load_plan(path) == plan
    file = planfile.load(path)
    assert show.diff(file, file) == "The plans are equal."
    # Marked, so that it is seen to be the file's: no plan is made with such a name of a device.
    replace(plan, devices=("first", "second")).save(path)
    ranks(2, **{"mesh.plan": str(path)})
    deep = fresh()
    worst = difference(expected, deep.train(), 0.1)
    assert worst.error <= limit("float64", 0.0), worst
    assert deep.step.plan(*deep.batch(0)).devices == ("first", "second")
    assert deep.evaluate.plan(*deep.batch(0)).devices == ("rank 0", "rank 1")
    wh.shutdown()
    ranks(2, **{"mesh.plan": str(path)})
    with pytest.raises(PlanError, match="made for another program"):
        deep.step(*(rows[:8] for rows in deep.batch(0)))
    wh.shutdown()
    with pytest.raises(PlanError, match="another number of ranks"):
        ranks(3, **{"mesh.plan": str(path)})


def test_programs_of_the_plans_name_without_its_inputs_are_planned() -> None:
    program = mlp(8, 4, 4, 2)
    found = SavedPlan("p.json", planned(program, 4, 4))
    assert found.find_plan(replace(program, inputs=()), PlanSettings(size=2)) is None and not found.used
    assert found.find_plan(program, PlanSettings(size=2)) is not None and found.used


def test_what_auto_parallel_chose_is_kept_in_the_file(
    ranks: Callable[..., None], speed: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Deep().train()
    speed(THIN_LINK, THIN_LINK)
    choices = search.choices
    monkeypatch.setattr(search, "choices", lambda *a: [c for c in choices(*a) if not c.replicated and not c.split])
    path = tmp_path / "plan.json"
    plan = saved(path, one_step, **{"mesh.auto_parallel": True})
    assert len(plan.stage_groups) == 2 and plan.searched
    saved(tmp_path / "rows.json", one_step)
    text = show.diff(planfile.load(tmp_path / "rows.json"), planfile.load(path))
    assert "stages" in text and "no longer: " in text and "batch x: S(0)[8,8] -> S(0)[16]" in text, text
    monkeypatch.setattr(auto, "best_way", None)  # nothing is chosen any more
    ranks(2, **{"mesh.plan": str(path), "mesh.auto_parallel": True})
    deep = fresh()
    worst = difference(expected, deep.train(), 0.1)
    assert worst.error <= limit("float64", 0.0), worst
    assert len(deep.step.plan(*deep.batch(0)).stage_groups) == 2


def test_a_run_measures_its_steps_and_operations(ranks: Callable[..., None], tmp_path: Path) -> None:
    path, profile = tmp_path / "plan.json", tmp_path / "profile.json"
    parts = {"pipeline.micro_batches": 2}  # operations of micro-batches are inside calls
    saved(path, one_step, **parts)
    write(TABLE, profile)
    meter = analyze._Meter(3)
    with context.measure_run(meter):
        ranks(2, **{"mesh.plan": str(path), **parts})
        deep = fresh()
        with pytest.raises(analyze._Done):
            for number in range(20):
                deep.step(*deep.batch(number))
    assert len(meter.taken) == 3 and min(meter.taken) > 0 and meter.moving_s > 0
    assert 0 < meter.busy_s <= sum(meter.kernels.values()) * (1 + 1e-6)
    assert meter.seen is not None
    predicted = analyze._predict(meter.seen, str(profile))
    measured = [
        analysis.MeasuredRank(rank, "step", meter.taken, dict(meter.kernels), meter.busy_s, 1e-4, meter.peak_bytes)
        for rank in range(2)
    ]
    products = [n for n in analysis._match_names(predicted.ranks[0].kernels_s, meter.kernels) if "MatMul" in n]
    assert len(products) >= 9  # of five layers: forward, and gradients
    text = analysis.report(predicted, measured)
    assert "rank 1" in text and "kernels by layer" in text


def test_what_is_far_off_is_marked() -> None:
    predicted = analysis.PredictedStep(
        "here", 0.010, [analysis.PredictedRank(0.008, 0.008, 0.002, 100, {"a/b/MatMul": 0.006, "loss": 0.002})], []
    )
    kernels = {"a/b/MatMul": 0.012, "loss": 0.002}
    rows = analysis.report(
        predicted, [analysis.MeasuredRank(0, "p", [0.015, 0.016, 0.017], kernels, 0.014, 0.002, 110)]
    )
    marked = {row.split("  ")[0].strip() or row.split()[0] for row in rows.splitlines() if row.endswith("<--")}
    assert marked == {"step (median)", "compute", "a/b"}
    assert rows.endswith("measured 16.0 ms (+60 %): mostly compute of rank 0 (+6.0 ms against the prediction).")
    assert analysis.layer_of("gradient_tape/a/b/MatMul/MatMul_1") == "a/b" == analysis.layer_of("a/b/MatMul")


SCRIPT = """
import tensorflow as tf
import whale as wh
from tests.runtime.compile.test_auto import Deep
tf.keras.backend.clear_session()
wh.init()
deep = Deep(wh.function)
deep.step(*deep.batch(0))
"""


def test_a_scripts_plan_becomes_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "s.py").write_text(SCRIPT)
    write(TABLE, tmp_path / "profile.json")
    dry_run.main(str(tmp_path / "s.py"), (), 2, str(tmp_path / "plan.json"))
    asked = ["html", str(tmp_path / "plan.json"), "-o", str(tmp_path / "p.html")]
    assert main([*asked, "--measured", str(tmp_path / "profile.json")]) == 0
    asked = ["trace", str(tmp_path / "plan.json"), "-o", str(tmp_path / "t.json")]
    assert main([*asked, "--measured", str(tmp_path / "profile.json")]) == 0
    events = msgspec.json.decode((tmp_path / "t.json").read_bytes())["traceEvents"]
    assert {e["pid"] for e in events if e["ph"] == "X"} == {0, 1}
    page = (tmp_path / "p.html").read_text()
    assert "http" not in page and "/*DATA*/" not in page and "rank 1" in page
    (data,) = msgspec.json.decode(page.partition("const PLANS = ")[2].partition(";\nconst chosen")[0])
    low_s, high_s = data["likely_s"]
    assert low_s < data["step_s"] < high_s and "limits this step" in data["limits"]
    assert sum(value for _, value, _, _ in data["fall"]) == pytest.approx(data["step_s"])
    assert all(track for track in data["tracks"]) and len(data["memory"]) == 2
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))  # a machine that was not measured
    assert main(["html", str(tmp_path / "plan.json"), "-o", str(tmp_path / "p.html")]) == 0
    assert "this machine by a catalogue's figures" in (tmp_path / "p.html").read_text()
    assert np.all(np.diff([p[0] for p in data["memory"][0]["points"]]) >= 0)


def test_a_plan_of_whole_batches_serves_ranks_that_pass_their_rows() -> None:
    """As `whale plan` sees a dataset whole, and a run of it has `wh.shard`."""
    program, settings = mlp(8, 4, 6, 3), PlanSettings(2)
    names = [b.name for b in make_plan(program, settings).batch_inputs]
    local = settings.but(batch__local=dict.fromkeys(names, (4, 4)))
    found = SavedPlan("plan.json", make_plan(program, settings)).find_plan(program, local)
    assert found is not None and all(b.local for b in found.batch_inputs)
    check(program, found)
    assert found.reshards == make_plan(program, local).reshards
    several = plan_program(scoped(program), settings.but(size=4, mesh=(Axis("tensor", 2),)))
    saved_several = SavedPlan("plan.json", replace(several, fingerprint=compute_fingerprint(program)))
    several_local = settings.but(size=4, batch__local={b.name: b.placement.sizes for b in several.batch_inputs})
    with pytest.raises(PlanError, match="a saved plan with several mesh axes, or with stages, needs whole batches"):
        saved_several.find_plan(program, several_local)
