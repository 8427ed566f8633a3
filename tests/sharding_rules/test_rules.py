"""What rules say: inventory, golden lines, sizes, lists, local constants, known outputs, what is done once."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.sharding_rules.helpers import found, placements, strategies, view
from whale.errors import RuleError
from whale.ir.layout import B, Strategy, shard
from whale.ir.ops import CONTROL_FLOW
from whale.sharding_rules import OpView, find_known_outputs, find_rule, load_rules, registry
from whale.sharding_rules.notation import FIRST_RANK, parse, parse_passes
from whale.sharding_rules.registry import rule

INVENTORY = Path(__file__).with_name("op_inventory.csv")


def test_every_op_of_real_programs_has_a_rule():
    with INVENTORY.open() as file:
        names = {row["op"] for row in csv.DictReader(file)}
    assert len(names) > 150
    assert names - set(load_rules()) - CONTROL_FLOW == set()
    assert not CONTROL_FLOW & set(load_rules())


def test_every_written_line_parses():
    for one in load_rules().values():
        if isinstance(one.spec, str) and one.spec != FIRST_RANK:
            parse(one.spec)
        for text, ops in ((one.lin, ("sum",)), (one.mono, ("max", "min")), (one.copy, ("sum", "max", "min", "prod"))):
            if isinstance(text, str):
                parse_passes(text, ops)


def test_no_rule_is_none():
    assert find_rule("NoSuchOp") is None


@pytest.mark.parametrize(
    ("op", "current", "expected"),
    [
        (
            view("MatMul", ["float32[4,6]", "float32[6,8]"], ["float32[4,8]"]),
            "S(0)[1,3] B",
            ["S(0)[1,3] B -> S(0)[1,3]"],
        ),
        (
            view("MatMul", ["float32[4,6]", "float32[6,8]"], ["float32[4,8]"]),
            "B S(0)[2,4]",
            ["S(1)[2,4] S(0)[2,4] -> P(sum)"],
        ),
        (
            view("MatMul", ["float32[4,6]", "float32[6,8]"], ["float32[4,8]"]),
            "S(0)[1,3] S(1)[4,4]",
            ["S(0)[1,3] B -> S(0)[1,3]", "B S(1)[4,4] -> S(1)[4,4]"],
        ),
        (view("AddV2", ["float32[4,6]", "float32[6]"], ["float32[4,6]"]), "P(sum) B", ["P(sum) P(sum) -> P(sum)"]),
        (view("AddV2", ["bool[4]", "bool[4]"], ["bool[4]"]), "P(sum) B", []),
        (view("Mul", ["float32[4,1]", "float32[4,6]"], ["float32[4,6]"]), "B S(1)[2,4]", ["B S(1)[2,4] -> S(1)[2,4]"]),
        (view("AddV2", ["float32[?,6]", "float32[?,6]"], ["float32[?,6]"]), "S(0)[2,2] B", []),
        (
            view("AddV2", ["float32[?,6]", "float32[?,6]"], ["float32[?,6]"]),
            "S(0)[2,2] S(0)[2,2]",
            ["S(0)[2,2] S(0)[2,2] -> S(0)[2,2]"],
        ),
        (view("Relu", ["float32[*]"], ["float32[*]"]), "S(0)[2,2]", []),
        (view("Reshape", ["float32[8,6]", "int32[1]"], ["float32[48]"]), "S(0)[2,6] B", ["S(0)[2,6] B -> S(0)[12,36]"]),
        (view("Reshape", ["float32[48]", "int32[2]"], ["float32[8,6]"]), "S(0)[10,38] B", []),
        (
            view("Reshape", ["float32[?,6]", "int32[3]"], ["float32[?,2,3]"]),
            "S(0)[1,3] B",
            ["S(0)[1,3] B -> S(0)[1,3]"],
        ),
        (view("Tile", ["float32[1,4]", "int32[2]"], ["float32[8,4]"], {1: [8, 1]}), "B B", []),
        (view("Shape", ["float32[?,4]"], ["int32[2]"]), "P(sum)", ["P(sum) -> B"]),
        (view("Shape", ["float32[?,4]"], ["int32[2]"]), "S(0)[2,2]", []),
        (view("Shape", ["float32[?,4]"], ["int32[2]"]), "S(1)[2,2]", ["S(1)[2,2] -> B"]),
        (view("Shape", ["float32[3,?,4]"], ["int32[3]"]), "S(0)[3,0]", ["S(0)[3,0] -> B"]),
        (
            view("IdentityN", ["float32[4]", "float32[6]"], ["float32[4]", "float32[6]"]),
            "S(0)[1,3] P(sum)",
            ["S(0)[1,3] P(sum) -> S(0)[1,3] P(sum)"],
        ),
        (
            view(
                "CudnnRNN",
                ["float32[5,8,3]", "float32[1,8,4]", "float32[1,8,4]", "float32[99]"],
                ["float32[5,8,4]", "float32[1,8,4]", "float32[1,8,4]", "float32[?]"],
            ),
            "S(1)[3,5] B B B",
            ["S(1)[3,5] S(1)[3,5] S(1)[3,5] B -> S(1)[3,5] S(1)[3,5] S(1)[3,5] S(0)[3,5]"],
        ),
    ],
)
def test_strategies(op: OpView, current: str, expected: list[str]):
    assert strategies(op, current) == expected


def test_replicated_comes_last_and_owner_is_empty():
    op = view("MatMul", ["float32[4,6]", "float32[6,8]"], ["float32[4,8]"])
    assert str(found(op, "S(0)[2,2] B")[-1]) == "B B -> B"
    assert found(view("ScalarSummary", ["string[]", "float32[]"], ["string[]"]), "B B") == []
    assert found(view("RandomUniform", ["int32[1]"], ["float32[4]"], seed=0, seed2=0), "B") == []
    assert [str(s) for s in found(view("RandomUniform", ["int32[1]"], ["float32[4]"], seed=0, seed2=3), "B")] == [
        "B -> B"
    ]


def test_outputs_can_be_wanted():
    op = view("Tile", ["float32[1,4]", "int32[2]"], ["float32[8,4]"], {1: [8, 1]})
    strategy = found(op, "B B", "S(0)[3,5]")[0]
    assert str(strategy) == "B B -> S(0)[3,5]"
    assert find_rule("Tile").local_op(op, strategy, 1).consts[1].tolist() == [5, 1]
    assert find_rule("Tile").produces_any and find_rule("TensorListReserve").produces_any


def test_outputs_of_tile_are_sharded_where_ranks_can_have_multiples_of_their_own():
    known = view("Tile", ["float32[1,4]", "int32[2]"], ["float32[8,4]"])
    assert str(found(known, "B B", "S(0)[3,5]")[0]) == "B B -> S(0)[3,5]"
    unknown = view("Tile", ["float32[1,4]", "int32[2]"], ["float32[8,?]"])
    assert [str(s) for s in found(unknown, "B B", "S(0)[3,5]")] == ["B B -> B"]
    kept = view("Tile", ["float32[6,?]", "int32[2]"], ["float32[6,?]"])
    assert str(found(kept, "S(0)[2,4] B")[0]) == "S(0)[2,4] B -> S(0)[2,4]"


LISTS = [
    (
        view("TensorListReserve", ["int32[2]", "int32[]"], ["variant[]"], {0: [-1, 8]}),
        "B B",
        "S(1)[3,5]",
        "B B -> S(1)[3,5]",
        {0: [-1, 5]},
    ),
    (
        view("TensorListReserve", ["int32[]", "int32[]"], ["variant[]"], {0: -1}),
        "B B",
        "S(1)[3,5]",
        "B B -> S(1)[3,5]",
        {},
    ),
    (
        view("TensorListReserve", ["int32[2]", "int32[]"], ["variant[]"], {0: [4, 8]}),
        "B B",
        "P(sum)",
        "B B -> P(sum)",
        {},
    ),
    (
        view("TensorListFromTensor", ["float32[5,8,3]", "int32[2]"], ["variant[]"], {1: [8, 3]}),
        "S(1)[3,5] B",
        "",
        "S(1)[3,5] B -> S(0)[3,5]",
        {1: [5, 3]},
    ),
    (
        view("TensorListStack", ["variant[]", "int32[2]"], ["float32[5,8,3]"], {1: [8, 3]}),
        "S(0)[3,5] B",
        "",
        "S(0)[3,5] B -> S(1)[3,5]",
        {1: [5, 3]},
    ),
    (
        view("TensorListStack", ["variant[]", "int32[2]"], ["float32[5,8,3]"]),
        "S(0)[3,5] B",
        "",
        "S(0)[3,5] B -> S(1)[3,5]",
        {1: [-1, -1]},
    ),
    (
        view("TensorListPushBack", ["variant[]", "float32[8,3]"], ["variant[]"]),
        "B P(sum)",
        "",
        "P(sum) P(sum) -> P(sum)",
        {},
    ),
    (
        view("TensorListSetItem", ["variant[]", "int32[]", "float32[8,3]"], ["variant[]"]),
        "S(0)[3,5] B B",
        "",
        "S(0)[3,5] B S(0)[3,5] -> S(0)[3,5]",
        {},
    ),
    (
        view("TensorListResize", ["variant[]", "int32[]"], ["variant[]"]),
        "S(1)[3,5] B",
        "",
        "S(1)[3,5] B -> S(1)[3,5]",
        {},
    ),
    (view("TensorListLength", ["variant[]"], ["int32[]"]), "S(1)[3,5]", "", "S(1)[3,5] -> B", {}),
    (
        view("TensorListPopBack", ["variant[]", "int32[2]"], ["variant[]", "float32[8,3]"], {1: [8, 3]}),
        "S(0)[3,5] B",
        "",
        "S(0)[3,5] B -> S(0)[3,5] S(0)[3,5]",
        {1: [5, 3]},
    ),
]


@pytest.mark.parametrize(("op", "current", "wanted", "expected", "consts"), LISTS)
def test_lists_lie_as_their_elements(op: OpView, current: str, wanted: str, expected: str, consts: dict):
    strategy = found(op, current, wanted)[0]
    assert str(strategy) == expected
    local = find_rule(op.node.op).local_op(op, strategy, 1)
    assert {i: v.tolist() for i, v in local.consts.items()} == consts
    assert all(v.dtype == np.int32 for v in local.consts.values())


def test_element_shape_of_a_cut_list_is_left_open():
    op = view("TensorListElementShape", ["variant[]"], ["int32[2]"])
    strategy = found(op, "S(0)[3,5]")[0]
    assert find_known_outputs(op, strategy, 0)[0].tolist() == [-1, -1]


def test_mean_over_a_cut_dimension_is_a_sum():
    op = view("Mean", ["float32[8,4]", "int32[1]"], ["float32[4]"], {1: [0]})
    local = find_rule("Mean").local_op(op, found(op, "S(0)[3,5] B")[0], 0)
    assert (local.op, local.divide_by) == ("Sum", 8.0)
    unknown = view("Mean", ["float32[?,4]", "int32[1]"], ["float32[4]"], {1: [0]})
    assert strategies(unknown, "S(0)[3,5] B") == []
    whole_numbers = view("Mean", ["int32[8,4]", "int32[1]"], ["int32[4]"], {1: [0]})
    assert strategies(whole_numbers, "S(0)[3,5] B") == []  # each part would be rounded


def test_an_empty_share_knows_its_outputs():
    op = view("Max", ["float32[8,4]", "int32[1]"], ["float32[4]"], {1: [0]})
    strategy = found(op, "S(0)[0,8] B")[0]
    assert find_known_outputs(op, strategy, 0)[0].tolist() == [-np.inf] * 4
    assert find_known_outputs(op, strategy, 1) == (None,)
    row = view("ArgMax", ["float32[8,4]", "int32[]"], ["int64[8]"], {1: 1})
    empty = find_known_outputs(row, found(row, "S(0)[0,8] B")[0], 0)[0]
    assert empty.shape == (0,) and empty.dtype == np.int64


def test_shapes_are_global():
    op = view("Shape", ["float32[8,4]"], ["int32[2]"])
    strategy = found(op, "S(0)[3,5]")[0]
    assert find_known_outputs(op, strategy, 1)[0].tolist() == [8, 4]


def test_a_rule_that_does_not_fit_says_which_op():
    one = rule("Sub", "m n, m n, m n -> m n")[0]
    with pytest.raises(RuleError, match="number of operands") as error:
        one.strategies(view("Sub", ["float32[4,6]", "float32[4,6]"], ["float32[4,6]"]), placements("B B"))
    assert "Sub n" in str(error.value)


def test_importing_rules_loads_little_and_reads_no_line():
    """What takes time at a start: other packages, and parsing. The seconds are what `benchmarks/start.py` prints."""
    code = (
        "import sys, numpy, whale.ir.program, whale.ir.layout; before = set(sys.modules)\n"
        "import whale.sharding_rules; whale.sharding_rules.load_rules()\n"
        "from whale.sharding_rules import notation, registry\n"
        "print(*sorted({name for name in sys.modules if name not in before}))\n"
        "print(notation.parse.cache_info().misses, registry._list_strategies.cache_info().misses)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded, counts = done.stdout.splitlines()
    assert {name.startswith("whale.sharding_rules") for name in loaded.split()} == {True}, loaded
    assert counts == "0 0"


def test_strategies_of_like_nodes_are_found_once():
    ops = [view("AddV2", [f"float32[{n},6]", "float32[6]"], [f"float32[{n},6]"]) for n in range(2, 102)]
    one, current = find_rule("AddV2"), [tuple(placements(f"S(0)[{n - 1},1] B")) for n in range(2, 102)]
    registry._list_strategies.cache_clear()
    for _ in range(30):
        for op, now in zip(ops, current):
            one.strategies(op, now)
    found = registry._list_strategies.cache_info()
    assert (found.misses, found.hits) == (100, 2900)


@pytest.mark.parametrize(("holds", "consts"), [("float32", [[3, 4]]), ("variant", [])])
def test_lists_of_lists_keep_the_element_shape_of_handles(holds: str, consts: list[list[int]]) -> None:
    """What a list of lists holds are handles: no dimension of theirs is cut, whatever the lists inside hold."""
    shape = [8, 4] if holds == "float32" else []
    operands = [f"int32[{len(shape)}]", "int32[]"]
    op = view("EmptyTensorList", operands, ["variant[]"], {0: shape, 1: -1}, element_dtype=holds)
    rule = find_rule("EmptyTensorList")
    assert rule is not None
    local = rule.local_op(op, Strategy((B, B), (shard(0, (5, 3)),), "as the reader asks"), 1)
    assert [value.tolist() for value in local.consts.values()] == consts
