"""Decomposes composite ops into simple ones that have sharding rules.

These are batch normalisation over a sharded batch (``sync_batch_norm``), softmax and its losses over sharded classes
(``vocab_parallel_softmax``), and ArgMax or ArgMin over a sharded dimension. ArgMax becomes the smallest of the indices
whose element equals the maximum, so that both reductions can be over shards; if no element equals it (NaN) the index is
0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from whale.errors import REPORT_FAULT, ProgramError
from whale.ir.ops import BATCH_NORM_GRADIENTS, BATCH_NORMS
from whale.ir.program import Node, Program, Ref, remove_unread, sort_nodes
from whale.ir.values import DType, TensorType
from whale.passes.normalize.emitter import NodeEmitter
from whale.passes.normalize.sync_batch_norm import sync_batch_norm
from whale.passes.normalize.vocab_parallel_softmax import is_softmax, softmax


def is_composite(node: Node) -> bool:
    """Returns True if ``node`` is a batch normalisation in training mode (statistics of the batch), or its gradient."""
    if node.op not in BATCH_NORMS and node.op not in BATCH_NORM_GRADIENTS:
        return False
    return node.attrs.get("is_training", True) is not False  # where the attribute is absent, it is its default


def has_split_form(program: Program, node: Node) -> bool:
    """Returns True if ``decompose`` can rewrite the softmax, loss or arg max ``node`` so that the dimension it reduces
    can be sharded.
    """
    return is_softmax(program, node) or _is_arg_extremum(program, node)


def decompose(program: Program, predicate: Callable[[Node], bool] = lambda node: True) -> Program:
    """Replaces the composite nodes that ``predicate`` selects by simple ops named ``<name>/...``, in the program and
    its functions.

    A batch norm's gradient reads mean and variance from its forward node's reserve spaces, so both or neither must be
    selected.

    Raises:
      ProgramError: a selected node's shape is unknown, or only one of a forward node and its gradient is selected.
    """
    functions = {name: _decompose_graph(body, predicate) for name, body in program.functions.items()}
    return replace(_decompose_graph(program, predicate), functions=functions)


def _decompose_graph(program: Program, predicate: Callable[[Node], bool]) -> Program:
    chosen = {n.name for n in program.nodes if predicate(n) and (is_composite(n) or has_split_form(program, n))}
    if not chosen:
        return program
    taken = set(program.by_name)
    moved: dict[Ref, Ref] = {}
    nodes: dict[str, Node] = {}
    for node in program.nodes:
        write = softmax if is_softmax(program, node) else _arg_extremum
        if node.op in BATCH_NORM_GRADIENTS:
            _check_pair(program, node, chosen)
        inputs = tuple([moved.get(r, r) for r in node.inputs])
        if inputs != node.inputs:
            node = replace(node, inputs=inputs)
        if node.name not in chosen:
            nodes[node.name] = node
            continue
        if not is_composite(node):
            results = write(NodeEmitter(program, node, nodes, taken))
        else:
            results = sync_batch_norm(program, node, nodes, taken)
        moved.update({Ref(node.name, i): r for i, r in enumerate(results)})
        # Nodes that wait for the composite op wait for this NoOp, and by it for all results.
        done = tuple(dict.fromkeys(r.node for r in results))
        nodes[node.name] = Node(node.name, "NoOp", (), done, scope=node.scope)
    return remove_unread(
        replace(
            program,
            nodes=sort_nodes(nodes),
            outputs=tuple(moved.get(r, r) for r in program.outputs),
        ),
        chosen,
    )


def _check_pair(program: Program, gradient: Node, chosen: set[str]) -> None:
    # Operand 3 is the forward node's reserve space 1; if it comes through a loop's state, no forward node is found.
    forward = program.by_name.get(gradient.inputs[3].node)
    if forward is None or forward.op not in BATCH_NORMS:
        return
    if (forward.name in chosen) != (gradient.name in chosen):
        raise ProgramError(
            "a batch normalisation and its gradient have to be decomposed together or not at all",
            op=gradient.name,
            given=f"only {forward.name if forward.name in chosen else gradient.name} is selected",
            expected=f"both or none of {forward.name} and {gradient.name}",
            action="call decompose with a `predicate` that returns the same for both nodes; if a run or plan stops "
            f"here, {REPORT_FAULT}",
        )


def _is_arg_extremum(program: Program, node: Node) -> bool:
    """Returns True if the node is an ArgMax or ArgMin that ``_arg_extremum`` can decompose: the dimension and its size
    are known.
    """
    if node.op not in ("ArgMax", "ArgMin"):
        return False
    kind = program.find_type(node.inputs[0])
    at = program.const(node.inputs[1])
    if kind.dtype not in ("float16", "bfloat16", "float32", "float64", "int32", "int64") or at is None:
        return False
    shape = kind.shape or ()
    return bool(shape) and shape[int(np.asarray(at).reshape(())) % len(shape)] is not None


def _arg_extremum(emit: NodeEmitter) -> list[Ref]:
    """Adds simple nodes that compute the result of the emitter's ArgMax or ArgMin node; returns it as the only item of
    a list.
    """
    node, x = emit.node, emit.node.inputs[0]
    shape = emit.type_of(x).shape or ()
    at = int(np.asarray(emit.program.const(node.inputs[1])).reshape(())) % len(shape)
    count = shape[at]
    assert count is not None, node.name
    index = node.outputs[0].dtype
    largest = emit.reduce_over("whale_max", "Max" if node.op == "ArgMax" else "Min", x, (at,), keep=True)
    attrs = {"T": DType(emit.dtype), "incompatible_shape_error": True}
    hit = emit.node_of("hit", "Equal", (x, largest), TensorType("bool", shape), attrs)
    wide = tuple(n if d == at else 1 for d, n in enumerate(shape))
    numbers = emit.const("numbers", np.arange(count, dtype=index).reshape(wide))
    size = emit.const("size", np.array(count, index))
    emit.dtype = index
    found = emit.add("candidates", "SelectV2", (hit, numbers, size), shape)
    first = emit.reduce_over("first", "Min", found, (at,), keep=False)
    return [emit.add("index", "FloorMod", (first, size), shape[:at] + shape[at + 1 :])]
