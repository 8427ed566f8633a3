"""The transports between real processes: shared memory inside a machine, MPI."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.draws import one_of
from tests.forkserver import warm_python

ROOT = Path(__file__).resolve().parents[3]


TRANSPORTS = ("memory", "mpi", "both")  # what tests.whale_ops.mpi.mpi_worker calls them


def mpirun(size: int, transport: str, scenario: str, within: tuple[str, ...] = ()) -> list[str]:
    """What each rank printed, by rank; all ranks must end well, having seen all others leave.

    ``within``: a command that runs the command behind it.
    """
    wheel = Path(sys.prefix) / "bin" / "mpirun"
    program = str(wheel) if wheel.exists() else shutil.which("mpirun")
    assert program, "no mpirun in this environment or on PATH"
    environment = os.environ | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PYTHONPATH": str(ROOT),
    }
    command = [
        *within,
        program,
        "--oversubscribe",
        "--bind-to",
        "none",
        "-np",
        str(size),
        sys.executable if within else warm_python(),
        "-m",
        "tests.whale_ops.mpi.mpi_worker",
        transport,
        scenario,
    ]
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    outcomes = dict(re.findall(r"^rank (\d+): (?!all left)(.*)$", result.stdout, re.MULTILINE))
    assert re.findall(r"all left (\w+)", result.stdout) == ["True"] * size, result.stdout + result.stderr
    return [outcomes[str(rank)] for rank in range(size)]


@pytest.mark.parametrize(
    ("size", "transport"),
    one_of(3, [(3, "both"), (2, "memory"), (2, "mpi"), (4, "hosts"), (3, "memory")], several=True),
)
def test_values(size: int, transport: str) -> None:
    assert mpirun(size, transport, "values") == ["values agree"] * size


@pytest.mark.parametrize("transport", [*TRANSPORTS, "hosts"])
def test_every_rank_starts_its_operations_in_an_order_of_its_own(transport: str) -> None:
    assert mpirun(3, transport, "random_orders") == ["orders agree"] * 3


@pytest.mark.parametrize("transport", one_of(2, ["memory", "mpi"]))
def test_a_message_of_more_than_2_to_the_30_bytes(transport: str) -> None:
    assert mpirun(2, transport, "large") == ["large agrees"] * 2


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_that_disagree(transport: str) -> None:
    for outcome in mpirun(3, transport, "disagree"):
        assert outcome.startswith("True") and "'k'" in outcome and "float32" in outcome and "float64" in outcome


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_abort(transport: str) -> None:
    assert mpirun(3, transport, "abort") == ["True rank 1 gave up kind: aborted next: look at its log"] * 3


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_leaves(transport: str) -> None:
    first, left, last = mpirun(3, transport, "leave")
    assert left == "rank 1 is done"
    for outcome in (first, last):
        assert outcome.startswith("True rank 1 has left the run") and "AllReduce 'k'" in outcome


@pytest.mark.parametrize("transport", ["memory", "mpi"])
def test_two_communicators(transport: str) -> None:
    assert mpirun(2, transport, "twice") == ["1.0 10.0"] * 2


def test_a_full_dev_shm_stops_nobody() -> None:
    apart = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=4k tmpfs /dev/shm && exec "$@"', "sh")
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user cannot mount a small /dev/shm for itself")
    full = (*apart, "sh", "-c", '! head -c 8192 /dev/zero 2>/dev/null > /dev/shm/full && exec "$@"', "sh")
    assert mpirun(2, "both", "twice", full) == ["1.0 10.0"] * 2


def test_more_messages_than_fit_into_a_ring() -> None:
    assert mpirun(2, "memory", "flood") == ["flood agrees"] * 2


@pytest.mark.core
def test_tensorflow_ops() -> None:
    assert mpirun(2, "mpi", "tensorflow") == ["tensorflow agrees"] * 2


@pytest.mark.core
def test_tensors_that_all_ranks_reach() -> None:
    for outcome in mpirun(2, "arena", "shared_tensors"):
        assert outcome.startswith("tensorflow agrees, shared tensors agree, ") and "rank 1 gave up" in outcome
