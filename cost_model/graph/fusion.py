"""Estimates what XLA's fusion saves in compiled parts of a program: elementwise ops run inside the kernels that use
them.

The rules are those of XLA's instruction fusion (xla/service/instruction_fusion.cc, gpu/transforms/priority_fusion.cc),
as far as bytes go: a cheap elementwise operation is computed again in every kernel that uses it, and its result is not
written, if that moves no more bytes; an expensive one only if a single operation uses it; a reduction ends a kernel,
and products read and write memory.

Decision: 0173.
"""

from __future__ import annotations

from cost_model.kernels.op_work import COPIES, EXPENSIVE, FILLS, POINTWISE, Work
from whale.ir.ops import ALIASES, REDUCTIONS
from whale.ir.program import Node, Program, Ref

_LOOPS = POINTWISE | COPIES | FILLS | {"AddN", "Slice", "StridedSlice"}
_ROOTS = REDUCTIONS | {"BiasAddGrad", "L2Loss"}
FUSIBLE = _LOOPS | _ROOTS


def is_fusible(node: Node) -> bool:
    """Returns True if XLA may compute the node inside another node's kernel, or other nodes inside its own."""
    return node.marks.compiled and node.op in FUSIBLE


def fuse_work(program: Program, work: list[Work]) -> list[Work]:
    """Returns each node's work after fusion: a node that is fused into its users has none, and these read its
    operands.
    """
    if not any(node.marks.compiled for node in program.nodes):
        return work
    users = _count_fusing_users(program)
    leaves: dict[Ref, frozenset[Ref]] = {}  # for a result that is not written, what its users read instead
    found: list[Work] = []
    for node, does in zip(program.nodes, work):
        reads = frozenset[Ref]().union(*(leaves.get(ref, (ref,)) for ref in node.inputs))
        read_bytes = float(sum(program.find_type(ref).bytes for ref in reads))
        count = users.get(node.name, 0)
        again_bytes, once_bytes = count * read_bytes, read_bytes + (1 + count) * does.written_bytes
        if count and (node.op in ALIASES or again_bytes <= once_bytes):
            leaves.update((ref, reads) for ref in node.list_refs())
            found.append(Work())
        elif is_fusible(node):
            found.append(Work(does.flops, read_bytes, does.written_bytes, does.kernels))
        else:
            found.append(does)
    return found


def _count_fusing_users(program: Program) -> dict[str, int]:
    """Returns, for each node that may be fused into all of its users, the number of kernels that then compute it.

    The users of an alias (reshape, identity) count as users of its operand.
    """
    fetched = {ref.node for ref in program.outputs}
    found: dict[str, int] = {}
    for node in reversed(program.nodes):
        if node.name in fetched or not node.marks.compiled or node.op not in _LOOPS | ALIASES:
            continue
        users = [user for ref in node.list_refs() for user, _ in program.consumers.get(ref, ())]
        if all(is_fusible(user) or (user.op in ALIASES and user.name in found) for user in users):
            count = sum(found[user.name] if user.op in ALIASES else 1 for user in users)
            if count == 1 or node.op not in EXPENSIVE:
                found[node.name] = count
    return found
