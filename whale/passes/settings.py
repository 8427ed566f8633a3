"""Defines the settings of planning: the ranks, and the user's choices, grouped by topic.

``PlanSettings`` is the whole; its groups correspond to keys of the user's configuration (see ``whale.config``).

Decision: 0053.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from whale.ir.layout import Placement
from whale.ir.mesh import Axis, Tiles
from whale.ir.plan import BatchInput
from whale.passes.run_passes import PassObserver


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """Holds the settings of the batch: its inputs, each rank's rows, and what batch statistics and random tensors mean.

    With ``local_statistics`` or ``local_streams`` results differ from those of one device.

    Attributes:
      shares: rows of each rank in a batch of the usual size; (): as equal as possible.
      marked: names of the inputs that the user says carry the batch; (): they are found by their sizes.
      local: name of each input that a rank passes with its own rows only -> the rows of every rank.
      inputs: the batch inputs where they are known already; None: they have to be found.
      local_statistics: batch norm takes the statistics of each rank's rows, not of the whole batch.
      local_streams: random tensors with the batch's rows are drawn by each rank by itself.
    """

    shares: tuple[int, ...] = ()
    marked: tuple[str, ...] = ()
    local: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    inputs: tuple[BatchInput, ...] | None = None
    local_statistics: bool = False
    local_streams: bool = False


@dataclass(frozen=True, slots=True)
class SplitSettings:
    """Holds the settings of tensors that may be sharded along other dimensions than the batch.

    Attributes:
      scopes: whether tensors are sharded under ``wh.split``; if False, split scopes are ignored and only rows are
        sharded.
      tiles: parts of the variables that the running program holds sharded already, over all mesh axes, by handle node.
      known: placements of the same variables over the mesh axis that is planned, by handle node.
      tables: whether an embedding table may be whole on one rank; False if another mesh axis is planned after this one,
        along which the table's row exchanges could not be split.
      state_only: whether, of variables without a fixed layout, only optimizer state may be sharded between steps.
    """

    scopes: bool = True
    tiles: Mapping[str, Tiles] = field(default_factory=dict)
    known: Mapping[str, Placement] = field(default_factory=dict)
    tables: bool = True
    state_only: bool = False


@dataclass(frozen=True, slots=True)
class ZeroSettings:
    """Holds the settings of ZeRO: which variables of data-parallel training are sharded between steps.

    Attributes:
      level: 0: none; from 1 on optimizer state; from 3 on weights as well.
      min_bytes: smaller variables stay replicated.
      avoid: handle node -> dimensions of the variable that are left for later axes of the mesh to shard.
      ahead: how many weights may be gathered in advance while another one is used (level 3).
    """

    level: int = 0
    min_bytes: int = 0
    ahead: int = 1
    avoid: Mapping[str, frozenset[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TimeSettings:
    """Holds the settings of a step's order in time: micro-batches and the pipeline schedule.

    Attributes:
      micro_batches: into how many parts each rank cuts its rows; 1: not at all.
      schedule: the order in which stages run micro-batches (see ``whale.ir.pipeline_schedule``).
      same_rows: each rank with rows has the same number in each micro-batch, and all micro-batches have equally many.
      local_statistics: batch norm takes the statistics of each micro-batch.
    """

    micro_batches: int = 1
    schedule: str = "1f1b"
    same_rows: bool = False
    local_statistics: bool = False


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """Holds the settings of memory: which tensors are not kept on a device during a step, and its memory limit.

    Attributes:
      recompute: which activations are kept for the backward pass while the others are recomputed (see
        ``whale.passes.memory.recompute``); "": all are kept.
      offload: which variables are kept in host memory beside an accelerator (see ``whale.passes.memory.offload``); "":
        none.
      limit_bytes: memory that each rank has for a step, in bytes; 0: unknown.
      scores_bytes: an attention whose score matrix is larger is computed in blocks; 0: none is.
    """

    recompute: str = ""
    offload: str = ""
    limit_bytes: int = 0
    scores_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PrecisionSettings:
    """Holds the settings of the dtypes in which a step computes.

    Attributes:
      matmul_dtype: the 16-bit dtype in which matrix products and convolutions are computed, "bfloat16" or "float16";
        "": the program's own.
    """

    matmul_dtype: str = ""


@dataclass(frozen=True, slots=True)
class ExchangeSettings:
    """Holds the settings of communication between ranks.

    Attributes:
      group_bytes: size in bytes of a gradient bucket: all-reduces are fused up to that; 0: none are fused.
      backend: the library that runs all-reduces (``communication.backend``).
      wire_dtype: the dtype that gradients are rounded to before they are sent; "": they are not rounded.
    """

    group_bytes: int = 4 << 20
    backend: str = "whale"
    wire_dtype: str = ""


@dataclass(frozen=True, slots=True)
class FuseSettings:
    """Holds the settings of kernels: which operations each rank replaces by faster ones.

    Attributes:
      updates: optimizer updates of many variables become one operation (see ``whale.kernels.updates``).
      elementwise: chains of other elementwise arithmetic become one operation (see ``whale.kernels.elementwise``).
      convolutions: small convolutions become matrix products (see ``whale.kernels.matmuls``).
      products: many matrix products become one batched product (see ``whale.kernels.matmuls``).
      einsums: batched products of other forms run in Whale's own kernel (see ``whale.kernels.einsums``).
      padding: matrix products are padded to faster widths (see ``whale.kernels.matmuls``).
      nn: ops for which Whale's kernels are faster than TensorFlow's use them (see ``whale.kernels.nn``).
      loops: loops of known length become few operations (see ``whale.kernels.loops``).
      xla: parts of the program that ask for XLA are compiled in clusters (see ``whale.kernels.clusters``).
      declined: names of kernels that measured slower on this machine, sorted (see ``whale.kernels.choices``).
    """

    updates: bool = False
    elementwise: bool = False
    convolutions: bool = False
    products: bool = False
    einsums: bool = False
    padding: bool = False
    nn: bool = False
    loops: bool = False
    xla: bool = False
    declined: tuple[str, ...] = ()

    @classmethod
    def all_on(cls) -> FuseSettings:
        """Returns settings in which every kind of kernel is on and none is declined."""
        on: dict[str, Any] = {one.name: True for one in fields(cls) if one.name != "declined"}
        return cls(**on)


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """Holds the inputs of planning beside the program.

    Attributes:
      size: number of ranks; on a mesh, of coordinates of the axis that is planned.
      devices: names of the ranks, as plans print them; (): "rank 0" and so on.
      observer: says whether passes are dumped, logged and verified.
      fuse: which operations are replaced by faster ones in the ranks' programs.
      own_processes: each rank is a process that runs the script's Python.
      mesh: axes whose sizes the user has fixed, outermost first; (): none.
      hosts: number of the host of each rank; (): all ranks are on one host.
      rank_order: the rank at each position of the mesh (see ``whale.passes.analysis.rank_order``); (): position and
        rank are the same number.
      stage_meshes: the ranks of a stage -> its mesh axes, for stages whose mesh differs from ``mesh``.
      lent_threads: number of threads of the one rank that computes, on cores that the other ranks, without a stage,
        lend it; 0: every rank has a stage.
    """

    size: int
    devices: tuple[str, ...] = ()
    batch: BatchSettings = field(default_factory=BatchSettings)
    split: SplitSettings = field(default_factory=SplitSettings)
    zero: ZeroSettings = field(default_factory=ZeroSettings)
    time: TimeSettings = field(default_factory=TimeSettings)
    memory: MemorySettings = field(default_factory=MemorySettings)
    precision: PrecisionSettings = field(default_factory=PrecisionSettings)
    exchange: ExchangeSettings = field(default_factory=ExchangeSettings)
    observer: PassObserver = field(default_factory=PassObserver)
    fuse: FuseSettings = field(default_factory=FuseSettings)
    own_processes: bool = False
    mesh: tuple[Axis, ...] = ()
    hosts: tuple[int, ...] = ()
    rank_order: tuple[int, ...] = ()
    stage_meshes: Mapping[tuple[int, ...], tuple[Axis, ...]] = field(default_factory=dict)
    lent_threads: int = 0

    def but(self, **changes: Any) -> PlanSettings:
        """Returns a copy of the settings with some fields changed: ``settings.but(size=2, zero__level=1)``.

        A field of a group is written as the group's name, two underscores, and the field's name.

        Raises:
          TypeError: there is no such field.
        """
        groups: dict[str, dict[str, Any]] = {}
        own: dict[str, Any] = {}
        for name, value in changes.items():
            group, in_group, field_name = name.partition("__")
            if in_group:
                groups.setdefault(group, {})[field_name] = value
            else:
                own[name] = value
        unknown = [group for group in groups if group not in self.__slots__]
        if unknown:
            known = ", ".join(f.name for f in fields(self))
            raise TypeError(f"PlanSettings has no group {unknown[0]!r} of settings; it has the fields {known}")
        return replace(self, **own, **{g: replace(getattr(self, g), **fields) for g, fields in groups.items()})
