"""Every change between layouts of two mesh axes, alone: the values arrive on all ranks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.draws import one_of
from tests.interpreter import run
from tests.partition.test_resharding import _program
from tests.programs import plan_of
from whale.ir.layout import Placement, Strategy, parse_placement, shard
from whale.ir.mesh import Axis, Mesh
from whale.ir.program import Program
from whale.partition.axis_partitioner import make_prefix
from whale.partition.rank_mapping import map_to_ranks, mark_axis
from whale.partition.spmd import partition_for_rank
from whale.passes.pass_manager import complete_plan
from whale.passes.propagation.propagate import propagate
from whale.passes.settings import PlanSettings

SHAPE = (6, 6)
KINDS = ("B", "P(sum)", "P(max)", "S(0)", "S(1)")


def _first(kind: str, groups: int) -> Placement:
    """A placement over the groups, in equal parts."""
    if not kind.startswith("S"):
        return parse_placement(kind)
    dim = int(kind[2])
    return shard(dim, (SHAPE[dim] // groups,) * groups)


def _second(kind: str, shape: tuple[int, ...], size: int) -> Placement:
    """A placement within a group of what a tensor of ``shape`` is there: uneven, with empty parts."""
    if not kind.startswith("S"):
        return _first(kind, 1)
    dim = int(kind[2])
    sizes = (shape[dim] - 1, 1, 0) if dim == 0 else (0, shape[dim], 0)
    return shard(dim, sizes[:size])


def _ranks(groups: list[Program], kinds: tuple[str, str], size: int) -> list[Program]:
    """What all ranks run, when the nodes' tensors lie as ``kinds`` say within each group."""
    fixed: dict[str, Strategy] = {}
    for name, kind in zip(("made", "moved"), kinds):
        placement = _second(kind, groups[0].by_name[name].outputs[0].shape, size)  # type: ignore[arg-type]
        fixed[name] = Strategy((placement,), (placement,), "test")
    mesh = Mesh((Axis("outer", len(groups)), Axis("inner", size)), tuple(range(len(groups) * size)))
    model = plan_of(groups[0], {"": propagate(groups[0], size, {}, fixed=fixed)[""]}, size, {})
    ranks = []
    for number, first in enumerate(groups):
        plan = complete_plan(first, PlanSettings(size), model) if number else model
        for place in range(size):
            lowered = partition_for_rank(first, plan, place, "comm", None, make_prefix(1))
            ranks.append(map_to_ranks(mark_axis(lowered, "inner"), mesh, number * size + place, "comm"))
    return ranks


@pytest.mark.parametrize(("groups", "size"), one_of(3, [(2, 2), (2, 3), (3, 2)], several=True))
@pytest.mark.parametrize("source", one_of(2, KINDS))
def test_every_change(source: str, groups: int, size: int) -> None:
    x = np.random.default_rng(0).normal(size=SHAPE)
    for target in KINDS:
        program, layout = _program(_first(source, groups), _first(target, groups), SHAPE)
        outer = plan_of(program, {"": layout}, groups, {})
        first = [mark_axis(partition_for_rank(program, outer, number, "", None), "outer") for number in range(groups)]
        for kinds in itertools.product(KINDS, repeat=2):
            found = run(_ranks(first, kinds, size), {"x": x}, {})
            for outputs in found.outputs:
                np.testing.assert_allclose(outputs[0], x, rtol=1e-12, err_msg=f"({source}, {target}) x {kinds}")
