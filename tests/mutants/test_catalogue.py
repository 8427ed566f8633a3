"""The catalogue of planted faults fits the product."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants.__main__ import judged
from tests.mutants.catalogue import MUTANTS, Mutant
from tests.mutants.copy import Ended

pytestmark = pytest.mark.core
ROOT = Path(__file__).resolve().parents[2]


def _id(mutant: Mutant) -> str:
    return mutant.name


def test_names_are_different() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=_id)
def test_what_is_replaced_stands_once_in_its_file(mutant: Mutant) -> None:
    assert mutant.path.split("/")[0] in ("whale", "cost_model", "whale_ops")
    source = (ROOT / mutant.path).read_text()
    assert source.count(mutant.old) == 1
    changed = source.replace(mutant.old, mutant.new)
    assert changed != source
    if mutant.path.endswith(".py"):
        ast.parse(changed)


@pytest.mark.parametrize("mutant", MUTANTS, ids=_id)
def test_the_tests_that_are_named_exist(mutant: Mutant) -> None:
    assert mutant.found_by
    for named in mutant.found_by:
        path, *inside = named.partition("[")[0].split("::")
        assert (ROOT / path).is_file(), named
        functions = {n.name for n in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(n, ast.FunctionDef)}
        assert functions.issuperset(inside), named


_RUNNING = "tests/a/test_a.py::test_one PASSED  [ 50%]\ntests/a/test_a.py::test_two[x y] "


@pytest.mark.parametrize(
    ("code", "output", "is_found", "what"),
    [
        (0, f"{_RUNNING}PASSED [100%]\n", False, "all tests passed"),
        (1, f"{_RUNNING}FAILED [100%]\nFAILED tests/a/test_a.py::test_two[x y] - assert 1 == 2\n", True,
         "tests/a/test_a.py::test_two[x y]"),
        (1, f"{_RUNNING}\nTimeout (0:05:00)!\nThread 0x1:\n", True, "hung: tests/a/test_a.py::test_two[x y]"),
        (-11, f"{_RUNNING}\nFatal Python error: Segmentation fault\n", True,
         "crashed: tests/a/test_a.py::test_two[x y]"),
        (None, _RUNNING, False, "no test's own limit ended tests/a/test_a.py::test_two[x y] within 60 s"),
        (4, "ERROR: file or directory not found: tests/b\n", False,
         "pytest ended with code 4: ERROR: file or directory not found: tests/b"),
        (2, "ERROR tests/a/test_a.py - ImportError\n!!! 1 error !!!\n", False,
         "pytest ended with code 2: !!! 1 error !!!"),
    ],
)  # fmt: skip
def test_what_a_run_of_tests_says(code: int | None, output: str, is_found: bool, what: str) -> None:
    verdict = judged(Ended(code, output, 1.0), 60)
    assert (verdict.is_found, verdict.what) == (is_found, what)
