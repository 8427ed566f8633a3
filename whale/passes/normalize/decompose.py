"""Decomposes composite ops into simple ones that have a distributed form.

Batch normalisation over a batch that is divided (``sync_batch_norm``), softmax and its losses over classes that are
split (``vocab_parallel_softmax``), the search for an extremum over these (``arg_extremum``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from whale.errors import ProgramError
from whale.ir.ops import BATCH_NORM_GRADIENTS, BATCH_NORMS
from whale.ir.program import Node, Program, Ref, remove_unread, sort_nodes
from whale.passes.normalize.arg_extremum import arg_extremum, is_arg_extremum
from whale.passes.normalize.emitter import NodeEmitter
from whale.passes.normalize.sync_batch_norm import sync_batch_norm
from whale.passes.normalize.vocab_parallel_softmax import is_softmax, softmax


def is_composite(node: Node) -> bool:
    """Tells whether ``node`` is a batch normalisation with the statistics of the batch, or its gradient."""
    if node.op not in BATCH_NORMS and node.op not in BATCH_NORM_GRADIENTS:
        return False
    return node.attrs.get("is_training", True) is not False  # where the attribute is absent, it is its default


def has_split_form(program: Program, node: Node) -> bool:
    """Tells whether ``decompose`` can rewrite the node so that the dimension it searches or sums can be split."""
    return is_softmax(node) or is_arg_extremum(program, node)


def decompose(program: Program, predicate: Callable[[Node], bool] = lambda node: True) -> Program:
    """Replaces the composite nodes of ``program`` that ``predicate`` selects by simple ops, called ``<name>/...``.

    A gradient reads mean and variance from its forward node's reserve spaces: both are decomposed, or neither.
    Bodies of functions are decomposed too.

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
        if node.op in BATCH_NORM_GRADIENTS:
            _check_pair(program, node, chosen)
        inputs = tuple([moved.get(r, r) for r in node.inputs])
        if inputs != node.inputs:
            node = replace(node, inputs=inputs)
        if node.name not in chosen:
            nodes[node.name] = node
            continue
        if not is_composite(node):
            write = softmax if is_softmax(node) else arg_extremum
            results = write(NodeEmitter(program, node, nodes, taken))
        else:
            results = sync_batch_norm(program, node, nodes, taken)
        moved.update({Ref(node.name, i): r for i, r in enumerate(results)})
        # Whatever waits for the whole op still can.
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
    # Reserve space 1 is the fourth operand; what reaches a gradient through a loop's state has no forward node here.
    forward = program.by_name.get(gradient.inputs[3].node)
    if forward is None or forward.op not in BATCH_NORMS:
        return
    if (forward.name in chosen) != (gradient.name in chosen):
        raise ProgramError(
            "batch normalisation and its gradient are decomposed together or not at all",
            op=gradient.name,
            given=f"only {forward.name if forward.name in chosen else gradient.name} is picked",
            expected=f"{forward.name} and {gradient.name}",
            action="let the predicate answer the same for both",
        )
