"""Marks of nodes: they travel with a node, tell programs apart, and stand nowhere but in their field."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.programs import mlp
from whale.ir.fingerprint import compute_fingerprint
from whale.ir.marks import NO_MARKS, Marks
from whale.ir.program import Node, Program, Ref, remove_work
from whale.ir.text import format_node, parse_node

ROOT = Path(__file__).resolve().parents[2]
NODE = Node("n", "Identity", (Ref("x"),))


def test_a_mark_is_added_to_those_that_are_there() -> None:
    node = NODE.with_marks(blocks=4).with_marks(recomputed=True)
    assert node.marks == Marks(blocks=4, recomputed=True)
    assert node.marks.list_given() == {"recomputed": True, "blocks": 4}
    assert NODE.marks is NO_MARKS and NO_MARKS.list_given() == {}
    with pytest.raises(TypeError):
        NODE.with_marks(unknown=True)


def test_marks_are_written_beside_attributes() -> None:
    node = replace(NODE, attrs={"N": 2}).with_marks(axis=("data", "tensor"), edge=(0, 1), ring_dim=0, on_host=True)
    text = format_node(node)
    assert text == 'n = Identity(x:0) {N=2} <on_host=True, axis=["data", "tensor"], edge=[0, 1], ring_dim=0>'
    assert parse_node(text) == node
    assert parse_node(format_node(NODE)).marks is NO_MARKS


def with_last(program: Program, node: Node) -> Program:
    return program.replace_nodes((*program.nodes[:-1], node))


def test_ranks_whose_nodes_have_other_marks_run_other_programs() -> None:
    program, last = mlp(), mlp().nodes[-1]
    marked = [
        with_last(program, last.with_marks(**marks)) for marks in ({"backward": True}, {"blocks": 2}, {"blocks": 3})
    ]
    assert len({compute_fingerprint(one) for one in (program, *marked)}) == 4
    # As if it had none; not the object that nodes share which have none.
    assert compute_fingerprint(with_last(program, replace(last, marks=Marks()))) == compute_fingerprint(program)


def test_what_does_nothing_any_more_has_no_marks() -> None:
    program = with_last(mlp(), mlp().nodes[-1].with_marks(backward=True))
    name = program.nodes[-1].name
    assert remove_work(program, {name}).by_name[name].marks is NO_MARKS


def test_no_pass_keeps_notes_in_attributes() -> None:
    """`_whale_` attributes are for graphs of TensorFlow's (whale.capture.attrs), and of Python objects there."""
    parts = ("ir", "sharding_rules", "passes", "partition", "kernels", "planner")
    sources = [path for part in parts for path in (ROOT / "whale" / part).rglob("*.py")]
    sources += (ROOT / "cost_model").rglob("*.py")
    assert len(sources) > 200
    assert [str(path) for path in sources if "_whale_" in path.read_text()] == []
