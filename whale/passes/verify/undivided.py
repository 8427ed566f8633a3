"""Explains why no part of a program is divided, so that every rank computes all of it, and how to change that."""

from __future__ import annotations

from whale.ir.ops import CONTRACTIONS, DATASET_LOOPS
from whale.ir.plan import Plan
from whale.ir.program import Program

_READS = frozenset({"IteratorGetNext", "IteratorGetNextSync", "IteratorGetNextAsOptional"})


def undivided(program: Program, plan: Plan) -> str:
    """Explains why every rank computes all of a program that could be divided, and what to do; "" if it is divided.

    Args:
      program: expanded, as of the plan.
    """
    if plan.size == 1 or plan.stage_groups or plan.inner is not None or plan.split_flops:
        return ""
    ops = {node.op for body in (program, *program.functions.values()) for node in body.nodes}
    if ops.isdisjoint(CONTRACTIONS):  # the plan's FLOPs are without those of functions that datasets call
        return ""
    if ops & _READS:
        why = "it reads its batches itself, from an iterator in a loop or a branch"
        next_step = "pass it a batch (`for batch in wh.shard(dataset): step(batch)`), or call next(iterator) in no loop"
    elif ops & DATASET_LOOPS:
        why = "it loops over a dataset itself"
        next_step = "take the loop out of it: `for batch in wh.shard(dataset): step(batch)`"
    elif not plan.batch_inputs:
        why = "none of its arguments has rows"
        next_step = "pass it the batch as an argument, as a tensor whose dimension 0 has the rows"
    else:
        names = ", ".join(b.name for b in plan.batch_inputs)
        why = f"what it makes of its batch ({names}) cannot be divided along the rows"
        next_step = "see where the rows end with `whale plan` and `whale explain`; name other inputs in batch.inputs"
    return f"every rank computes the whole program `{plan.program}`, since {why}; {next_step}"
