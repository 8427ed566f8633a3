"""The settings of planning: the ranks, and the user's choices in groups (see ``whale.config``).

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
    """The settings of the batch: its inputs, each rank's rows, and the meaning of batch statistics and random rows.

    With ``local_statistics`` or ``local_streams`` results differ from those of one device.

    Attributes:
      shares: rows of each rank, of the usual batch; (): as equal as possible.
      marked: names of the inputs that the user says carry the batch; (): they are found.
      local: inputs of which a rank gets its own rows only -> the rows of every rank.
      inputs: the batch inputs where they are known already; None: to be found.
      local_statistics: batch statistics are of each rank's rows, not of the whole batch.
      local_streams: random tensors with the batch's rows are drawn by each rank.
    """

    shares: tuple[int, ...] = ()
    marked: tuple[str, ...] = ()
    local: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    inputs: tuple[BatchInput, ...] | None = None
    local_statistics: bool = False
    local_streams: bool = False


@dataclass(frozen=True, slots=True)
class SplitSettings:
    """The settings of tensors that may be divided other than by the batch.

    Attributes:
      scopes: whether tensors are divided under ``wh.split``; else rows are, as elsewhere.
      tiles: the tiles of the run's variables that are already split, over all axes, by handle node.
      known: their placements over the axis that is planned.
      tables: whether tables may be whole on one rank; false if another axis follows, which could not split their
        exchanges.
      state_only: whether, of variables without a fixed layout, only optimizer state may be split between steps.
    """

    scopes: bool = True
    tiles: Mapping[str, Tiles] = field(default_factory=dict)
    known: Mapping[str, Placement] = field(default_factory=dict)
    tables: bool = True
    state_only: bool = False


@dataclass(frozen=True, slots=True)
class ZeroSettings:
    """The settings of ZeRO: which variables of data parallel training are split between steps.

    Attributes:
      level: 0 nothing; from 1 on the state of optimizers; from 3 on weights as well.
      min_bytes: smaller variables stay whole.
      avoid: dimensions of variables (by handle node) that later axes of the mesh divide.
      ahead: how many weights may be gathered while another is used (level 3).
    """

    level: int = 0
    min_bytes: int = 0
    ahead: int = 1
    avoid: Mapping[str, frozenset[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TimeSettings:
    """The settings of a step's order in time.

    Attributes:
      micro_batches: into how many parts each rank cuts its rows; 1: none.
      schedule: in which order stages run them (see ``whale.ir.pipeline_schedule``).
      same_rows: each rank has the same rows of each micro-batch, or none, and so have the micro-batches.
      local_statistics: batch statistics are of each micro-batch.
    """

    micro_batches: int = 1
    schedule: str = "1f1b"
    same_rows: bool = False
    local_statistics: bool = False


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """The settings of memory: which tensors are not kept on a device during a step, and its memory limit.

    Attributes:
      recompute: which activations are kept while the others are recomputed (see ``whale.passes.memory.recompute``);
        "": all.
      offload: which variables are in the host's memory beside an accelerator (see ``whale.passes.memory.offload``);
        "": none.
      limit_bytes: memory that each rank has for a step, in bytes; 0: unknown.
      scores_bytes: attentions with larger scores are computed in blocks; 0: none are.
    """

    recompute: str = ""
    offload: str = ""
    limit_bytes: int = 0
    scores_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PrecisionSettings:
    """The settings of the types in which a step computes.

    Attributes:
      matmul_dtype: the type of 16 bits that products and convolutions are computed in; "": that of the program.
    """

    matmul_dtype: str = ""


@dataclass(frozen=True, slots=True)
class ExchangeSettings:
    """The settings of communication between ranks.

    Attributes:
      group_bytes: all-reduces are fused up to that many bytes; 0: none are.
      backend: the library that runs all-reduces (``communication.backend``).
      wire_dtype: the type that gradients are rounded to before they are sent; "": they are not rounded.
    """

    group_bytes: int = 4 << 20
    backend: str = "whale"
    wire_dtype: str = ""


@dataclass(frozen=True, slots=True)
class FuseSettings:
    """The settings of kernels: which operations each rank replaces by others.

    Attributes:
      updates: updates of many variables, by one operation (see ``whale.kernels.updates``).
      elementwise: other elementwise arithmetic, likewise (see ``whale.kernels.elementwise``).
      convolutions: small ones, by products of matrices (see ``whale.kernels.matmuls``).
      products: batches of matrix products, by one (see ``whale.kernels.matmuls``).
      einsums: batches of other products, by a kernel of ours (see ``whale.kernels.einsums``).
      padding: matrix products, by wider ones (see ``whale.kernels.matmuls``).
      nn: ops for which our kernels are faster than TensorFlow's (see ``whale.kernels.nn``).
      loops: loops of known length, by few operations (see ``whale.kernels.loops``).
      xla: what asks for XLA, in clusters (see ``whale.kernels.clusters``).
      declined: names of those that measured slower on this machine, sorted (see ``whale.kernels.choices``).
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
        """Returns the settings with all of them on."""
        on: dict[str, Any] = {one.name: True for one in fields(cls) if one.name != "declined"}
        return cls(**on)


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """The inputs of planning beside the program.

    Attributes:
      size: number of ranks.
      devices: their names, as plans print them; (): "rank 0" and so on.
      observer: observes the passes: dumps and times them.
      fuse: the operations that are replaced by others in the ranks' programs.
      own_processes: each rank is a process, which runs the script's Python.
      mesh: axes whose sizes the user has fixed, outermost first; (): none.
      hosts: of each rank, the number of its host; (): all are on one.
      rank_order: the rank at each position of the mesh (see ``whale.passes.analysis.rank_order``); (): position and
        rank are the same number.
      stage_meshes: the axes of stages whose mesh differs from ``mesh``, by their ranks.
      lent_threads: of the rank that runs the only stage, on the cores of the others, which have none; 0: every rank has
        a stage.
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
        """Returns these settings with some fields changed: ``settings.but(size=2, zero__level=1)``.

        A field of a group is named with its group, and two underscores between them.

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
            raise TypeError(f"PlanSettings has no group {unknown[0]!r}")
        return replace(self, **own, **{g: replace(getattr(self, g), **fields) for g, fields in groups.items()})
