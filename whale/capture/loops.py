"""Imports a graph so that the outputs of its loops and branches are as static as their inputs allow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from whale.ir.ops import BRANCHES, HAS_BODIES, LOOPS

# (graph of the caller, name of a function, its arguments) -> what the function returns, typed for these arguments.
Results = Callable[[tf.Graph, str, list[tf.Tensor]], Sequence[tf.Tensor]]


def import_settled(graph_def: Any, imported: Callable[[], tf.Graph], results: Results) -> tf.Graph:
    """Imports ``graph_def`` by ``imported`` until the shapes written into it have settled, and returns the graph.

    Loops and branches record the shapes that their outputs had when they were built; with other placeholders these are
    too loose. Each loop is first taken to keep the shapes of its inputs. Where the body, typed so, returns another
    shape, that dimension is loosened. A branch node gets what its alternatives, typed for its inputs, agree on. The
    graph is imported again until nothing changes: sizes of loops are only ever loosened, and between two such changes
    branches settle in the order in which they depend on each other, so this ends. Writes to ``graph_def``.
    """
    loose = [n for n in graph_def.node if _is_loose(n)]
    loops = [n for n in loose if n.op in LOOPS]
    branches = [n for n in loose if n.op in BRANCHES]
    recorded = {n.name: _read_recorded_shapes(n) for n in loose}
    for node in loops:
        # Without recorded shapes a While passes its inputs' shapes on.
        node.attr["output_shapes"].list.ClearField("shape")
    while True:
        graph = imported()
        changed = False
        for node in loops:
            op = graph.get_operation_by_name(node.name)
            changed |= _write_shapes(node, op, _loosen_loop_shapes(graph, node, op, recorded[node.name], results))
        for node in branches:
            op = graph.get_operation_by_name(node.name)
            changed |= _write_shapes(node, op, _merge_branch_shapes(graph, node, op, recorded[node.name], results))
        if not changed:
            return graph


def _read_recorded_shapes(node: Any) -> list[tf.TensorShape]:
    return [tf.TensorShape(s) for s in node.attr["output_shapes"].list.shape]


def _is_loose(node: Any) -> bool:
    if node.op not in HAS_BODIES:
        return False
    shapes = node.attr["output_shapes"].list.shape
    return any(s.unknown_rank or any(d.size < 0 for d in s.dim) for s in shapes)


def _write_shapes(node: Any, op: tf.Operation, shapes: Sequence[tf.TensorShape]) -> bool:
    """Records ``shapes`` unless the outputs have them already; says whether it did."""
    if _list_dims([t.shape for t in op.outputs]) == _list_dims(shapes):
        return False
    del node.attr["output_shapes"].list.shape[:]
    node.attr["output_shapes"].list.shape.extend(s.as_proto() for s in shapes)
    return True


def _list_dims(shapes: Sequence[tf.TensorShape]) -> list[Any]:
    return [None if s.rank is None else tuple(s.as_list()) for s in shapes]


def _loosen_loop_shapes(
    graph: tf.Graph, node: Any, op: tf.Operation, recorded: Sequence[tf.TensorShape], results: Results
) -> list[tf.TensorShape]:
    """Returns the shapes of the loop's outputs, loosened where one iteration of the body does not keep them."""
    arguments = [i if i.dtype in (tf.resource, tf.variant) else o for i, o in zip(op.inputs, op.outputs, strict=True)]
    returned = results(graph, node.attr["body"].func.name, arguments)
    kept = []
    for i, (own, result) in enumerate(zip(op.outputs, returned, strict=True)):
        shape = own.shape.most_specific_common_supertype([result.shape]) if own.shape.rank is not None else own.shape
        kept.append(_merge_recorded(shape, recorded[i]))
    return kept


def _merge_branch_shapes(
    graph: tf.Graph, node: Any, op: tf.Operation, recorded: Sequence[tf.TensorShape], results: Results
) -> list[tf.TensorShape]:
    """Returns the shapes on which all alternatives of a branch node agree, for each of its outputs."""
    if "branches" in node.attr:
        names = [f.name for f in node.attr["branches"].list.func]
    else:
        names = [node.attr[key].func.name for key in ("then_branch", "else_branch")]
    first, *others = [results(graph, name, list(op.inputs)[1:]) for name in names]
    agreed = []
    for i, result in enumerate(first):
        shape = result.shape
        if shape.rank is not None:
            shape = shape.most_specific_common_supertype([other[i].shape for other in others])
        agreed.append(_merge_recorded(shape, recorded[i]))
    return agreed


def _merge_recorded(shape: tf.TensorShape | None, recorded: tf.TensorShape) -> tf.TensorShape:
    """Merges a shape with the one that the node was built with, which holds in any case, if they are compatible."""
    shape = tf.TensorShape(None) if shape is None else shape
    return shape.merge_with(recorded) if shape.is_compatible_with(recorded) else shape
