"""Starts Horovod in this process as a backend, and ends it before MPI is ended.

Whale's transport and Horovod share one MPI, which whoever comes first starts with MPI_THREAD_MULTIPLE: each has a
thread of its own that talks to MPI, on communicators of its own.
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
    """Starts Horovod among the processes of this run and loads its ops; collective. Does nothing for one rank.

    Raises:
      ConfigError: the ranks are threads of this process, which Horovod cannot join.
      ClusterError: Horovod is not installed, does not load, or counts its ranks differently.
    """
    if config["communication.in_process_ranks"]:
        raise ConfigError(
            "Horovod joins processes, and the in-process transport has one",
            given='communication.backend "horovod" with communication.in_process_ranks',
            expected="the transport between processes",
            action='start the script with `whale run -np 2`, or set communication.backend to "whale"',
        )
    if size == 1:
        return
    if APART_VARIABLE in os.environ:
        raise ConfigError(
            "Horovod needs an MPI that connects all ranks",
            given='communication.backend "horovod", and `whale run --hosts-from`: each host has an mpirun of its own',
            expected="one mpirun for all hosts",
            action='start the script with --hosts, or set communication.backend to "whale"',
        )
    if importlib.util.find_spec("horovod") is None:
        raise ClusterError(
            "Horovod is to sum the gradients and is not installed",
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
            expected="the same numbers",
            action="build Horovod against the MPI of Whale's transport: " + _BUILD,
        )


def is_running() -> bool:
    """Tells whether Horovod is initialised in this process, by this module or by the script."""
    hvd = sys.modules.get("horovod.tensorflow")  # without the module nobody has started it
    return hvd is not None and hvd.is_initialized()


def stop() -> None:
    """Ends Horovod if it runs in this process; collective."""
    if is_running():
        sys.modules["horovod.tensorflow"].shutdown()
