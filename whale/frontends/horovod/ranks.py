"""Implements Horovod's functions about ranks (``hvd.rank()``), and refuses parts of its API that Whale does not
support.

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
      comm: must be None, which means all ranks.
      process_sets: must be None or empty.
      config: Whale's configuration; None: the defaults. Horovod's own ``init`` has no such argument.

    Raises:
      ClusterError: the ranks cannot be connected, or ``wh.init`` was called before.
      ProgramError: ``comm`` or ``process_sets`` asks for some of the ranks only.
    """
    if comm is not None or process_sets:
        given = f"comm={comm!r}" if comm is not None else f"process_sets={process_sets!r}"
        _refuse(
            "hvd.init() connects all ranks",
            given,
            "hvd.init()",
            "call hvd.init() without arguments, and start only these ranks (`whale run -np N`)",
        )
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
    """Warns at the end of a run in which the script has exchanged nothing: perhaps DistributedOptimizer was
    forgotten.
    """
    if context.rank == 0 and context.size > 1 and not programs.exchanges:
        log.warning(
            f"hvd.init() connected {context.size} ranks, but the script exchanged nothing, so each rank ran alone; to "
            "average gradients, use hvd.DistributedOptimizer or hvd.DistributedGradientTape"
        )


def shutdown() -> None:
    """Ends Whale in this process; may be called more than once."""
    start.shutdown()


def is_initialized() -> bool:
    """Returns True between ``hvd.init()`` and ``hvd.shutdown()``."""
    context = find_running()
    return context is not None and context.planning.own_programs is not None


def require_own_run(what: str) -> tuple[Context, OwnPrograms]:
    """Returns the run that ``hvd.init`` has begun, and what is known of each rank's own program.

    Args:
      what: the call that needs the run, for the error's text.

    Raises:
      ClusterError: ``hvd.init`` was not called.
    """
    context = find_running()
    if context is None or context.planning.own_programs is None:
        raise ClusterError(
            f"{what} needs hvd.init()",
            given="no call of hvd.init() so far" if context is None else "a run that wh.init() began",
            expected=f"hvd.init() before {what}",
            action="call hvd.init() at the start of the script",
        )
    return context, context.planning.own_programs


def rank() -> int:
    """Returns this process's rank: 0 to ``size() - 1``."""
    return require_own_run("hvd.rank()")[0].rank


def size() -> int:
    """Returns the number of ranks."""
    return require_own_run("hvd.size()")[0].size


def local_rank() -> int:
    """Returns this rank's number among the ranks on its host, from 0."""
    return require_own_run("hvd.local_rank()")[0].place.local_rank


def local_size() -> int:
    """Returns the number of ranks on this host."""
    return require_own_run("hvd.local_size()")[0].place.local_size


def cross_rank() -> int:
    """Returns the number of this host among the hosts that have a rank with this rank's ``local_rank()``."""
    context, programs = require_own_run("hvd.cross_rank()")
    return programs.local_ranks[: context.rank].count(context.place.local_rank)


def cross_size() -> int:
    """Returns the number of hosts that have a rank with this rank's ``local_rank()``."""
    context, programs = require_own_run("hvd.cross_size()")
    return programs.local_ranks.count(context.place.local_rank)


def is_homogeneous() -> bool:
    """Returns True if all hosts have the same number of ranks."""
    ranks = require_own_run("hvd.is_homogeneous()")[1].local_ranks
    return len({ranks.count(number) for number in set(ranks)}) == 1


class ProcessSet:
    """Represents the set of all ranks; Whale supports no other process set."""

    process_set_id = 0

    @property
    def ranks(self) -> list[int]:
        """Returns all ranks: [0, 1, ..., size - 1]."""
        return list(range(size()))

    def size(self) -> int:
        """Returns the number of ranks."""
        return size()

    def rank(self) -> int:
        """Returns this process's rank."""
        return rank()

    def included(self) -> bool:
        """Returns True: the set has all ranks."""
        return True


global_process_set = ProcessSet()


def refuse_other_set(process_set: Any, what: str) -> None:
    """Raises a ProgramError if ``process_set`` is not None and not the set of all ranks.

    Args:
      what: the call with this argument, for the error's text.
    """
    if process_set is not None and not isinstance(process_set, ProcessSet):
        _refuse(
            f"{what} exchanges among all ranks; Whale has no other process sets",
            f"process_set={process_set!r}",
            "hvd.global_process_set or no process_set",
            "leave process_set out",
        )


def add_process_set(process_set: Any) -> NoReturn:
    """Raises a ProgramError: Whale has no process sets other than that of all ranks."""
    _refuse(
        "Whale has no process sets beside that of all ranks",
        "hvd.add_process_set()",
        "exchanges among all ranks",
        "leave the call out",
    )


def remove_process_set(process_set: Any) -> NoReturn:
    """Raises a ProgramError: Whale has no process sets other than that of all ranks."""
    _refuse(
        "Whale has no process sets beside that of all ranks",
        "hvd.remove_process_set()",
        "exchanges among all ranks",
        "leave the call out",
    )


def join(device: int = -1) -> NoReturn:
    """Raises a ProgramError: a rank that runs out of batches cannot know what the other ranks still exchange."""
    _refuse(
        "hvd.join() is not supported: no rank can stop while others go on",
        "hvd.join()",
        "the same number of steps on every rank",
        "give every rank the same number of batches, for example with dataset.repeat() and steps_per_epoch",
    )


def start_timeline(file_path: str, mark_cycles: bool = False) -> NoReturn:
    """Raises a ProgramError: Whale writes its own trace instead of Horovod's timeline."""
    _refuse(
        "Whale does not write Horovod's timeline",
        f"hvd.start_timeline({file_path!r})",
        "Whale's own trace",
        "start the script with `whale run --trace FILE`",
    )


def stop_timeline() -> NoReturn:
    """Raises a ProgramError: Whale writes its own trace instead of Horovod's timeline."""
    _refuse(
        "Whale does not write Horovod's timeline",
        "hvd.stop_timeline()",
        "Whale's own trace",
        "start the script with `whale run --trace FILE`",
    )


class RefusedModule:
    """Stands in for a module of Horovod that Whale does not support; access to any name in it raises a ProgramError.

    Args:
      name: the module's name.
      message, expected, action: texts of the error.
    """

    def __init__(self, name: str, message: str, expected: str, action: str) -> None:
        self._said = message, name, expected, action

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        message, module, expected, action = self._said
        _refuse(message, f"{module}.{name}", expected, action)


elastic = RefusedModule(
    "hvd.elastic",
    "hvd.elastic is not supported: after hvd.init() no rank can continue when another one fails",
    "an elastic run of wh.init(elastic=True), or a run that restarts from checkpoints",
    "call wh.init(elastic=True) instead of hvd.init(), and use plain optimizers; or save with "
    "tf.train.CheckpointManager on rank 0 and start with `whale run --max-restarts N`",
)


def mpi_threads_supported() -> bool:
    """Returns True: Whale initialises MPI with support for threads."""
    return True


def mpi_enabled() -> bool:
    """Returns True: ranks on different hosts communicate through MPI."""
    return True


def mpi_built() -> bool:
    """Returns True: ranks on different hosts communicate through MPI."""
    return True


def _is_not_built() -> bool:
    """Returns False, for ``gloo_built()`` and other libraries that these exchanges do not use."""
    return False


gloo_enabled = gloo_built = ddl_built = ccl_built = cuda_built = rocm_built = _is_not_built


def nccl_built() -> int:
    """Returns 0: exchanges of this API do not use NCCL, but go through host memory."""
    return 0


def _refuse(message: str, given: str, expected: str, action: str) -> NoReturn:
    raise ProgramError(message, given=given, expected=expected, action=action)
