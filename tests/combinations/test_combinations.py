"""A few of the runs of ``python -m tests.combinations``, the same each time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf

from tests.combinations import run
from tests.combinations.__main__ import ROOT, read_page, write_page
from tests.combinations.features import BY_NAME, RANKS, Feature
from tests.combinations.own_rows import bring_own_rows
from tests.combinations.program import ROWS
from tests.combinations.run import outcome
from tests.draws import one_of
from whale.errors import REPORT_FAULT, PlanError

SAMPLE = [
    ("tensor", "2 stages", "zb-h1", "devices"),
    ("tensor", "second tensor axis", "loop"),
    ("unequal stages", "micro-batches", "recompute marked"),
    ("2 stages", "zb-h1", "branch", "session"),
    ("second tensor axis", "session"),
    ("sequence", "zero 3", "devices"),
    ("tensor", "zero 3", "session"),
    ("context", "micro-batches", "recompute auto", "devices"),
    ("tensor", "context", "micro-batches", "recompute auto"),
    ("tensor", "unequal shares"),
    ("lstm", "zero 3"),
    ("second tensor axis", "saved"),
    ("session", "accumulation", "devices"),
    ("tensor", "accumulation", "zero 3"),
    ("sequence", "4 stages", "accumulation"),
    ("scan", "amp", "devices"),
    ("interleaved", "unequal shares", "session"),
    ("unequal stages", "some devices", "zb-h1"),
    ("sequence", "2 stages", "gpipe", "some devices"),
    ("second tensor axis", "gpipe", "some devices"),
    ("second tensor axis", "2 stages", "unequal shares", "devices"),
    ("second tensor axis", "some devices", "loop", "recompute marked"),
    ("unequal stages", "zb-h1", "lstm", "7 rows"),
    ("tensor", "second tensor axis", "2 stages", "zb-h1", "7 rows"),
    ("tensor", "interleaved", "micro-batches", "unequal shares", "7 rows"),
    ("tensor", "2 stages", "zb-h1", "experts", "table"),
    ("none dropped", "growing table", "classes", "unequal shares"),
    ("tensor", "zero 3", "table", "sampled classes", "7 rows"),
    ("2 stages", "micro-batches", "hot table", "zero 1"),
    ("micro-batches", "recompute auto", "hot table", "zero 3"),
    ("2 stages", "loop", "table"),
    ("2 stages", "accumulation", "table"),
    ("4 stages", "branch", "loop", "hot table"),
    ("tensor", "two updates", "empty shares"),
    ("zero 3", "two updates", "empty shares"),
]


LAZY = {"table", "growing table", "hot table"}  # their optimizers are those of Keras 3


@pytest.mark.parametrize("names", one_of(6, SAMPLE), ids=" + ".join)
def test_features_together_are_as_one_device(names: tuple[str, ...]) -> None:
    if LAZY & set(names) and tf.__version__ < "2.16":
        pytest.skip("lazy optimizers are those of Keras 3")
    kind, what = outcome([BY_NAME[name] for name in names])
    assert kind == "equal", what


@pytest.mark.parametrize(
    "names, shares",
    one_of(
        3,
        [
            (
                ("unequal stages", "micro-batches"),
                (12, 0, 0, 0, 4, 4, 8, 0),
            ),  # of each rank: a stage takes those of its own
            (("tensor",), (6, 6, 4, 4, 4, 4, 2, 2)),  # two of a group are alike, and groups are not
            (("tensor", "2 stages", "gpipe"), (20, 12)),  # of each coordinate of the axis data
            (("tensor", "gpipe"), (16, 0, 16, 0)),
            (("second tensor axis", "gpipe"), (6, 2, 4, 4, 4, 4, 2, 6)),  # no micro-batch has rows in this proportion
            (("tensor", "micro-batches"), (29, 1, 1, 1)),
            (("second tensor axis", "micro-batches"), (16, 0, 16, 0, 0, 0, 0, 0)),
            # Ranks without rows have no readers of what they send to others, in the second of two stages and the last.
            (("interleaved", "second tensor axis", "micro-batches"), (0, 0, 0, 32, 32, 0, 0, 0)),
            (("2 stages", "second tensor axis", "zb-h1"), (0, 0, 0, 32, 32, 0, 0, 0)),
            # What stages of unlike shares exchange for each micro-batch, ranks with rows know.
            (("2 stages", "second tensor axis", "micro-batches"), (0, 32, 0, 0, 0, 0, 16, 16)),
        ],
        several=True,
    ),
)
def test_any_shares_are_as_one_device(names: tuple[str, ...], shares: tuple[int, ...]) -> None:
    asked = Feature("shares", config={"batch.shares": shares})
    kind, what = outcome([*(BY_NAME[name] for name in names), asked])
    assert kind == "equal", what


@pytest.mark.parametrize(
    "names", one_of(3, [("sequence", "zb-h1"), ("lstm", "gpipe"), ("second tensor axis", "micro-batches")])
)
def test_ranks_bring_their_rows_of_micro_batches(names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    bring_own_rows(monkeypatch, (ROWS // RANKS,) * RANKS)
    kind, what = outcome([BY_NAME[name] for name in names])
    assert kind == "equal", what


def test_a_stage_of_which_no_rank_has_rows_is_refused() -> None:
    shares = Feature("shares", config={"batch.shares": (8, 8, 8, 8, 0, 0, 0, 0)})
    kind, what = outcome([BY_NAME["unequal stages"], shares])
    assert kind == "refused" and what.startswith("no rank of a stage has a share of the batch"), what


def test_what_says_that_it_is_a_fault_of_whale_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(features: object, folder: str) -> None:
        raise PlanError("a value is lost", action=REPORT_FAULT)

    monkeypatch.setattr(run, "spread", fail)
    assert outcome([BY_NAME["tensor"]]) == ("WRONG", f"a value is lost\n  next: {REPORT_FAULT}")


def test_the_page_keeps_its_cells_until_they_are_run_again() -> None:
    page = (ROOT / "docs" / "combinations.md").read_text()
    rows, triples = read_page(page)
    assert rows["tensor",] == ("equal", "") and ("tensor", "sequence") not in rows, "one cell is run, one can not be"
    assert write_page(rows, triples) == page
    mended = rows | {("interleaved", "gpipe"): ("equal", "1e-16"), ("loop", "branch"): ("refused", "another\nreason")}
    again = read_page(write_page(mended, triples))
    differ = {names for names in rows if again[0][names] != rows[names]}
    assert differ == {("interleaved", "gpipe"), ("loop", "branch")} and again[1] == triples
    assert again[0]["loop", "branch"] == ("refused", "another")


@pytest.mark.long
def test_a_cell_is_run_again_and_the_page_has_what_others_came_to(tmp_path: Path) -> None:
    out = tmp_path / "page.md"
    out.write_text(
        write_page({("loop", "branch"): ("refused", "it was"), ("offload", "branch"): ("refused", "it was")})
    )
    asked = ["--cells", "branch + offload", "--out", str(out)]
    done = subprocess.run([sys.executable, "-m", "tests.combinations", *asked], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = [line for line in out.read_text().splitlines() if line.startswith("| 24 branch |")]
    cells = row.split(" | ")[1:]
    assert (cells[17], cells[20]) == ("=", "(1)"), row
