"""Reads from the launcher's environment variables: this process's rank, the number of ranks, and its place on the host.

Understands `whale run`, Open MPI's mpirun, MPICH-like launchers (PMI), and SLURM's srun. Needs no TensorFlow.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from whale.errors import ClusterError

RANK_VARIABLE = "WHALE_RANK"
SIZE_VARIABLE = "WHALE_SIZE"
LOCAL_RANK_VARIABLE = "WHALE_LOCAL_RANK"
LOCAL_SIZE_VARIABLE = "WHALE_LOCAL_SIZE"
RESTART_VARIABLE = "WHALE_RESTART"
# Set for a process that joins a running run: the number of ranks with which that began.
JOINS_VARIABLE = "WHALE_JOINS"
# Set for a process that joins: for every rank so far, its number on its host, unique among the processes there.
SLOTS_VARIABLE = "WHALE_SLOTS"
# Address under which other ranks of the run can connect to this process, and the token to send: "address secret".
PEERS_VARIABLE = "WHALE_PEERS"
# Set when ranks may join the run while it goes on.
GROWS_VARIABLE = "WHALE_GROWS"
# Set when each host has an mpirun, and so an MPI, of its own: ranks then connect in the way in which ranks join.
APART_VARIABLE = "WHALE_APART"
# "<pid>:<file descriptor>" of the socket between a script and the worker of `whale run` beside it: lines of JSON.
CONTROL_VARIABLE = "WHALE_CONTROL"
# The same for the pipe that takes the script's trace, when `whale run --trace` asks for one.
TRACE_PIPE_VARIABLE = "WHALE_TRACE_PIPE"
# Folder in memory (tmpfs) on this host for files of the run, removed however the run ends.
FILES_VARIABLE = "WHALE_RUN_FILES"
# Set by `whale run -v`: ranks report their communication counters.
COUNTERS_VARIABLE = "WHALE_COUNTERS"
# Set by `whale run --logdir`: ranks report the plans of programs as text.
PLANS_VARIABLE = "WHALE_PLANS"


@dataclass(frozen=True, slots=True)
class ProcessPlace:
    """Holds the place of this process among the ranks.

    Attributes:
        rank: number of this process, 0 <= rank < size.
        size: number of ranks.
        local_rank: number of this process among those on its host, 0 <= local_rank < local_size.
        local_size: number of ranks on this host.
        launcher: whose variables were read: ``whale run``, ``Open MPI``, ``PMI``, ``SLURM``, or ``none`` for a process
            started alone.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    launcher: str


@dataclass(frozen=True, slots=True)
class _Dialect:
    launcher: str
    rank: str
    size: str
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]


# In the order asked: a launcher that starts another one (srun mpirun ...) sets the outer variables too, and the inner
# launcher's are the true ones. SLURM comes last because they are also set in a batch script that starts nothing.
_DIALECTS = (
    _Dialect("whale run", RANK_VARIABLE, SIZE_VARIABLE, (LOCAL_RANK_VARIABLE,), (LOCAL_SIZE_VARIABLE,)),
    _Dialect(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Dialect("PMI", "PMI_RANK", "PMI_SIZE", ("MPI_LOCALRANKID",), ("MPI_LOCALNRANKS",)),
    _Dialect("SLURM", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", ("SLURM_LOCALID",), ()),
)


def process_place(environment: Mapping[str, str] | None = None) -> ProcessPlace:
    """Reads this process's rank from the launcher's environment variables.

    Raises:
        ClusterError: the variables of a launcher contradict each other or are not numbers.
    """
    environment = os.environ if environment is None else environment
    for dialect in _DIALECTS:
        if dialect.rank in environment and dialect.size in environment:
            return _read(dialect, environment)
    return ProcessPlace(rank=0, size=1, local_rank=0, local_size=1, launcher="none")


def own_descriptor(variable: str) -> int | None:
    """Returns the file descriptor that `whale run` left open for this process and named in an environment variable.

    None: there is none, or the variable was inherited from the process that it is for, as in a child process of the
    script.
    """
    pid, _, number = os.environ.get(variable, "").partition(":")
    return int(number) if pid == str(os.getpid()) else None


def joins() -> int:
    """Returns the number of ranks that the run had at its start, if this process joined it later; else 0."""
    return int(os.environ.get(JOINS_VARIABLE, "0"))


def find_slot(place: ProcessPlace) -> int:
    """Returns this process's number among the run's processes on its host.

    For a process that joins, the launcher's number counts only the processes started together with it, so the number
    that `whale run` gave is used.
    """
    slots = os.environ.get(SLOTS_VARIABLE, "")
    return int(slots.split(",")[place.rank]) if joins() and slots else place.local_rank


def restarts() -> int:
    """Returns how often `whale run --max-restarts` has restarted this run after a fault; 0 in the first attempt."""
    return int(os.environ.get(RESTART_VARIABLE, "0"))


def _read(dialect: _Dialect, environment: Mapping[str, str]) -> ProcessPlace:
    rank = _number(environment, dialect, dialect.rank)
    size = _number(environment, dialect, dialect.size)
    # If a launcher says nothing about hosts, all of its ranks are assumed to be on one.
    local_rank = next((_number(environment, dialect, v) for v in dialect.local_rank if v in environment), rank)
    local_size = next((_number(environment, dialect, v) for v in dialect.local_size if v in environment), None)
    if local_size is None:
        local_size = _slurm_local_size(environment, size) if dialect.launcher == "SLURM" else size
    if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
        raise ClusterError(
            f"{dialect.launcher} gave this process an impossible rank or number of ranks",
            given=f"rank {rank} of {size}, local rank {local_rank} of {local_size}",
            expected="0 <= rank < size and 0 <= local rank < local size <= size",
            action=f"check {dialect.rank}, {dialect.size} and the local variables in the environment",
        )
    return ProcessPlace(rank, size, local_rank, local_size, dialect.launcher)


def _number(environment: Mapping[str, str], dialect: _Dialect, variable: str) -> int:
    try:
        return int(environment[variable])
    except ValueError:
        raise ClusterError(
            f"{variable} is not a number",
            given=f"{variable}={environment[variable]}",
            expected="a whole number",
            action=f"start the program through {dialect.launcher} again, or unset the variable",
        ) from None


def _slurm_local_size(environment: Mapping[str, str], size: int) -> int:
    """Returns the number of SLURM's tasks on this node.

    SLURM_STEP_TASKS_PER_NODE "2(x3),1" means two tasks on each of three nodes, then one.
    """
    text, node = environment.get("SLURM_STEP_TASKS_PER_NODE"), environment.get("SLURM_NODEID", "0")
    if text is None:
        return size
    counts: list[int] = []
    try:
        for part in text.split(","):
            tasks, _, repeat = part.partition("(x")
            counts += [int(tasks)] * int(repeat.rstrip(")") or 1)
        return counts[int(node)]
    except (ValueError, IndexError):
        raise ClusterError(
            "SLURM's task layout cannot be read",
            given=f"SLURM_STEP_TASKS_PER_NODE={text}, SLURM_NODEID={node}",
            expected="counts like 2(x3),1 with an entry for the node",
            action="start the program through srun again",
        ) from None
