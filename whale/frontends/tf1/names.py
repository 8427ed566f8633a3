"""Names variables and other resources in the graph in which a session's ranks run."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from whale.ir.program import Node, Program


def find_name(handle: Node) -> str:
    """Returns the name under which the session knows a variable."""
    return str(handle.attrs.get("shared_name") or handle.name)


def make_rank_prefix(position: int) -> str:
    """Returns the prefix of the names of variables (and tables, queues) of this process's rank number ``position``."""
    return f"whale_rank{position}/" if position else ""


def rename_resources(program: Program, position: int, on_host: Collection[str]) -> Program:
    """Renames the resources of a program for the session, where variables, tables, queues and iterators are found by
    name.

    The first rank's have the user's names, those of in-process ranks others. A resource without a shared name has its
    node's, as in TensorFlow.

    Args:
      on_host: names of the variables in the host's memory beside an accelerator.
    """
    prefix = make_rank_prefix(position)

    def rename_node(node: Node) -> Node:
        shared = node.attrs.get("shared_name") if node.stateful and node.op != "OneShotIterator" else None
        if shared is None:
            return node
        if node.op == "VarHandleOp" and find_name(node) in on_host:
            node = node.with_marks(on_host=True)
        return replace(node, attrs={**node.attrs, "shared_name": prefix + (shared or node.name)})

    return program.replace_nodes(tuple(map(rename_node, program.nodes)))
