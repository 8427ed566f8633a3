"""The notation: what lines mean, and a precise message for each mistake."""

from __future__ import annotations

import pytest

from whale.errors import RuleError
from whale.sharding_rules.notation import parse, parse_passes


def test_line_has_terms_and_flags():
    line = parse("m k+, k+ n -> m n")
    assert [t.labels() for t in line.inputs] == [["m", "k"], ["k", "n"]]
    assert line.flags == {"m": "", "k": "+", "n": ""}


def test_compound_dimensions_and_roles():
    line = parse("(b s) d^, [out0], {.} -> b s d^")
    assert line.inputs[0].items[0].labels == ("b", "s")
    assert [t.kind for t in line.inputs] == ["dims", "role", "whole"]
    assert line.inputs[2].variadic


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("m k, k n", "a rule line needs one '->'"),
        ("a -> b -> c", "a rule line needs one '->'"),
        ("m k, k n -> m n", "label 'k' is in an operand but not in output 0"),
        ("m k+, k n -> m n", "label 'k' has two flags"),
        ("m, -> m", "a term is empty"),
        ("m %, n -> m", "a term cannot be read"),
        ("m () -> m", "a compound dimension has no label"),
        ("(4 2) -> b", "a compound dimension has no label"),
        ("a a -> a", "label 'a' is twice in operand 0"),
        ("* a * -> *", "a term has two '*'"),
        ("{a, b} -> a", "a variadic term is not closed"),
        ("{a}, {b} -> a^", "two variadic terms on one side"),
        ("=a -> a", "'=' stands before an operand"),
        ("a -> ~a", "'~' stands before an output"),
        ("[a b] -> c", "a role cannot be read"),
    ],
)
def test_mistake_is_named(text: str, message: str):
    with pytest.raises(RuleError) as error:
        parse(text)
    assert message in str(error.value)
    assert text in str(error.value) and "expected:" in str(error.value) and "next:" in str(error.value)


def test_operand_sets():
    assert [(p.op, p.operands) for p in parse_passes("0|1&2", ("sum",))] == [("sum", (0,)), ("sum", (1, 2))]
    assert [(p.op, p.operands) for p in parse_passes("0|max:all", ("max", "min"))] == [
        ("max", (0,)),
        ("min", (0,)),
        ("max", None),
    ]
    (one,) = parse_passes("0&2>1", ("sum",))
    assert (one.operands, one.outputs) == ((0, 2), (1,))


@pytest.mark.parametrize("text", ["", "0,1", "mean:0", "0&", "x", "0>", "0>x"])
def test_operand_set_mistakes(text: str):
    with pytest.raises(RuleError):
        parse_passes(text, ("sum",))
