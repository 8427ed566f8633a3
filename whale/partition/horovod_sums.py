"""Hands sums over all ranks to Horovod, where a step runs over several mesh axes or in stages.

Horovod connects all ranks, so sums over some of them stay with Whale. Plans of one axis decide by themselves who
carries out what (``whale.passes.resharding``).

  give_to_horovod   a rank's program in which Horovod carries out what it can
"""

from __future__ import annotations

import re
from dataclasses import replace
from zlib import crc32

from whale.ir.emitter import Emitter
from whale.ir.layout import B, Partial
from whale.ir.ops import ALL_REDUCE
from whale.ir.plan import Reshard
from whale.ir.program import Node, Program, Ref, rewire
from whale.passes.analysis.uses import taken_by_updates
from whale.passes.resharding.horovod import HOROVOD_DTYPES


def give_to_horovod(program: Program, rank: int, size: int, comm: str) -> Program:
    """Lets Horovod carry out a rank program's sums over all ranks.

    It gets the gradients: what they wait for is the same on all ranks, and little waits for them. Sums in loops,
    branches and micro-batches stay with Whale.
    """
    emitter = Emitter(rank, size, comm)
    moved: dict[Ref, Ref] = {}
    for node in program.nodes:
        if not _can_go(program, node, size):
            emitter.nodes[node.name] = node
            continue
        key = str(node.attrs["key"])
        name = f"whale/by_all/{re.sub('[^A-Za-z0-9_]', '_', key)}_{crc32(key.encode()):08x}"  # equal on all ranks
        r = Reshard("", Ref(node.name), Partial("sum"), B, key, 0, backend="horovod")
        emitter.all_reduce(name, node.inputs[1:], node.outputs, r, key)
        emitter.nodes[name] = replace(emitter.nodes[name], controls=node.controls)
        moved.update((ref, Ref(name, ref.index)) for ref in node.list_refs())
    return rewire(program, emitter.nodes, moved) if moved else program


def _can_go(program: Program, node: Node, size: int) -> bool:
    if node.op != ALL_REDUCE or node.attrs["reduction"] != "sum" or len(node.attrs["ranks"]) not in (0, size):
        return False
    if any(t.dtype not in HOROVOD_DTYPES for t in node.outputs):
        return False
    return "wire_dtype" not in node.attrs and all(taken_by_updates(program, ref) for ref in node.list_refs())
