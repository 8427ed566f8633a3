"""Lets a rank without rows take part in the communication of micro-batches, as often as the ranks with rows.

Decision: 0085.
"""

from __future__ import annotations

from whale.ir.layout import B, Strategy, divide_evenly, shard
from whale.ir.ops import COLLECTIVES, HAS_BODIES
from whale.ir.program import Node, Program
from whale.ir.values import TensorType, require_static_shape
from whale.sharding_rules.graph import list_called_functions


def of_no_rows(program: Program, micro_batches: int) -> dict[str, Strategy]:
    """Returns strategies with which a rank without rows takes part in the other ranks' exchanges, in each
    micro-batch.
    """
    found: dict[str, Strategy] = {}
    known: set[str] = set()  # values made from constants alone, or by ranks that have no rows either
    for node in program.nodes:
        of_known = node.inputs and not node.stateful and all(r.node in known for r in node.inputs)
        if node.op == "Const" or of_known or (node.op in COLLECTIVES and all(map(_has_no_elements, node.outputs))):
            known.add(node.name)
        dim, runs = node.marks.runs or (0, 0)
        operands = node.inputs[1:]
        if (
            node.op in COLLECTIVES
            and runs == micro_batches
            and all(r.node in known or _has_no_elements(program.find_type(r)) for r in operands)
        ):
            types = [*map(program.find_type, operands), *node.outputs]
            # Runs of one row may be seen as no runs where there are no rows.
            cuts = [shard(dim, divide_evenly(require_static_shape(t)[dim], runs)) for t in types]
            found[node.name] = Strategy((B, *cuts[: len(operands)]), tuple(cuts[len(operands) :]), "no rows")
    return found


def bodies_of(program: Program, node: Node) -> list[str]:
    """Returns the names of the bodies of a loop or branch, including nested ones."""
    names = [f.name for f in list_called_functions(node)] if node.op in HAS_BODIES else []
    return [
        *names,
        *(b for name in names for inner in program.functions[name].nodes for b in bodies_of(program, inner)),
    ]


def _has_no_elements(t: TensorType) -> bool:
    return t.is_static and 0 in require_static_shape(t)
