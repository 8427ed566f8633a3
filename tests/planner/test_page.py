"""The page of a plan in a browser, where one is installed: nothing is wider than the window, nothing fails."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest

from cost_model.cluster import cluster_file
from whale.cli import main
from whale.errors import PlanError
from whale.planner import ask
from whale.planner.report import draw, planfile
from whale.planner.report.measured_step import read, step_drawn
from whale.planner.report.page_parts import describe_likely, describe_limit
from whale.planner.report.sliders import sliders

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PICTURES = os.environ.get("WHALE_TEST_PICTURES")  # a folder that keeps the page as it was seen, light and dark
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
# Seven layers in a line, all read by one below it, as pages of scripts have them.
GRAPH = {
    "lines": 2,
    "boxes": [
        {"name": f"dense_{x}", "x": x - 3, "y": 0, "ways": [1, 0.5], "longest": x == 3, "moved": "", "text": "layers"}
        for x in range(7)
    ]
    + [{"name": "the last of the layers", "x": 0, "y": 1, "ways": [0, 0], "longest": True, "moved": "8 B", "text": ""}],
    "arrows": [[x, 7, "4 KiB", {"P(sum) -> B": 2} if x else {}, x == 3] for x in range(7)],
}
LOOK = """<script>
addEventListener("error", e => document.body.dataset.failed = e.message);
addEventListener("load", () => {
  const search = document.getElementById("search"); search.value = "layer 3"; search.oninput({target: search});
  const clear = [...document.querySelectorAll("[data-from]")].filter(c => c.style.opacity === "1").length;
  const wide = [...document.querySelectorAll("main > *")].filter(e => e.scrollWidth > e.clientWidth + 1).length;
  const ticks = [...document.querySelectorAll(".ticks span")].map(e => e.textContent);
  const axis = ticksOf(0, D.step_s, 8).map(t => t[1]), plans = document.querySelectorAll(".pick").length;
  const kinds = document.querySelectorAll("#mlegend span").length, text = document.body.innerText;
  const slow = document.querySelector("#sliders input"); slow.value = 0; slow.oninput({target: slow});
  const then = document.getElementById("then").textContent;
  const ran = document.getElementById("ran").clientHeight, mesh = document.querySelectorAll(".mesh b").length;
  const boxes = document.querySelectorAll("#graph text").length;
  const arrows = document.querySelectorAll("#graph path").length;
  const page = document.documentElement.scrollWidth;
  document.body.dataset.seen = JSON.stringify(
    {ran, mesh, boxes, arrows, page, wide, clear, ticks, then, axis, plans, kinds, text});
});
</script>"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on PATH")
@pytest.mark.parametrize("width", [1440, 400])
def test_the_page_in_a_browser(width: int, tmp_path: Path) -> None:
    assert BROWSER is not None
    transformer, batch = ask.describe("gpt:layers=8,hidden=1024,heads=8,batch=32")
    assert transformer is not None and batch is not None
    limits = ask.limits(["stages=2"], 2.0)
    plan = ask.plan(cluster_file.parse(LAB), batch, transformer, None, "megatron-2022", limits, "whale")
    page, frame = tmp_path / "page.html", tmp_path / "frame.html"
    described = [
        {**draw.describe_page(plan, step_drawn(RUN, "out.json", 1e-3)), "name": "one.json", "graph": GRAPH},
        {**draw.describe_page(plan), "name": "other.json"},
    ]
    page.write_text(draw.page(described).replace("<head>", f"<head>{LOOK}"))
    # A window has 500 points at least; a frame in it may have fewer. It hands up what it has seen.
    size = f"width:{width}px;height:2400px"
    up = 'onload="Object.assign(document.body.dataset, this.contentDocument.body.dataset)"'
    frame.write_text(f'<body style="margin:0"><iframe src="page.html" style="border:0;{size}" {up}></iframe>')
    line = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    line += [f"--window-size={max(500, width)},2400", "--virtual-time-budget=2000", "--allow-file-access-from-files"]
    done = subprocess.run(
        [*line, "--dump-dom", frame.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    assert "data-failed" not in done.stdout
    found = re.search(r'data-seen="([^"]*)"', done.stdout)
    assert found, done.stdout[-500:]
    seen = json.loads(html.unescape(found[1]))
    assert seen["page"] <= width and seen["wide"] == 0
    assert seen["ran"] > 40 and seen["mesh"] == 8 and seen["plans"] == 2 and seen["kinds"] == 5
    assert (seen["boxes"], seen["arrows"]) == (8, 2 * 7)  # an arrow has a wider one around it, for the mouse
    assert 0 < seen["clear"] < 8 * 6 and seen["ticks"]
    assert re.fullmatch(r"\S+ m?s a step, \d+\.\d% longer", seen["then"]), seen["then"]
    assert len(seen["axis"]) > 3 and len({text.split()[-1] for text in seen["axis"][1:]}) == 1
    assert "limits this step: " in seen["text"] and "likely " in seen["text"] and "`" not in seen["text"]
    for scheme in (0, 1) if PICTURES else ():  # dark, light
        name = f"plan-{width}-{'light' if scheme else 'dark'}.png"
        shot = [
            f"--screenshot={Path(str(PICTURES)).resolve() / name}",
            f"--blink-settings=preferredColorScheme={scheme}",
        ]
        subprocess.run([*line, *shot, frame.as_uri()], capture_output=True, timeout=120, check=True)


def test_a_sentence_says_what_limits_a_step() -> None:
    said = describe_limit("compute", 0.88, 1.0, "stage 0 (14 layers on 16 a100)", 0.04, 0.741)
    assert said == (
        "Computing limits this step: kernels of stage 0 (14 layers on 16 a100) take 88% of it. A faster network saves "
        "at most 4%. The fullest device uses 74% of its memory."
    )
    assert "saves nothing" in describe_limit("bubble", 0.9, 1.0, "stage 1", 0.001, None)
    assert "network" not in describe_limit("communication", 0.6, 1.0, "rank 1", 0.6, None)
    assert describe_likely(None, "any").startswith("the error of this prediction is unknown")


def test_a_trace_goes_with_one_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformer, batch = ask.describe("gpt:layers=8,hidden=1024,heads=8,batch=32")
    assert transformer is not None and batch is not None
    lab, page = cluster_file.parse(LAB), str(tmp_path / "page.html")
    paths = [str(tmp_path / name) for name in ("one.json", "other.json")]
    for path, stages in zip(paths, (1, 2)):
        limits = ask.limits([f"stages={stages}"], 1.0)
        planfile.save(ask.plan(lab, batch, transformer, None, "megatron-2022", limits, "whale"), path)
    assert main(["html", *paths, "-o", page]) == 0
    data = re.search(r"const PLANS = (.*);\n", Path(page).read_text())
    assert data is not None
    first, second = json.loads(data[1].replace("<\\/", "</"))
    assert [first["name"], second["name"]] == paths and first["step_s"] != second["step_s"]
    trace = tmp_path / "out.json"
    trace.write_text("[\n" + ",\n".join(map(json.dumps, RUN)) + "\n]")
    assert main(["html", *paths, "--trace", str(trace), "-o", page]) != 0
    assert "a trace is of one run" in capsys.readouterr().err


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
