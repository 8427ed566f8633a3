"""Completes a published row's division of work: unpublished sizes get the best legal choice, which is reported."""

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

NAMES = ("t", "p", "d", "v", "b")  # as labels have them
TENSORS = (1, 2, 4, 8)  # that are assumed where a row names none: no more than a host has devices
MOST_CHUNKS, MOST_ROWS = 24, 64


@dataclass(frozen=True, slots=True)
class Division:
    """The division of work that a row gives; None: its field is blank.

    Attributes:
        sizes: tensor, pipeline, data, chunks of a stage, rows of a micro-batch.
        devices: of the job.
        context: ranks that divide a row's tokens; shard: over which ZeRO divides states (0: all).
        stage_layers: of each chunk (empty: as equal as they can be).
        experts: ranks that divide a layer's experts.
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
        """Returns how the step runs besides: recompute, sequence parallelism, ZeRO."""
        return self.recompute, self.sequence_parallel, self.zero


def complete(row: Division, model: Transformer, software: str, where: Cluster) -> tuple[Degrees, str]:
    """Returns the completed division, and a text with the assumptions made (empty: none).

    Sequence parallelism that is blank is used where tensors are divided, ZeRO 1 where there are replicas: both take
    less memory and no more time.

    Raises:
        PlanError: no division completes the row.
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
    """Returns the fastest division of work that completes a row and fits into memory, and True.

    Where none fits, returns the one with the smallest peak memory, and False. Where the row leaves recompute blank, the
    least recompute with which any division fits is taken.
    """
    smallest: tuple[float, Degrees] | None = None
    refused = "no size of a micro-batch, and no number of stages and chunks, divides them"
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
            "no division of work completes the row",
            given=", ".join(f"{name} {value or '(blank)'}" for name, value in zip(NAMES, row.sizes)),
            expected="sizes that divide the devices, the layers and the batch",
            reason=" ".join(refused.split()),
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
    """Yields all choices of the sizes that a row leaves open and that divide its devices, layers, heads and batch."""
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
            raise PlanError("a row names neither its devices nor its replicas", expected="one of them")
        else:
            data = datas
        for each in choices(rows, tuple(2**i for i in range(MOST_ROWS.bit_length()))):
            if data < 1 or row.batch % (data * each):
                continue
            count = row.batch // (data * each)
            for own in choices(chunks, range(1, MOST_CHUNKS + 1)):
                if model.layers % (pipeline * own) == 0 and (own == 1 or (pipeline > 1 and count % pipeline == 0)):
                    yield tensor, pipeline, data, own, each
