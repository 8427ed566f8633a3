"""Tells optimizer state from what a model computes with, by what is computed from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from whale.ir.ops import BRANCHES, CONTRACTIONS, HAS_BODIES, LOOKUPS
from whale.ir.program import Node, Program
from whale.passes.analysis.resharding_cost import count_matmul_flops
from whale.sharding_rules.graph import list_called_functions


def only_state(program: Program) -> set[str]:
    """Returns the nodes that only contribute to updates of variables: no product, lookup or fetched tensor uses
    them.
    """
    fetched = {ref.node for ref in program.outputs}
    other = leading_to(program, lambda node: node.name in fetched or is_model(program, node))
    return {node.name for node in program.nodes if node.name not in other}


def leading_to(program: Program, is_end: Callable[[Node], bool]) -> set[str]:
    """Returns the nodes for which ``is_end`` is true, and all nodes from whose values these are computed."""
    found: set[str] = set()
    for node in reversed(program.nodes):
        if node.name in found or is_end(node):
            found.add(node.name)
            found.update([ref.node for ref in node.inputs])
    return found


def is_model(program: Program, node: Node) -> bool:
    """Tells whether a node belongs to the model: it is a product or a lookup, or has nested functions."""
    if node.op in BRANCHES:  # a branch may hold nothing but updates, every so many steps
        functions = program.functions
        bodies = [replace(functions[func.name], functions=functions) for func in list_called_functions(node)]
        return any(is_model(body, inside) for body in bodies for inside in body.nodes)
    if node.op in HAS_BODIES or node.op in LOOKUPS or node.op == "SparseTensorDenseMatMul":
        return True
    if node.op == "WhaleCall":  # a micro-batch
        return True
    return node.op in CONTRACTIONS and count_matmul_flops(node, [program.find_type(r) for r in node.inputs]) > 0
