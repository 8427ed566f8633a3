"""The figures of the pages show what their pages say; drawing them needs matplotlib, reading them does not."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from benchmarks.comm import report as comm
from benchmarks.predictions import page as predictions
from benchmarks.step_time import report as step_time
from cost_model.figures import find_colour, find_ticks
from cost_model.validation.cases import DATA, read
from tests.launcher.helpers import ROOT

DOCS = ROOT / "docs"


def texts(name: str) -> Counter[str]:
    return Counter(re.findall(r"<text[^>]*>([^<]+)</text>", (DOCS / name).read_text()))


def dots(name: str) -> int:
    """Counts the markers of a scatter, without those of the legend."""
    drawn = re.sub(r"(?s)<defs>.*?</defs>", "", (DOCS / name).read_text().partition('id="legend_1"')[0])
    return sum(part.partition(' id="')[0].count("<use") for part in drawn.split('id="PathCollection_')[1:])


def test_step_times_are_compared_within_their_own_rounds() -> None:
    """The second set of groups met a faster machine: its own rounds of the reference tell."""
    results = [
        step_time.Result("GPT", step_time.REFERENCE, (200.0, 202.0, 201.0), reference_ms=201.0),
        step_time.Result("GPT", "TensorFlow", (402.0, 402.0, 402.0), reference_ms=201.0),
        step_time.Result("GPT", "PyTorch", (120.0, 120.0, 120.0), reference_ms=114.0),
    ]
    table = step_time.markdown(results)
    assert "| TensorFlow | 0.50 |" in table and "| PyTorch | 0.95 |" in table
    assert [bar.configuration for bar in step_time.read_table(table)] == [step_time.REFERENCE, "TensorFlow", "PyTorch"]


def test_step_times_are_those_of_the_table() -> None:
    bars, seen = step_time.read_table((DOCS / "benchmarks.md").read_text()), texts("benchmarks.svg")
    assert len(bars) > 60
    for bar in bars:
        text = step_time._figures(bar.median_ms)
        assert seen[text] + seen[f"{text} (cut)"] and seen[bar.configuration], bar
    assert sum(count for text, count in seen.items() if any(b.configuration == text for b in bars)) == len(bars)


def test_communication_is_that_of_its_samples() -> None:
    found, seen = comm.read(DOCS / "communication.json"), texts("communication.svg")
    assert {r.size for r in found} | {r.library for r in found} <= set(seen)


def test_dots_are_rows() -> None:
    runs = predictions.read_table((DOCS / "predictions.md").read_text())
    assert dots("predictions.svg") == 2 * len(runs) == 72
    assert dots("validation.svg") == 2 * sum(len(read(path)[1]) for path in DATA.glob("*.csv"))


@pytest.mark.parametrize("name", ["benchmarks.svg", "communication.svg", "predictions.svg", "validation.svg"])
def test_figures_follow_the_scheme_of_their_reader(name: str) -> None:
    drawn = (DOCS / name).read_text()
    assert "prefers-color-scheme: dark" in drawn and not re.search(r"fill: #000000|fill: #ffffff", drawn)
    assert not re.search(r"https?://(?!www\.w3\.org|matplotlib\.org|purl\.org|creativecommons\.org)", drawn)


def test_ticks_and_colours() -> None:
    assert find_ticks(4, 260) == [5, 10, 20, 50, 100, 200] and find_ticks(0.05, 4000) == [0.1, 1, 10, 100, 1000]
    assert find_colour("Whale over Horovod, 2 ranks") == find_colour("Whale, 4 ranks") != find_colour("Horovod, Gloo")
