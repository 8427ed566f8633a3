"""Names in the graph in which a session's ranks run: of their variables, and of other resources."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from whale.ir.program import Node, Program


def find_name(handle: Node) -> str:
    """What the session knows a variable by."""
    return str(handle.attrs.get("shared_name") or handle.name)


def make_rank_prefix(position: int) -> str:
    """Of the names of variables (and tables, queues) of this process's rank number ``position``."""
    return f"whale_rank{position}/" if position else ""


def rename_resources(program: Program, position: int, on_host: Collection[str]) -> Program:
    """Variables, tables, queues and iterators are found by name in the session, in every run: by the user's names for
    the first rank, by others for in-process ranks. One without a shared name goes by its node's, as in TensorFlow.

    Args:
      on_host: names of the variables that lie in the host's memory beside an accelerator.
    """
    prefix = make_rank_prefix(position)

    def rename_node(node: Node) -> Node:
        shared = node.attrs.get("shared_name") if node.stateful and node.op != "OneShotIterator" else None
        if shared is None:
            return node
        if node.op == "VarHandleOp" and find_name(node) in on_host:
            node = node.marked(on_host=True)
        return replace(node, attrs={**node.attrs, "shared_name": prefix + (shared or node.name)})

    return program.replace_nodes(tuple(map(rename_node, program.nodes)))
