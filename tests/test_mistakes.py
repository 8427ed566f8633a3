"""What a newcomer mistypes: one sentence, what was given, what to do, exit code 2, before anything slow is imported."""

from __future__ import annotations

import json
import os
import runpy
import select
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.launcher.helpers import ROOT
from tests.programs import mlp, planned
from whale.cli import main
from whale.cli.cluster import EXAMPLE
from whale.errors import ProgramError
from whale.planner.report import planfile

pytestmark = pytest.mark.core
SMALL = "name: small\nhosts: [{name: a, devices: [{type: t4, count: 2}]}]\n"
GPT = "gpt:layers=4,hidden=512,heads=8,sequence=128,vocabulary=1024,batch=8"
BAD = [
    ("plan -np 0 train.py", "'0' is no whole number above 0"),
    ("plan -np two train.py", "'two' is no whole number"),
    ("plan absent.py", "a file cannot be read\n  given: absent.py"),
    ("plan train.py -o nowhere/plan.json", "there is no folder"),
    ("plan train.py -o .", "this is a folder"),
    ("plan train.py --measured absent.json", "given: absent.json"),
    ("plan train.py --cluster absent.yaml", "given: absent.yaml"),
    (f"plan --describe {GPT} --cluster absent.yaml", "given: absent.yaml"),
    (f"plan --describe {GPT} --cluster small.yaml -o nowhere/p.json", "given: -o nowhere/p.json"),
    (f"plan --describe {GPT} --cluster small.yaml --budget soon", "'soon' is no number of seconds"),
    (f"plan --describe {GPT}", "can be planned only for a cluster"),
    ("plan --describe gtp:layers=4 --cluster small.yaml", "gtp"),
    ("plan --profile absent.yaml --cluster small.yaml", "given: absent.yaml"),
    ("plan", "there is nothing to plan"),
    ("show absent.json", "the plan cannot be read"),
    ("show train.py", "the plan cannot be read"),
    ("show plan.json --analyze --steps 0", "'0' is no whole number"),
    ("explain plan.json 99", "there is no such layer"),
    ("explain plan.json dense", "cannot be answered for this plan"),
    ("diff plan.json absent.json", "given: absent.json"),
    ("check absent.json", "given: absent.json"),
    ("check plan.json --cluster absent.yaml", "given: absent.yaml"),
    ("html plan.json -o nowhere/page.html", "there is no folder"),
    ("html plan.json", "required: -o"),
    ("trace plan.json -o .", "this is a folder"),
    ("profile absent.py", "given: absent.py"),
    ("profile -o nowhere/profile.json", "there is no folder"),
    ("html plan.json -o page.html --trace absent.json", "given: absent.json"),
    ("html plan.json -o page.html --trace train.py", "the file is not a trace of a run"),
    ("profile -np 0", "'0' is no whole number"),
    ("simulate absent.yaml --cluster small.yaml", "given: absent.yaml"),
    ("simulate absent.yaml --measured absent.json", "given: absent.yaml"),
    ("simulate small.yaml", "either --cluster or --measured"),
    ("cluster", "is needed"),
    ("cluster absent.yaml", "given: absent.yaml"),
    ("cluster train.py", "cluster file"),
    ("run -np 2 absent.py", "the script does not exist"),
    ("run -np 0 train.py", "-np must be at least 1"),
    ("run -np 2 --plan absent.json train.py", "given: absent.json"),
    ("run -np 2 --annotate absent.json train.py", "given: absent.json"),
    ("run -np 2 --trace nowhere/t.json train.py", "given: --trace nowhere/t.json"),
    ("run train.py", "required: -np"),
    ("completion fish", "choose from"),
    ("doctor --timeout never", "'never' is no number of seconds"),
    ("walk", "invalid choice: 'walk'"),
    ("plan train.py -np 0", "'0' is no whole number above 0"),
    (f"plan --describe {GPT} --cluster small.yaml -o .", "this is a folder"),
    ("plan --offers absent.yaml train.py", "offers are for a described or measured model"),
    ("plan --jobs absent.yaml --cluster small.yaml", "given: absent.yaml"),
    ("plan --jobs small.yaml --cluster small.yaml -o plan.json --set zero=1", "with -o, --set"),
    ("explain absent.json 1", "the plan cannot be read"),
    ("show plan.json --analyze --measured absent.json", "the plan was not made from a script"),
    ("diff plan.json small.yaml", "cannot be"),
    ("diff absent.json plan.json", "given: absent.json"),
    ("check small.yaml", "the plan cannot be read"),
    ("check plan.json --cluster train.py", "cluster file"),
    ("html absent.json -o page.html", "the plan cannot be read"),
    ("trace absent.json -o t.json", "the plan cannot be read"),
    ("trace plan.json -o nowhere/t.json", "there is no folder"),
    ("trace plan.json", "required: -o"),
    ("html program.json -o page.html --measured absent.json", "given: absent.json"),
    ("html program.json -o page.html --cluster absent.yaml", "given: absent.yaml"),
    ("profile --threads 0", "'0' is no whole number"),
    ("simulate small.yaml --cluster absent.yaml", "given: absent.yaml"),
    ("simulate small.yaml --cluster small.yaml", "small.yaml"),
    ("run -np two train.py", "'two'"),
    ("run -np 2 -H a:x train.py", "a:x"),
    ("run -np 2 --hostfile absent train.py", "given: absent"),
    ("run -np 2 --mesh data=3 train.py", "data=3"),
    ("run -np 2 --mesh data train.py", "data"),
    ("run -np 2 --metrics-port here train.py", "here"),
    ("run -np 2 --threads 0 train.py", "threads"),
    ("run -np 2 --max-restarts -1 train.py", "restart"),
    ("run -np 2 --min-ranks 3 train.py", "3"),
    ("run -np 2", "required: script"),
    ("run --np 2 train.py", "there is no option --np\n  next: write -np, if that is meant"),
    ("run train.py -np 2", "required: -np; behind the script it is the script's own"),
    ("plan --describe gpt:layer=48 --cluster small.yaml", "a gpt model has no field layer\n  given: layer=48"),
    ("plan --describe gpt:layer=48 --cluster small.yaml", "next: write layers=48, if that is meant"),
    (f"plan --describe {GPT} --cluster small.yaml --set stage=2", "next: write stages=2, if that is meant"),
    (
        f"plan --describe {GPT} --cluster small.yaml --set recompute=ful",
        "expected: recompute=none or selective or full",
    ),
    ("plan train.py --set tensor=2", "a script has --set mesh=tensor=2"),
    ("plan train.py --set zero=9", "expected: int, at least 0 and at most 3"),
    (f"plan --config absent.yaml --describe {GPT}", "--config is for scripts"),
    ("run -np 2 --set stage=2 train.py", "next: write --set pipeline.stages=2, if that is meant"),
    ("run -np 2 --set zero train.py", "the configuration key 'memory.zero' is given no value"),
    ("run -np 2 --set zero=many train.py", "given: 'many'\n  source: command line"),
    ("run -np 2 --config absent.yaml train.py", "given: absent.yaml"),
    ("run -np 3 --plan program.json train.py", "given: program.json: 2 ranks, of which 3 run"),
    (
        "run -np 2 --plan program.json other.py",
        "the plan was made for another script\n  given: program.json, of train.py",
    ),
    ("config -o keys.txt", "ends with .yaml"),
    ("config --set zero=1", "are for `whale config show`"),
    ("config show --from small.yaml", "--from writes a file"),
    ("config --from absent.json", "given: absent.json"),
    ("config --from small.yaml", "no name in the file is a field of DeepSpeed's configuration\n  given: small.yaml"),
    ("run --num_gpus 2 train.py", "there is no option --num_gpus\n  next: write -np N"),
    ("run --nproc_per_node=2 train.py", "there is no option --nproc_per_node\n  next: write -np N"),
    ("run -np 2 --deepspeed_config ds.json train.py", "`whale config --from ds_config.json`"),
    ("run --host-discovery-script hosts.sh train.py", "next: write --hosts-from FILE"),
    ("run -np 2 --config small.yaml train.py", "unknown configuration key 'name'"),  # the last: the variable stays set
    ("completion", "required: shell"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise SystemExit('started')\n")
    (tmp_path / "other.py").write_text("raise SystemExit('another')\n")
    (tmp_path / "small.yaml").write_text(SMALL)
    for name in ("WHALE_CONFIG", "WHALE_LAUNCHER_SETTINGS"):  # which the command sets; afterwards they are as before
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # whose machine was not measured
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    plan = planned(mlp(4, 4, 4, 2), 2, 4)
    replace(plan, script=("train.py",)).save(tmp_path / "program.json")
    assert main(["plan", "--describe", GPT, "--cluster", "small.yaml", "--budget", "1", "-o", "plan.json"]) == 0
    capsys.readouterr()
    return tmp_path


@pytest.fixture
def no_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing what needs TensorFlow is an error: a mistake is to be found before."""
    for name in ("whale.tools.dry_run", "whale.tools.program_report", "whale.tools.profile.profile"):
        monkeypatch.setitem(sys.modules, name, None)


def _ended(line: str) -> int:
    try:
        return main(line.split())
    except SystemExit as end:  # argparse's way
        assert isinstance(end.code, int)
        return end.code


def test_each_is_one_sentence_and_code_2(folder: Path, no_tensorflow: None, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {}
    for line, words in BAD:
        code = _ended(line)
        told = capsys.readouterr()
        first = told.err.partition("\n")[0]
        good = code == 2 and words in told.err and "Traceback" not in told.err and not told.out
        if not good or not first.startswith(f"whale {line.split()[0]}: ".replace("whale walk: ", "whale: ")):
            wrong[line] = (code, told)
    assert wrong == {}
    files = ["other.py", "plan.json", "program.json", "small.yaml", "train.py"]
    assert sorted(path.name for path in folder.iterdir()) == files


def test_a_plan_is_of_a_script_with_its_name_or_its_text(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the script lies now; and another script runs under it where that is asked for by its key."""
    monkeypatch.setattr("whale.launcher.run.run", lambda options: 5)
    monkeypatch.setenv("WHALE_MESH_PLAN", "")
    (folder / "moved").mkdir()
    (folder / "moved" / "train.py").write_text("pass")
    (folder / "copy.py").write_text((folder / "train.py").read_text())
    for script in ("moved/train.py", "copy.py"):
        assert main(["run", "-np", "2", "--plan", "program.json", script]) == 5
    assert main(["run", "-np", "2", "--set", "mesh.plan=program.json", "other.py"]) == 5


def test_a_plan_for_more_kinds_of_devices_than_the_cluster_has(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = ", ".join(f"{{name: {n}, devices: [{{type: {n}}}], networks: {{n: {{nics: 1}}}}}}" for n in ("t4", "v100"))
    (folder / "both.yaml").write_text(f"name: both\nnetworks: {{n: {{type: ethernet-100g}}}}\nhosts: [{hosts}]\n")
    assert main(["plan", "--describe", GPT, "--cluster", "both.yaml", "--set", "stages=2", "-o", "two.json"]) == 0
    capsys.readouterr()
    assert main(["check", "two.json", "--cluster", "small.yaml"]) == 1
    assert capsys.readouterr().out == "the plan has 2 kinds of devices, the cluster 1: 2 a/t4\n"


def test_numbers_of_profiles_are_as_json_writes_them(folder: Path) -> None:
    from whale.planner.analytic_search.layer_profiles import read

    one = {"layer": "dense", "device": "t4", "forward_s": 4e-06, "backward_s": 1e-05}
    layer = {"name": "dense", "count": 2, "parameters": 10, "output_bytes": 8}
    (folder / "table.json").write_text(json.dumps({"layers": [layer], "measured": [one]}))
    assert "4e-06" in (folder / "table.json").read_text()
    assert read(folder / "table.json").measured[0].forward_s == 4e-06


def test_the_example_of_a_cluster_can_be_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "--example"]) == 0
    assert capsys.readouterr().out == EXAMPLE
    (folder / "example.yaml").write_text(EXAMPLE)
    assert main(["cluster", "example.yaml"]) == 0
    assert capsys.readouterr().out.startswith("lab: 32 devices\n    16 new/a100-sxm-80gb")
    assert main(["cluster", "--devices"]) == 0
    assert "  a100-sxm-80gb           80.0 GiB" in capsys.readouterr().out


def test_bash_completes_verbs_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    ask = "\nCOMP_WORDS=(whale {}); COMP_CWORD={}; _whale; echo ${{COMPREPLY[@]}}"
    for words, at, expected in (("sim", 1, "simulate"), ("run --max", 2, "--max-restarts")):
        done = subprocess.run(["bash", "-c", script + ask.format(words, at)], capture_output=True, text=True)
        assert done.stdout.split() == [expected], done


def test_a_plan_is_written_though_nobody_reads_the_screen(folder: Path) -> None:
    line = f"{sys.executable} -m whale plan --describe {GPT} --cluster small.yaml --budget 1 -o new.json"
    done = subprocess.run(
        ["bash", "-c", f"{line} | true; exit ${{PIPESTATUS[0]}}"],
        capture_output=True, text=True, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.stderr == "" and done.returncode in (0, 141), done
    assert planfile.load(folder / "new.json").batch == 8


def test_a_script_that_fails_is_told_without_the_frames_of_whale(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from whale.tools.run_as_main import as_main, failures_told

    script = tmp_path / "boom.py"
    script.write_text("def f():\n    raise ValueError('batch 3 is empty')\nf()\n")
    with pytest.raises(ProgramError, match=r"boom.py failed before.*\n  reason: ValueError: batch 3 is empty"):
        with as_main(str(script), ()), failures_told(str(script)):
            runpy.run_path(str(script), run_name="__main__")
    told = capsys.readouterr().err
    assert told.count("File ") == 3 and f'File "{script}", line 3, in <module>' in told  # this test's, and the script's
    assert told.endswith("ValueError: batch 3 is empty\n")


def test_a_script_beside_the_package_is_the_users_though_its_name_begins_alike(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from whale.tools.run_as_main import failures_told

    scope: dict[str, Callable[..., None]] = {}
    exec(compile("def inside(f): f()", str(ROOT / "whale/inside.py"), "exec"), scope)
    exec(compile("def fail(): raise ValueError('no rows')", str(ROOT / "whale_script.py"), "exec"), scope)
    with pytest.raises(ProgramError, match="no rows"), failures_told("whale_script.py"):
        scope["inside"](scope["fail"])
    told = capsys.readouterr().err
    assert "whale_script.py" in told and "inside.py" not in told


def test_a_terminal_has_a_line_while_something_takes_its_time() -> None:
    screen, terminal = os.openpty()
    script = (
        "from whale.cli.given import show_progress\nimport time\nwith show_progress('looking', 0.01): time.sleep(0.1)"
    )
    subprocess.run([sys.executable, "-c", script], stderr=terminal, cwd=ROOT, check=True)
    told = ""
    while not told.endswith("\r\x1b[K") and select.select([screen], [], [], 10)[0]:  # what was written comes in parts
        told += os.read(screen, 10_000).decode()
    assert told.startswith("\r\x1b[Klooking ...") and "looking ... 0 s" in told and told.endswith("\r\x1b[K")
    os.close(terminal), os.close(screen)
