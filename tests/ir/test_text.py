"""The text form of programs: what is printed reads back equal."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from tests.ir.strategies import nodes, programs
from tests.programs import body, mlp, planned
from whale.ir.layout import B, Strategy, shard
from whale.ir.plan import BatchInput, Edge, Plan, StageGroup
from whale.ir.plan_text import fit, format_bytes, format_change, format_flops, format_plan, format_seconds
from whale.ir.prediction import Prediction, RankPrediction
from whale.ir.program import Node, Program, Ref, Variable
from whale.ir.text import (
    format_node,
    format_program,
    format_value,
    parse_node,
    parse_program,
)
from whale.ir.values import DType, Func, Shape, Tensor, TensorType

RELAXED = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@RELAXED
@given(programs)
def test_what_is_printed_reads_back_equal(program: Program) -> None:
    again = parse_program(format_program(program))
    assert again == program
    assert _types_of_attributes(again) == _types_of_attributes(program)


def _types_of_attributes(program: Program) -> list:
    """1 == True == 1.0 and DType("a") == "a" in Python; the text form must keep them apart."""

    def kind(value: object) -> object:
        if isinstance(value, tuple):
            return [kind(v) for v in value]
        if isinstance(value, Func):
            return value.name, {k: kind(v) for k, v in value.attrs.items()}
        return type(value)

    graphs = [program, *program.functions.values()]
    return [{k: kind(v) for k, v in n.attrs.items()} for g in graphs for n in g.nodes]


@RELAXED
@given(nodes)
def test_a_node_reads_back_equal(node: Node) -> None:
    assert parse_node(format_node(node)) == node
    assert "\n" not in format_node(node)


@pytest.mark.parametrize("name", ["input", "input_1", "variable", "return", "return_value", "effects", "effects_0"])
def test_node_names_that_are_words_of_the_form(name: str) -> None:
    program = Program("p", (Node(name, "NoOp"),), effects=(name,))
    assert parse_program(format_program(program)) == program


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "True"), (1, "1"), (1.0, "float(1.0)"), (float("-inf"), "float(-inf)"), (-0.0, "float(-0.0)"),
        ("a\"b", '"a\\"b"'), (b"\xff", "bytes(/w==)"), (DType("half"), "dtype(half)"), (Shape(None), "shape([*])"),
        (Shape((2, None)), "shape([2,?])"), (Shape(()), "shape([])"), ((1, (True,)), "[1, [True]]"), ((), "[]"),
        (Func("f", {"N": 2}), "func(f {N=2})"),
        (Tensor.from_numpy(np.array([1, 2], np.int32)), "tensor(int32[2] [1, 2])"),
        (Tensor.from_numpy(np.array(["ab"])), 'tensor(string[1] ["YWI="])'),
        (Tensor.from_numpy(np.array(np.nan, np.float32)), "tensor(float32[] base64 AADAfw==)"),
    ],
)  # fmt: skip
def test_texts_of_values(value: object, text: str) -> None:
    assert format_value(value) == text
    again = parse_node(f"n = Op() {{a={text}}}").attrs["a"]
    assert again == value and type(again) is type(value)


def test_a_node_in_full() -> None:
    node = Node("a/b", "MatMul", (Ref("x"), Ref("y", 1)), ("c",), {"T": DType("float32"), "ta": False},
                (TensorType("float32", (None, 3)),), "replica_0", True)  # fmt: skip
    text = 'a/b = MatMul(x:0, y:1) ^c {T=dtype(float32), ta=False} : float32[?,3] @"replica_0" !'
    assert format_node(node) == text
    assert parse_node(text) == node


def test_what_is_no_attribute_value_is_refused() -> None:
    with pytest.raises(TypeError, match=r"complex.* cannot be the value of a node's attribute"):
        format_value(1j)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("program p\n  a = Op(x)\n", "':' is expected"),
        ("program p\n  a = Op(x:0 {\n", r"'\\\\\)' is expected"),
        ("program p\n  a = Op() {k=what(1)}\n", "unknown kind 'what'"),
        ("function f f\n", "no line starts with `program`"),
        ("nonsense\n", "program|function"),
        ("  a = Op()\n", "no line starts with `program`"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_program(text)


def test_programs_with_functions_and_variables() -> None:
    inner, (a,) = body("double", (2,))
    program = mlp()
    program = program.replace_nodes(program.nodes, functions={"double": inner.build([inner.op("AddV2", a, a)])})
    text = format_program(program)
    assert parse_program(text) == program
    assert 'variable w1 "w1:0" float64[4,6]' in text and "function double double" in text
    assert isinstance(parse_program(text).variables[0], Variable)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 20, "3.0 MiB"), (5 << 40, "5.0 TiB")]
)
def test_bytes_for_people(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 FLOP"), (1728, "1.73 kFLOP"), (2.5e9, "2.50 GFLOP"), (3e13, "30.00 TFLOP"), (4e15, "4.00 PFLOP")],
)
def test_flops_for_people(count: float, text: str) -> None:
    assert format_flops(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0 ms"), (2e-6, "2 us"), (2e-4, "0.2 ms"), (0.5, "500.0 ms"), (2, "2.00 s"), (300, "300 s")],
)
def test_seconds_for_people(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
    assert format_change(seconds) == f"+{text}" and (not seconds or format_change(-seconds) == f"-{text}")


def test_lines_go_on_below_a_column() -> None:
    row = "  x            S(0)[16,16]   rule: dimension 0 has the size of the first input's"
    assert fit([row, "short"], 60) == [
        "  x            S(0)[16,16]   rule: dimension 0 has the size",
        "                             of the first input's",
        "short",
    ]
    assert fit(["  a b c d e f g"], 10) == ["  a b c d", "    e f g"]
    assert fit([row], 200) == [row]


def test_stages_send_tensors_and_update_their_own_variables() -> None:
    groups = tuple(StageGroup(f"stage_{i}", (i,), (f"stage_{i}",)) for i in range(2))
    edges = tuple(Edge(Ref(f"t{i}"), i % 2, 1 - i % 2, 1024) for i in range(4))
    plan = Plan("p", "f", 1, stage_groups=groups, edges=edges, updates=(1, 3))
    text = format_plan(plan)
    assert "logical, 4 tensors sent between stages\n" in text and "collective" not in text
    assert "Updates  3 variables written by 1 operation on rank 0; every other rank updates those of its own" in text
    alone = format_plan(replace(plan, size=2, stage_groups=(), edges=()))
    assert "on rank 0; every other rank updates likewise" in alone and "logical, 0 tensors in 0 collectives" in alone


def test_a_plan_is_short_where_nobody_asks_for_all_of_it() -> None:
    """At Python's prompt, and in a notebook, where the rest unfolds."""
    plan = planned(mlp(8, 4, 4, 2), 2, 8)
    assert repr(plan).startswith("Plan for mlp: 2 ranks: 2 replicas; ") and len(repr(plan).splitlines()) <= 2
    assert len(repr(plan)) < 200 < len(format_plan(plan))
    page = getattr(plan, "_repr_html_")()  # noqa: B009 -- the class does not declare it
    assert page.startswith(f"<pre>{plan!r}</pre><details>") and "Batch inputs" in page.partition("<details>")[2]


def test_what_runs_once_is_counted_as_that() -> None:
    plan = Plan("p", "f", 2, strategies={"": {"print": Strategy((B,), (), "", once=True), "x": Strategy((), (B,), "")}})
    assert "1 first rank only, 1 on every rank" in format_plan(plan)


def test_a_predicted_plan_says_what_a_step_takes_and_what_bounds_it() -> None:
    rows = shard(0, (6, 2))
    ranks = (RankPrediction(0.3, 0.1, 0.05, 2_000_000, 1_000_000), RankPrediction(0.4, 0.3, 0.05, 2_000_000, 1_000_000))
    inputs, layouts = (BatchInput("x", rows, ""),), {"": {"x": Strategy((), (rows,), "")}}
    plan = Plan("p", "f", 2, batch_inputs=inputs, strategies=layouts, predicted=Prediction("some", 0.4, ranks))
    lines = format_plan(plan).splitlines()
    assert "Predicted on some: 400.0 ms a step, 20 rows/s" in lines and lines[-2] == "Bound by kernels of rank 1"
    assert lines[-1].startswith("Plan: 1 tensor split, 0 reshards (0 B a step). Predicted 400.0 ms: compute 75%, ")
    assert "Predicted" not in format_plan(replace(plan, predicted=None))


def test_a_plan_of_one_rank_says_that_nothing_is_divided() -> None:
    text = format_plan(Plan("p", "f", 1, ("rank 0",), strategies={"": {"x": Strategy((), (B,), "input")}}))
    assert "1 rank (rank 0)" in text and "Batch inputs: none" in text and "0 B logical" in text


def test_a_plan_lists_ops_without_a_rule() -> None:
    plan = Plan(
        "p", "f", 2, strategies={"": {"x": Strategy((shard(0, (1, 1)),), (B,), "")}}, unruled={"m (Mystery)": 2048}
    )
    assert "m (Mystery)" in format_plan(plan) and "2.0 KiB gathered" in format_plan(plan)
