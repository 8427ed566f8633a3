"""Loads the functions of a graph's library as graphs whose static shapes follow from the shapes that a caller passes.

TensorFlow traces a function, a loop's body or a branch once, often with unknown sizes. To plan a program, Whale needs
the sizes of one call. ``load_body`` loads one function for given arguments, ``import_settled_graph`` a whole GraphDef.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import func_graph, function_def_to_graph
from tensorflow.python.ops import handle_data_util

from whale.ir.ops import BRANCHES, CALLS, HAS_BODIES, LOOPS

# (graph of the caller, name of a function, its arguments) -> what the function returns, typed for these arguments.
Results = Callable[[tf.Graph, str, list[tf.Tensor]], Sequence[tf.Tensor]]

_HANDLES = (tf.resource, tf.variant)


@dataclass(frozen=True, slots=True)
class Body:
    """Holds a function of a graph's library as a graph of its own, with the static shapes of one call; ``load_body``
    creates it.

    Attributes:
      graph: the graph of the function's nodes.
      graph_def: the GraphDef of ``graph`` if it has been made already, else None.
      inputs: names of the placeholders that stand for the arguments.
      outputs: the tensors of ``graph`` that the function returns.
      effects: names of the nodes that run for their side effects (the function's control outputs).
    """

    graph: tf.Graph
    graph_def: Any | None
    inputs: list[str]
    outputs: list[tf.Tensor]
    effects: list[str]


def load_body(caller: tf.Graph, library: Mapping[str, Any], name: str, arguments: list[tf.Tensor] | None) -> Body:
    """Returns function ``name`` as a graph whose shapes follow from ``arguments``.

    The FuncGraph that tf.function has traced is used if its inputs are at least as static as ``arguments``. Otherwise
    the FunctionDef is imported again, so that TensorFlow's shape functions see the caller's shapes.

    Args:
      caller: the graph that holds the call.
      library: FunctionDefs by name.
      arguments: the tensors of ``caller`` that the call passes; None: use the types that the FunctionDef declares.
    """
    function_def = library[name]
    traced = _find_traced_graph(caller, name)
    if traced is not None and _is_fitting_trace(traced, function_def, arguments):
        body = _make_traced_body(traced, function_def)
        if body is not None:
            return body
    return _import_body(caller, library, function_def, arguments)


def _find_traced_graph(graph: tf.Graph | None, name: str) -> func_graph.FuncGraph | None:
    while graph is not None:
        function = graph._functions.get(name)
        if function is not None:
            traced = getattr(function, "graph", None)
            return traced if isinstance(traced, func_graph.FuncGraph) else None
        graph = getattr(graph, "outer_graph", None)
    return None


def _is_fitting_trace(traced: func_graph.FuncGraph, function_def: Any, arguments: list[tf.Tensor] | None) -> bool:
    # A trace's inputs and outputs grow when its gradient is taken, after the FunctionDef was made.
    if len(traced.inputs) != len(function_def.signature.input_arg):
        return False
    if arguments is None:
        return True
    return all(
        own.dtype == given.dtype and (own.dtype in _HANDLES or _is_compatible_and_known(own.shape, given.shape))
        for own, given in zip(traced.inputs, arguments)
    )


def _is_compatible_and_known(own: tf.TensorShape, given: tf.TensorShape) -> bool:
    if given.rank is None:
        return True
    if own.rank != given.rank:
        return False
    return all(g is None or g == o for o, g in zip(own.as_list(), given.as_list()))


def _make_traced_body(traced: func_graph.FuncGraph, function_def: Any) -> Body | None:
    """Returns the traced graph as a Body; None if its node names differ from those of ``function_def``."""
    arguments = {a.name: t for a, t in zip(function_def.signature.input_arg, traced.inputs)}
    graph_def = traced.as_graph_def()
    op_types = {n.name: n.op for n in graph_def.node}
    if any(op_types.get(n.name) != n.op for n in function_def.node_def):
        return None
    outputs = []
    for result in function_def.signature.output_arg:
        text = function_def.ret[result.name]
        if text in arguments:
            outputs.append(arguments[text])
            continue
        node, output_arg, index = text.split(":")
        op = traced.get_operation_by_name(node)
        outputs.append(op.outputs[_map_output_ranges(op)[output_arg] + int(index)])
    effects = [function_def.control_ret[c] for c in function_def.signature.control_output]
    return Body(traced, graph_def, [t.op.name for t in traced.inputs], outputs, effects)


def _map_output_ranges(op: tf.Operation) -> dict[str, int]:
    """Maps each output argument of the op to the index of its first tensor in ``op.outputs``."""
    first: dict[str, int] = {}
    count = 0
    node_def = op.node_def
    for argument in op.op_def.output_arg:
        first[argument.name] = count
        if argument.number_attr:
            count += node_def.attr[argument.number_attr].i
        elif argument.type_list_attr:
            count += len(node_def.attr[argument.type_list_attr].list.type)
        else:
            count += 1
    return first


def import_settled_graph(graph_def: Any) -> tf.Graph:
    """Imports a GraphDef into a new graph, with the shapes of loops and branches as static as their inputs allow.

    Changes the shapes that ``graph_def`` records for loops and branches, as ``import_settled`` does.
    """
    library = {f.signature.name: f for f in graph_def.library.function}

    def import_graph() -> tf.Graph:
        graph = tf.Graph()
        with graph.as_default():
            tf.graph_util.import_graph_def(graph_def, name="")
        return graph

    return import_settled(graph_def, import_graph, lambda g, name, given: load_body(g, library, name, given).outputs)


def _import_body(
    caller: tf.Graph, library: Mapping[str, Any], function_def: Any, arguments: list[tf.Tensor] | None
) -> Body:
    signature = function_def.signature
    with caller.as_default():
        graph_def, flat_names = function_def_to_graph.function_def_to_graph_def(function_def)
    count = len(signature.input_arg)
    own_shapes = [n.attr["shape"].shape if "shape" in n.attr else None for n in graph_def.node[:count]]
    del graph_def.node[:count]
    for node in graph_def.node:
        node.attr.pop("_class", None)
        node.attr.pop("_output_shapes", None)
    # With the callees at hand TensorFlow infers shapes through calls.
    present = {f.signature.name for f in graph_def.library.function}
    graph_def.library.function.extend(library[n] for n in _list_callees(graph_def, library) if n not in present)
    # The importer refuses names that no node reads.
    read = {text for node in graph_def.node for text in node.input}
    given: dict[str, tf.Tensor] = {}

    def import_function() -> func_graph.FuncGraph:
        with caller.as_default():
            graph = func_graph.FuncGraph(signature.name)
        with graph.as_default():
            for i, argument in enumerate(signature.input_arg):
                shape = own_shapes[i] if arguments is None else arguments[i].shape
                tensor = tf.compat.v1.placeholder(tf.dtypes.as_dtype(argument.type), shape, argument.name)
                if arguments is not None and tensor.dtype in _HANDLES:
                    handle_data_util.copy_handle_data(arguments[i], tensor)
                given[argument.name] = tensor
                graph.inputs.append(tensor)
            input_map: dict[str, Any] = {}
            for name, tensor in given.items():
                if name in read or f"{name}:0" in read:
                    input_map[f"{name}:0"] = tensor
                if f"^{name}" in read:
                    input_map[f"^{name}"] = tensor.op
            tf.graph_util.import_graph_def(graph_def, input_map=input_map, name="")
        return graph

    graph = import_settled(
        graph_def, import_function, lambda g, name, given: load_body(g, library, name, given).outputs
    )

    def find_tensor(text: str) -> tf.Tensor:
        return given[text] if text in given else graph.get_tensor_by_name(flat_names[text])

    outputs = [find_tensor(function_def.ret[r.name]) for r in signature.output_arg]
    effects = [function_def.control_ret[c] for c in signature.control_output]
    return Body(graph, None, [t.op.name for t in graph.inputs], outputs, effects)


def _list_callees(graph_def: Any, library: Mapping[str, Any]) -> list[str]:
    """Returns the names of the functions that the nodes of ``graph_def`` call, directly or through other functions."""
    found: dict[str, None] = {}
    waiting = [graph_def.node]
    while waiting:
        for node in waiting.pop():
            names = [node.op] if node.op in library else []
            if node.op in CALLS:
                names.append(node.attr["f"].func.name)
            for name in names:
                if name in library and name not in found:
                    found[name] = None
                    waiting.append(library[name].node_def)
    return list(found)


def import_settled(graph_def: Any, imported: Callable[[], tf.Graph], results: Results) -> tf.Graph:
    """Imports ``graph_def`` repeatedly, until the shapes of its loops and branches no longer change.

    A While or If node records the shapes that its outputs had when it was built, which are too loose for placeholders
    of smaller or better known shapes. Each loop is first assumed to keep the shapes of its inputs. If its body, with
    arguments of these shapes, returns another size in some dimension, that dimension becomes unknown. A branch node
    gets the most specific shapes that all its branches fit. This ends, because shapes of loops only get looser, and
    between two such changes the branches settle in the order in which they depend on each other.

    Args:
      graph_def: the graph to import; the shapes that its loops and branches record are overwritten.
      imported: called for each import: imports the present ``graph_def`` into a new graph and returns that graph.
      results: ``results(graph, name, arguments)`` returns the output tensors, with their shapes, of library function
        ``name`` for these arguments.

    Returns:
      The graph of the last import.
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
    """Records ``shapes`` in the node; returns False if the outputs of ``op`` had these shapes already."""
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
    """Returns new output shapes of a While op: in dimensions whose size an iteration of the body changes, the size
    becomes unknown.

    Args:
      graph: the latest import of the graph.
      node: the loop's NodeDef.
      op: the loop's operation in ``graph``.
      recorded: the output shapes that the node recorded when it was built.
      results: as for ``import_settled``.
    """
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
    """Returns, for each output of a branch node (If, Case), the most specific shape that fits the results of all
    branches.

    Args:
      graph: the latest import of the graph.
      node: the NodeDef.
      op: the operation in ``graph``.
      recorded: the output shapes that the node recorded when it was built.
      results: as for ``import_settled``.
    """
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
    """Fills unknown sizes of an inferred shape from the shape that the node recorded when it was built.

    Returns the inferred shape unchanged if the two contradict each other.

    Args:
      shape: the inferred shape; None: nothing was inferred.
      recorded: the shape that the node recorded.
    """
    shape = tf.TensorShape(None) if shape is None else shape
    return shape.merge_with(recorded) if shape.is_compatible_with(recorded) else shape
