"""Finds which tensors updates use element by element, and which tensors leave the scopes that divide them."""

from __future__ import annotations

import re

from whale.ir.ops import ALIASES, EXCHANGES
from whale.ir.program import Node, Program, Ref
from whale.passes.analysis.scopes import split_scope
from whale.sharding_rules import find_rule

_POINTWISE = re.compile(r"\{?~?\*\}?(, \*)* -> \*")


def is_taken_by_updates(program: Program, ref: Ref) -> bool:
    """Tells whether an update uses the elements of a tensor one by one, as a gradient that may be clipped or scaled.

    On the way the tensor may be sliced for ranks, or gathered from them.
    """
    seen, stack = {ref}, [ref]
    while stack:
        taken = stack.pop()
        elements = program.find_type(taken).elements
        for node, _ in program.consumers.get(taken, ()):
            if not node.outputs and any(r.node in program.variable_of for r in node.inputs):
                return True
            if not _keeps_elements(node):
                continue
            here = (r for r, t in zip(node.list_refs(), node.outputs) if t.is_static)
            more = {r for r in here if node.op in EXCHANGES or program.find_type(r).elements == elements} - seen
            seen |= more
            stack += more
    return False


def _keeps_elements(node: Node) -> bool:
    """Tells whether each element of a node's result depends only on the elements of its operands at the same index."""
    return node.op in ALIASES or node.op in EXCHANGES or node.op == "ClipByValue" or is_pointwise(node)


def is_pointwise(node: Node) -> bool:
    """Tells whether the one result is elementwise in the operands, which may broadcast."""
    line = getattr(find_rule(node.op), "spec", "")
    return len(node.outputs) == 1 and isinstance(line, str) and bool(_POINTWISE.fullmatch(line))


def find_leaving(program: Program) -> frozenset[Ref]:
    """Returns the tensors that leave ``wh.split`` scopes on the way to the program's results: activations that lead to
    the loss.

    Gradients are not among them, although they may lead to a norm that the program returns.
    """
    wanted: set[str] = set()
    stack = [ref.node for ref in program.outputs]
    while stack:
        name = stack.pop()
        if name not in wanted:
            wanted.add(name)
            stack += [r.node for r in program.by_name[name].inputs]
    split = {n.name for n in program.nodes if n.scope and split_scope(n.scope)}
    found = set()
    for node in program.nodes:
        if node.name in wanted and node.name not in split:
            found |= {r for r in node.inputs if r.node in split and r.node not in program.variable_of}
    return frozenset(ref for ref in found if not is_taken_by_updates(program, ref))
