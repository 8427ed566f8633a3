"""Starts and stops Horovod in this process, for `communication.backend` "horovod".

Horovod and Whale's transport use the same MPI; whichever comes first initialises it, with MPI_THREAD_MULTIPLE, since
each calls MPI from a thread of its own, on communicators of its own. Horovod has to stop before MPI is finalised.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence

from whale.config import Config
from whale.errors import ClusterError, ConfigError
from whale.started import APART_VARIABLE

_BUILD = "python -m whale_ops.build_horovod (see docs/guides/horovod.md)"


def start(config: Config, size: int, ranks: Sequence[int]) -> None:
    """Starts Horovod among the processes of this run and loads its ops; collective. Does nothing if there is one rank.

    Args:
      config: the configuration.
      size: number of ranks.
      ranks: the ranks of this process.

    Raises:
      ConfigError: the ranks are threads of one process, or have no MPI in common (`whale run --hosts-from`).
      ClusterError: Horovod is not installed, does not load, lacks MPI, or counts its ranks differently.
    """
    if config["communication.in_process_ranks"]:
        raise ConfigError(
            "Horovod connects processes, but communication.in_process_ranks makes all ranks one process",
            given='communication.backend "horovod" with communication.in_process_ranks',
            expected="one process per rank",
            action='start the script with `whale run -np 2`, or set communication.backend to "whale"',
        )
    if size == 1:
        return
    if APART_VARIABLE in os.environ:
        raise ConfigError(
            "Horovod needs an MPI that connects all ranks",
            given='communication.backend "horovod", and `whale run --hosts-from`: each host has an mpirun of its own',
            expected="one mpirun for all hosts",
            action='start the script by `whale run --hosts ...`, or set communication.backend to "whale"',
        )
    if importlib.util.find_spec("horovod") is None:
        raise ClusterError(
            "communication.backend asks for Horovod, which is not installed",
            given=f'communication.backend "horovod" ({config.origin("communication.backend")})',
            expected="Horovod, built for this TensorFlow and MPI",
            action=f'{_BUILD} builds it, or set communication.backend to "whale"',
        )
    try:
        import horovod.tensorflow as hvd
    except Exception as e:  # whatever the loader says: another TensorFlow, no MPI, a missing package
        raise ClusterError(
            "Horovod is installed but does not load",
            reason=f"{type(e).__name__}: {e}",
            expected="Horovod, built for this TensorFlow and MPI",
            action=f"build it again: {_BUILD}",
        ) from e
    if not hvd.mpi_built():
        raise ClusterError(
            "Horovod was built without MPI, which starts and connects the ranks here",
            given="hvd.mpi_built() is False",
            expected="a build with HOROVOD_WITH_MPI=1",
            action=f"build it again: {_BUILD}",
        )
    hvd.init()
    if (hvd.size(), hvd.rank()) != (size, ranks[0]):
        raise ClusterError(
            "Horovod and Whale count the ranks differently",
            given=f"Horovod says rank {hvd.rank()} of {hvd.size()}, Whale says rank {ranks[0]} of {size}",
            expected="the same rank and number of ranks from both",
            action="build Horovod against the MPI of Whale's transport: " + _BUILD,
        )


def is_running() -> bool:
    """Returns True if Horovod is initialised in this process, by `start` or by the script."""
    hvd = sys.modules.get("horovod.tensorflow")  # without the module nobody has started it
    return hvd is not None and hvd.is_initialized()


def stop() -> None:
    """Shuts Horovod down if it runs in this process; collective."""
    if is_running():
        sys.modules["horovod.tensorflow"].shutdown()
