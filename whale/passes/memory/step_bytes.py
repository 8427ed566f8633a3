"""Computes a rank's peak memory in a step, by category; all decisions about memory use this figure.

step_bytes             of the tensors of one rank
step_bytes_of_ranks    of several ranks, simulating equal programs once
predict_taken_bytes    with NCCL's memory added
predict_at_most_bytes  an upper limit, found without a simulation
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from cost_model.graph.peak_memory import simulate_held
from cost_model.graph.predict import find_alike
from cost_model.kernels.gpu_memory import nccl_bytes
from cost_model.kernels.loop_counts import count_executions
from whale.ir.program import Program, Ref
from whale.passes.analysis.uses import CATEGORIES, tensor_kinds, variable_kinds
from whale.passes.resharding.on_devices import partners
from whale.passes.settings import PlanSettings

_KINDS = ("activations", *(name for name in CATEGORIES if name != "activations"))


def step_bytes(program: Program, rank: int, size: int, counted_from_bytes: int = 0) -> dict[str, int]:
    """Returns the bytes that ``rank`` holds at the memory peak of a step of its ``program``, by category
    (``uses.CATEGORIES``).

    Args:
      size: number of ranks.
      counted_from_bytes: smaller tensors are left out, as TensorFlow's counters of host memory leave them out.
    """
    number = {name: i for i, name in enumerate(_KINDS)}

    def kinds_of(graph: Program) -> tuple[dict[Ref, int], dict[str, int]]:
        tensors = {ref: number[kind] for ref, kind in tensor_kinds(graph).items()}
        return tensors, {handle: number[kind] for handle, kind in variable_kinds(graph).items()}

    found = simulate_held(program, rank, size, len(_KINDS), kinds_of, number["buffers"], counted_from_bytes)
    by_name = dict(zip(_KINDS, found.at_peak))
    return {name: by_name[name] for name in CATEGORIES}


def step_bytes_of_ranks(programs: Sequence[Program], size: int) -> list[dict[str, int]]:
    """Returns `step_bytes` of each rank with a program in ``programs``, which may be the first ones of ``size`` ranks;
    equal programs are simulated once.
    """
    found: dict[int, dict[str, int]] = {}
    for rank, first in enumerate(alike := find_alike(programs)):
        if first == rank:
            found[rank] = step_bytes(programs[rank], rank, size)
    return [found[first] for first in alike]


def predict_taken_bytes(program: Program, rank: int, settings: PlanSettings) -> dict[str, int]:
    """Returns `step_bytes`, with the memory that NCCL takes on the rank's GPU as one more category."""
    return step_bytes(program, rank, settings.size) | nccl_memory(program, rank, settings)


def nccl_memory(program: Program, rank: int, settings: PlanSettings) -> dict[str, int]:
    """Returns {"NCCL": bytes that it takes for the communication of ``rank``}; {} without NCCL, or if the user has set
    a memory limit.
    """
    if settings.exchange.backend != "nccl" or settings.size == 1 or settings.memory.limit_bytes:
        return {}
    return {"NCCL": nccl_bytes(*partners(program, rank, settings.size), os.environ)}


def predict_at_most_bytes(program: Program, rank: int, settings: PlanSettings) -> int:
    """Returns an upper limit for the memory of ``rank``, without a simulation: all tensors of a step at once, twice for
    fragmentation, and NCCL's memory.
    """
    called = (times * _sum_bytes(program.functions[name]) for name, times in count_executions(program).items())
    tensors = 2 * (_sum_bytes(program) + sum(called) + sum(2 * v.type.bytes for v in program.variables))
    return tensors + sum(nccl_memory(program, rank, settings).values())


def _sum_bytes(program: Program) -> int:
    return sum(t.bytes for node in program.nodes for t in node.outputs)
