"""Completes the parallel degrees of a published row: unpublished ones get the fastest legal value, which is
reported.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from cost_model.analytic.job import too_large
from cost_model.analytic.predict import predict
from cost_model.analytic.stacks import stack
from cost_model.analytic.transformer import Transformer
from cost_model.cluster.cluster_file import Cluster
from whale.errors import PlanError, WhaleError
from whale.ir.strategy import Degrees, Recompute

NAMES = ("t", "p", "d", "v", "b")  # of `Division.sizes` in labels
TENSORS = (1, 2, 4, 8)  # tensor degrees that are tried if a row names none: no more than a host has devices
MOST_CHUNKS, MOST_ROWS = 24, 64


@dataclass(frozen=True, slots=True)
class Division:
    """Holds the parallel degrees that a published row gives; None for fields that it leaves blank.

    Attributes:
        sizes: tensor, pipeline and data degree, chunks per stage, rows of a micro-batch.
        devices: number of the job's devices.
        batch: rows of a step.
        recompute: kind of recompute.
        sequence_parallel: whether Megatron's sequence parallelism is used.
        zero: ZeRO level.
        context: number of ranks that divide a row's tokens.
        shard: number of ranks over which ZeRO shards states; 0: all.
        stage_layers: number of layers of each chunk; (): as equal as possible.
        experts: number of ranks that divide a layer's experts.
    """

    sizes: tuple[int | None, ...]
    devices: int | None
    batch: int
    recompute: Recompute | None
    sequence_parallel: bool | None = False
    zero: int | None = 0
    context: int = 1
    shard: int = 0
    stage_layers: tuple[int, ...] = ()
    experts: int = 1

    @property
    def ways(self) -> tuple[Recompute | None, bool | None, int | None]:
        """Returns (recompute, sequence parallelism, ZeRO), the fields besides the sizes that may be blank."""
        return self.recompute, self.sequence_parallel, self.zero


def complete(row: Division, model: Transformer, software: str, where: Cluster) -> tuple[Degrees, str]:
    """Completes a row's parallel degrees; returns them, and a text with the values that were assumed ("" if none).

    Blank sequence parallelism is taken as on with tensor parallelism, blank ZeRO as 1 with replicas: both take less
    memory and no more time.

    Args:
        software: name of the stack.
        where: the cluster.

    Raises:
        PlanError: no legal values complete the row.
    """
    tensor, pipeline, data, chunks, rows = row.sizes
    if None not in (tensor, pipeline, rows) and row.devices is not None and data is None:
        data = row.devices // (tensor * pipeline * row.context)  # type: ignore[operator]
    if None not in (tensor, pipeline, data, rows, *row.ways) and (chunks is not None or pipeline == 1):
        return _parallel(row, (tensor, pipeline, data, chunks or 1, rows)), ""
    p, fits = _fastest(row, model, software, where)
    chosen = zip(NAMES, row.sizes, (p.tensor, p.stages, p.data, p.chunks, p.micro_batch))
    text = [f"{name}{value}" for name, known, value in chosen if known is None]
    text += [f"{p.recompute} recompute"] * (row.recompute is None)
    text += ["sequence parallel" if p.sequence_parallel else "not sequence parallel"] * (row.sequence_parallel is None)
    text += [f"ZeRO {p.zero}"] * (row.zero is None)
    text += ["which does not fit"] * (not fits)
    return p, f" (assumed: {' '.join(text)})"


def _fastest(row: Division, model: Transformer, software: str, where: Cluster) -> tuple[Degrees, bool]:
    """Returns (the fastest degrees that complete a row and fit into memory, True).

    If none fits, returns (those with the smallest peak memory, False). If the row leaves recompute blank, the least
    recompute with which anything fits is taken.
    """
    smallest: tuple[float, Degrees] | None = None
    refused = "no micro-batch size, number of stages and number of chunks divides the batch, the devices and the layers"
    recomputes: tuple[Recompute, ...] = ("none", "selective", "full")
    for how in recomputes if row.recompute is None else (row.recompute,):
        best: tuple[float, Degrees] | None = None
        for sizes in _legal(row, model):
            try:
                parallel = _parallel(replace(row, recompute=how), sizes)
                found = predict(model, parallel, stack(software), where)
            except WhaleError as error:
                refused = str(error)
                continue
            if smallest is None or found.peak_bytes < smallest[0]:
                smallest = found.peak_bytes, parallel
            if (best is None or found.step_s < best[0]) and not too_large(where, found):
                best = found.step_s, parallel
        if best is not None:
            return best[1], True
    if smallest is None:
        raise PlanError(
            "no parallel degrees for the row's blank fields give a plan that can be predicted",
            given=", ".join(f"{name} {value or '(blank)'}" for name, value in zip(NAMES, row.sizes)),
            expected="sizes that divide the devices, the layers and the batch",
            reason=" ".join(refused.split()),
            action="correct the row's sizes, or leave those blank that were not published",
        )
    return smallest[1], False


def _parallel(row: Division, sizes: tuple[int | None, ...]) -> Degrees:
    tensor, pipeline, data, chunks, rows = (int(size or 1) for size in sizes)
    return Degrees(
        tensor=tensor,
        stages=pipeline,
        data=data,
        chunks=chunks,
        micro_batch=rows,
        batch=row.batch,
        recompute=row.recompute or "none",
        sequence_parallel=tensor > 1 if row.sequence_parallel is None else row.sequence_parallel,
        zero=int(data * row.context > 1) if row.zero is None else row.zero,
        context=row.context,
        shard=row.shard,
        stage_layers=row.stage_layers,
        experts=row.experts,
    )


def _legal(row: Division, model: Transformer) -> Iterator[tuple[int, ...]]:
    """Yields all values of the sizes that a row leaves open which divide its devices, layers, heads and batch."""
    tensors, pipelines, datas, chunks, rows = row.sizes

    def choices(known: int | None, of: range | tuple[int, ...]) -> tuple[int, ...]:
        return (known,) if known is not None else tuple(of)

    for tensor, pipeline in itertools.product(
        choices(tensors, TENSORS), choices(pipelines, range(1, model.layers + 1))
    ):
        if model.heads % tensor or model.layers % pipeline:
            continue
        if row.devices is not None:
            data, left = divmod(row.devices, tensor * pipeline * row.context)
            if left or datas not in (None, data):
                continue
        elif datas is None:
            raise PlanError(
                "a row names neither its devices nor its data-parallel ranks",
                expected="a value for devices or data",
                action="fill in one of these columns of the row",
            )
        else:
            data = datas
        for each in choices(rows, tuple(2**i for i in range(MOST_ROWS.bit_length()))):
            if data < 1 or row.batch % (data * each):
                continue
            count = row.batch // (data * each)
            for own in choices(chunks, range(1, MOST_CHUNKS + 1)):
                if model.layers % (pipeline * own) == 0 and (own == 1 or (pipeline > 1 and count % pipeline == 0)):
                    yield tensor, pipeline, data, own, each
