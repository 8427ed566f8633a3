"""Sorts a rank's variables and tensors into categories of memory.

parameters (what a model computes with), slots (what only updates read), buffers (other variables; a step's inputs; what
communication keeps), gradients (with the sums of micro-batches, and what updates make of them on their way), gathered
(split weights, put together for their use), activations (all else, scratch memory of kernels as well).
"""

from __future__ import annotations

from whale.ir.ops import BATCH_NORM_GRADIENTS, EINSUMS, FILTER_GRADIENTS, MATMULS, RANK_REDUCTIONS, VIEWS
from whale.ir.program import PRODUCT, Program, Ref
from whale.ir.values import TensorType
from whale.passes.analysis.state import is_model, leading_to, only_state

OPTIMIZER_STATE = "optimizer state"
CATEGORIES = ("parameters", OPTIMIZER_STATE, "buffers", "gradients", "gathered", "activations")
# Ops that make a gradient from activations; their operands are no gradients.
_MADE_BY = (
    MATMULS
    | FILTER_GRADIENTS
    | BATCH_NORM_GRADIENTS
    | EINSUMS
    | {"BiasAddGrad", "Sum", "UnsortedSegmentSum", "ReadVariableOp"}
)


def variable_kinds(program: Program) -> dict[str, str]:
    """Maps handle nodes to parameters (what a model computes with), optimizer state (what only updates read), or
    buffers (the rest).
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
    """Returns the category of every tensor that is not an activation, in a rank's program or the function of a
    micro-batch.

    Gradients are tensors that are reduced over ranks or summed over micro-batches, and tensors of a variable's shape
    from which its update is computed.
    """
    found: dict[Ref, str] = {}
    waiting: list[Ref] = []
    passed = set[tuple[str, TensorType | None]]()  # an update of many variables has hundreds of results and operands
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
