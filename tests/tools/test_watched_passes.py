"""The passes over a step as a user sees them: `whale plan -v`, and WHALE_DEBUG_DUMP in plans and runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tensorflow as tf

import whale as wh
from tests.tools.test_what_if import SCRIPT
from whale.kernels.substitute import FOR_RUN, KERNELS, REWRITE
from whale.partition.lower import PARTITION
from whale.passes.pass_manager import NORMALIZE, PLAN
from whale.tools import dry_run


def script(folder: Path, scope: str = "contextlib.nullcontext()") -> str:
    path = folder / "s.py"
    path.write_text(SCRIPT.replace("SCOPE", scope))
    return str(path)


def dumped(folder: Path) -> set[str]:
    """The names of the passes behind which a folder has texts."""
    (program,) = [path for path in folder.iterdir() if list(path.glob("*-build_plan_draft.txt"))]
    return {path.stem.partition("-")[2] for path in program.iterdir()}


def test_a_plan_says_what_each_pass_took_and_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script(tmp_path)
    dry_run.main(path, (), 2)
    plain = capsys.readouterr().out
    dry_run.main(path, (), 2, verbose=True)
    out = capsys.readouterr().out
    assert out.startswith(plain) and "passes  " not in plain
    rows = {line.split()[0]: line.split(maxsplit=2) for line in out.removeprefix(plain).splitlines() if line.strip()}
    for table in (NORMALIZE, PLAN, PARTITION, REWRITE):
        of_passes = sum(float(rows[one.name][1].replace("-", "0")) for one in table.passes)
        assert float(rows[table.name][1]) == pytest.approx(of_passes, abs=1e-4 * len(table.passes))
    assert rows["share_scalars"][2].startswith("1 gone, 1 changed, of ")
    assert rows["update_on_owners"][1] != "-", "the program is made ready for as many ranks as the plan is for"
    assert rows["build_plan_draft"][2].endswith("layouts of nodes") and float(rows["build_plan_draft"][1]) > 0
    assert rows["partition"][2].endswith("nodes") and "new" in rows["partition"][2]
    assert rows["elementwise"][2].endswith("nodes")
    assert rows["micro_batches"][1:] == ["-", "off; on by pipeline.micro_batches"]
    assert rows["unique_keys"][1] == "-"


def test_a_mesh_is_planned_axis_by_axis(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # a row of the table in a line
    path = Path(script(tmp_path, "wh.split()"))
    path.write_text(path.read_text().replace("wh.init()", 'wh.init({"mesh": wh.Mesh(tensor=2)})'))
    dry_run.main(str(path), (), 4, verbose=True)
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert rows["build_plan_draft"].endswith("(2 times)")
    assert rows["partition_mesh"].endswith("nodes") and "off" in rows["partition"]


def test_a_plan_is_dumped_up_to_what_ranks_compute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHALE_DEBUG_DUMP", str(tmp_path / "dump"))
    dry_run.main(script(tmp_path), (), 2)
    names = dumped(tmp_path / "dump")
    assert {"captured", "inline", "build_plan_draft", "fuse_all_reduces", "plan", "partition", "elementwise"} <= names
    assert {one.name for one in KERNELS} - names == {"updates_last", "padding", "clusters"} - names
    assert not names & {one.name for one in FOR_RUN}


def test_a_run_is_dumped_up_to_what_tensorflow_gets(ranks: Callable[..., None], tmp_path: Path) -> None:
    ranks(2, **{"debug.dump": str(tmp_path), "pipeline.micro_batches": 2})
    one = tf.Variable(tf.ones((64, 96)))

    @wh.function
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.matmul(x, one)))
        one.assign_sub(0.1 * tf.convert_to_tensor(tape.gradient(loss, one)))
        return loss

    step(tf.ones((8, 64)))
    names = dumped(tmp_path)
    always = {row.name for table in (NORMALIZE, PLAN, PARTITION, REWRITE) for row in table.passes if row.when is None}
    assert always | {"partition", "micro_batches", "updates", "unique_keys"} <= names
    last = max((tmp_path / "step").iterdir())
    assert last.stem.partition("-")[2] == REWRITE.passes[-1].name and "WhaleAllReduce" in last.read_text()
