"""Which activations are held, and which are computed again."""

from __future__ import annotations

import pytest

from tests.programs import Builder
from whale.ir.ops import VIEWS
from whale.ir.program import Program
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
    return _marked(b.build([loss, slope]), {"seen": "checkpoint", "gradient": "backward"})


def _marked(program: Program, marks: dict[str, str]) -> Program:
    return program.replace_nodes(
        tuple(n.with_marks(**{marks[n.name]: True}) if n.name in marks else n for n in program.nodes)
    )


@pytest.mark.parametrize("view", sorted(VIEWS))
def test_what_a_mark_only_shows_is_held_too(view: str) -> None:
    """The marked tensor and the one whose memory it is are one: to compute one of them again would hold both."""
    program = recompute(_step(view), "marked")
    (slope,) = (n for n in program.nodes if n.name == "slope")
    assert slope.inputs[0].node == "made"


@pytest.mark.parametrize("op", ["RandomUniform", "TruncatedNormal", "Multinomial"])
def test_a_mask_of_random_numbers_is_held(op: str) -> None:
    """It is small beside the numbers that it is made of, and those are not drawn twice."""
    b = Builder()
    x, shape = b.input("x", (8, 4)), b.ints(8, 4)
    noise = b.node(op, (shape,), (b.types[x],), "noise", stateful=True, seed=0, seed2=0)
    mask = b.op("Square", noise, name="mask")
    made = b.op("Tanh", b.op("Mul", x, mask), name="made")
    square = b.op("Square", made)
    gradient = b.op("Mul", square, made, name="gradient")
    slope = b.op("Mul", mask, gradient, name="slope")
    program = b.build([b.reduce("Sum", square, 0, 1, name="loss"), slope])
    again = recompute(_marked(program, {"made": "checkpoint", "gradient": "backward"}), "marked")
    assert again.by_name["slope"].inputs[0] == mask
