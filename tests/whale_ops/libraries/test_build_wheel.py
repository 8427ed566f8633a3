"""The portable wheel: what its libraries are compiled with, what they may ask for, and where headers come from."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from whale.errors import CommError
from whale_ops import build, build_wheel

pytestmark = pytest.mark.core


def test_portable_libraries_are_others_than_those_of_this_machine() -> None:
    compiler = build.find_compiler_command()
    plain = {target.name: target for target in build._list_targets()}
    for target in build._list_targets(portable=True):
        assert build._compute_digest(target, compiler) != build._compute_digest(plain[target.name], compiler)
        assert target.compile_flags[-1] == "whale_ops/portable/older_symbols.h"
        has_runtime = build.PACKAGE / "portable/runtime.cc" in target.sources
        assert has_runtime != (target.name == build.LOOPBACK_NAME), "mpirun may have no C++ library"


def test_an_op_library_is_made_for_each_tensorflow(tmp_path: Path) -> None:
    each = [build.TensorFlow(f"{minor}.0", tmp_path / minor) for minor in build.SUPPORTED_TENSORFLOWS]
    targets = {target.name: target for target in build._list_targets(each)}
    for tensorflow in each:
        target = targets[build.make_ops_name(tensorflow.version)]
        assert target.include_folders == (f"{tensorflow.folder}/include",)
        assert target.facts == {"tensorflow": tensorflow.version}


def test_a_library_that_asks_for_newer_symbols_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    core = build.IN_PLACE / build.CORE_NAME
    monkeypatch.setattr(build_wheel, "NEWEST", {"GLIBC": (2, 99), "GLIBCXX": (3, 4, 99), "CXXABI": (1, 3, 99)})
    with pytest.raises(CommError, match=r"libwhale_core.so asks for symbols .*\n  given: .*@GCC_3\.0"):
        build_wheel.require_portable(core)  # of a family that the platform does not name
    monkeypatch.setitem(build_wheel.NEWEST, "GCC", (7, 0, 0))
    build_wheel.require_portable(core)
    monkeypatch.setitem(build_wheel.NEWEST, "GLIBC", (2, 2, 5))
    with pytest.raises(CommError, match=r"getrandom@GLIBC_2\.25"):
        build_wheel.require_portable(core)


def test_of_a_tensorflow_only_what_is_compiled_against_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "tensorflow_cpu-2.18.7-py3-none-any.whl"
    kept = {"tensorflow/include/tensorflow/core/public/version.h", f"tensorflow/{build.FRAMEWORK_LIBRARY}"}
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in (*kept, "tensorflow/__init__.py", "tensorflow/libtensorflow_cc.so.2"):
            archive.writestr(name, "")
        about = "tensorflow_cpu-2.18.7.dist-info"
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: tensorflow-cpu\nVersion: 2.18.7\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    folder = tmp_path / "tensorflows"
    found = build_wheel.fetch_tensorflow("2.18", folder)
    assert found == build.TensorFlow("2.18.7", folder / "2.18.7" / "tensorflow")
    files = {str(path.relative_to(folder / "2.18.7")) for path in folder.rglob("*") if path.is_file()}
    assert files == kept and [path.name for path in folder.iterdir()] == ["2.18.7"]
    wheel.unlink()
    assert build_wheel.fetch_tensorflow("2.18", folder) == found, "it is not downloaded again"
    with pytest.raises(CommError, match=r"TensorFlow 2\.19 cannot be downloaded"):
        build_wheel.fetch_tensorflow("2.19", folder)
