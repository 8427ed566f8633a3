"""The command `whale`: what it parses and how it answers mistakes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import whale
from whale.cli import VERBS, main, make_parser
from whale.errors import PlanError
from whale.launcher.mpirun import Host, Options, list_asked, make_command, parse_hosts

pytestmark = pytest.mark.core
ROOT = Path(__file__).resolve().parents[1]


def _options_of_run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Options:
    seen: list[Options] = []

    def record(options: Options) -> int:
        seen.append(options)
        return 5

    monkeypatch.setattr("whale.launcher.run.run", record)
    assert main(["run", *arguments]) == 5
    return seen[0]


def test_run_passes_everything_after_the_script_on(monkeypatch: pytest.MonkeyPatch) -> None:
    options = _options_of_run(monkeypatch, "-np", "4", "--threads", "2", "train.py", "-np", "9", "--hosts", "-v", "--")
    assert options == Options(4, "train.py", ("-np", "9", "--hosts", "-v", "--"), threads=2)


def test_run_takes_hosts_and_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    options = _options_of_run(monkeypatch, "-np", "3", "--hosts", "a:2, b", "-v", "-m", "pkg.train", "x")
    hosts = (Host("a", 2), Host("b", 1))
    assert options == Options(3, "pkg.train", ("x",), as_module=True, hosts=hosts, verbose=True)


def test_run_takes_what_horovodrun_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=2\n# b slots=9\nc:1\n")
    line = ["-np", "3", "--hostfile", str(tmp_path / "hosts"), "--timeline-filename", str(tmp_path / "t.json")]
    options = _options_of_run(monkeypatch, *line, "--verbose", "python3", "train.py", "-x")
    assert options == Options(
        3, "train.py", ("-x",), hosts=(Host("a", 2), Host("c", 1)), verbose=True, trace=str(tmp_path / "t.json")
    )
    assert _options_of_run(monkeypatch, "--hostfile", line[3], "train.py").ranks == 3
    assert _options_of_run(monkeypatch, "-H", "a:2,b", "train.py").ranks == 3
    options = _options_of_run(monkeypatch, "-np", "2", "-H", "a:1,b:1", "python", "-m", "pkg.train", "x")
    assert options == Options(2, "pkg.train", ("x",), as_module=True, hosts=(Host("a", 1), Host("b", 1)))


@pytest.mark.parametrize(
    "line, target, as_module, python_options",
    [
        ("python -u train.py -u x", "train.py", False, ("-u",)),
        ("python3.11 -B -OO -W ignore ./train.py -u x", "./train.py", False, ("-B", "-OO", "-W", "ignore")),
        ("python -Wignore -X dev train.py -u x", "train.py", False, ("-W", "ignore", "-X", "dev")),
        ("python -uBXfaulthandler -um pkg.train -u x", "pkg.train", True, ("-uB", "-X", "faulthandler", "-u")),
        ("-m pkg.train -u x", "pkg.train", True, ()),
    ],
)
def test_run_gives_ranks_the_options_of_python(
    monkeypatch: pytest.MonkeyPatch, line: str, target: str, as_module: bool, python_options: tuple[str, ...]
) -> None:
    found = _options_of_run(monkeypatch, "-np", "2", *line.split())
    assert found == Options(2, target, ("-u", "x"), as_module=as_module, python_options=python_options)
    command = make_command(found, "mpirun", {})
    begin = command.index(sys.executable) + 1
    assert tuple(command[begin : begin + len(python_options)]) == python_options


@pytest.mark.parametrize("line", ["python -c pass", "python -E train.py", "python -u", "python -W", "python - x"])
def test_run_refuses_other_options_of_python(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["run", "-np", "2", *line.split()])
    said = capsys.readouterr().err
    assert end.value.code == 2 and "next: " in said and ("script" in said or "value" in said), said


@pytest.mark.parametrize("text", ["", "a:0", "a:", "a:-1", ":2", "a,,b", "a b:1", "-x:1", "a:1,a:2"])
def test_wrong_hosts(text: str) -> None:
    with pytest.raises(whale.ClusterError, match="next: "):
        parse_hosts(text)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["walk"],
        ["run"],
        ["run", "train.py"],
        ["run", "-np", "two", "x.py"],
        ["plan"],
        ["plan", "--model", "m.yaml", "-np"],
        ["show"],
    ],
)
def test_usage_errors_end_with_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith("whale") and "\n  next: see `whale" in told


def test_plan_hands_its_arguments_to_the_dry_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class DryRun:
        seen: tuple[Any, ...] = ()
        verbose = False
        PredictionTarget = staticmethod(lambda *where: where)

        @classmethod
        def main(cls, *arguments: Any, verbose: bool) -> int:
            cls.seen, cls.verbose = arguments[:-1], verbose  # the last ends the status line
            return 3

    monkeypatch.setitem(sys.modules, "whale.tools.dry_run", DryRun)
    monkeypatch.setattr("whale.cli.plan.require_readable", lambda *paths: None)
    assert main(["plan", "-np", "3", "-o", "plan.json", "train.py", "--width", "8"]) == 3
    assert DryRun.seen == ("train.py", ("--width", "8"), 3, "plan.json", (None, None, None), False, None, [])
    main(["plan", "--set", "a.split=2", "train.py"])
    assert DryRun.seen == ("train.py", (), None, None, (None, None, None), False, None, ["a.split=2"])
    assert not DryRun.verbose
    main(["plan", "-v", "train.py"])
    assert DryRun.verbose
    # Right behind the script its own options may stand; from the first other one on, all is the script's.
    main(["plan", "train.py", "--cluster", "c.yaml", "-o=p.json", "--set", "a.split=2", "--width", "8", "-o", "x"])
    assert DryRun.seen == (
        "train.py", ("--width", "8", "-o", "x"), None, "p.json", (None, "c.yaml", None), False, None, ["a.split=2"]
    )  # fmt: skip
    main(["plan", "train.py", "-np", "3", "--", "-o", "x"])
    assert DryRun.seen == ("train.py", ("-o", "x"), 3, None, (None, None, None), False, None, [])


def test_an_error_of_whale_is_explained_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(options: Options) -> int:
        raise PlanError("no legal plan", given="3 rows", expected="a multiple of 2", action="give 4 rows")

    monkeypatch.setattr("whale.launcher.run.run", refuse)
    assert main(["run", "-np", "1", "x.py"]) == 2
    assert capsys.readouterr().err == (
        "whale run: no legal plan\n  given: 3 rows\n  expected: a multiple of 2\n  next: give 4 rows\n"
    )


def test_show_explains_a_plan_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(tmp_path / "absent.json")]) == 2
    assert "whale show: the plan cannot be read\n  given: " in capsys.readouterr().err


def test_the_version() -> None:
    line = [sys.executable, "-m", "whale", "--version"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == f"whale {whale.__version__}\n"


def test_every_file_of_a_verb_is_a_part_of_the_command() -> None:
    files = {path.stem for path in (ROOT / "whale" / "cli").glob("*.py") if "def add_parser(" in path.read_text()}
    assert {verb.__name__.rpartition(".")[2] for verb in VERBS} == files
    text = make_parser().format_help()
    first_words = [line.split()[0] for line in text.splitlines() if line.strip()]
    assert files <= set(first_words)


def test_config_asks_writes_and_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong answer is asked for again; what is written is what a run reads, and each value says where it is from."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("WHALE_CONFIG", "WHALE_LAUNCHER_SETTINGS"):
        monkeypatch.setenv(name, "")
    answers = iter(["y", "", "7", "2", "", "bfloat16", "", ""])
    monkeypatch.setattr("builtins.input", lambda question: next(answers))
    assert main(["config"]) == 0
    asked = capsys.readouterr().out
    assert "a wrong value for the configuration key 'memory.zero': expected int, at least 0 and at most 3" in asked
    monkeypatch.setenv("WHALE_BATCH_SHARES", "3,1")
    assert main(["config", "show", "--config", "whale.yaml", "--set", "micro_batches=4"]) == 0
    shown = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in shown.splitlines() if "." in line[:30]}
    assert rows["mesh.auto_parallel"] == ["file", "true"] and rows["precision.compute_dtype"] == ["file", "bfloat16"]
    assert rows["pipeline.micro_batches"] == ["command", "line", "4"] and rows["fault.elastic"] == ["default", "empty"]
    assert rows["batch.shares"] == ["environment", "3,", "1"]
    assert max(map(len, shown.splitlines()[:-1])) <= 80 and shown.endswith(f"file {tmp_path / 'whale.yaml'}\n")
    monkeypatch.setattr("builtins.input", lambda question: "")
    before = (tmp_path / "whale.yaml").read_text()
    assert main(["config"]) == 1 and (tmp_path / "whale.yaml").read_text() == before, "it is replaced when told to"


def test_config_is_written_by_one_of_deepspeed_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every field is said: as a key, or as what is done in its place; the file is one that a run takes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("WHALE_CONFIG", "WHALE_LAUNCHER_SETTINGS"):
        monkeypatch.setenv(name, "")
    fields = (
        '"train_batch_size": 64, "gradient_accumulation_steps": 4, "optimizer": {"type": "AdamW"}, '
        '"zero_optimization": {"stage": 2, "overlap_comm": true}, "bf16": {"enabled": true}, "gradient_clipping": 1.0'
    )
    (tmp_path / "ds_config.json").write_text("{" + fields + "}")
    assert main(["config", "--from", "ds_config.json"]) == 0
    said = capsys.readouterr().out
    assert "  memory.zero: 2                        zero_optimization.stage\n" in said
    assert "  train_batch_size: the script gives its step 64 rows" in said and "zero_optimization: overlap_comm" in said
    assert "  optimizer: nothing" in said and "global_clipnorm" in said and max(map(len, said.splitlines())) <= 80
    assert main(["config", "show", "--config", "whale.yaml"]) == 0
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines() if "." in line[:30]}
    assert [rows[key] for key in ("memory.zero", "pipeline.micro_batches", "precision.compute_dtype")] == [
        ["file", "2"], ["file", "4"], ["file", "bfloat16"]
    ]  # fmt: skip


def test_what_a_script_without_init_ignores_is_listed() -> None:
    environment = {"WHALE_MESH": "data=2", "WHALE_LAUNCHER_SETTINGS": '{"memory.zero": "2"}', "WHALE_MESH_PLAN": ""}
    assert list_asked(environment) == ["WHALE_MESH=data=2", "--set memory.zero=2"]
