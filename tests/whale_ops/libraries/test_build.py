"""What is built: libraries that hold nothing of the machine that built them, and clear refusals."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from whale.errors import CommError
from whale_ops import _native, build

pytestmark = pytest.mark.core
ROOT = Path(__file__).resolve().parents[3]
SYSTEM = {"libstdc++.so.6", "libgcc_s.so.1", "libm.so.6", "libc.so.6", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
SYSTEM |= {"libdl.so.2", "libpthread.so.0"}  # parts of libc since 2.34


def dynamic(path: Path) -> dict[str, list[str]]:
    """The entries of the dynamic section that the loader reads names from."""
    text = subprocess.run(["readelf", "-dW", str(path)], capture_output=True, text=True, check=True).stdout
    found = defaultdict(list)
    for kind, value in re.findall(r"\((NEEDED|SONAME|RPATH|RUNPATH)\).*\[(.*)\]", text):
        found[kind].append(value)
    return found


def names() -> list[str]:
    """Libraries that fit the sources; one for another TensorFlow may be older."""
    return sorted(name for name, facts in _native.build_info().items() if facts["core"] == build.compute_core_digest())


def test_libraries_name_others_without_folders() -> None:
    assert {build.CORE_NAME, build.CUDA_NAME} <= {*names()} and build.MPI_NAME in names()
    for name in names():
        entries = dynamic(_native.find_library(name))
        assert entries["SONAME"] == [name]
        assert "RPATH" not in entries
        ops = name not in (build.CORE_NAME, build.LOOPBACK_NAME, build.CUDA_NAME, build.MPI_NAME)
        assert entries["RUNPATH"] == (["$ORIGIN"] if ops else [])
        others = {text for text in entries["NEEDED"] if text not in SYSTEM}
        if ops:
            assert others == {build.CORE_NAME, "libtensorflow_framework.so.2"}
        elif name == build.MPI_NAME:
            assert len(others) == 1 and re.fullmatch(r"libmpi\.so\.\d+", others.pop())
        else:
            assert others == set()


def test_libraries_quote_no_folder_of_the_machine() -> None:
    for name in names():
        content = _native.find_library(name).read_bytes()
        for folder in (str(ROOT), sys.prefix):
            assert folder.encode() not in content, f"{name} contains {folder}"


def test_what_is_told_to_bazel_is_what_is_built() -> None:
    line = [sys.executable, "-m", "whale_ops.build", "--describe"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True)
    described = {library["name"]: library for library in json.loads(done.stdout)["libraries"]}
    assert next(iter(described)) == build.CORE_NAME
    always = [build.LOOPBACK_NAME, build.CUDA_NAME]
    assert list(described)[2:] in (always, [*always, build.MPI_NAME])
    info = _native.build_info()
    for name, library in described.items():
        assert library["facts"].items() <= info[name].items()
        assert all(Path(folder).is_dir() for folder in library["include_folders"])


def bazel_rules() -> dict[str, dict[str, Any]]:
    """What the BUILD file makes, by name: read as Python, with rules that only take notes."""
    rules: dict[str, dict[str, Any]] = {}

    def glob(patterns: list[str], exclude: Sequence[str] = ()) -> list[str]:
        found = {path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()}
        left_out = {path for pattern in exclude for path in ROOT.glob(pattern)}
        return sorted(str(path.relative_to(ROOT)) for path in found - left_out)

    def note(name: str = "", **attributes: Any) -> None:
        rules[name] = attributes

    libraries = [
        SimpleNamespace(name=library["name"], copts=[], linkopts=[], headers="", units=library["units"])
        for library in build.describe()["libraries"]
    ]
    names = dict(zip(("CORE", "OPS", "LOOPBACK", "CUDA"), libraries), MPI=libraries[4:], FLAGS=[], glob=glob)
    names |= dict.fromkeys(("load", "package", "exports_files"), lambda *_, **__: None)
    exec((ROOT / "BUILD").read_text(), defaultdict(lambda: note, names))
    return rules


def test_bazel_compiles_what_pip_compiles() -> None:
    rules = bazel_rules()
    targets = list(build._list_targets())
    assert {target.name for target in targets} >= {build.CORE_NAME, build.MPI_NAME}
    headers = {str(path.relative_to(ROOT)) for path in build.list_core_headers()}
    for target in targets:
        rule = rules["core"] if target.name == build.CORE_NAME else rules[f"whale_ops/lib/{target.name}"]
        files = set(rule["srcs"]) | set(rule.get("hdrs", ()))
        units = {name for name in files if name.startswith(":")}
        files -= units
        for unit in units:  # a file that includes them
            files |= {word for word in rules[unit[1:]]["cmd"].split() if word.endswith(".cc")}
        sources = {str(path.relative_to(ROOT)) for path in target.sources}
        assert {name for name in files if not name.endswith(".h")} == sources, target.name
        assert files >= headers, target.name
    compiled = {source for target in targets for source in target.sources}
    parts = ("core", "tf_kernels", "loopback", "gpu")
    there = {path for part in parts for path in (ROOT / "whale_ops" / part).rglob("*.cc")}
    assert compiled >= there


@pytest.mark.parametrize("version", ["2.14.1", "2.22.0", None])
def test_a_tensorflow_that_is_not_supported(
    version: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def installed(name: str) -> str:
        if version is None or name != "tensorflow-cpu":
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)
    monkeypatch.setattr(build, "_compile", lambda *_: None)
    with pytest.raises(CommError, match=r"expected: TensorFlow 2\.15 to 2\.21\n  next: ") as refused:
        build.build(tmp_path, verbose=False)
    assert (version or "no TensorFlow") in str(refused.value)


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "absent-compiler -O0")
    with pytest.raises(CommError, match=r"no C\+\+ compiler was found\n  given: absent-compiler -O0\n(.*\n)*  next: "):
        build.build(tmp_path, verbose=False)


def test_units_are_all_sources_and_few_read_the_headers_of_tensorflow() -> None:
    for part in ("core", "tf_kernels", "loopback", "gpu", "mpi"):
        units = build.list_units(part)
        assert sorted(source for unit in units for source in unit.sources) == list(build.list_sources(part))
        assert len({unit.name for unit in units}) == len(units)
    loops, glue = build.list_units("tf_kernels")
    assert loops.flags == () and all(unit.flags == () for part in ("core", "mpi") for unit in build.list_units(part))
    for pattern in build._KERNELS_WITH_LOOPS:
        assert any(source.match(f"tf_kernels/{pattern}") for source in loops.sources), f"{pattern} names no file"
    assert glue.flags == ("-O1",)


def test_digests_notice_sources_headers_and_flags(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "whale_ops"
    for folder in ("core", "tf_kernels"):
        shutil.copytree(build.PACKAGE / folder, package / folder)
    monkeypatch.setattr(build, "PACKAGE", package)

    def digests(compiler: str = "g++", compile_flags: tuple[str, ...] = (), **of_unit: Any) -> dict[str, str]:
        target = build.Target(
            "ops", build.list_units("tf_kernels"), (), "TensorFlow 2", {}, compile_flags, uses_core=True
        )
        return {
            unit.name: build._compute_object_digest(dataclasses.replace(unit, **of_unit), target, [compiler])
            for unit in target.units
        }

    before = digests()
    for changed in (digests("clang++"), digests(compile_flags=("-DX",)), digests(flags=("-O0",))):
        assert not set(changed.values()) & set(before.values())
    for header in ("core/base/types.h", "tf_kernels/communication/communication_op.h"):
        with open(package / header, "a") as file:
            file.write("// changed\n")
        after, before = before, digests()
        assert not set(after.values()) & set(before.values()), header
    with open(package / "tf_kernels" / "communication" / "shapes.cc", "a") as file:
        file.write("// changed\n")
    after = digests()
    assert after["loops"] == before["loops"] and after["glue"] != before["glue"]


_COMPILER = """#!/bin/sh
case "$*" in *--version*) echo "a compiler 1.0"; exit;; esac
echo "$*" >> "$CALLS"
if [ "$(wc -l < "$CALLS")" -ge "$STOP_AT" ]; then
  kill -"$SIGNAL" "$BUILDER"
  [ "$SIGNAL" = KILL ] || exec sleep 600
  exit 1
fi
while [ $# -gt 0 ]; do [ "$1" = -o ] && echo made > "$2"; shift; done
"""
_BUILDER = """
import os, signal, sys
from whale_ops.build import build
signal.signal(signal.SIGINT, signal.default_int_handler)  # what starts the tests may ignore it
os.environ["BUILDER"] = str(os.getpid())
build(sys.argv[1], objects=sys.argv[2])
"""


@pytest.mark.parametrize("stopped_by", ["INT", "KILL"])
def test_a_build_that_was_interrupted_goes_on(stopped_by: str, tmp_path: Path) -> None:
    compiler, calls, objects, output = (tmp_path / name for name in ("cxx", "calls", "objects", "out"))
    compiler.write_text(_COMPILER)
    compiler.chmod(0o755)
    line = [sys.executable, "-c", _BUILDER, str(output), str(objects)]

    def run(stop_at: int) -> subprocess.CompletedProcess[str]:
        own = {"CXX": str(compiler), "CALLS": str(calls), "STOP_AT": str(stop_at), "SIGNAL": stopped_by}
        calls.unlink(missing_ok=True)
        # The compilers that are stopped would sleep for longer than this.
        return subprocess.run(line, cwd=ROOT, env=os.environ | own, capture_output=True, text=True, timeout=300)

    targets = list(build._list_targets())
    total = sum(len(target.units) for target in targets)
    assert run(6).returncode < 0 or stopped_by == "INT"
    while subprocess.run(["pgrep", "-f", str(compiler)], capture_output=True).returncode == 0:
        time.sleep(0.01)  # compilers whose builder was killed come to their end
    made = len(list(objects.rglob("*.o")))
    assert 1 <= made < total
    assert not list(output.glob("*.so"))
    done = run(1000)
    assert done.returncode == 0, done.stderr
    assert len(calls.read_text().splitlines()) == total - made + len(targets), "what was compiled is not compiled again"
    assert f"whale_ops: compiling {total - made} of {total - made} (" in done.stdout
    assert {path.name for path in output.glob("*.so")} == {target.name for target in targets}
    assert {path.suffix for path in objects.rglob("*") if path.is_file() and path.name != ".lock"} == {".o"}


def test_an_installed_package_gets_no_objects(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "cxx"
    compiler.write_text(_COMPILER)
    compiler.chmod(0o755)
    for name, value in {"CXX": str(compiler), "CALLS": str(tmp_path / "calls"), "STOP_AT": "1000"}.items():
        monkeypatch.setenv(name, value)
    build.build(tmp_path / "out", verbose=False)
    libraries = {target.name for target in build._list_targets()}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*libraries, ".lock", build.INFO_NAME}


def test_progress_counts_in_one_line() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal, log = Terminal(), io.StringIO()
    for stream in (terminal, log):
        progress = build._Progress(40, stream)
        for number in range(40):
            progress.step(f"unit {number}")
        progress.end()
    assert terminal.getvalue().count("\n") == 1 and terminal.getvalue().count("\r") == 40
    assert terminal.getvalue().endswith("whale_ops: compiling 40 of 40 (unit 39)\x1b[K\n")
    lines = log.getvalue().splitlines()
    assert lines[0] == "whale_ops: compiling 1 of 40 (unit 0)" and lines[-1].startswith("whale_ops: compiling 40 of 40")
    assert len(lines) < 40
