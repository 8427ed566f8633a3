"""Which activations are held, and which are computed again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.programs import Builder
from whale.ir.ops import VIEWS
from whale.ir.program import BACKWARD, CHECKPOINT, Program
from whale.passes.memory.recompute import recompute


def _step(view: str) -> Program:
    """tanh, of which the user marks what a view makes of it; the gradient of the sum of its squares."""
    b = Builder()
    x = b.input("x", (8, 4))
    made = b.op("Tanh", b.op("Exp", x, name="exp"), name="made")
    shape = b.ints(8, 4) if view == "Reshape" else b.const(0, "int32")
    seen = b.node(view, (made, shape) if view in ("Reshape", "ExpandDims") else (made,), (b.types[made],), "seen")
    square = b.op("Square", seen)
    loss = b.reduce("Sum", square, 0, 1, name="loss")
    gradient = b.op("Mul", square, seen, name="gradient")  # of what lies behind the mark
    slope = b.op("Mul", made, gradient, name="slope")
    program = b.build([loss, slope])
    marks = {"seen": CHECKPOINT, "gradient": BACKWARD}
    return program.with_nodes(
        tuple(replace(n, attrs={**n.attrs, marks[n.name]: True}) if n.name in marks else n for n in program.nodes)
    )


@pytest.mark.parametrize("view", sorted(VIEWS))
def test_what_a_mark_only_shows_is_held_too(view: str) -> None:
    """The marked tensor and the one whose memory it is are one: to compute one of them again would hold both."""
    program = recompute(_step(view), "collection")
    (slope,) = (n for n in program.nodes if n.name == "slope")
    assert slope.inputs[0].node == "made"
