"""README is true: each figure stands on the page that it links to, the caption is what its commands print, and
the lines of its ten minutes do what they say in a fresh clone.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path

import pytest

import whale
from tests import ten_minutes
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


@pytest.mark.long
def test_the_ten_minutes_run_in_a_fresh_clone(tmp_path: Path) -> None:
    rows = ten_minutes.run(tmp_path)
    assert [row.wrong for row in rows] == [""] * len(rows) and len(rows) == len(ten_minutes.list_lines(README))


def test_every_line_of_the_ten_minutes_is_looked_at() -> None:
    assert [ten_minutes.find_check(line).__name__ for line in ten_minutes.list_lines(README)] == [
        "expect_environment", "expect_packages", "expect_whale", "expect_good_machine", "expect_same_losses",
        "expect_profile", "expect_page", "expect_survivor"
    ]  # fmt: skip


def test_an_output_that_is_not_as_the_page_says_is_seen(tmp_path: Path) -> None:
    clone = ten_minutes.Clone(tmp_path / "project", tmp_path / "home", {})
    for line in ten_minutes.list_lines(README)[2:]:
        assert ten_minutes.find_check(line)(clone, "nothing of it"), line
