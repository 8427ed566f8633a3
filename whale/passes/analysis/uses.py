"""Finds what the values of a program are used for, from the nodes that read them.

``only_state`` finds nodes that compute nothing but optimizer state, ``is_taken_by_updates`` tells gradients (an update
takes them element by element), ``find_leaving`` finds activations that leave split scopes. ``variable_kinds`` and
``tensor_kinds`` sort a rank's variables and tensors into categories of memory:

    parameters       variables that the model computes with
    optimizer state  variables that only updates read (slot variables)
    buffers          other variables; a step's inputs; memory that communication keeps
    gradients        with sums of micro-batches, and what updates compute from gradients on the way
    gathered         sharded weights that were gathered for their use
    activations      everything else, also scratch memory of kernels
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from whale.ir.ops import (
    ALIASES,
    BATCH_NORM_GRADIENTS,
    BRANCHES,
    CONTRACTIONS,
    EINSUMS,
    EXCHANGES,
    FILTER_GRADIENTS,
    HAS_BODIES,
    LOOKUPS,
    MATMULS,
    RANK_REDUCTIONS,
    VIEWS,
)
from whale.ir.program import PRODUCT, Node, Program, Ref
from whale.ir.values import TensorType
from whale.passes.analysis.resharding_cost import count_matmul_flops
from whale.passes.analysis.scopes import split_scope
from whale.sharding_rules import find_rule
from whale.sharding_rules.graph import list_called_functions

_POINTWISE = re.compile(r"\{?~?\*\}?(, \*)* -> \*")
OPTIMIZER_STATE = "optimizer state"
CATEGORIES = ("parameters", OPTIMIZER_STATE, "buffers", "gradients", "gathered", "activations")

# Ops that compute a weight's gradient from activations: tensors before them are not counted as gradients.
_MADE_BY = (
    MATMULS
    | FILTER_GRADIENTS
    | BATCH_NORM_GRADIENTS
    | EINSUMS
    | {"BiasAddGrad", "Sum", "UnsortedSegmentSum", "ReadVariableOp"}
)


def is_taken_by_updates(program: Program, ref: Ref) -> bool:
    """Returns True if an update reads the tensor element by element, as it does a gradient, which may be clipped or
    scaled on the way.

    On the way the tensor may also be sliced for ranks, or gathered from them.
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
    """Returns True if each element of a node's result depends only on its operands' elements at the same index, or the
    node communicates.
    """
    return node.op in ALIASES or node.op in EXCHANGES or node.op == "ClipByValue" or is_pointwise(node)


def is_pointwise(node: Node) -> bool:
    """Returns True if the node has one result that is elementwise in its operands, which may broadcast; decided by its
    sharding rule.
    """
    line = getattr(find_rule(node.op), "spec", "")
    return len(node.outputs) == 1 and isinstance(line, str) and bool(_POINTWISE.fullmatch(line))


def find_leaving(program: Program) -> frozenset[Ref]:
    """Returns the tensors that leave ``wh.split`` scopes on the way to the program's results: activations that lead to
    the loss.

    Gradients are not among them, although the program may return their norm.
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


def only_state(program: Program) -> set[str]:
    """Returns the names of nodes that contribute to nothing but updates of variables: no product, lookup or returned
    tensor depends on them.
    """
    fetched = {ref.node for ref in program.outputs}
    other = leading_to(program, lambda node: node.name in fetched or is_model(program, node))
    return {node.name for node in program.nodes if node.name not in other}


def leading_to(program: Program, is_end: Callable[[Node], bool]) -> set[str]:
    """Returns the names of nodes for which ``is_end`` returns True, and of all nodes that these depend on."""
    found: set[str] = set()
    for node in reversed(program.nodes):
        if node.name in found or is_end(node):
            found.add(node.name)
            found.update([ref.node for ref in node.inputs])
    return found


def is_model(program: Program, node: Node) -> bool:
    """Returns True if a node belongs to the model rather than to updates: it is a matrix product, a lookup, a loop, or
    a branch that contains one of these.
    """
    if node.op in BRANCHES:  # a branch may contain only updates, as of an optimizer that runs every few steps
        functions = program.functions
        bodies = [replace(functions[func.name], functions=functions) for func in list_called_functions(node)]
        return any(is_model(body, inside) for body in bodies for inside in body.nodes)
    if node.op in HAS_BODIES or node.op in LOOKUPS or node.op == "SparseTensorDenseMatMul":
        return True
    if node.op == "WhaleCall":  # a micro-batch
        return True
    return node.op in CONTRACTIONS and count_matmul_flops(node, [program.find_type(r) for r in node.inputs]) > 0


def variable_kinds(program: Program) -> dict[str, str]:
    """Maps the handle node of each variable to its category: parameters, optimizer state or buffers (see the module's
    text).
    """
    state, model = only_state(program), leading_to(program, lambda node: is_model(program, node))
    found = {}
    for variable in program.variables:
        if variable.node in state:
            found[variable.node] = OPTIMIZER_STATE if variable.type.shape else "buffers"
        else:
            found[variable.node] = "parameters" if variable.node in model else "buffers"
    return found


def tensor_kinds(program: Program) -> dict[Ref, str]:
    """Maps every tensor that is not an activation to its category, gradients or gathered, in a rank's program or the
    function of a micro-batch.

    Gradients are tensors that are reduced over ranks or summed over micro-batches, and tensors of a variable's shape
    from which its update is computed.
    """
    found: dict[Ref, str] = {}
    waiting: list[Ref] = []
    passed = set[tuple[str, TensorType | None]]()  # visited: a fused update has hundreds of operands and results
    for node in program.nodes:
        if node.op in RANK_REDUCTIONS:
            waiting += [ref for ref in (*node.list_refs(), *node.inputs) if program.find_type(ref).dtype != "resource"]
        elif node.op == "WhaleAllGather" and _is_read(program, node.inputs[-1]):
            found[Ref(node.name)] = "gathered"
        elif node.name.endswith("/and_before"):
            waiting.append(Ref(node.name))
        elif node.inputs and node.inputs[0].node in program.variable_of and node.op != "ReadVariableOp":
            shapes = {v.type.shape for r in node.inputs if (v := program.variable_of.get(r.node)) and v.type.shape}
            waiting += [ref for ref in node.inputs[1:] if program.find_type(ref).shape in shapes]
    while waiting:
        ref = waiting.pop()
        if ref in found or ref.node in program.variable_of:
            continue
        node = program.by_name[ref.node]
        if node.op != "ReadVariableOp":
            found[ref] = "gradients"
        padded = node.op == "Slice" and node.inputs[0].node == f"{node.name}/{PRODUCT}"
        alike = None if padded or node.op in VIEWS else program.find_type(ref)
        if node.op not in _MADE_BY and (node.name, alike) not in passed:
            passed.add((node.name, alike))
            waiting += [r for r in node.inputs if alike is None or program.find_type(r) == alike]
    return found


def _is_read(program: Program, ref: Ref) -> bool:
    node = program.by_name[ref.node]
    while node.op in VIEWS and node.inputs:
        node = program.by_name[node.inputs[0].node]
    return node.op == "ReadVariableOp"
