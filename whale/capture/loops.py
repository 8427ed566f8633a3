"""Importing a graph so that the outputs of its While loops are as static as the loops' inputs allow."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from whale.capture.bodies import body_graph

_LOOPS = frozenset({"While", "StatelessWhile"})


def import_with_loops(graph_def: Any) -> tf.Graph:
    """``graph_def`` in a new graph.

    A While records the shapes that its loop variables had when it was built; with other placeholders these are too
    loose. Each loop is first taken to keep the shapes of its inputs. Where the body, typed so, returns another shape,
    that dimension is loosened and the graph imported again, until all bodies agree (sizes are only ever loosened, so
    this ends). Writes to ``graph_def``.
    """
    library = {f.signature.name: f for f in graph_def.library.function}
    loops = [n for n in graph_def.node if n.op in _LOOPS and _is_loose(n)]
    recorded = {n.name: [tf.TensorShape(s) for s in n.attr["output_shapes"].list.shape] for n in loops}
    for node in loops:
        # Without recorded shapes a While passes its inputs' shapes on.
        node.attr["output_shapes"].list.ClearField("shape")
    while True:
        graph = tf.Graph()
        with graph.as_default():
            tf.graph_util.import_graph_def(graph_def, name="")
        changed = False
        for node in loops:
            op = graph.get_operation_by_name(node.name)
            taken = [t.shape for t in op.outputs]
            agreed = _agreed(graph, library, node, op, recorded[node.name])
            if any(t != a for t, a in zip(_dims(taken), _dims(agreed), strict=True)):
                del node.attr["output_shapes"].list.shape[:]
                node.attr["output_shapes"].list.shape.extend(s.as_proto() for s in agreed)
                changed = True
        if not changed:
            return graph


def _is_loose(node: Any) -> bool:
    shapes = node.attr["output_shapes"].list.shape
    return any(s.unknown_rank or any(d.size < 0 for d in s.dim) for s in shapes)


def _dims(shapes: list[tf.TensorShape]) -> list[Any]:
    return [None if s.rank is None else tuple(s.as_list()) for s in shapes]


def _agreed(
    graph: tf.Graph, library: Any, node: Any, op: tf.Operation, recorded: list[tf.TensorShape]
) -> list[tf.TensorShape]:
    """The shapes of the loop's outputs, loosened where one turn of the body does not keep them."""
    arguments = [
        i if i.dtype in (tf.resource, tf.variant) else o for i, o in zip(op.inputs, op.outputs, strict=True)
    ]
    results = body_graph(graph, library, node.attr["body"].func.name, arguments).outputs
    agreed = []
    for i, (own, result) in enumerate(zip(op.outputs, results, strict=True)):
        shape = own.shape.most_specific_common_supertype([result.shape]) if own.shape.rank is not None else own.shape
        shape = tf.TensorShape(None) if shape is None else shape
        # What the loop was built with holds in any case.
        agreed.append(shape.merge_with(recorded[i]) if shape.is_compatible_with(recorded[i]) else shape)
    return agreed
