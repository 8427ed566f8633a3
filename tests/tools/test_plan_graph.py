"""The graph of a plan: its operations and tensors, with layouts and bytes on them."""

from __future__ import annotations

from collections.abc import Callable

import networkx
import tensorflow as tf

import whale as wh


def train_step(x: tf.Tensor, weights: tf.Variable, bias: tf.Variable) -> tf.Tensor:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(x @ weights + bias))
    for variable, gradient in zip((weights, bias), tape.gradient(loss, (weights, bias))):
        variable.assign_sub(0.1 * gradient)
    return loss


def test_a_graph_has_the_steps_operations_with_their_layouts_and_what_they_move() -> None:
    weights, bias = tf.Variable(tf.ones((6, 4))), tf.Variable(tf.ones(4))
    plan = wh.plan(lambda x: train_step(x, weights, bias), tf.TensorSpec((8, 6)), ranks=2)
    graph = plan.graph()
    assert isinstance(graph, networkx.DiGraph) and networkx.is_directed_acyclic_graph(graph)
    product = next(name for name, op in graph.nodes(data="op") if op == "MatMul")
    assert graph.nodes[product]["layouts"] == {"data": ["S(0)[4,4]"]} and graph.nodes[product]["shapes"] == [(8, 4)]
    assert graph.nodes[product]["flops"] == 2 * 8 * 6 * 4
    moved = dict(graph.nodes(data="moved_bytes"))
    assert sum(moved.values()) == plan.logical_bytes > 0
    resharded = [edge for *_, edge in graph.edges(data="resharded") if edge]
    changes = {change for edge in resharded for change in edge}
    assert "data: P(sum) -> B" in changes and all(change.startswith("data: ") for change in changes)
    batch = next(before for before, _ in graph.in_edges(product) if graph.nodes[before]["op"] == "Placeholder")
    assert graph.edges[batch, product]["bytes"] == 8 * 6 * 4
    # What networkx computes of it: the loss depends on the batch, and the longest chain ends in an update.
    assert networkx.has_path(graph, batch, product)
    assert graph.nodes[networkx.dag_longest_path(graph)[-1]]["op"] in ("AssignSubVariableOp", "Identity", "NoOp")


def test_each_axis_of_a_mesh_has_its_layouts(ranks: Callable[..., None]) -> None:
    ranks(4, mesh=wh.Mesh(data=2, tensor=2))
    weights, bias = tf.Variable(tf.ones((6, 4))), tf.Variable(tf.ones(4))

    def step(x: tf.Tensor) -> tf.Tensor:
        with wh.split(axis="tensor"):
            return train_step(x, weights, bias)

    plan = wh.plan(step, tf.TensorSpec((8, 6)))
    graph = plan.graph()
    layouts = [found for _, found in graph.nodes(data="layouts") if found.keys() == {"data", "tensor"}]
    assert any(found["data"] == ["S(0)[4,4]"] for found in layouts)
    assert plan.record().strategy is not None
