"""Translates the configuration of a run into the planner's settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cost_model.cluster.cluster_file import Cluster
from whale.config import Config
from whale.distributed.device_exchange import OwnGpu, list_visible_gpus
from whale.errors import PlanError
from whale.ir.mesh import Axis
from whale.passes.run_passes import PassObserver
from whale.passes.settings import (
    BatchSettings,
    ExchangeSettings,
    FuseSettings,
    MemorySettings,
    PlanSettings,
    PrecisionSettings,
    TimeSettings,
    ZeroSettings,
)
from whale.runtime.compile.kernel_choices import kernel_times_of
from whale.runtime.compile.offload import has_compute_device
from whale.runtime.context import Context
from whale_ops.processor import can_multiply_by_avx2

_SCORES_PART = 256  # this part of a GPU's memory: two such tensors in each of 32 layers fill a quarter of the memory


def settings_of(context: Context) -> PlanSettings:
    """Returns the planner's settings for the run.

    Raises:
      PlanError: ``pipeline.stages`` is set without ``mesh.auto_parallel``.
    """
    config = context.config
    if config["pipeline.stages"] and not config["mesh.auto_parallel"]:
        raise PlanError(
            "pipeline.stages needs auto_parallel; without it the program defines its stages",
            given=f"pipeline.stages={config['pipeline.stages']}, mesh.auto_parallel=False",
            expected="mesh.auto_parallel=True, or wh.stage in the program",
            action="set mesh.auto_parallel=True, or leave pipeline.stages out",
        )
    times = kernel_times_of(context)
    declined = times.declined if times is not None else ()
    fuse = FuseSettings(**dict.fromkeys(config["kernels"], True), declined=declined)
    return PlanSettings(
        size=context.size,
        batch=BatchSettings(
            shares=tuple(config["batch.shares"]),
            marked=tuple(config["batch.inputs"]),
            local_statistics=config["batch.norm_statistics"] != "batch",
            local_streams=config["batch.random"] == "local",
        ),
        zero=ZeroSettings(config["memory.zero"], config["memory.zero_min_bytes"], config["memory.zero_prefetch"]),
        time=TimeSettings(
            micro_batches=config["pipeline.micro_batches"],
            schedule=config["pipeline.schedule"],
            local_statistics=config["batch.norm_statistics"] == "micro-batch",
        ),
        memory=MemorySettings(
            recompute=config["memory.recompute"],
            offload=config["memory.offload"],
            limit_bytes=config["memory.limit_bytes"],
            scores_bytes=choose_scores_bytes(config, _list_gpus(context)),
        ),
        precision=PrecisionSettings(config["precision.compute_dtype"]),
        exchange=ExchangeSettings(
            group_bytes=config.bucket_bytes,
            backend=config["communication.backend"],
            wire_dtype=config["communication.wire_dtype"],
        ),
        observer=PassObserver(
            config["debug.dump"] if context.rank == 0 else "",
            context.planning.dry.passes if context.planning.dry is not None else None,
        ),
        fuse=choose_fused(context.planning.dry.cluster if context.planning.dry is not None else None, fuse),
        own_processes=not config["communication.in_process_ranks"],
        mesh=tuple(Axis(name, size) for name, size in context.mesh.items()),
        hosts=topology.hosts if (topology := context.planned_topology) and context.is_laid_by_links else (),
        rank_order=context.rank_order,
    )


def choose_scores_bytes(config: Config, gpus: Sequence[OwnGpu | None]) -> int:
    """Returns the bytes of attention scores from which attention is computed in blocks, which saves memory and takes
    time.

    It is the configured number; if that is not set and every rank has a GPU, at least a fixed part of the smallest
    GPU's free memory.

    Decision: 0205.

    Args:
      gpus: each rank's GPU; None: it has none.
    """
    asked = int(config["memory.attention_scores_bytes"])
    if config.origin("memory.attention_scores_bytes") != "default" or not gpus:
        return asked
    smallest_bytes = min(0 if gpu is None else (gpu.memory_bytes - gpu.used_bytes) // gpu.sharing for gpu in gpus)
    return max(asked, smallest_bytes // _SCORES_PART)


def _list_gpus(context: Context) -> Sequence[OwnGpu | None]:
    """Returns each rank's GPU (None: it has none), as far as this process knows, equal on all ranks; () if nothing is
    known.
    """
    if context.gpus:
        return context.gpus
    if context.planning.dry is not None:
        return list_visible_gpus() if context.planning.dry.cluster is None else ()
    return () if context.own_gpu is None else (context.own_gpu,)


def choose_fused(cluster: Cluster | None, asked: FuseSettings) -> FuseSettings:
    """Returns which of the requested fused kernels are used.

    All except XLA's run on CPUs only. Padding for the matrix library needs AVX2, which is unknown for a described
    cluster.

    Args:
      cluster: the described devices of a dry run; None: this process's devices.
      asked: the kernels that the configuration requests.
    """
    if has_compute_device() if cluster is None else cluster.kinds != {"cpu"}:
        return FuseSettings(xla=asked.xla)
    return replace(asked, padding=asked.padding and cluster is None and can_multiply_by_avx2())
