"""Checks what an sdist holds, and what type checkers see of the package."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from setuptools._distutils.filelist import FileList

if TYPE_CHECKING:
    from typing_extensions import assert_type

    import whale as wh

pytestmark = pytest.mark.core
ROOT = Path(__file__).resolve().parents[1]
# Setuptools takes these without being told, and Python sources of packages; an sdist is no repository.
_TAKEN = {"MANIFEST.in", "pyproject.toml", "setup.py", ".gitignore"}
_PACKAGES = ("whale/", "whale_ops/", "cost_model/")


def test_an_sdist_has_every_file_of_the_repository() -> None:
    asked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    files = asked.stdout.splitlines()
    if asked.returncode or "MANIFEST.in" not in files:
        pytest.skip("no checkout of the repository")
    listed = FileList()
    listed.allfiles = files
    for line in (ROOT / "MANIFEST.in").read_text().splitlines():
        listed.process_template_line(line)
    missing = set(files) - set(listed.files) - _TAKEN
    assert {path for path in missing if not (path.startswith(_PACKAGES) and path.endswith(".py"))} == set()


def test_type_checkers_are_told_of_every_package() -> None:
    assert all((ROOT / package / "py.typed").is_file() for package in _PACKAGES)


def _check_that_steps_keep_their_types() -> None:
    """Is read by mypy (`make lint`), and never called: a step has the arguments and the result of its function."""

    @wh.function
    def step(x: int, scale: float = 1.0) -> float:
        return x * scale

    @wh.function(autograph=False)
    def plain(x: int) -> float:
        return float(x)

    class Model:
        @wh.function
        def step(self, x: int) -> float:
            return float(x)

    assert_type(step(1, scale=2.0), float)
    assert_type(plain(1), float)
    assert_type(Model().step(1), float)
