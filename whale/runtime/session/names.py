"""Names in the graph in which a session's ranks run: of their variables, and of what keeps a state from run to run."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import replace

import numpy as np

from whale.ir.program import Node, Program, Ref


def name_of(handle: Node) -> str:
    """What the session knows a variable by."""
    return str(handle.attrs.get("shared_name") or handle.name)


def rank_prefix(position: int) -> str:
    """Of the names of variables (and tables, queues) of this process's rank number ``position``."""
    return f"whale_rank{position}/" if position else ""


def random_streams(program: Program) -> dict[str, Hashable]:
    """Random tensors whose numbers go on from run to run, as they do in one session of TensorFlow: name -> identity.

    The state is the kernel's, so another run reads the same node. It can where the operands are constants: for other
    shapes, and for draws from distributions that are computed, each run has a stream of its own.
    """
    found: dict[str, Hashable] = {}
    for node in program.nodes:
        if not node.stateful or node.controls or not (node.attrs.get("seed") or node.attrs.get("seed2")):
            continue
        operands = [program.const(r) for r in node.inputs]
        if any(value is None for value in operands) or Ref(node.name) not in program.consumers:
            continue
        values = tuple(np.asarray(value).tobytes() for value in operands)
        found[f"{node.name}:0"] = (node.name, values, node.attrs["seed"], node.attrs["seed2"])
    return found


def own_resources(program: Program, position: int, on_host: Collection[str]) -> Program:
    """Variables, tables, queues and iterators are found by name in the session, in every run: by the user's names for
    the first rank, by others for in-process ranks. One without a shared name goes by its node's, as in TensorFlow.

    Args:
      on_host: names of the variables that lie in the host's memory beside an accelerator.
    """
    prefix = rank_prefix(position)

    def own(node: Node) -> Node:
        shared = node.attrs.get("shared_name") if node.stateful and node.op != "OneShotIterator" else None
        if shared is None:
            return node
        if node.op == "VarHandleOp" and name_of(node) in on_host:
            node = node.marked(on_host=True)
        return replace(node, attrs={**node.attrs, "shared_name": prefix + (shared or node.name)})

    return program.with_nodes(tuple(map(own, program.nodes)))
