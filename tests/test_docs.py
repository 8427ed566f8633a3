"""What the documents refer to exists: links, files, modules; the index of the decisions is complete."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import whale
from whale.config.keys import KEYS

pytestmark = pytest.mark.core
ROOT = Path(__file__).resolve().parents[1]
DECISIONS = ROOT / "docs" / "decisions"
DOCUMENTS = [
    *(
        path
        for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
        if (path := ROOT / name).exists()
    ),
    *sorted((ROOT / "docs").rglob("*.md")),
]
_ROOTS = sorted(p.name for p in ROOT.iterdir() if p.is_dir() and p.name not in {".git", "dist"})  # dist: made wheels
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
# whale/ir/plan.py, and with braces or a star: whale/{ir,rules}/*.py
_FILE = re.compile(rf"(?<![\w/.:-])((?:{'|'.join(map(re.escape, _ROOTS))})/[\w./{{}},*-]*\.[a-z]{{1,4}})(?![\w/])")
_MODULE = re.compile(r"(?<![\w./])((?:whale|whale_ops|cost_model)(?:\.[A-Za-z_]\w*)+)(?![\w/])")
_EXTENSIONS = {"py", "md", "json", "yaml", "csv", "html", "so", "txt", "png", "svg"}
_LISTED = re.compile(r"^([A-Za-z_]\w*(?:, [A-Za-z_]\w*)*) {2,}\S", re.MULTILINE)  # names, and what each does
_IMPORT = re.compile(r"(?:from|import) (whale(?:_ops)?(?:\.\w+)+)")


def _record(path: Path) -> tuple[str, str, str]:
    """Number, date and title of a decision."""
    found = re.match(r"# (\d{4})\. (.+)\n\n\* Date: (\d{4}-\d\d-\d\d)\n\* Status: (.+)\n", path.read_text())
    assert found, f"{path.name}: not in the form that docs/decisions/README.md shows"
    number, title, date, status = found.groups()
    assert path.name.startswith(f"{number}-"), path.name
    assert status == "accepted" or re.match(r"(accepted; |superseded by \[\d{4}\]\()", status), f"{path.name}: {status}"
    return number, date, title


def test_the_index_of_decisions_is_complete() -> None:
    records = [_record(path) for path in sorted(DECISIONS.glob("[0-9]*.md"))]
    page = (DECISIONS / "README.md").read_text()
    rows = re.findall(r"^\| \[(\d{4})\]\((.*?)\) \| (\S+) \| (.*?) \| (.+) \|$", page, re.MULTILINE)
    by_subject = page.partition("By subject:")[2].partition("By number:")[0]
    assert set(re.findall(r"\[(\d{4})\]\(", by_subject)) == {number for number, *_ in rows}
    assert [(number, date, title) for number, _, date, title, _ in rows] == records
    assert [int(number) for number, *_ in records] == list(range(1, len(records) + 1))
    assert all((DECISIONS / link).exists() and link.startswith(number) for number, link, *_ in rows)
    assert {path.name for path in DECISIONS.iterdir()} == {"README.md", *(link for _, link, *_ in rows)}


def test_readme_begins_with_its_two_commands() -> None:
    first = re.search(r"(?:^    .*\n)+", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert first is not None and re.findall(r"^    (make \w+) ", first[0], re.MULTILINE) == ["make demo", "make test"]
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"demo", "test"} <= set(targets)


def test_the_changelog_is_a_page() -> None:
    """Holds each version to what is there now; git has the history."""
    for version in (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1:]:
        assert len(version) < 9000, f"{version.splitlines()[0]}: join lines that speak of one thing"


def test_every_decision_is_cited_by_the_module_that_it_binds() -> None:
    sources = [
        path for part in ("whale", "whale_ops", "cost_model", "tests", "bazel") for path in (ROOT / part).rglob("*.*")
    ]
    cited: set[str] = set()
    for path in sources:
        if path.suffix in (".py", ".pyi", ".cc", ".h", ".bzl"):
            for line in re.findall(r"^\W*Decisions?: ([\d, ]+)", path.read_text(), re.MULTILINE):
                cited |= set(re.findall(r"\d{4}", line))
    assert cited == {path.name[:4] for path in DECISIONS.glob("[0-9]*.md")}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_document_refers_to_exists(document: Path) -> None:
    text = re.sub(r"^\+.*$", "", document.read_text(), flags=re.MULTILINE)  # what a diff adds need not exist
    missing = [link for link in _LINK.findall(text) if not _link_exists(document, link)]
    missing += [name for name in _FILE.findall(text) if not all(any(ROOT.glob(one)) for one in _spelt_out(name))]
    missing += [name for name in _MODULE.findall(text) if not _name_exists(name)]
    assert missing == []


def test_modules_that_scripts_in_tests_import_exist() -> None:
    """Scripts that tests write are text to every other tool."""
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for name in _IMPORT.findall(path.read_text())
        if not _name_exists(name)
    }
    assert missing == set()


def test_names_that_modules_list_at_their_head_exist() -> None:
    """Lines such as `lower_ranks   runs the passes for some ranks`; a package's may name what its modules define."""
    missing, found = set[str](), 0
    for path in sorted(path for top in ("whale", "whale_ops", "cost_model") for path in (ROOT / top).rglob("*.py")):
        head = ast.get_docstring(ast.parse(path.read_text())) or ""
        listed = {name.strip() for names in _LISTED.findall(head) for name in names.split(",")}
        if listed:
            found += len(listed)
            files = path.parent.glob("*.py") if path.name == "__init__.py" else [path]
            known = {name for file in files for name in (file.stem, *_defined(file))}
            missing |= {f"{path.relative_to(ROOT)}: {name}" for name in listed - known}
    assert missing == set() and found > 50


def test_files_that_sources_refer_to_exist() -> None:
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for folder in ("whale", "whale_ops", "cost_model", "benchmarks", "examples")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in {".py", ".cc", ".h", ".cu"}
        for name in _FILE.findall(path.read_text())
        if "{" not in name and not any(ROOT.glob(name))
    }
    assert missing == set()


def _link_exists(document: Path, link: str) -> bool:
    target, _, anchor = link.partition("#")
    if re.match(r"[a-z]+:", target):
        return True
    path = (document.parent / target) if target else document
    return path.exists() and (not anchor or anchor in _anchors(path))


@cache
def _anchors(path: Path) -> set[str]:
    """What the headings of a document are called in links."""
    heads = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def _spelt_out(pattern: str) -> list[str]:
    """``a/{b,c}.py`` as ``a/b.py`` and ``a/c.py``."""
    found = re.match(r"(.*?)\{(.*?)\}(.*)", pattern)
    if found is None:
        return [pattern]
    return [one for middle in found[2].split(",") for one in _spelt_out(found[1] + middle + found[3])]


def _name_exists(name: str) -> bool:
    """Whether a dotted name is a module of the project, or what a module defines."""
    parts = name.split(".")
    if parts[-1] in _EXTENSIONS or name in {key.name for key in KEYS}:
        return True  # a file, or a key of the configuration
    for count in range(len(parts), 0, -1):
        place = ROOT.joinpath(*parts[:count])
        source = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        if source.exists():
            return count == len(parts) or parts[count] in _defined(source)
    return False


@cache
def _defined(source: Path) -> set[str]:
    """Names at the top of a module, with those that `whale` loads when they are asked for."""
    names = {*whale.__all__, *whale._modules()} if source == ROOT / "whale" / "__init__.py" else set()
    for statement in ast.walk(ast.parse(source.read_text())):
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            names.add(statement.name)
        elif isinstance(statement, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name for alias in statement.names}
        elif isinstance(statement, ast.Name) and isinstance(statement.ctx, ast.Store):
            names.add(statement.id)
        elif isinstance(statement, ast.Constant) and isinstance(statement.value, str) and "__path__" in names:
            names |= set(re.split(r"[\s.]", statement.value))  # of modules that exist by their names only
    return names
