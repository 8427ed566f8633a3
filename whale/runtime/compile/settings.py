"""Turns the configuration of a run into the planner's settings."""

from __future__ import annotations

from dataclasses import fields, replace

from cost_model.cluster.cluster_file import Cluster
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
    SplitSettings,
    TimeSettings,
    ZeroSettings,
)
from whale.runtime.compile.offload import has_compute_device
from whale.runtime.run.context import Context
from whale_ops.processor import can_multiply_by_avx2


def settings_of(context: Context) -> PlanSettings:
    """Returns the planner's settings for the run."""
    config = context.config
    if config["pipeline.num_stages"] and not config["auto_parallel"]:
        raise PlanError(
            "a number of stages is for auto_parallel to keep to; without it stages are those of the program",
            given=f"pipeline.num_stages={config['pipeline.num_stages']}, auto_parallel=False",
            expected="auto_parallel=True, or wh.stage in the program",
            action="set auto_parallel, or leave pipeline.num_stages out",
        )
    if config["mesh"] and config["split.ranks"]:
        raise PlanError(
            "a mesh and its short form say two things",
            given=f"mesh={config['mesh']}, split.ranks={config['split.ranks']}",
            expected="one of the two",
            action="leave split.ranks out: mesh has the sizes of all axes",
        )
    fuse = FuseSettings(**{one.name: config[f"fuse.{one.name}"] for one in fields(FuseSettings)})
    return PlanSettings(
        size=context.size,
        batch=BatchSettings(
            shares=tuple(config["replica.shares"]),
            marked=tuple(config["batch.inputs"]),
            local_statistics=not config["sync_batch_norm"],
            local_streams=config["random"] == "local",
        ),
        split=SplitSettings(ranks=context.split_ranks or config["split.ranks"]),
        zero=ZeroSettings(config.zero_level, config["zero.min_bytes"], config["zero.ahead"]),
        time=TimeSettings(
            micro_batches=config["pipeline.num_micro_batch"],
            schedule=config["pipeline.schedule"],
            local_statistics=config["pipeline.micro_batch_statistics"],
        ),
        memory=MemorySettings(
            recompute=config["gradient_checkpoint.type"],
            offload=config["offload.level"],
            limit_bytes=config["memory.limit_bytes"],
            scores_bytes=config["attention.scores_bytes"],
        ),
        precision=PrecisionSettings(config["amp.dtype"] if config["amp.level"] == "O1" else ""),
        exchange=ExchangeSettings(
            group_bytes=config["communication.group_bytes"],
            backend=config["communication.backend"],
            wire_dtype=config["communication.wire_dtype"],
        ),
        observer=PassObserver(
            config["dump"] if context.rank == 0 else "", context.dry.passes if context.dry is not None else None
        ),
        fuse=fused_on(context.dry.cluster if context.dry is not None else None, fuse),
        mesh=tuple(Axis(name, size) for name, size in config.mesh.items()),
    )


def fused_on(cluster: Cluster | None, asked: FuseSettings) -> FuseSettings:
    """Returns which fused operations, of those asked for, replace the program's, on a described cluster or in this
    process.

    They have kernels for processors only; what a described one multiplies by is unknown.
    """
    if has_compute_device() if cluster is None else "gpu" in cluster.kinds:
        return FuseSettings()
    return replace(asked, padding=asked.padding and cluster is None and can_multiply_by_avx2())
