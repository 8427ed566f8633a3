"""Implements ``epl.Cluster``: presents the run's ranks as workers with devices, in place of a script's hosts."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from whale.errors import ClusterError
from whale.frontends.epl.known import require_env
from whale.runtime.context import require_current

# Devices of one worker, as epl-launch was told; a worker is a rank where nobody says so.
PER_WORKER_VARIABLE = "EPL_DEVICES_PER_WORKER"
_DEVICE = re.compile(r"(?:/job:\w+)?(?:/replica:\d+)?/task:(?P<task>\d+)(?:/device:\w+:(?P<index>\d+))?$")
_LAYOUTS = '"all", "auto", {"specific": [[[device]]]}, {"aware_row": n}'


class WrongClusterError(ClusterError, RuntimeError):
    """The error for devices that cannot be arranged as asked; scripts for the library expect a RuntimeError."""


@dataclass(frozen=True)
class VirtualDevice:
    """The devices of a task graph.

    Attributes:
      index: of the task graph.
      slice_devices: for each replica, names of its devices.
      local_devices: those of this worker.
    """

    index: int
    slice_devices: list[list[str]]
    local_devices: tuple[str, ...]

    @property
    def all_devices(self) -> tuple[str, ...]:
        """Returns the devices of all replicas."""
        return tuple(d for of_one in self.slice_devices for d in of_one)

    @property
    def num_replicas(self) -> int:
        """Returns the number of replicas."""
        return len(self.all_devices) or 1

    def get_device(self, replica_idx: int, device_idx: int) -> str:
        """Returns one device of one replica."""
        return self.slice_devices[replica_idx][device_idx]


class Cluster:
    """The run's ranks, as a context manager too.

    A worker is a rank, or as many as ``epl-launch --gpu_per_worker`` says. ``worker_hosts``, ``ps_hosts``, ``job_name``
    and ``worker_index`` are taken, and so is ``TF_CONFIG``: the ranks that were started are what counts.

    Args:
      layout: ``"all"``: one slice of all devices. ``"auto"`` or None: slices follow from the task graphs.
        ``{"specific": slices}``: for each task graph the devices of each replica, which then has these ranks.
        ``{"aware_row": n}``: slices of n devices in a row.

    Raises:
      ClusterError: before ``epl.init``; devices that there are not; a number that does not divide them.
    """

    def __init__(
        self,
        worker_hosts: str | None = None,
        ps_hosts: str | None = None,
        job_name: str = "worker",
        worker_index: int = 0,
        layout: Any = "all",
    ) -> None:
        context = require_current("epl.Cluster()")
        self.total_gpu_num = context.planned_size
        per_worker = os.environ.get(PER_WORKER_VARIABLE, "1")
        self.gpu_num_per_worker = int(per_worker) if per_worker.isdigit() and int(per_worker) else 1
        if self.total_gpu_num % self.gpu_num_per_worker:
            self.gpu_num_per_worker = 1
        self.worker_num = self.total_gpu_num // self.gpu_num_per_worker
        self.worker_index = context.rank // self.gpu_num_per_worker
        self.worker_num_per_machine = max(1, context.local_ranks // self.gpu_num_per_worker)
        self.layout = layout
        self.slices: tuple[tuple[tuple[int, ...], ...], ...] = ()
        kind: str
        value: Any
        kind, value = (layout, None) if isinstance(layout, str) else next(iter((layout or {"auto": 1}).items()))
        if kind == "specific":
            self.slices = tuple(tuple(tuple(self.rank_of(d) for d in of_one) for of_one in s) for s in value)
        elif kind == "aware_row":
            self.slices = self._rows(int(value))
        elif kind not in ("all", "auto"):
            raise WrongClusterError(
                "the devices cannot be arranged as the layout says",
                given=repr(layout),
                expected=_LAYOUTS,
                action="correct layout",
            )
        self._kind = kind

    def _rows(self, count: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
        size = self.total_gpu_num
        if count < 1 or size % count or self.gpu_num_per_worker != 1:
            raise WrongClusterError(
                "the devices cannot be arranged in such rows",
                given=f"aware_row={count}, {size} devices, {self.gpu_num_per_worker} of a worker",
                expected=f"a number that divides {size}, and one device for each worker",
                action="correct the number, or start another number of ranks",
            )
        return tuple(tuple((r,) for r in range(k * count, (k + 1) * count)) for k in range(size // count))

    def device(self, rank: int) -> str:
        """Returns the name of a rank's device."""
        worker, index = divmod(rank, self.gpu_num_per_worker)
        return f"/job:worker/replica:0/task:{worker}/device:GPU:{index}"

    def rank_of(self, device: str) -> int:
        """Returns the rank for a device's name.

        Raises:
          ClusterError: no rank has this name.
        """
        return rank_of_device(device, self.gpu_num_per_worker, self.total_gpu_num)

    def device_of(self, ranks: Sequence[Sequence[int]], index: int) -> VirtualDevice:
        """Returns the devices of a task graph whose replicas are on these ranks."""
        slices = [[self.device(r) for r in of_one] for of_one in ranks]
        mine = f"/task:{self.worker_index}/"
        return VirtualDevice(index, slices, tuple(d for of_one in slices for d in of_one if mine in d))

    @property
    def virtual_devices(self) -> list[VirtualDevice]:
        """Returns the devices of each slice."""
        if self.slices:
            return [self.device_of(s, i) for i, s in enumerate(self.slices)]
        if self._kind == "all":
            return [self.device_of([(r,) for r in range(self.total_gpu_num)], 0)]
        graph = require_env("epl.Cluster").default_graph
        return [self.device_of(ranks, k) for k, ranks in sorted(graph.layout.ranks.items()) if graph.taskgraphs]

    @property
    def available_devices(self) -> list[str]:
        """Returns the devices of this worker."""
        first = self.worker_index * self.gpu_num_per_worker
        return [self.device(first + i) for i in range(self.gpu_num_per_worker)]

    @property
    def hosts(self) -> str:
        """Returns the names of the workers; they are not network addresses, since Whale connects the ranks itself."""
        return ",".join(f"worker{i}:0" for i in range(self.worker_num))

    @property
    def cluster_spec(self) -> Any:
        """Returns the workers as TensorFlow describes them."""
        import tensorflow as tf

        return tf.train.ClusterSpec({"worker": self.hosts.split(",")})

    def get_local_rank(self, global_rank: int) -> int:
        """Returns a device's number in its worker."""
        return global_rank % self.gpu_num_per_worker

    def current_worker_chief_gpu(self) -> str:
        """Returns the first device of this worker."""
        return self.available_devices[0]

    def current_worker_cpu(self) -> str:
        """Returns the CPU device of this worker."""
        return f"/job:worker/replica:0/task:{self.worker_index}/device:CPU:0"

    def __enter__(self) -> Cluster:
        require_env("epl.Cluster()").cluster = self
        return self

    def __exit__(self, *_: Any) -> None:
        """Ends the scope; sessions created later still use the slices, as in the library."""


def rank_of_device(device: str, per_worker: int, size: int) -> int:
    """Returns the rank of a device's name: worker x devices of a worker + number of the device.

    Raises:
      ClusterError: it is no such name, or there is no such rank.
    """
    found = _DEVICE.match(device)
    rank = int(found["task"]) * per_worker + int(found["index"] or 0) if found else -1
    if not found or not 0 <= rank < size or int(found["index"] or 0) >= per_worker:
        raise WrongClusterError(
            "a device has no rank",
            given=f"{device!r}; {size // per_worker} workers of {per_worker} devices",
            expected="/job:worker/replica:0/task:<worker>/device:GPU:<number>",
            action="correct the name, or start more ranks",
        )
    return rank
