"""Builds the op library as a part of the package; everything else stands in pyproject.toml.

The library is compiled against the TensorFlow that the build sees, and runs with that minor version only. An isolated
build (pip's default) sees a TensorFlow of its own: where the environment holds another one, the build refuses.
`python -m whale_ops.build_wheel` compiles libraries for all versions first, and names their folder by WHALE_LIBRARIES.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools < 70.1
    from wheel.bdist_wheel import bdist_wheel

ROOT = Path(__file__).resolve().parent
LIBRARY = "whale_ops/lib"


class BuildOps(build_ext):
    """Compiles the shared libraries of whale_ops instead of a Python extension module."""

    def run(self) -> None:
        """Builds the libraries for the TensorFlow that the build sees."""
        if made := os.environ.get("WHALE_LIBRARIES"):
            shutil.copytree(made, self._folder(), ignore=shutil.ignore_patterns(".*", "objects"), dirs_exist_ok=True)
            return
        _refuse_another_tensorflow()
        # An isolated build does not put the project on the path.
        sys.path.insert(0, str(ROOT))
        from whale.errors import CommError
        from whale_ops.build import build

        if self._folder() != ROOT / LIBRARY:
            shutil.rmtree(self._folder(), ignore_errors=True)  # what an earlier build made for another TensorFlow
        try:
            # In place, the objects lie beside the libraries.
            build(
                self._folder(),
                objects=None if self._folder() == ROOT / LIBRARY else Path(self.build_temp) / "whale_ops",
            )
        except CommError as error:
            raise SystemExit(f"whale_ops: {error}") from None

    def _folder(self) -> Path:
        in_place = self.inplace or getattr(self, "editable_mode", False)
        return (ROOT if in_place else Path(self.build_lib)) / LIBRARY

    def get_outputs(self) -> list[str]:
        """Paths of the libraries."""
        return sorted(str(path) for path in self._folder().glob("*") if path.is_file())

    def get_output_mapping(self) -> dict[str, str]:
        """Nothing is copied: an editable install uses the libraries where they are built."""

        return {}


def _refuse_another_tensorflow() -> None:
    """Stops an isolated build whose TensorFlow differs from the one beside which the package will be installed."""
    installed = _tensorflow_version([sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]])
    seen = _tensorflow_version(sys.path)
    if installed is not None and seen is not None and installed[:2] != seen[:2]:
        raise SystemExit(
            "the op library would be built for another TensorFlow than the one installed\n"
            f"  installed: {'.'.join(installed)}\n  in the isolated build: {'.'.join(seen)}\n"
            "  next: pip install 'setuptools>=77' wheel && pip install --no-build-isolation ."
        )


def _tensorflow_version(folders: list[str]) -> tuple[str, ...] | None:
    for folder in folders:
        for path in Path(folder or ".").glob("tensorflow*.dist-info"):
            match = re.fullmatch(r"tensorflow(?:_cpu|_rocm|_intel)?-(\d+)\.(\d+)\.(.+)\.dist-info", path.name)
            if match:
                return match.groups()
    return None


class Wheel(bdist_wheel):
    """The libraries use TensorFlow's C++ interface, not Python's: one wheel fits every Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """The wheel's tags: any Python 3, this platform."""
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension(LIBRARY.replace("/", "."), sources=[])],
    cmdclass={"bdist_wheel": Wheel, "build_ext": BuildOps},
)
