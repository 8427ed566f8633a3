"""Implements ``epl.Cluster``: shows a run's ranks to an EPL script as workers that have GPUs."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from whale.errors import ClusterError
from whale.frontends.epl.known import require_env
from whale.runtime.context import require_current

# Number of devices per worker, set by epl-launch; without this variable a worker has one device.
PER_WORKER_VARIABLE = "EPL_DEVICES_PER_WORKER"
_DEVICE = re.compile(r"(?:/job:\w+)?(?:/replica:\d+)?/task:(?P<task>\d+)(?:/device:\w+:(?P<index>\d+))?$")
_LAYOUTS = '"all", "auto", {"specific": [[[device]]]}, {"aware_row": n}'


class WrongClusterError(ClusterError, RuntimeError):
    """Raised if devices cannot be arranged as asked. It is also a RuntimeError, which EPL raises and scripts may
    catch.
    """


@dataclass(frozen=True)
class VirtualDevice:
    """Describes the devices of one task graph.

    Attributes:
      index: number of the task graph.
      slice_devices: for each replica, the names of its devices.
      local_devices: names of the devices that belong to this worker.
    """

    index: int
    slice_devices: list[list[str]]
    local_devices: tuple[str, ...]

    @property
    def all_devices(self) -> tuple[str, ...]:
        """Returns the names of the devices of all replicas."""
        return tuple(d for of_one in self.slice_devices for d in of_one)

    @property
    def num_replicas(self) -> int:
        """Returns the number of devices in all replicas, which is what EPL returns here; 1 if there are none."""
        return len(self.all_devices) or 1

    def get_device(self, replica_idx: int, device_idx: int) -> str:
        """Returns the name of device ``device_idx`` of replica ``replica_idx``."""
        return self.slice_devices[replica_idx][device_idx]


class Cluster:
    """Presents the ranks of the run as workers with devices; also usable as ``with epl.Cluster(...):``.

    A worker is one rank, or as many ranks as ``epl-launch --gpu_per_worker`` gives it. ``worker_hosts``, ``ps_hosts``,
    ``job_name``, ``worker_index`` and the variable ``TF_CONFIG`` are accepted and ignored: the ranks that were started
    form the cluster.

    Args:
      layout: ``"all"``: one slice of all devices. ``"auto"`` or None: the slices follow from the task graphs.
        ``{"specific": slices}``: for each task graph and each replica, the names of its devices. ``{"aware_row": n}``:
        slices of n consecutive devices.

    Raises:
      ClusterError: ``epl.init`` was not called, the layout names a device that does not exist, or n does not divide the
        number of devices.
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
                "epl.Cluster does not know this layout",
                given=f"layout={layout!r}",
                expected=_LAYOUTS,
                action="pass one of these layouts",
            )
        self._kind = kind

    def _rows(self, count: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
        size = self.total_gpu_num
        if count < 1 or size % count or self.gpu_num_per_worker != 1:
            raise WrongClusterError(
                "the devices cannot be arranged in rows of this length",
                given=f"aware_row={count}, {size} devices, {self.gpu_num_per_worker} per worker",
                expected=f"a number that divides {size}, and one device per worker",
                action="change aware_row, or start another number of ranks",
            )
        return tuple(tuple((r,) for r in range(k * count, (k + 1) * count)) for k in range(size // count))

    def device(self, rank: int) -> str:
        """Returns the name of a rank's device, e.g. ``/job:worker/replica:0/task:1/device:GPU:0``."""
        worker, index = divmod(rank, self.gpu_num_per_worker)
        return f"/job:worker/replica:0/task:{worker}/device:GPU:{index}"

    def rank_of(self, device: str) -> int:
        """Returns the rank that a device's name stands for.

        Raises:
          ClusterError: no rank has a device of this name.
        """
        return rank_of_device(device, self.gpu_num_per_worker, self.total_gpu_num)

    def device_of(self, ranks: Sequence[Sequence[int]], index: int) -> VirtualDevice:
        """Returns the devices of task graph ``index``.

        Args:
          ranks: for each replica of the task graph, its ranks.
          index: number of the task graph.
        """
        slices = [[self.device(r) for r in of_one] for of_one in ranks]
        mine = f"/task:{self.worker_index}/"
        return VirtualDevice(index, slices, tuple(d for of_one in slices for d in of_one if mine in d))

    @property
    def virtual_devices(self) -> list[VirtualDevice]:
        """Returns one VirtualDevice per slice; with the layout "auto", one per task graph so far."""
        if self.slices:
            return [self.device_of(s, i) for i, s in enumerate(self.slices)]
        if self._kind == "all":
            return [self.device_of([(r,) for r in range(self.total_gpu_num)], 0)]
        graph = require_env("epl.Cluster").default_graph
        return [self.device_of(ranks, k) for k, ranks in sorted(graph.layout.ranks.items()) if graph.taskgraphs]

    @property
    def available_devices(self) -> list[str]:
        """Returns the names of this worker's devices."""
        first = self.worker_index * self.gpu_num_per_worker
        return [self.device(first + i) for i in range(self.gpu_num_per_worker)]

    @property
    def hosts(self) -> str:
        """Returns names for the workers: ``worker0:0,worker1:0``.

        These are no network addresses, since Whale connects the ranks itself.
        """
        return ",".join(f"worker{i}:0" for i in range(self.worker_num))

    @property
    def cluster_spec(self) -> Any:
        """Returns the workers as a tf.train.ClusterSpec, with the names of ``hosts``."""
        import tensorflow as tf

        return tf.train.ClusterSpec({"worker": self.hosts.split(",")})

    def get_local_rank(self, global_rank: int) -> int:
        """Returns the number of a rank's device within its worker."""
        return global_rank % self.gpu_num_per_worker

    def current_worker_chief_gpu(self) -> str:
        """Returns the name of this worker's first device."""
        return self.available_devices[0]

    def current_worker_cpu(self) -> str:
        """Returns the name of this worker's CPU device."""
        return f"/job:worker/replica:0/task:{self.worker_index}/device:CPU:0"

    def __enter__(self) -> Cluster:
        require_env("epl.Cluster()").cluster = self
        return self

    def __exit__(self, *_: Any) -> None:
        """Does nothing: as in EPL, the slices stay in use for sessions that are created later."""


def rank_of_device(device: str, per_worker: int, size: int) -> int:
    """Returns the rank that a device's name stands for: task number x ``per_worker`` + device number.

    Args:
      device: such as ``/job:worker/replica:0/task:1/device:GPU:0``; job, replica and device may be left out.
      per_worker: number of devices per worker.
      size: number of ranks.

    Raises:
      ClusterError: the name has another form, or there is no such rank.
    """
    found = _DEVICE.match(device)
    rank = int(found["task"]) * per_worker + int(found["index"] or 0) if found else -1
    if not found or not 0 <= rank < size or int(found["index"] or 0) >= per_worker:
        raise WrongClusterError(
            "no rank of this run has the device",
            given=f"{device!r}; the run has {size // per_worker} workers of {per_worker} devices",
            expected="/job:worker/replica:0/task:<worker>/device:GPU:<number in the worker>",
            action="use the name of a device of this run, such as /job:worker/task:0/device:GPU:0, or start more ranks",
        )
    return rank
