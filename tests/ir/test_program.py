"""Programs: lookups, sorting, and dropping what nobody needs."""

from __future__ import annotations

import graphlib
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.programs import Builder, body, mlp
from whale.errors import PlanError, ProgramError
from whale.ir.ops import IDENTITIES
from whale.ir.program import Node, Ref, iterate_function_refs, prune, sort_nodes
from whale.ir.values import Func, Tensor, TensorType, count_item_bytes, find_numpy_dtype, require_static_shape


def test_lookups() -> None:
    program = mlp()
    assert program.find_type(Ref("layer1")) == TensorType("float64", (8, 6))
    assert [(n.name, i) for n, i in program.consumers[Ref("relu")]] == [("layer2", 0), ("d_w2", 0)]
    assert program.variable_of["w2"].name == "w2:0"
    assert program.by_name["d_w1"].list_refs() == (Ref("d_w1"),)


@pytest.mark.parametrize("op", sorted(IDENTITIES))
def test_a_constant_is_seen_through_identities(op: str) -> None:
    b = Builder()
    c = b.const([1, 2], "int32")
    seen = b.op("StopGradient", b.node(op, (c,), (b.types[c],)))
    x = b.input("x", (2,))
    program = b.build([seen, x])
    np.testing.assert_array_equal(program.const(seen), [1, 2])
    assert program.const(x) is None


@given(st.permutations(range(12)))
def test_sorting_puts_operands_and_controls_first(order: list[int]) -> None:
    """Node i reads i // 2 and waits for i // 3."""
    nodes = {i: Node(f"n{i}", "Op", (Ref(f"n{i // 2}"),) if i else (), (f"n{i // 3}",) if i else ()) for i in range(12)}
    result = sort_nodes({f"n{i}": nodes[i] for i in order})
    position = {n.name: k for k, n in enumerate(result)}
    assert len(position) == 12
    assert all(
        position[f"n{i // 2}"] < position[f"n{i}"] and position[f"n{i // 3}"] < position[f"n{i}"] for i in range(1, 12)
    )
    drawn = {i: k for k, i in enumerate(order)}
    if all(max(drawn[i // 2], drawn[i // 3]) < drawn[i] for i in range(1, 12)):  # a sorted graph keeps its order
        assert [n.name for n in result] == [f"n{i}" for i in order]
    else:
        before = {f"n{i}": dict.fromkeys([*(r.node for r in nodes[i].inputs), *nodes[i].controls]) for i in order}
        assert [n.name for n in result] == list(graphlib.TopologicalSorter(before).static_order())


def test_a_sorted_graph_keeps_its_order() -> None:
    program = mlp()
    assert sort_nodes(program.by_name) == program.nodes


def test_all_processes_sort_alike() -> None:
    """Ranks hash strings differently, and have to arrive at the same order."""
    script = (
        "from whale.ir.program import Node, Ref, sort_nodes\n"
        "nodes = [Node(f'n{i}', 'Op', tuple(Ref(f'm{i * k % 9}') for k in range(5)), ('m3', 'm7')) for i in range(9)]\n"
        "nodes += [Node(f'm{i}', 'Op') for i in range(9)]\n"
        "print([n.name for n in sort_nodes({n.name: n for n in nodes})])\n"
    )
    orders = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(orders) == 1


def test_a_cycle_is_refused() -> None:
    with pytest.raises(PlanError, match="would wait for each other in a cycle"):
        sort_nodes({"a": Node("a", "Op", (Ref("b"),)), "b": Node("b", "Op", (), ("a",))})


def test_pruning_keeps_what_outputs_and_effects_need() -> None:
    program = mlp()
    kept = prune(program)
    assert kept == program  # everything serves the loss or an update
    loss_only = prune(program.replace_nodes(program.nodes, effects=()))
    names = set(loss_only.by_name)
    assert "loss" in names and "y" in names and "d_w1" not in names and "sgd_w1" not in names
    one_update = prune(program.replace_nodes(program.nodes, outputs=(), effects=("sgd_b2",)))
    assert {v.node for v in one_update.variables} == {"w1", "b1", "w2", "b2"}  # all are read by the forward pass
    assert "sgd_w1" not in one_update.by_name and "loss" not in one_update.by_name
    assert one_update.inputs == ("x", "y")


def test_pruning_keeps_controls_and_called_functions() -> None:
    used, (a,) = body("used", (2,))
    helper, (h,) = body("helper", (2,))
    unused, (u,) = body("unused", (2,))
    b = Builder()
    x = b.input("x", (2,))
    b.node("NoOp", (), (), "waited_for")
    b.node("NoOp", (), (), "alone")
    b.functions = {
        "used": used.build([used.node("PartitionedCall", (a,), (used.types[a],), f=Func("helper"))]),
        "helper": helper.build([h]), "unused": unused.build([u]),
    }  # fmt: skip
    y = b.node("PartitionedCall", (x,), (b.types[x],), "call", ["waited_for"], f=Func("used"))
    kept = prune(b.build([y]))
    assert set(kept.by_name) == {"x", "waited_for", "call"}
    assert set(kept.functions) == {"used", "helper"}


def test_functions_that_a_node_names() -> None:
    node = Node("n", "Case", attrs={"branches": (Func("a"), Func("b")), "f": Func("c"), "N": 2, "names": ("x",)})
    assert [(k, f.name) for k, f in iterate_function_refs(node)] == [("branches", "a"), ("branches", "b"), ("f", "c")]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int64", "bool", "complex64", "uint16"])
def test_tensors_give_their_elements_back(dtype: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(find_numpy_dtype(dtype))
    t = Tensor.from_numpy(array)
    assert t.dtype == dtype and t.shape == (2, 3)
    np.testing.assert_array_equal(t.numpy(), array)
    assert count_item_bytes(dtype) == array.itemsize


def test_types_count_elements_and_bytes() -> None:
    assert TensorType("float32", (2, 3)).bytes == 24 and TensorType("float32", (0, 3)).bytes == 0
    assert TensorType("float64", ()).bytes == 8 and TensorType("string", (4,)).bytes == 0
    assert not TensorType("float32", (None, 3)).is_static and TensorType("float32", (None, 3)).elements == 3
    assert not TensorType("float32").is_static and TensorType("float32", ()).is_static
    assert str(TensorType("int8", (None, 3))) == "int8[?,3]" and str(TensorType("int8")) == "int8[*]"


def test_static_shape() -> None:
    assert require_static_shape(TensorType("float32", (2, 0, 3))) == (2, 0, 3)
    assert require_static_shape(TensorType("float32", ())) == ()


@pytest.mark.parametrize("shape", [None, (2, None)])
def test_a_shape_that_is_not_static_is_refused(shape) -> None:
    with pytest.raises(ProgramError, match="unknown") as info:
        require_static_shape(TensorType("float32", shape))
    assert info.value.facts["given"] == str(TensorType("float32", shape))
