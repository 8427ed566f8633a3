"""What the pages for contributors say is there: tables of imports, every folder once, words, the lines of examples.

``python -m tests.test_architecture --update`` writes the tables of imports into the page anew.

Decision: 0129.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.test_imports import ALLOWED, PACKAGES

pytestmark = pytest.mark.core
ROOT = Path(__file__).resolve().parents[1]
PAGE, GLOSSARY, GUIDE = ROOT / "docs" / "architecture.md", ROOT / "docs" / "glossary.md", ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- imports: tests/test_imports.py -->\n", "<!-- end of imports -->\n"
_PACKAGE = re.compile(r"\* `([\w/]+/)` (.*(?:\n  \S.*)*)")
_WORD = re.compile(r"\| ([^|]+) \| (.+) \| `([\w/.]+)`(?: `([\w.]+)`)? \|")
_NAMED = re.compile(r"`(\w+/[\w/]+\.(?:py|cc|h))`((?:,? `[A-Za-z_][\w.]*`)+)")
_TEST = re.compile(r"\btest_\w+\b(?!\.py)")
_STEP = re.compile(r"\*\*\d+\. `([^`]+)`(, new, in)?")
MOST_LINES = 3


def _named(modules: set[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(modules)) or "nothing"


def tables() -> str:
    """The tables of imports as the page shows them."""
    rows = ["| part | may import |", "|---|---|"]
    rows += [f"| `{part}` | {_named(targets)} |" for part, targets in ALLOWED.items()]
    rows += [
        "",
        "Inside a part a package or module may import those before it (`PACKAGES`; `*`: modules that are not named):",
        "",
    ]
    rows += ["| part | its packages and modules, from the lowest up |", "|---|---|"]
    rows += [f"| `{part}` | {', '.join(f'`{name}`' for name in order)} |" for part, order in PACKAGES.items()]
    return "".join(f"{row}\n" for row in rows)


def folders() -> set[str]:
    """Every folder with sources, and every folder of such folders."""
    found = set()
    for top in ("whale", "whale_ops", "cost_model"):
        for path in (ROOT / top).rglob("*"):
            names = path.relative_to(ROOT).parts
            if path.suffix in (".py", ".cc", ".h") and "lib" not in names:
                found |= {f"{'/'.join(names[:n])}/" for n in range(1, len(names))}
    return found


def test_the_tables_of_imports_are_those_of_the_tests() -> None:
    shown = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    assert shown.strip() == tables().strip(), "python -m tests.test_architecture --update"


def test_every_folder_is_described_once_in_a_few_lines() -> None:
    described = _PACKAGE.findall(PAGE.read_text())
    assert {name: count for name, count in Counter(name for name, _ in described).items() if count > 1} == {}
    assert {name for name, _ in described} == folders()
    assert {name for name, text in described if text.count("\n") >= MOST_LINES} == set()


def test_the_names_of_a_package_are_in_its_files() -> None:
    missing = []
    for package, text in _PACKAGE.findall(PAGE.read_text()):
        sources = "".join(p.read_text() for p in (ROOT / package).iterdir() if p.suffix in (".py", ".cc", ".h"))
        files = {p.name for p in (ROOT / package).iterdir()}
        for name in re.findall(r"`([A-Za-z_]\w*(?:\.\w+)?)`", text):
            known = name in files or all(re.search(rf"\b{part}\b", sources) for part in name.split("."))
            missing += [] if known else [f"{package}: {name}"]
    assert missing == []


def test_the_glossary_is_sorted_and_its_words_are_where_it_says() -> None:
    rows = _WORD.findall(GLOSSARY.read_text())
    words = [re.sub(r"\W", "", word).casefold() for word, *_ in rows]
    assert 20 < len(rows) <= 50 and len(rows) == GLOSSARY.read_text().count("\n| ") - 1
    assert words == sorted(words)
    wrong = [
        f"{word}: {file} {name}"
        for word, _, file, name in rows
        if not (ROOT / file).exists() or (name and not _mentions(ROOT / file, name))
    ]
    assert wrong == []


def test_the_steps_way_goes_through_functions_that_exist() -> None:
    picture = PAGE.read_text().partition("```text\n")[2].partition("```")[0]
    calls = re.findall(r"([\w/]+\.py): ([\w.]+)", picture)
    assert len(calls) > 15
    assert [f"{file}: {name}" for file, name in calls if not _defines(ROOT / "whale" / file, name)] == []


@pytest.mark.parametrize("page", [PAGE, GUIDE], ids=lambda page: page.name)
def test_names_beside_a_file_are_in_it(page: Path) -> None:
    pairs = [(file, name) for file, names in _NAMED.findall(page.read_text()) for name in re.findall(r"[\w.]+", names)]
    assert [f"{file}: {name}" for file, name in pairs if not _mentions(ROOT / file, name)] == []


def test_tests_that_the_guide_names_exist() -> None:
    text = re.sub(r"^\+.*$", "", GUIDE.read_text(), flags=re.MULTILINE)
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    named = {name for name in _TEST.findall(text) if f"`{name}.py`" not in text}
    assert {name for name in named if f"def {name}(" not in sources and not list(ROOT.rglob(f"{name}.py"))} == set()


def test_the_lines_that_an_example_changes_are_there() -> None:
    """Of each change in the guide, what it takes away and what stands around it."""
    missing, step, path, within = [], "", ROOT, False
    for line in GUIDE.read_text().splitlines():
        header = _STEP.match(line)
        if header is not None:
            step, path = header[1], ROOT / header[1]
            assert path.exists() != bool(header[2]), f"{step} {'exists already' if header[2] else 'does not exist'}"
        elif line.startswith("```"):
            within = line == "```diff"
        elif within and line.startswith(" # "):
            step, path = line[3:], ROOT / line[3:]
        elif within and line[:1] in ("-", " ") and line[1:] not in path.read_text().splitlines():
            missing.append(f"{step}: {line}")
    assert missing == [], "if your change is meant, update the example in CONTRIBUTING.md"


def test_what_an_example_asks_of_programs_and_nodes_is_there() -> None:
    added = "\n".join(line for line in GUIDE.read_text().splitlines() if line.startswith("+"))
    asked = set(re.findall(r"\b(?:program|node)\.(\w+)", added))
    program = (ROOT / "whale/ir/program.py").read_text()
    assert asked and {one for one in asked if not re.search(rf"def {one}\b|^ +{one}: ", program, re.MULTILINE)} == set()


def _mentions(path: Path, name: str) -> bool:
    return all(re.search(rf"\b{part}\b", path.read_text()) for part in name.split("."))


def _defines(path: Path, name: str) -> bool:
    text = path.read_text()
    return all(re.search(rf"^ *(def|class) {part}\b|^{part}\b.* = ", text, re.MULTILINE) for part in name.split("."))


if __name__ == "__main__" and sys.argv[1:] == ["--update"]:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{tables()}\n{END}{rest.partition(END)[2]}")
