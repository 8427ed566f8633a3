"""The place of a process, read from the variables of several launchers."""

from __future__ import annotations

import pytest

from whale.errors import ClusterError
from whale.started import ProcessPlace, process_place

pytestmark = pytest.mark.core
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, ProcessPlace(0, 1, 0, 1, "none")),
        (OPEN_MPI, ProcessPlace(3, 4, 1, 2, "Open MPI")),
        (SLURM, ProcessPlace(5, 7, 1, 2, "SLURM")),
        ({**SLURM, **OPEN_MPI}, ProcessPlace(3, 4, 1, 2, "Open MPI")),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, ProcessPlace(0, 1, 0, 1, "none")),  # a batch script, no srun
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, ProcessPlace(1, 2, 1, 2, "PMI")),
        (
            {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
            ProcessPlace(3, 4, 1, 2, "PMI"),
        ),
        (
            {**OPEN_MPI, "WHALE_RANK": "0", "WHALE_SIZE": "2", "WHALE_LOCAL_RANK": "0", "WHALE_LOCAL_SIZE": "1"},
            ProcessPlace(0, 2, 0, 1, "whale run"),
        ),
    ],
)
def test_the_place_a_launcher_gives(environment: dict[str, str], place: ProcessPlace) -> None:
    assert process_place(environment) == place


@pytest.mark.parametrize(
    ("environment", "word"),
    [
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "4"}, "rank 4 of 4"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "9"}, "of 9"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "many"}, "OMPI_COMM_WORLD_SIZE=many"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2x3"}, "2x3"),
        ({**SLURM, "SLURM_NODEID": "9"}, "SLURM_NODEID=9"),
    ],
)
def test_an_impossible_place_is_refused(environment: dict[str, str], word: str) -> None:
    with pytest.raises(ClusterError) as caught:
        process_place(environment)
    assert word in str(caught.value) and "\n  next: " in str(caught.value)
