"""README is true: each figure stands on the page that it links to, the caption is what its commands print, and
the lines of its ten minutes do what they say in a fresh clone.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
from pathlib import Path

import pytest

import whale
from tests.test_docs import _anchors
from whale.cli import main
from whale_ops import build

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e-\d+)?")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def _numbers(text: str) -> set[str]:
    return {number.strip(",").replace(",", "") for number in _NUMBER.findall(text)}


def _claims(block: str) -> set[str]:
    """The numbers of a block of README, without those of links, of code, and of names such as V100."""
    return _numbers(re.sub(r"`[^`]*`|\]\([^)]*\)|\b[A-Z]+\w*\d+\b", " ", block))


def _blocks() -> list[str]:
    """Paragraphs and rows of tables, without code."""
    text = re.sub(r"^```[^`]*^```$|^(?: {4}.*\n)+", "", README, flags=re.MULTILINE)
    paragraphs = [block for block in text.split("\n\n") if not block.lstrip().startswith("![")]
    return [line for block in paragraphs for line in (block.splitlines() if block.startswith("|") else [block])]


def _section(link: str) -> str:
    """The text that a link leads to: a page, or a part of one with all that is below its heading."""
    name, _, anchor = link.partition("#")
    page = (ROOT / name).read_text()
    if not anchor:
        return page
    assert anchor in _anchors(ROOT / name), link
    parts = re.split(r"^(#+) (.*)$", page, flags=re.MULTILINE)
    found, depth = [], 0
    for marks, head, body in zip(parts[1::3], parts[2::3], parts[3::3]):
        is_it = re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") == anchor
        depth = len(marks) if is_it else 0 if depth and len(marks) <= depth else depth
        if depth:
            found.append(head + body)
    return "\n".join(found)


def _stands_there(number: str, page: set[str]) -> bool:
    """Tells whether a page has a number, or one that rounds to it."""
    places = len(number.partition(".")[2]) if "e" not in number else None
    if places is None or number in page:
        return number in page
    rounded = {f"{float(one):.{places}f}" for one in page if "e" not in one and len(one.partition(".")[2]) > places}
    return number in rounded


@pytest.mark.parametrize("block", [block for block in _blocks() if _claims(block)], ids=lambda block: block[:40])
def test_a_figure_stands_on_the_page_that_is_linked(block: str) -> None:
    links = [link for link in _LINK.findall(block) if not re.match(r"[a-z]+:", link)]
    known = {build.OLDEST_TENSORFLOW, build.NEWEST_TENSORFLOW, *re.findall(r"\d+", whale.__version__)}
    known |= {"3.10", "3.13", "2", "3", "1"}  # of Python and Keras, TensorFlow's first version, and words' numbers
    page = set().union(*(_numbers(_section(link)) for link in links)) if links else set()
    assert {number for number in _claims(block) if number not in known and not _stands_there(number, page)} == set()


def test_a_figure_that_no_page_has_is_seen() -> None:
    page = _numbers("| 1.355x | 203 ms | 1,561 | 9.37 % | 1e-10 |")
    assert [_stands_there(n, page) for n in ("203", "1561", "9.4", "9", "1e-10", "277", "1.5", "9.5", "20")] == [
        True, True, True, True, True, False, False, False, False
    ]  # fmt: skip


def test_versions_are_those_of_the_package() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    pythons = re.findall(r"Python :: (3\.\d+)", project)
    assert f"Python {pythons[0]} to {pythons[-1]}" in README and f"Version {whale.__version__}" in README
    assert f"TensorFlow {build.OLDEST_TENSORFLOW} to {build.NEWEST_TENSORFLOW}" in README


def test_the_caption_is_what_its_commands_print(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caption = re.search(r"^\*`(whale .*?)`: (.*?)\*$", README, re.MULTILINE | re.DOTALL)
    picture = re.search(r"!\[A plan for (\d+) A100 and (\d+) V100", README)
    assert caption is not None and picture is not None
    monkeypatch.chdir(tmp_path)
    for line in caption[1].replace("\n", " ").split("; "):
        command, _, into = line.partition(" > ")
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            assert main(command.split()[1:]) == 0
        if into:
            (tmp_path / into).write_text(said.getvalue())
    saved = json.loads((tmp_path / "gpt.json").read_text())
    strategy = saved["strategy"]
    pools = saved["cluster"]["hosts"]
    old = [stage for stage in strategy["stages"] if "v100" in str(pools[stage["parts"][0]["pool"]]).lower()]
    claim = re.search(r"the V100s get (\d+) of (\d+) layers, each sharded (\d+) ways", caption[2].replace("\n", " "))
    assert claim is not None, caption[2]
    of_old, of_all = (
        sum(last - first for one in stages for first, last in one["layers"]) for stages in (old, strategy["stages"])
    )
    assert (of_old, of_all) == (int(claim[1]), int(claim[2]))
    assert {part["tensor"] for stage in old for part in stage["parts"]} == {int(claim[3])}
    assert (tmp_path / "gpt.html").stat().st_size > 10_000


def _lines_of(section: str) -> list[str]:
    """The command lines of a section, without comments."""
    text = README.partition(f"## {section}\n")[2].partition("\n## ")[0]
    return [re.split(r" {2,}#", line)[0].strip() for line in re.findall(r"^    (.*)$", text, re.MULTILINE)]


@pytest.mark.long
def test_the_ten_minutes_run_in_a_fresh_clone(tmp_path: Path) -> None:
    clone, home = tmp_path / "project", tmp_path / "home"
    home.mkdir()
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    lines = _lines_of("Ten minutes")
    assert [line.split()[0] for line in lines[:2]] == ["python3", "pip"] and len(lines) == 8
    script = "\n".join(["set -e", *(f"echo '== {i}' >&2; echo '== {i}'\n{line}" for i, line in enumerate(lines))])
    names = {"HOME": str(home), "PATH": os.environ["PATH"], "TMPDIR": str(tmp_path)}
    kept = {name: text for name, text in os.environ.items() if name.startswith("PIP_")}
    done = subprocess.run(
        ["bash", "-c", script], cwd=clone, env=kept | names, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    said = dict(zip(range(len(lines)), re.split(r"^== \d+$", done.stdout, flags=re.MULTILINE)[1:]))
    assert "runs work here" in said[3]
    python = str(home / "whale/bin/python")
    alone = subprocess.run(
        [python, "examples/hello.py"], cwd=clone, env=kept | names, capture_output=True, text=True, check=True
    )
    losses = [re.findall(r"loss: ([\d.]+)", text) for text in (said[4], alone.stdout)]
    assert losses[0] == losses[1] and len(losses[0]) == 3
    assert (clone / "plan.html").stat().st_size > 10_000
    assert "rank 1 was killed by SIGKILL" in done.stdout + done.stderr and "ranks at the end: 1" in said[7]
