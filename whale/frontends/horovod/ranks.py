"""Implements Horovod's functions about ranks, and refuses parts of its API that Whale does not support.

Decision: 0058.
"""

from __future__ import annotations

from typing import Any, NoReturn

from whale.config import Config
from whale.errors import ClusterError, ProgramError
from whale.log import log
from whale.runtime import start
from whale.runtime.context import Context, OwnPrograms, find_running


def init(comm: Any = None, process_sets: Any = None, *, config: Config | None = None) -> None:
    """Connects the ranks that `whale run`, mpirun or srun has started; collective. A second call does nothing.

    Args:
      comm: only None, which is all ranks.
      process_sets: only None.
      config: Whale's configuration, which Horovod's own ``init`` does not have.

    Raises:
      ClusterError: the ranks cannot be connected, or ``wh.init`` was called before.
      ProgramError: some of the ranks are asked for.
    """
    if comm is not None or process_sets:
        given = f"comm={comm!r}" if comm is not None else f"process_sets={process_sets!r}"
        _refuse("hvd.init() connects all ranks", given, "hvd.init()", "start a run with only these ranks")
    context = find_running()
    if context is None:
        start.init_own_programs(config)
        began, programs = require_own_run("hvd.init()")
        began.hooks.before_shutdown.append(lambda: _say_if_nothing_was_exchanged(began, programs))
    elif context.planning.own_programs is None:
        raise ClusterError(
            "wh.init() and hvd.init() cannot be used in one process",
            given="hvd.init() after wh.init()",
            expected="wh.init() for one program of all ranks, or hvd.init() for a program of each rank",
            action="remove one of the two",
        )


def _say_if_nothing_was_exchanged(context: Context, programs: OwnPrograms) -> None:
    """Warns if the script exchanged nothing: it may be meant to run alone, or lack its distributed optimizer."""
    if context.rank == 0 and context.size > 1 and not programs.exchanges:
        log.warning(
            f"hvd.init() connected {context.size} ranks, and the script exchanged nothing: each has run alone; "
            "training averages gradients by hvd.DistributedOptimizer or hvd.DistributedGradientTape"
        )


def shutdown() -> None:
    """Ends Whale in this process; safe to repeat."""
    start.shutdown()


def is_initialized() -> bool:
    """Tells whether ``init`` was called, and ``shutdown`` not."""
    context = find_running()
    return context is not None and context.planning.own_programs is not None


def require_own_run(what: str) -> tuple[Context, OwnPrograms]:
    """Returns the run that ``init`` began.

    Raises:
      ClusterError: there is none; names ``what`` asked for it.
    """
    context = find_running()
    if context is None or context.planning.own_programs is None:
        raise ClusterError(
            f"{what} needs hvd.init()",
            given="no run" if context is None else "a run that wh.init() began",
            expected="hvd.init() before it",
            action="call hvd.init() at the start of the script",
        )
    return context, context.planning.own_programs


def rank() -> int:
    """Returns the number of this process's rank."""
    return require_own_run("hvd.rank()")[0].rank


def size() -> int:
    """Returns the number of ranks."""
    return require_own_run("hvd.size()")[0].size


def local_rank() -> int:
    """Returns the number of this rank among those on its host."""
    return require_own_run("hvd.local_rank()")[0].place.local_rank


def local_size() -> int:
    """Returns the number of ranks on this host."""
    return require_own_run("hvd.local_size()")[0].place.local_size


def cross_rank() -> int:
    """Returns the number of this host among those that have a rank of this local rank."""
    context, programs = require_own_run("hvd.cross_rank()")
    return programs.local_ranks[: context.rank].count(context.place.local_rank)


def cross_size() -> int:
    """Returns the number of hosts that have a rank of this local rank."""
    context, programs = require_own_run("hvd.cross_size()")
    return programs.local_ranks.count(context.place.local_rank)


def is_homogeneous() -> bool:
    """Tells whether all hosts have as many ranks."""
    ranks = require_own_run("hvd.is_homogeneous()")[1].local_ranks
    return len({ranks.count(number) for number in set(ranks)}) == 1


class ProcessSet:
    """The set of all ranks, which is the only one there is here."""

    process_set_id = 0

    @property
    def ranks(self) -> list[int]:
        """Returns the numbers of all ranks."""
        return list(range(size()))

    def size(self) -> int:
        """Returns the number of ranks."""
        return size()

    def rank(self) -> int:
        """Returns the number of this process's rank."""
        return rank()

    def included(self) -> bool:
        """Tells whether this rank is one of them."""
        return True


global_process_set = ProcessSet()


def refuse_other_set(process_set: Any, what: str) -> None:
    """Raises an error for any set of ranks other than all of them."""
    if process_set is not None and not isinstance(process_set, ProcessSet):
        _refuse(f"{what} is among all ranks", f"process_set={process_set!r}", "hvd.global_process_set", "leave it out")


def add_process_set(process_set: Any) -> NoReturn:
    """Raises ProgramError: exchanges are among all ranks."""
    _refuse("ranks have no sets", "hvd.add_process_set()", "exchanges among all ranks", "leave it out")


def remove_process_set(process_set: Any) -> NoReturn:
    """Raises ProgramError: exchanges are among all ranks."""
    _refuse("ranks have no sets", "hvd.remove_process_set()", "exchanges among all ranks", "leave it out")


def join(device: int = -1) -> NoReturn:
    """Raises ProgramError: a rank that ends early would have to guess what the others exchange."""
    _refuse(
        "a rank cannot stand aside while the others go on",
        "hvd.join()",
        "as many steps on every rank",
        "give every rank as many batches, for example with dataset.repeat() and steps_per_epoch",
    )


def start_timeline(file_path: str, mark_cycles: bool = False) -> NoReturn:
    """Raises ProgramError: Whale writes its own trace."""
    _refuse("Horovod's timeline is not written", f"hvd.start_timeline({file_path!r})", "Whale's trace",
            "start the script with `whale run --trace FILE`")  # fmt: skip


def stop_timeline() -> NoReturn:
    """Raises ProgramError: Whale writes its own trace."""
    _refuse("Horovod's timeline is not written", "hvd.stop_timeline()", "Whale's trace",
            "start the script with `whale run --trace FILE`")  # fmt: skip


class RefusedModule:
    """A stand-in for a module of Horovod that Whale does not support: any access raises an error with the reason."""

    def __init__(self, name: str, message: str, expected: str, action: str) -> None:
        self._said = message, name, expected, action

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        message, module, expected, action = self._said
        _refuse(message, f"{module}.{name}", expected, action)


elastic = RefusedModule(
    "hvd.elastic",
    "ranks of a script for Horovod run programs of their own, which do not go on without each other",
    "steps that Whale distributes, or checkpoints and a run that is started again from them",
    "call wh.init(elastic=True) in the place of hvd.init(), with plain optimizers; or save with "
    "tf.train.CheckpointManager on rank 0 and start with `whale run --max-restarts N`",
)


def mpi_threads_supported() -> bool:
    """Returns True: Whale's transport asks MPI for threads."""
    return True


def mpi_enabled() -> bool:
    """Returns True: ranks of several hosts talk through MPI."""
    return True


def mpi_built() -> bool:
    """Returns True: ranks of several hosts talk through MPI."""
    return True


def _is_not_built() -> bool:
    """Returns False: this library is not used for exchanges."""
    return False


gloo_enabled = gloo_built = ddl_built = ccl_built = cuda_built = rocm_built = _is_not_built


def nccl_built() -> int:
    """Returns 0: these exchanges go through the host's memory."""
    return 0


def _refuse(message: str, given: str, expected: str, action: str) -> NoReturn:
    raise ProgramError(message, given=given, expected=expected, action=action)
