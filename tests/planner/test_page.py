"""The page of a plan in a browser, where one is installed: nothing is wider than the window, nothing fails."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest

from cost_model.cluster import cluster_file
from whale.errors import PlanError
from whale.planner import ask
from whale.planner.report import draw
from whale.planner.report.measured_step import read, step_drawn
from whale.planner.report.sliders import sliders

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PICTURES = os.environ.get("WHALE_TEST_PICTURES")  # a folder that keeps the page as it was seen
LAB = """
name: lab
networks: {fabric: {type: infiniband-hdr-200}}
hosts:
  - {name: new, devices: [{type: a100-sxm-80gb, count: 4}], networks: {fabric: {nics: 4}}}
  - {name: old, devices: [{type: v100-sxm2-32gb, count: 4}], networks: {fabric: {nics: 4}}}
"""
# Two ranks, calls 0 to 5 of a step of 100 us and 10 more each; rank 1 waits for rank 0, which begins 20 us later.
RUN = [
    {**event, "pid": rank, "tid": 1}
    for rank in (0, 1)
    for call in range(6)
    for event in (
        {"name": f"step {call}", "ph": "B", "cat": "step", "ts": 1000 * call + 20 * (1 - rank)},
        {"name": "AllReduce 0:g", "ph": "X", "cat": "AllReduce", "ts": 1000 * call + 40, "dur": 30,
         "args": {"key": "0:g", "waiting_us": 20 * rank}},
        {"name": f"step {call}", "ph": "E", "ts": 1000 * call + 100 + 10 * call},
    )
]  # fmt: skip
LOOK = """<script>
addEventListener("error", e => document.body.dataset.failed = e.message);
addEventListener("load", () => {
  const search = document.getElementById("search"); search.value = "layer 3"; search.oninput({target: search});
  const clear = [...document.querySelectorAll("[data-column]")].filter(c => c.style.opacity === "1").length;
  const wide = [...document.querySelectorAll("main > *")].filter(e => e.scrollWidth > e.clientWidth + 1).length;
  const ticks = [...document.querySelectorAll(".ticks span")].map(e => e.textContent);
  const slow = document.querySelector("#sliders input"); slow.value = 0; slow.oninput({target: slow});
  const then = document.getElementById("then").textContent;
  const ran = document.getElementById("ran").clientHeight, mesh = document.querySelectorAll(".mesh b").length;
  const page = document.documentElement.scrollWidth;
  document.body.dataset.seen = JSON.stringify({ran, mesh, page, wide, clear, ticks, then});
});
</script>"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on PATH")
@pytest.mark.parametrize("width", [1400, 500])
def test_the_page_in_a_browser(width: int, tmp_path: Path) -> None:
    assert BROWSER is not None
    transformer, batch = ask.describe("gpt:layers=8,hidden=1024,heads=8,batch=32")
    assert transformer is not None and batch is not None
    limits = ask.limits(["stages=2"], 2.0)
    plan = ask.plan(cluster_file.parse(LAB), batch, transformer, None, "megatron-2022", limits, "whale")
    page = tmp_path / "page.html"
    measured = step_drawn(RUN, "out.json", 1e-3)
    page.write_text(draw.html(plan, measured).replace("<head>", f"<head>{LOOK}"))
    line = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    line += [f"--window-size={width},1200", "--virtual-time-budget=2000", "--dump-dom", page.as_uri()]
    dom = subprocess.run(line, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "data-failed" not in dom
    found = re.search(r'data-seen="([^"]*)"', dom)
    assert found, dom[-500:]
    seen = json.loads(found[1].replace("&quot;", '"'))
    assert seen["page"] <= width and seen["wide"] == 0
    assert seen["ran"] > 40 and seen["mesh"] == 8
    assert 0 < seen["clear"] < 8 * 6 and seen["ticks"]
    assert re.fullmatch(r"\S+ m?s a step, \d+\.\d% longer", seen["then"]), seen["then"]
    if PICTURES:
        shot = [*line[:-2], f"--screenshot={Path(PICTURES).resolve() / f'plan-{width}.png'}", page.as_uri()]
        subprocess.run(shot, capture_output=True, timeout=120, check=True)


def test_sliders_are_the_plan_on_other_machines() -> None:
    transformer, batch = ask.describe("gpt:layers=8,hidden=1024,heads=8,batch=32")
    assert transformer is not None and batch is not None
    lab = cluster_file.parse(LAB)
    plan = ask.plan(lab, batch, transformer, None, "megatron-2022", ask.limits(["stages=2"], 2.0), "whale")
    _, machines, found = plan.evaluate()
    drawn = sliders(plan, machines)
    assert drawn is not None
    (_, networks, now), *speeds = drawn["axes"]
    assert (len(networks), now) == (5, 2) and len(drawn["step_s"]) == 5 * 4 ** len(speeds)
    per = 4 ** len(speeds)
    assert drawn["step_s"][now * per + per - 1] == pytest.approx(found.step_s, rel=1e-4)
    assert drawn["step_s"][now * per] > 1.5 * found.step_s  # all devices at 40 %
    halved = cluster_file.parse(LAB.replace("infiniband-hdr-200}", "infiniband-hdr-200, oversubscription: 2}"))
    other = msgspec.structs.replace(plan, cluster=halved).evaluate()[2]
    assert drawn["step_s"][(now - 1) * per + per - 1] == pytest.approx(other.step_s, rel=1e-4)


def test_the_trace_numbers_micro_batches_and_counts_memory() -> None:
    transformer, batch = ask.describe("gpt:layers=8,hidden=1024,heads=8,batch=32")
    assert transformer is not None and batch is not None
    limits = ask.limits(["stages=2"], 2.0)
    plan = ask.plan(cluster_file.parse(LAB), batch, transformer, None, "megatron-2022", limits, "whale")
    events = json.loads(draw.trace(plan))["traceEvents"]
    forward = [e["args"]["micro_batch"] for e in events if e["name"].startswith("forward") and e["tid"] == 0]
    assert sorted(forward) == sorted([*range(plan.strategy.micro_batches)] * plan.strategy.chunks)
    for index in range(2):
        held = [e["args"]["bytes"] for e in events if e["name"] == f"memory of stage {index}"]
        assert len(held) > 4 and max(held) > min(held) > 0


@pytest.mark.parametrize("cut", [False, True])
def test_a_measured_step_is_drawn(cut: bool, tmp_path: Path) -> None:
    """The middle call by length, which is number 4 of 2 to 5; a killed launcher leaves no last bracket."""
    text = "[\n" + ",\n".join(map(json.dumps, RUN))
    path = tmp_path / "out.json"
    path.write_text(text + (',\n{"name": "Al' if cut else "\n]"))
    drawn = step_drawn(read(path), str(path), 1.4e-4)
    assert drawn["label"].startswith("step 4, the middle one by length of 4") and "+0%" in drawn["label"]
    first, second = drawn["tracks"]
    assert first == [(0, 2e-5, 1.4e-4, "", 0, 2), (2, 4e-5, 7e-5, "AllReduce 0:g", 1, 2)]
    assert second[1:] == [(1, 4e-5, 6e-5, "AllReduce 0:g", 1, 2), (2, 6e-5, 7e-5, "AllReduce 0:g", 1, 2)]
    path.write_text("not a trace")
    with pytest.raises(PlanError, match="the file is not a trace of a run"):
        read(path)
    with pytest.raises(PlanError, match="no step of the trace was run by all ranks"):
        step_drawn([e for e in RUN if e["ph"] == "X"], "out.json", 1.0)
