"""Patterns of names: what they match, what they put into which scopes, and what is like one that matches nothing."""

from __future__ import annotations

import pytest

from tests.programs import mlp
from whale.passes.analysis.scopes import Pattern, in_named_scopes, nearest


def _split(text: str, number: int = 0) -> Pattern:
    return Pattern(text, "split", f"split_{number}")


@pytest.mark.parametrize(
    ("text", "name", "matches"),
    [
        ("dense", "net/dense/MatMul", True),
        ("dense", "dense", True),
        ("dense", "gradient_tape/net/dense/MatMul/MatMul_1", True),
        ("dense", "net/dense_1/MatMul", False),
        ("dense_[12]", "net/dense_1/kernel", True),
        ("dense_[12]", "net/dense_12/kernel", False),
        ("decoder/layers_[0-5]/*", "t5/decoder/layers_3/mlp/wi/kernel", True),
        ("decoder/layers_[0-5]/*", "t5/decoder/layers_6/mlp/wi/kernel", False),
        ("*/mlp/*kernel", "t5/decoder/layers_6/mlp/wi/kernel", True),
        ("*/mlp/*kernel", "t5/decoder/layers_6/mlp/wi/kernel_2", False),
        ("*kernel", "a/recurrent_kernel", True),
        ("net/dense", "subnet/dense", False),
        ("layer_?/kernel", "layer_1/kernel", True),
        ("a.b", "axb", False),
    ],
)
def test_where_a_pattern_begins_and_ends(text: str, name: str, matches: bool) -> None:
    assert _split(text).matches(name) is matches


def test_the_first_pattern_of_each_kind_counts() -> None:
    program = mlp()
    patterns = [
        Pattern("layer1", "stage", "stage_0"),
        Pattern("*", "stage", "stage_1"),
        _split("net/w1"),
        _split("absent"),
    ]
    named = in_named_scopes(program, patterns, {"w1": "net/w1", "w2": "net/w2"})
    scopes = {n.name: n.scope for n in named.program.nodes}
    assert scopes["layer1"] == "stage_0/split_0", "what reads a variable stands in its split"
    assert scopes["relu"] == scopes["layer2"] == "stage_1"
    assert {v.node: v.scope for v in named.program.variables}["w1"] == "stage_1/split_0"
    assert named.matched == {"layer1", "*", "net/w1"}
    assert {"net/w1", "net/w2"} <= set(named.names)


def test_scopes_of_the_code_stay() -> None:
    program = in_named_scopes(mlp(), [_split("*", 1)], {}).program
    again = in_named_scopes(program, [_split("*", 2)], {}).program
    assert again == program


def test_names_that_are_like_a_pattern() -> None:
    names = ["net/decoder/dense/kernel", "net/decoder/norm/gamma", "net/encoder"]
    assert nearest("decodr/dense/kernl", names)[0] == "decoder/dense/kernel"
    assert nearest("encoders", names)[0] == "encoder"
    assert nearest("zzzz", names) == []
