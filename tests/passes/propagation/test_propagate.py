"""Propagation: which strategy every node of a hand-written program gets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.programs import Builder, body, mlp, planned
from whale.ir.layout import FIRST, P_MAX, P_SUM, B, Placement, Strategy, shard
from whale.ir.program import Node, Program, Ref, Variable
from whale.ir.values import DType, Shape, TensorType
from whale.passes.propagation.graph_layout import GraphLayout
from whale.passes.propagation.node_choice import NodeChoice
from whale.passes.propagation.propagate import propagate

ROWS = shard(0, (5, 3))
RESOURCE, VARIANT = TensorType("resource", ()), TensorType("variant", ())


def _main(program: Program, placed: dict[str, Placement], parts: int = 2) -> GraphLayout:
    return propagate(program, parts, placed)[""]


def _texts(layout: GraphLayout, *names: str) -> list[str]:
    return [str(layout.strategies[n]) for n in names]


def test_a_training_step() -> None:
    """Forward and backward by rows, gradients partial, updates of whole variables with reduced gradients."""
    layout = _main(mlp(), {"x": ROWS, "y": ROWS})
    s, b, p = str(ROWS), "B", "P(sum)"
    expected = {
        "x": f" -> {b}", "y": f" -> {b}", "w1": f" -> {b}", "w1/read": f"{b} -> {b}", "b2/read": f"{b} -> {b}",
        "layer1": f"{s} {b} -> {s}", "bias1": f"{s} {b} -> {s}", "relu": f"{s} -> {s}", "layer2": f"{s} {b} -> {s}",
        "bias2": f"{s} {b} -> {s}", "difference": f"{s} {s} -> {s}", "square": f"{s} -> {s}", "loss": f"{s} {b} -> {p}",
        "d_out": f"{s} {b} -> {s}", "d_w2": f"{s} {s} -> {p}", "d_b2": f"{s} -> {p}", "d_act": f"{s} {b} -> {s}",
        "d_h": f"{s} {s} -> {s}", "d_w1": f"{s} {s} -> {p}", "d_b1": f"{s} -> {p}", "rate": f" -> {b}",
        "sgd_w1": f"{b} {b} {b} -> ", "sgd_b2": f"{b} {b} {b} -> ",
    }  # fmt: skip
    assert {name: str(layout.strategies[name]) for name in expected} == expected
    assert layout.preferred == {Ref("x"): ROWS, Ref("y"): ROWS}
    assert layout.outputs == (B,) and layout.unruled == []


def test_one_rank_has_everything_whole() -> None:
    layout = _main(mlp(), {}, 1)
    assert {p for s in layout.strategies.values() for p in s.inputs + s.outputs} == {B}


def test_an_op_without_a_rule_sees_everything_and_rows_are_cut_again() -> None:
    b = Builder()
    x, w = b.input("x", (8, 4)), b.input("w", (4, 4))
    mixed = b.op("UnruledMix", b.matmul(x, w, name="before"), name="mixed")
    after = b.op("Relu", b.matmul(mixed, w, name="after"), name="relu")
    layout = _main(b.build([after]), {"x": ROWS})
    assert _texts(layout, "before", "mixed", "after", "relu") == [
        f"{ROWS} B -> {ROWS}", "B -> B", f"{ROWS} B -> {ROWS}", f"{ROWS} -> {ROWS}",
    ]  # fmt: skip
    assert layout.preferred[mixed] == ROWS and layout.unruled == ["mixed"]


def test_the_batch_is_followed_to_where_it_went() -> None:
    """The rows were dimension 1; behind an op without a rule they are the only dimension of that size, or gone."""
    columns = shard(1, (5, 3))
    b = Builder()
    x = b.op("Tanh", b.input("x", (4, 8)), name="x_tanh")
    turned = b.node("UnruledTurn", (x,), (TensorType("float64", (8, 3)),), "turned")
    lost = b.node("UnruledTurn", (x,), (TensorType("float64", (3, 5)),), "lost")
    layout = _main(b.build([b.op("Tanh", turned, name="after"), lost]), {"x": columns})
    assert _texts(layout, "x_tanh", "turned") == [f"{columns} -> {columns}", "B -> B"]
    assert layout.preferred[turned] == ROWS and _texts(layout, "after") == [f"{ROWS} -> {ROWS}"]
    assert lost not in layout.preferred


def test_a_stateful_op_without_a_rule_runs_once_and_is_sent() -> None:
    b = Builder()
    x = b.input("x", (8, 4))
    drawn = b.node(
        "UnruledNoise", (b.matmul(x, b.const(np.eye(4)), name="product"),), (b.types[x],), "drawn", stateful=True
    )
    out = b.op("Relu", b.op("Mul", drawn, x, name="scaled"), name="relu")
    layout = _main(b.build([out]), {"x": ROWS})
    assert layout.strategies["drawn"].once and _texts(layout, "drawn") == ["B -> O"]
    assert layout.strategies["drawn"].why == "stateful, and no rule for UnruledNoise"
    assert FIRST not in layout.strategies["scaled"].inputs
    assert layout.unruled == ["drawn"]


def test_a_stateful_op_without_a_rule_that_holds_a_variable_runs_everywhere() -> None:
    """On the first rank alone it would change that rank's variable only."""
    b = Builder()
    x, handle = b.input("x", (8, 4)), b.variable("w", (4,))
    update = b.update("UnruledApply", handle, b.reduce("Sum", b.matmul(x, b.const(np.eye(4))), 0), name="update")
    layout = _main(b.build([], [update]), {"x": ROWS})
    assert not layout.strategies["update"].once and _texts(layout, "update") == ["B B -> "]
    assert layout.unruled == ["update"]


def test_values_that_cannot_be_sent_grow_the_region() -> None:
    """The queue lives on the first rank, so what touches its handle does too, until a tensor that can be sent."""
    b = Builder()
    x = b.input("x", (8, 4))
    queue = b.node("UnruledQueue", (), (RESOURCE,), "queue", stateful=True)
    wrapped = b.node("Identity", (queue,), (RESOURCE,), "wrapped")
    taken = b.node("UnruledDequeue", (wrapped,), (b.types[x],), "taken", stateful=True)
    size = b.node("UnruledSize", (wrapped,), (TensorType("int32", ()),), "size")
    out = b.op("AddV2", taken, x, name="sum")
    layout = _main(b.build([out, size]), {"x": ROWS})
    assert [layout.strategies[n].once for n in ("queue", "wrapped", "taken", "size", "sum")] == [True] * 4 + [False]
    assert _texts(layout, "wrapped", "taken", "size") == ["O -> O"] * 3
    assert layout.outputs == (B, B)


def test_a_handle_that_is_fetched_stays_where_it_is() -> None:
    b = Builder()
    queue = b.node("UnruledQueue", (), (RESOURCE,), "queue", stateful=True)
    assert _main(b.build([queue]), {}).outputs == (FIRST,)


def test_a_list_that_a_once_op_reads_is_made_whole() -> None:
    b = Builder()
    x = b.matmul(b.input("x", (8, 4)), b.const(np.eye(4)))
    stacked = b.op("Pack", x, x, axis=0, N=2)
    listed = b.node("TensorListFromTensor", (stacked, b.ints(8, 4)), (VARIANT,), "list")
    kept = b.node("UnruledKeep", (listed,), (), "keep", stateful=True)
    layout = _main(b.build([], [kept.node]), {"x": ROWS})
    assert _texts(layout, "list", "keep") == ["B B -> B", "B -> "]


def test_products_are_divided_even_when_copies_would_be_cheaper() -> None:
    b = Builder()
    x = b.input("x", (8, 1))
    tiny = b.matmul(x, b.const([[1.0]]), name="tiny")
    layout = _main(b.build([tiny]), {"x": ROWS})
    assert _texts(layout, "tiny") == [f"{ROWS} B -> {ROWS}"]


def test_partial_sums_pass_linear_ops() -> None:
    """The sum is scaled, negated and added to another before anything needs it whole."""
    b = Builder()
    x = b.matmul(b.input("x", (8, 400)), b.const(np.eye(400)), name="rows")
    a = b.op("Mul", b.reduce("Sum", x, 0, name="sum"), b.const(2.0), name="scaled")
    c = b.op("Neg", b.reduce("Sum", b.op("Square", x), 0), name="negated")
    out = b.op("Tanh", b.op("AddV2", a, c, name="added"), name="tanh")
    layout = _main(b.build([out]), {"x": ROWS})
    assert _texts(layout, "scaled", "negated", "added", "tanh") == [
        "P(sum) B -> P(sum)", "P(sum) -> P(sum)", "P(sum) P(sum) -> P(sum)", "B -> B",
    ]  # fmt: skip


def test_maxima_are_partial_too() -> None:
    b = Builder()
    x = b.matmul(b.input("x", (8, 400)), b.const(np.eye(400)))
    top = b.reduce("Max", x, 0, name="max")
    layout = _main(b.build([b.op("Relu", top, name="relu")]), {"x": ROWS})
    assert layout.produced[top] == P_MAX


# -- loops and branches


def _cond(*shapes: tuple[int, ...]) -> Program:
    b, args = body("cond", *shapes)
    return b.build([b.op("Less", args[0], b.const(3.0))])


def _looping(shapes: list[tuple[int, ...]], step: Program, *state: object) -> tuple[Builder, Ref]:
    b = Builder()
    made = [b.input(s, shape) if isinstance(s, str) else b.const(s) for s, shape in zip(state, shapes)]
    return b, b.loop(_cond(*shapes), step, *made)


def test_loop_state_keeps_rows_and_gathers_partial_sums() -> None:
    shapes = [(), (8, 40), (40,)]
    inner, (i, x, total) = body("body", *shapes)
    moved = inner.op("Tanh", inner.matmul(x, inner.const(np.eye(40))))
    step = inner.build(
        [inner.op("AddV2", i, inner.const(1.0)), moved, inner.op("AddV2", total, inner.reduce("Sum", moved, 0))]
    )
    b, loop = _looping(shapes, step, 0.0, "x", np.zeros(40))
    layouts = propagate(b.build(b.nodes[-1].list_refs()), 2, {"x": ROWS})
    strategy = layouts[""].strategies[loop.node]
    assert strategy.inputs == strategy.outputs == (B, ROWS, P_SUM)
    assert layouts["body"].outputs == (B, ROWS, P_SUM) and layouts["cond"].outputs == (B,)
    assert [layouts["body"].strategies[f"body_arg{i}"].outputs[0] for i in range(3)] == [B, ROWS, P_SUM]


def test_loop_state_that_the_body_cannot_keep_is_whole() -> None:
    """The partial sum goes through tanh in each iteration: it enters whole."""
    shapes = [(), (8, 40), (40,)]
    inner, (i, x, total) = body("body", *shapes)
    product = inner.matmul(x, inner.const(np.eye(40)))
    bent = inner.op("Tanh", inner.op("AddV2", total, inner.reduce("Sum", product, 0)), name="bent")
    step = inner.build([inner.op("AddV2", i, inner.const(1.0)), x, bent])
    b, loop = _looping(shapes, step, 0.0, "x", np.zeros(40))
    layouts = propagate(b.build(b.nodes[-1].list_refs()), 2, {"x": ROWS})
    assert layouts[""].strategies[loop.node].inputs == (B, ROWS, B)
    assert layouts["body"].strategies["bent"].inputs == (B,)


def test_loop_state_that_swaps_dimensions_settles() -> None:
    """Two states change places in each iteration; one is split by rows, the other not at all."""
    shapes = [(), (8, 8), (8, 8)]
    inner, (i, x, y) = body("body", *shapes)
    step = inner.build([inner.op("AddV2", i, inner.const(1.0)), inner.matmul(y, inner.const(np.eye(8))), x])
    b, loop = _looping(shapes, step, 0.0, "x", "y")
    layouts = propagate(b.build(b.nodes[-1].list_refs()), 2, {"x": ROWS})
    strategy = layouts[""].strategies[loop.node]
    assert strategy.inputs == strategy.outputs
    planned(b.build(b.nodes[-1].list_refs()), 5, 3, x=ROWS)  # the checker agrees


def test_a_loop_over_a_handle_of_the_first_rank_runs_there() -> None:
    inner, (i,) = body("body", ())
    handle = inner.node("Placeholder", (), (RESOURCE,), "handle")
    inner.inputs.append("handle")
    step = inner.build([inner.op("AddV2", i, inner.const(1.0)), handle])
    condition, (j,) = body("cond", ())
    condition.inputs.append(condition.node("Placeholder", (), (RESOURCE,), "cond_handle").node)
    stop = condition.build([condition.op("Less", j, condition.const(3.0))])
    b = Builder()
    queue = b.node("UnruledQueue", (), (RESOURCE,), "queue", stateful=True)
    loop = b.loop(stop, step, b.const(0.0), queue)
    layouts = propagate(b.build([loop]), 2, {})
    assert layouts[""].strategies["loop"].once and set(layouts) == {""}


def _branches(then_rule: str, else_rule: str) -> GraphLayout:
    def function(name: str, rule: str) -> Program:
        b, (x,) = body(name, (8, 40))
        product = b.matmul(x, b.const(np.eye(40)))
        if rule == "rows":
            return b.build([b.reduce("Max", product, 1)])
        return b.build([b.reduce("Sum", b.op("Mul", b.transpose(product, 1, 0), b.const(np.ones((40, 8)))), 0)])

    b = Builder()
    x = b.input("x", (8, 40))
    b.branch(b.op("Less", b.const(0.0), b.const(1.0)), function("then", then_rule), function("other", else_rule), x)
    return propagate(b.build(b.nodes[-1].list_refs()), 2, {"x": ROWS})[""]


def test_branches_that_agree_keep_their_layout() -> None:
    strategy = _branches("rows", "rows").strategies["branch"]
    assert strategy.inputs == (B, ROWS) and strategy.outputs == (ROWS,)


def test_branches_that_differ_meet_whole() -> None:
    b = Builder()
    x = b.input("x", (8, 8))
    then, (t,) = body("then", (8, 8))
    other, (e,) = body("other", (8, 8))
    product = other.matmul(e, other.const(np.eye(8)))
    then_out = then.matmul(t, then.const(np.eye(8)))
    other_out = other.matmul(product, other.op("Relu", product), a=True)  # a sum over the batch
    b.branch(b.op("Less", b.const(0.0), b.const(1.0)), then.build([then_out]), other.build([other_out]), x)
    layouts = propagate(b.build(b.nodes[-1].list_refs()), 2, {"x": ROWS})
    assert layouts["then"].place(then_out) == ROWS and layouts["other"].place(other_out) == P_SUM
    assert layouts[""].strategies["branch"].outputs == (B,)
    assert layouts["then"].outputs == layouts["other"].outputs == (B,)


def test_lists_that_lie_differently_are_made_whole() -> None:
    b = Builder()
    x, y = b.input("x", (8, 4)), b.input("y", (8, 4))
    lists = []
    for name, t in (("x", x), ("y", y)):
        rows = b.op("Pack", b.matmul(t, b.const(np.eye(4))), axis=0, N=1, name=f"pack_{name}")
        lists.append(b.node("TensorListFromTensor", (rows, b.ints(8, 4)), (VARIANT,), f"list_{name}"))
    added = b.node("AddN", lists, (VARIANT,), "added", N=2)
    program = b.build([], [added.node])
    assert _main(program, {"x": ROWS, "y": ROWS}).strategies["added"].inputs == (ROWS, ROWS)
    layout = _main(program, {"x": ROWS, "y": shard(0, (3, 5))})
    assert _texts(layout, "list_x", "list_y", "added") == ["B B -> B", "B B -> B", "B B -> B"]


def test_a_list_that_must_be_whole_is_not_divided_by_rows_instead_of_columns() -> None:
    """To send its element's columns to where the rows are would cost less than to gather them."""
    b = Builder()
    element = b.op("Relu", b.input("x", (8, 4)), name="element")
    empty = b.node("TensorListReserve", (b.ints(8, 4), b.const(1, "int32")), (VARIANT,), "empty")
    put = b.node("TensorListSetItem", (empty, b.const(0, "int32"), element), (VARIANT,), "put")
    whole = b.node("TensorListFromTensor", (b.input("y", (1, 8, 4)), b.ints(8, 4)), (VARIANT,), "whole")
    added = b.node("AddN", (put, whole), (VARIANT,), "added", N=2)
    columns = shard(1, (2, 2))
    layout = _main(b.build([], [added.node]), {"x": columns})
    assert _texts(layout, "element", "put", "added") == [f"{columns} -> {columns}", "B B B -> B", "B B -> B"]


def test_updates_that_are_alike_are_decided_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[str] = []
    choose = NodeChoice.choose

    def counted(self: NodeChoice, node: Node, *others: Any) -> Strategy:
        chosen.append(node.name)
        return choose(self, node, *others)

    monkeypatch.setattr(NodeChoice, "choose", counted)
    counts: list[list[str]] = []
    for variables in (3, 30):
        chosen.clear()
        program = _updates(variables)
        layout = propagate(program, 2, {"x": shard(0, (4, 4))})[""]
        counts.append([name for name in chosen if not name.startswith("grad")])  # what these do depends on a constant
        for i in range(variables):
            assert layout.strategies[f"grad{i}"].outputs == (P_SUM,)
            assert layout.strategies[f"update{i}"].inputs == (B, B)
    assert counts[0] == counts[1]


def _updates(variables: int) -> Program:
    """Steps of variables by sums over the rows of a batch."""
    b = Builder("updates")
    held, rows, dtype = TensorType("float64", (4,)), TensorType("float64", (8, 4)), DType("float64")
    x, effects = b.input("x", (8, 4)), []
    axis = b.ints(0)
    resource = TensorType("resource", ())
    for i in range(variables):
        b.variables.append(Variable(f"w{i}", f"w{i}:0", held))
        handle = b.node("VarHandleOp", (), (resource,), f"w{i}", stateful=True, dtype=dtype, shape=Shape((4,)))
        read = b.node("ReadVariableOp", (handle,), (held,), f"read{i}", stateful=True, dtype=dtype)
        made = b.node("Mul", (x, read), (rows,), f"made{i}", T=dtype)
        slope = b.node("Sum", (made, axis), (held,), f"grad{i}", T=dtype, Tidx=DType("int32"), keep_dims=False)
        effects.append(f"update{i}")
        b.node("AssignSubVariableOp", (handle, slope), (), effects[-1], (f"read{i}",), True, dtype=dtype)
    return b.build([], effects)
