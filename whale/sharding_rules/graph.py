"""Presents nodes of a program to sharding rules, and finds the uses of variables and the functions of loops and
branches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from whale.ir.layout import Placement
from whale.ir.ops import BRANCHES, HAS_BODIES, IDENTITIES, LOOPS
from whale.ir.program import Node, Program, Ref
from whale.ir.values import Func
from whale.sharding_rules.base import OpView
from whale.sharding_rules.registry import find_rule

_LIST_OPS = IDENTITIES | {"ZerosLike", "AddN"}


def is_list_op(node: Node) -> bool:
    """Returns True if the node returns TensorLists that it was given, or zeros like them, or their sum.

    Such nodes need no rule of their own: the placement of a list is that of its elements.
    """
    return node.op in _LIST_OPS and all(t.dtype == "variant" for t in node.outputs)


def has_variable_handle(program: Program, node: Node) -> bool:
    """Returns True if the node takes the handle of a variable; in a function's body, any resource that is passed in."""
    handles = program.variable_of
    return any(
        r.node in handles or (not handles and r.node in program.inputs)
        for r in node.inputs
        if program.find_type(r).dtype == "resource"
    )


def make_op_view(program: Program, node: Node, parts: int) -> OpView:
    """Returns ``node`` as its rule sees it, for a mesh axis with ``parts`` coordinates."""
    by_name = program.by_name
    types = tuple(by_name[r.node].outputs[r.index] for r in node.inputs)
    return OpView(node, types, parts, lambda i: program.const(node.inputs[i]))


def can_take(program: Program, node: Node, operand: int, current: list[Placement], parts: int) -> bool:
    """Returns True if the node's rule allows operand number ``operand`` in its present placement, so that it need not
    be resharded.

    The result is False for loops, branches and ops without a rule.

    Args:
      current: the present placements of all operands.
      parts: number of coordinates of the mesh axis.
    """
    rule = find_rule(node.op)
    if rule is None or node.op in HAS_BODIES:
        return False
    options = rule.strategies(make_op_view(program, node, parts), current)
    return any(option.inputs[operand] == current[operand] for option in options)


@dataclass(frozen=True, slots=True)
class Use:
    """Represents an op that takes variables.

    Attributes:
      graph: the graph that has the op: the program, or the body of a branch.
      node: the op.
      handles: for each operand, the name of the program's node that yields the variable's handle; "" if it is no
        variable.
    """

    graph: Program
    node: Node
    handles: tuple[str, ...]


def iterate_variable_uses(program: Program) -> Iterator[Use]:
    """Yields every op that takes variables; for a branch, the ops in its functions instead of the branch itself."""
    waiting = [(program, {Ref(name): name for name in program.variable_of})]
    while waiting:
        graph, known = waiting.pop()
        for node in graph.nodes:
            if known.keys().isdisjoint(node.inputs):
                continue
            handles = tuple([known.get(ref, "") for ref in node.inputs])
            if node.op not in BRANCHES:
                yield Use(graph, node, handles)
                continue
            for func in list_called_functions(node):
                body = program.functions[func.name]
                waiting.append((body, {Ref(name): handle for name, handle in zip(body.inputs, handles[1:]) if handle}))


def is_recreatable(program: Program, ref: Ref) -> bool:
    """Returns True if the producer of a tensor can be repeated to yield the tensor in any placement, instead of
    resharding it.

    That holds for ops such as a Fill, or one that makes an empty TensorList: those whose rule has ``produces_any``.
    """
    node = program.by_name[ref.node]
    return bool(getattr(find_rule(node.op), "produces_any", False))


def list_called_functions(node: Node) -> tuple[Func, ...]:
    """Returns the functions that a loop or branch node runs: (condition, body), or the branches in their order."""
    if "branches" in node.attrs:
        return tuple(node.attrs["branches"])
    keys = ("cond", "body") if node.op in LOOPS else ("then_branch", "else_branch")
    return tuple(node.attrs[k] for k in keys)
