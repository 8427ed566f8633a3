"""Ranks of a mesh that have no rows, or nothing of a tensor: they take part in the same exchanges as the others."""

from __future__ import annotations

from tests.partition.compare import assert_equal_mesh
from tests.programs import Builder
from whale.ir.mesh import Axis
from whale.partition.mesh import plan_program
from whale.passes.settings import PlanSettings
from whale.sharding_rules.structure.shape import write_reshape_terms

SETTINGS = PlanSettings(4, mesh=(Axis("data", 2), Axis("tensor", 2)))


def test_a_sum_over_both_axes_of_which_some_ranks_add_nothing() -> None:
    """The rows are those of one rank: the others' part of the product is a constant, and no sum within their group."""
    b = Builder()
    b.scope = "split_0"
    first, x, w = b.input("first", (1, 2)), b.input("x", (1, 1)), b.variable("w", (1, 1))
    held = b.read(w)
    b.scope = ""
    product = b.matmul(x, held, a=True)
    flat = b.reshape(product, 1)
    b.scope = "split_0"
    program = b.build([first, flat], [b.update("AssignSubVariableOp", w, product)])
    plan = plan_program(program, SETTINGS)
    assert plan.inner is not None
    assert_equal_mesh(program, plan, SETTINGS)


def test_the_first_dimensions_of_nothing_can_be_cut() -> None:
    left, right = write_reshape_terms((4, 0), (4, 2, 0))
    assert left[0] == right[0] and left[1] == right[2]
    left, right = write_reshape_terms((3, 0), (0, 5))
    assert not set(left) & set(right)
