"""Files and arguments from anywhere: an answer, or an error of Whale's, soon. ``python -m tests.attack`` tries more."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from tests.attack.inputs import CLUSTER, LIMIT_S, Inputs
from whale.cli import main
from whale.errors import REPORT_FAULT, PlanError

_SMALL = "gpt:layers=2,hidden=64,heads=2,batch=4"


def test_changed_files_are_answered_or_refused(tmp_path: Path) -> None:
    found = Inputs(tmp_path).tried(300, seed=24)
    assert found.problems == []
    assert found.answered > 30 and found.refused > 100 and found.count == 300


@pytest.mark.parametrize(
    "text",
    [
        "[" * 50_000,
        "{a: " * 20_000,
        "- " * 20_000,
        "name: &a [x]\nhosts: [" + "*a, " * 5_000 + "]",
        "\udcff\udcfe",
        "name: .inf",
        "name: 2001-99-99",
        CLUSTER.replace("count: 2", f"count: {'9' * 5000}"),
        CLUSTER.replace("count: 2", "count: .inf"),
        CLUSTER.replace("new", "!!python/object/apply:os.system [id]"),
    ],
    ids=["brackets", "braces", "dashes", "aliases", "bytes", "infinity", "date", "digits", "count", "object"],
)
def test_a_cluster_file_that_no_parser_should_read(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.yaml").write_bytes(text.encode("utf-8", "surrogateescape"))
    start_s = time.monotonic()
    asked = ["plan", "--describe", "gpt:layers=2,hidden=64,heads=2,batch=4", "--cluster", str(tmp_path / "c.yaml")]
    assert main(asked) == 2
    assert time.monotonic() - start_s < 10 * LIMIT_S and str(tmp_path) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "-np", "9" * 20, "x.py"], "cannot have that many ranks"),
        (["run", "-np", "2", "--hosts", "a..b:1,c:1", "x.py"], "list of hosts cannot be read"),
        (["run", "-np", "2", "--hosts", f"a:{'9' * 6000}", "x.py"], "list of hosts cannot be read"),
        (["plan", "--describe", "gpt:layers=100000000,hidden=64,heads=2,batch=4", "--budget", "1"], "of that size"),
        (["plan", "--describe", f"gpt:layers={'9' * 6000},hidden=64,heads=2,batch=4"], "of that size"),
        (["plan", "--describe", _SMALL, "--budget", "1", "-o", "/dev/full"], "No space"),
        (["plan", "--describe", _SMALL, "--budget", "1", "-o", "no/x"], "there is no folder"),
    ],
    ids=["ranks", "host", "slots", "layers", "digits", "full", "folder"],
)  # fmt: skip
def test_arguments_that_cannot_be(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(CLUSTER)
    assert main([*arguments, "--cluster", "c.yaml"] if arguments[0] == "plan" else arguments) == 2
    errors = capsys.readouterr().err
    assert said in errors and "Traceback" not in errors


@pytest.mark.parametrize("verb", ["show", "html"])
def test_a_described_plan_of_endless_micro_batches_is_refused(verb: str, tmp_path: Path) -> None:
    path = Path(Inputs(tmp_path).folder / "described.json")
    plan = msgspec.json.decode(path.read_bytes())
    plan["strategy"]["micro_batches"] = 2**31
    path.write_bytes(msgspec.json.encode(plan))
    start_s = time.monotonic()
    assert main([verb, str(path), *(["-o", str(tmp_path / "page")] if verb == "html" else [])]) == 2
    assert time.monotonic() - start_s < 10 * LIMIT_S


@pytest.mark.parametrize("layers", [300, 4096])
def test_a_search_ends_with_its_budget_however_many_layers_there_are(
    layers: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.yaml").write_text(CLUSTER)
    asked = ["plan", "--describe", f"gpt:layers={layers},hidden=256,heads=4,batch=64", "--budget", "0.5"]
    start_s = time.process_time()
    assert main([*asked, "--cluster", str(tmp_path / "c.yaml")]) == 0
    assert time.process_time() - start_s < 5.0 and "step" in capsys.readouterr().out


def test_a_damaged_file_is_not_taken_for_a_fault_of_whale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = Inputs(tmp_path)

    def fail(path: str) -> None:
        raise PlanError("a value is lost", action=REPORT_FAULT)

    monkeypatch.setitem(inputs.readers, "profile.json", fail)
    problems = inputs.tried(len(inputs.commands) + len(inputs.readers), seed=1).problems
    assert [problem.partition(": said to be a fault")[0] for problem in problems] == ["profile.json"]
