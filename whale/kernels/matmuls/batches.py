"""Replaces batches of products that share a matrix by one matrix product, in a rank's program.

Keras' projections (EinsumDense, and with it all of its attentions) multiply a batch of matrices by one: TensorFlow
computes a product for each matrix of the batch, and as many gradients of the weight, which it adds up.

Decision: 0125.
"""

from __future__ import annotations

from dataclasses import replace

from whale.ir.program import Node, Program
from whale.ir.values import require_static_shape
from whale.kernels.choices import ALL, Choices
from whale.kernels.matmuls.matrices import Factor, ProductNodes, may_multiply
from whale.kernels.xla import change_other_graphs

_BATCHES = ("BatchMatMul", "BatchMatMulV2")


def replace_batches(program: Program, choices: Choices = ALL) -> Program:
    """Replaces batches of products with a common matrix by one product, in one rank's program and its functions."""
    return change_other_graphs(program, lambda graph: _replace_in_graph(graph, choices))


def _replace_in_graph(program: Program, choices: Choices) -> Program:
    if program.ops.isdisjoint(_BATCHES):
        return program
    summed = {name: batch for name, batch in _find_sums(program).items() if choices.takes("products", program, batch)}
    gone = {batch.name for batch in summed.values()}
    products = ProductNodes()
    for node in program.nodes:
        if node.name in gone:
            continue
        batch = summed.get(node.name)
        if batch is not None:
            node = replace(node, controls=tuple(dict.fromkeys((*node.controls, *batch.controls))))
            products.add(node, _list_factors(program, batch))
        elif _has_one_matrix(program, node) and choices.takes("products", program, node):
            products.add(node, _list_factors(program, node))
        else:
            products.keep(node)
    return program.replace_nodes(tuple(products.emitter.nodes.values()))


def _list_factors(program: Program, batch: Node) -> list[Factor]:
    """Returns a batch's operands as matrices of their last dimension."""
    turned = (bool(batch.attrs.get(key, False)) for key in ("adj_x", "adj_y"))
    return [Factor(ref, program.find_type(ref), turn) for ref, turn in zip(batch.inputs, turned)]


def _has_one_matrix(program: Program, node: Node) -> bool:
    """Tells whether all matrices of a batch are multiplied by the same one."""
    if node.op not in _BATCHES:
        return False
    left, right = _list_factors(program, node)
    if left.transposed or not may_multiply(node, (left.type, right.type, node.outputs[0])):
        return False
    return set(require_static_shape(right.type)[:-2]) <= {1}


def _find_sums(program: Program) -> dict[str, Node]:
    """Finds nodes that sum all products of a batch over the rows of each matrix; returns each with its batch.

    Nothing else reads such a batch.
    """
    needed = {*program.effects, *[ref.node for ref in program.outputs]}
    needed.update(name for node in program.nodes for name in node.controls)
    found = {}
    for node in program.nodes:
        batch = program.by_name[node.inputs[0].node] if node.op == "Sum" else None
        if batch is None or batch.op not in _BATCHES or batch.name in needed:
            continue
        left, right = _list_factors(program, batch)
        axes = program.const(node.inputs[1])
        if axes is None or not may_multiply(batch, (left.type, right.type, node.outputs[0])):
            continue
        sizes = require_static_shape(left.type)
        rank = len(sizes)
        alone = len(program.consumers[node.inputs[0]]) == 1 and left.transposed and not right.transposed
        whole = sorted(int(axis) % rank for axis in axes.reshape(-1)) == list(range(rank - 2))
        if alone and whole and rank > 2 and sizes[:-2] == require_static_shape(right.type)[:-2]:
            found[node.name] = batch
    return found
