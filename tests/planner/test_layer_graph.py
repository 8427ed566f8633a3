"""The graph of layers on the page of a captured plan."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import networkx

from whale.planner.report.layer_graph import ACROSS, describe_layer_graph


def step(
    arrows: Iterable[tuple[str, str]],
    resharded: dict[tuple[str, str], list[str]] | None = None,
    layouts: dict[str, dict[str, list[str]]] | None = None,
) -> Any:
    graph = networkx.DiGraph()
    for a, b in arrows:
        graph.add_edge(a, b, bytes=1024, resharded=(resharded or {}).get((a, b), []))
    for name in graph:
        graph.nodes[name].update(op=name.rpartition("/")[2], flops=int(not name.startswith("Const")), moved_bytes=8)
        graph.nodes[name].update(shapes=[(4, None)], layouts=(layouts or {}).get(name, {}))
    return graph


def describe(graph: Any, kept: Iterable[str], seconds: dict[str, float] | None = None) -> Any:
    kept = list(kept)
    return describe_layer_graph(graph, kept, seconds or {}, {name: f"of {name}" for name in kept})


def arrows_of(found: Any) -> set[tuple[str, str]]:
    return {(found["boxes"][a]["name"], found["boxes"][b]["name"]) for a, b, *_ in found["arrows"]}


def test_layers_stand_below_what_they_read() -> None:
    chain = [
        ("net/a/m", "net/b/m"),
        ("net/b/m", "net/c/m"),
        ("net/a/m", "net/c/m"),
        ("net/c/m", "gradient_tape/net/c/g"),
    ]
    chain += [("gradient_tape/net/c/g", "sgd/add"), ("net/b/m", "net/b/n"), ("net/b/n", "net/c/m")]
    rows, columns = {"data": ["S(0)[2,2]"]}, {"data": ["S(0)[2,2]"], "tensor": ["P(sum)"]}
    layouts = {"net/a/m": rows, "net/b/m": columns, "net/b/n": {"data": ["B"]}, "net/c/m": {"tensor": ["S(1)[2,2]"]}}
    graph = step(chain, {("net/b/m", "net/c/m"): ["data: S(0) -> B"]}, layouts)
    found = describe(graph, ["net/a", "net/b", "net/c", "sgd"], {"net/a": 1.0, "net/b": 1.0, "net/c": 1.0, "sgd": 9.0})
    boxes = {box["name"]: box for box in found["boxes"]}
    assert {name: box["y"] for name, box in boxes.items()} == {"a": 0, "b": 1, "c": 2} and found["lines"] == 3
    assert arrows_of(found) == {("a", "b"), ("b", "c"), ("a", "c")}
    assert [boxes[name]["ways"] for name in "abc"] == [[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]]
    assert boxes["b"]["text"] == "net/b\nof net/b" and boxes["b"]["moved"] == "16 B"
    changes = {tuple(arrow[:2]): arrow[2:] for arrow in found["arrows"]}
    assert changes[1, 2] == ["2.0 KiB", {"data: S(0) -> B": 1}, True]  # on the longest chain, as a -> c is not
    assert changes[0, 2] == ["1.0 KiB", {}, False]


def test_the_first_layer_of_the_longest_chain_counts() -> None:
    graph = step([("slow/m", "end/m"), ("quick/m", "more/m"), ("more/m", "end/m")])
    found = describe(graph, ["slow", "quick", "more", "end"], {"slow": 5.0, "quick": 1.0, "more": 1.0, "end": 1.0})
    # `layer_of` has two levels of scopes, of which the last is the operation: these layers are of one.
    assert {box["name"] for box in found["boxes"] if box["longest"]} == {"slow", "end"}


def test_arrows_lead_past_layers_that_are_not_drawn() -> None:
    graph = step([("a/m", "shape/s"), ("shape/s", "cast/c"), ("cast/c", "b/m")], {("a/m", "shape/s"): ["P(sum) -> B"]})
    found = describe(graph, ["a", "b"])
    assert arrows_of(found) == {("a", "b")} and found["arrows"][0][3] == {"P(sum) -> B": 1}


def test_layers_that_read_each_other_share_a_box() -> None:
    graph = step([("a/1", "b/1"), ("b/1", "a/2"), ("a/2", "c/1")])
    found = describe(graph, ["a", "b", "c"])
    assert {box["name"] for box in found["boxes"]} == {"a + b", "c"} and arrows_of(found) == {("a + b", "c")}


def test_operations_without_a_scope_stand_alone() -> None:
    graph = step([("MatMul", "a/m"), ("a/m", "MatMul_1"), ("MatMul_1", "b/m"), ("Const", "a/m")])
    found = describe(graph, ["a", "b", "(no scope)"])
    assert {box["name"]: box["y"] for box in found["boxes"]} == {"MatMul": 0, "a": 1, "MatMul_1": 2, "b": 3}
    assert arrows_of(describe(graph, ["a", "b"])) == {("a", "b")}


def test_operations_between_layers_of_their_scope_stand_alone() -> None:
    graph = step([("net/a/m", "net/add"), ("net/add", "net/b/m"), ("net/b/m", "net/add_1"), ("net/a/m", "net/add_1")])
    found = describe(graph, ["net", "net/a", "net/b"])
    assert {box["name"]: box["y"] for box in found["boxes"]} == {"a": 0, "add": 1, "b": 2, "add_1": 3}


def test_what_leads_to_no_gradient_is_no_layer_of_the_forward_pass() -> None:
    graph = step(
        [("a/m", "b/m"), ("b/m", "gradient_tape/b/g"), ("adam/rate", "adam/step"), ("gradient_tape/b/g", "adam/step")]
    )
    assert arrows_of(describe(graph, ["a", "b", "adam"])) == {("a", "b")}


def test_a_wide_generation_stands_on_several_lines() -> None:
    names = [f"table{number}" for number in range(ACROSS + 2)]
    found = describe(step((f"{name}/m", "all/m") for name in names), [*names, "all"])
    lines = [box["y"] for box in found["boxes"]]
    assert sorted(lines) == [0] * ACROSS + [1, 1, 2] and found["lines"] == 3
    assert all(abs(box["x"]) <= (ACROSS - 1) / 2 for box in found["boxes"])


def test_one_layer_is_no_graph() -> None:
    assert describe(step([("a/1", "a/2")]), ["a"]) is None
