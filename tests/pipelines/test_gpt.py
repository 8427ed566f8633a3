"""Data, tensors and stages divide a GPT: a sample of ``python -m tests.pipelines.gpt``, in one process."""

from __future__ import annotations

import contextlib
from collections import Counter

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from tests.pipelines.gpt_on_ranks import MESH, SCHEDULES, Sizes, formulas, moved_by_axis, trained
from whale.errors import PlanError
from whale.runtime.compile.exchanges import MESSAGE, phases_of_exchanges, refuse_unlike_phases

SMALL = Sizes(layers=2)


def test_a_gpt_over_three_axes_moves_what_the_formulas_say() -> None:
    name, stages = SCHEDULES["zb-h1"]
    nothing = contextlib.nullcontext
    wanted, _ = trained(SMALL, stages, nothing, nothing, tf.function)
    settings = {"pipeline.schedule": name, "pipeline.micro_batches": SMALL.micro_batches, "mesh": MESH}
    wh.init({"communication.in_process_ranks": 8, **settings})
    try:
        found, step = trained(SMALL, stages, wh.stage, wh.split, wh.function)
        compiled = next(iter(step._steps.values())).compiled
    finally:
        wh.shutdown()
    for key, value in wanted.items():
        np.testing.assert_allclose(found[key], value, rtol=0, atol=1e-11, err_msg=key)
    moved: Counter[str] = Counter()
    for rank, program in enumerate(compiled.ranks):
        moved.update(moved_by_axis(program, rank))
    limits = formulas(SMALL, stages)
    for axis, bytes_ in limits.items():
        assert 0.9 * bytes_ < moved[axis] <= bytes_, axis
    # A sum of gradients over data for what lies split, one for what lies whole and has no slope over tensors, ...
    sums = [n for n in compiled.ranks[0].nodes if n.op == "WhaleAllReduce" and n.attrs["ranks"] == (0, 2)]
    assert len(sums) <= 2 and sum(len(n.outputs) for n in sums) == 12, sums
    phases = {rank: phases_of_exchanges(program, stages=True) for rank, program in enumerate(compiled.ranks)}
    refuse_unlike_phases(phases)
    key = next(key for key, (_, counts) in phases[5].items() if set(counts) not in ({""}, {MESSAGE}))
    phases[5] = {**phases[5], key: ([4, 5], {"": 1})}
    with pytest.raises(PlanError, match=r"different phases.*\n.*\n  given: rank 4 has it in [FB]0 of \d micro"):
        refuse_unlike_phases(phases)
    del phases[5][key]
    with pytest.raises(PlanError, match=r"takes no part.*\n.*\n.*rank 5 in none"):
        refuse_unlike_phases(phases)
    phases[5][key] = phases[4][key]
    refuse_unlike_phases(phases)
    sent, (receivers, _) = next(item for item in phases[5].items() if set(item[1][1]) == {MESSAGE})
    del phases[receivers[0]][sent]
    with pytest.raises(PlanError, match="takes no part"):
        refuse_unlike_phases(phases)
