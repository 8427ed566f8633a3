"""Defines a spread of a chain of layers: stages, the devices of each, and how rows, tensors and memory are divided.

It is what the planner decides, and what a job file says of equal stages (`Parallel`). Stages may be unequal in their
layers and devices, and the ranks of one stage in their kind and rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

import msgspec

from cost_model.cluster.pools import Machines
from cost_model.kernels.interval import ONE_HOST, SEVERAL_HOSTS, interval_s
from whale.errors import PlanError

Recompute = Literal["none", "selective", "full"]
# What lies in the hosts' memory and is updated there: nothing, the optimizer's state, or weights and gradients as well.
Offload = Literal["none", "state", "all"]


class Part(msgspec.Struct, frozen=True):
    """Equal ranks of a stage: `replicas` groups of `tensor` devices of a pool, each with `rows` of a micro-batch."""

    pool: int
    tensor: int
    replicas: int
    rows: int

    @property
    def ranks(self) -> int:
        """Returns the number of the part's devices."""
        return self.tensor * self.replicas


class Stage(msgspec.Struct, frozen=True):
    """Consecutive layers (several ranges when the schedule interleaves chunks) on some ranks.

    `recompute`: what this stage computes again for its backward passes; None: as the spread says.
    """

    layers: tuple[tuple[int, int], ...]
    parts: tuple[Part, ...]
    recompute: Recompute | None = None

    @property
    def count(self) -> int:
        """Returns the number of the stage's layers, all chunks."""
        return sum(high - low for low, high in self.layers)

    @property
    def ranks(self) -> int:
        """Returns the number of the stage's devices."""
        return sum(part.ranks for part in self.parts)

    @property
    def replicas(self) -> int:
        """Returns the number of data-parallel replicas of the stage's layers, over all parts."""
        return sum(part.replicas for part in self.parts)

    @property
    def rows(self) -> int:
        """Returns the rows of one micro-batch, over all replicas."""
        return sum(part.replicas * part.rows for part in self.parts)


class Spread(msgspec.Struct, frozen=True):
    """One way to train: stages in order, micro-batches of a step, recompute, ZeRO level, what is offloaded.

    Experts, where a model has them, are divided over the replicas of their stage.
    """

    stages: tuple[Stage, ...]
    micro_batches: int
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    zero: int = 0
    schedule: str = "1f1b"
    offload: Offload = "none"

    def recompute_of(self, stage: Stage) -> Recompute:
        """Returns what a stage computes again."""
        return stage.recompute or self.recompute

    @property
    def recomputes(self) -> tuple[Recompute, ...]:
        """Returns what each stage computes again."""
        return tuple(self.recompute_of(stage) for stage in self.stages)

    def recomputing(self, each: Sequence[Recompute]) -> Spread:
        """Returns this spread with each stage's recompute; stages like the first one say nothing of their own."""
        stages = tuple(
            msgspec.structs.replace(stage, recompute=None if how == each[0] else how)
            for stage, how in zip(self.stages, each)
        )
        return msgspec.structs.replace(self, stages=stages, recompute=each[0])

    @property
    def chunks(self) -> int:
        """Returns the number of ranges of layers that each stage holds: several where the schedule interleaves them."""
        return len(self.stages[0].layers)

    @property
    def ranks(self) -> int:
        """Returns the number of devices of all stages."""
        return sum(stage.ranks for stage in self.stages)

    def likely_s(self, machines: Machines, step_s: float) -> tuple[float, float]:
        """Returns the seconds between which nine of ten steps lie that are predicted to take `step_s` here."""
        used = {part.pool for stage in self.stages for part in stage.parts}
        one_host = len({machines.pools[n].host.name for n in used}) == 1
        one_host = one_host and self.ranks <= max(machines.pools[n].on_host for n in used)
        return interval_s(step_s, ONE_HOST if one_host else SEVERAL_HOSTS)

    @property
    def batch(self) -> int:
        """Returns the rows of a step."""
        return self.micro_batches * self.stages[0].rows

    def summary(self) -> str:
        """Returns one line: 8 stages x 12 data x 8 tensor, 2 chunks, 96 micro-batches of 2 rows, ..."""
        stages = self.stages
        tensors = sorted({part.tensor for stage in stages for part in stage.parts})
        datas = sorted({stage.replicas for stage in stages})
        rows = sorted({part.rows for stage in stages for part in stage.parts})
        text = (
            f"{len(stages)} pipeline x {_span(datas)} data x {_span(tensors)} tensor on {counted(self.ranks, 'device')}"
        )
        text += f", {counted(self.micro_batches, 'micro-batch', 'es')} of {_span(rows)} row{'s' * (rows != [1])}"
        if self.chunks > 1:
            text += f", {self.chunks} chunks"
        text += "".join(f", {one} recompute{where}" for one, where in self._recompute_where())
        if self.sequence_parallel and tensors != [1]:
            text += ", sequence parallel"
        text += f", ZeRO {self.zero}" if self.zero else ""
        return text + {"none": "", "state": ", state offloaded", "all": ", weights and state offloaded"}[self.offload]

    def _recompute_where(self) -> list[tuple[str, str]]:
        """Returns what is computed again, and in which stages, if not in all."""
        each = self.recomputes
        if len(set(each)) == 1:
            return [(each[0], "")] if each[0] != "none" else []
        found = []
        for kind in ("selective", "full"):
            own = [s for s, one in enumerate(each) if one == kind]
            runs = [s for s in own if s - 1 not in own]  # where stages of that kind begin
            ends = [s for s in own if s + 1 not in own]
            if own:
                text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(runs, ends))
                found.append((kind, f" in stage{'s' * (len(own) > 1)} {text}"))
        return found


def expert_ranks(experts: int, replicas: int) -> int:
    """Returns how many of a stage's replicas divide a layer's experts: as many as divide them evenly; 1: none."""
    return math.gcd(experts, replicas) if experts else 1


def even_chunks(layers: int, stages: int, chunks: int) -> list[tuple[tuple[int, int], ...]]:
    """Returns each stage's ranges of layers, [low, high) by chunk, as equal as can be; earlier chunks get what is left.

    Chunk c of stage s is part c * stages + s of the model, as interleaved schedules want it.

    Raises:
        PlanError: there are more chunks than layers.
    """
    count = stages * chunks
    if layers < count:
        raise PlanError("there are more stages than layers", given=f"{count} chunks, {layers} layers")
    each, more = divmod(layers, count)
    ends = list(accumulate((each + (i < more) for i in range(count)), initial=0))
    return [tuple((ends[c * stages + s], ends[c * stages + s + 1]) for c in range(chunks)) for s in range(stages)]


def live_chunks(schedule: str, stages: int, chunks: int, micro_batches: int, stage: int) -> int:
    """Returns the most forward passes of chunks whose activations a stage holds, as `live_micro_batches` does.

    1F1B holds as many micro-batches as there are stages from this one on; interleaved as Narayanan et al. (SC 2021)
    order it, whose first passes are 2 (stages - 1 - stage) + (chunks - 1) stages before the first backward pass; GPipe
    holds all.
    """
    if schedule == "gpipe":
        return micro_batches
    if chunks == 1:
        return min(micro_batches, stages - stage)
    if micro_batches == stages:
        return micro_batches * chunks
    return min(micro_batches * chunks, 2 * (stages - 1 - stage) + (chunks - 1) * stages + 1)


def counted(count: int, name: str, plural: str = "s") -> str:
    """Returns a count with its noun: 1 stage, 2 stages."""
    return f"{count} {name}{plural if count != 1 else ''}"


def _span(values: list[int]) -> str:
    return str(values[0]) if len(values) == 1 else f"{values[0]}-{values[-1]}"
