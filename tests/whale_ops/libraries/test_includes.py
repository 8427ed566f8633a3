"""Include arrows run one way: which folder of the C++ code may include which, read from the sources."""

from __future__ import annotations

import graphlib
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.core
ROOT = Path(__file__).resolve().parents[3]
OURS = ROOT / "whale_ops"

# Folder -> the folders that it includes. Nothing of TensorFlow, MPI or CUDA in the core: each has a library of its own.
INCLUDED: dict[str, set[str]] = {
    "core/base": set(),
    "core/transport": {"core/base"},
    "core/collective": {"core/base"},
    "core/operation": {"core/base", "core/transport", "core/collective"},
    "core/progress": {"core/transport", "core/collective", "core/operation"},
    "core/device": {"core/base", "core/collective", "core/progress"},
    "core/compute": {"core/base"},
    "core/schedule": {"core/base"},
    "core/c_api": {
        "core/base",
        "core/transport",
        "core/collective",
        "core/progress",
        "core/device",
        "core/schedule",
    },
    "mpi": {"core/transport"},
    "portable": set(),
    "loopback": set(),
    "gpu": {"core/base", "core/device"},
    "tf_kernels": {"core/base"},
    "tf_kernels/communication": {"core/collective", "core/progress", "tf_kernels"},
    "tf_kernels/compute": {"core/compute", "tf_kernels"},
    "tf_kernels/gpu": {"core/device", "tf_kernels/communication"},
    "tf_kernels/random": {"tf_kernels"},
    "tf_kernels/memory": {"core/transport", "tf_kernels"},
}
# Headers of others -> the only folder that includes them, or one inside it. None has those of CUDA and NCCL: what is
# needed of them is declared.
OTHERS = {r"tensorflow/|absl/|xla/|unsupported/|Eigen": "tf_kernels", r"mpi\.h": "mpi", r"cuda|nccl|nvrtc": "none"}


def sources() -> list[Path]:
    return [path for suffix in ("h", "cc", "cu") for path in sorted(OURS.rglob(f"*.{suffix}"))]


def folder(path: Path) -> str:
    return str(path.parent.relative_to(OURS))


def includes(path: Path) -> list[tuple[str, str]]:
    """(quote or bracket, what is named) of every include in a file."""
    return re.findall(r'^\s*#\s*include\s+(["<])([^">]+)[">]', path.read_text(), re.MULTILINE)


def circle(graph: dict[str, set[str]]) -> list[str]:
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_folders_include_what_the_table_says() -> None:
    found: dict[str, set[str]] = {folder(path): set() for path in sources()}
    for path in sources():
        for quote, name in includes(path):
            if (ROOT / name).exists():
                assert quote == '"', f"{path}: {name} is ours"
                found[folder(path)].add(folder(ROOT / name))
                continue
            assert quote == "<" or folder(path).startswith("tf_kernels"), (
                f"{path}: {name} is not named by its place in the project"
            )
            for others, only in OTHERS.items():
                assert folder(path).startswith(only) or not re.match(others, name), f"{path} includes {name}"
    assert {here: there - {here} for here, there in found.items()} == INCLUDED


def test_no_circles() -> None:
    assert circle(INCLUDED) == []
    files = {str(path.relative_to(ROOT)): {name for _, name in includes(path)} for path in sources()}
    assert circle({path: {name for name in names if name in files} for path, names in files.items()}) == []
