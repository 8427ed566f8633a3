"""Assigns a stage's nodes of a micro-batch to its forward and its backward pass, by structure.

Backward nodes are those that depend on a tensor that a later stage has sent back, and those that neither a later stage
nor a fetch needs: the gradients that the last stage begins with. Weights' gradients are nodes that no earlier stage
waits for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType

from whale.errors import PlanError
from whale.ir.ops import COLLECTIVES
from whale.ir.program import Node, Program
from whale.passes.analysis.stages import free_nodes, stage_of


def kinds(
    program: Program,
    each: Collection[str],
    stages: Mapping[str, int],
    weights_apart: bool,
    agreed: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:
    """Returns F, B or W for each node of a micro-batch.

    Args:
      program: the whole program, all stages.
      each: the nodes that are computed for each micro-batch.
      stages: number of each stage in the order of the data.
      weights_apart: tell W from B.
      agreed: F, B or W of nodes on other ranks, which may exchange something there that nobody reads here.

    Raises:
      PlanError: stages wait for each other in a way that no schedule has.
    """
    at = _numbers(program, stages)
    mine = [n for n in program.nodes if n.name in each]
    back: set[str] = set()
    for node in mine:
        for ref in node.inputs:
            if ref.node in back or (ref.node in each and _is_before(at, node.name, ref.node)):
                back.add(node.name)
    begun = [*(r.node for r in program.outputs), *(name for name, kind in agreed.items() if kind == "F")]
    forward = {name for name in begun if name in each and name not in back}
    sent_back = {name for name, kind in agreed.items() if kind == "B"}
    for node in reversed(mine):
        for ref in node.inputs:
            if ref.node not in each:
                continue
            if ref.node not in back and (node.name in forward or _is_before(at, ref.node, node.name)):
                forward.add(ref.node)
            if node.name in sent_back or _is_before(at, node.name, ref.node):
                sent_back.add(ref.node)
    _add_what_is_fetched(program, each, at, forward, back, sent_back)
    found = {}
    for node in mine:
        late = weights_apart and node.name not in sent_back
        found[node.name] = "F" if node.name in forward else "W" if late else "B"
        for ref in node.inputs:
            if found.get(ref.node, "F") != "F" and _is_before(at, ref.node, node.name):
                raise _circle(node, ref.node)
    return found


def _add_what_is_fetched(
    program: Program,
    each: Collection[str],
    at: Mapping[str, int],
    forward: set[str],
    back: Collection[str],
    sent_back: Collection[str],
) -> None:
    """Adds the nodes from which a fetched loss or metric of all micro-batches is computed to ``forward``.

    Of the last stage, only the cheapest nodes are added: the loss. Otherwise a fetched norm of gradients would make
    backward passes part of the forward pass; so nothing else is added that an earlier stage waits for.
    """
    before: dict[str, set[str]] = {}
    for name in _read_for_outputs(program, each):
        if name not in back:
            closure, stack = {name}, [name]
            while stack:
                for ref in program.by_name[stack.pop()].inputs:
                    if ref.node in each and ref.node not in closure and ref.node not in forward:
                        closure.add(ref.node)
                        stack.append(ref.node)
            before[name] = closure
    last, first = max(at.values(), default=0), True
    for name, closure in sorted(before.items(), key=lambda item: len(item[1])):
        more = closure - forward
        if more & set(back):
            continue
        if not more & set(sent_back):
            forward |= more
        elif first and at.get(name) == last:
            forward |= more
            first = False


def _read_for_outputs(program: Program, each: Collection[str]) -> set[str]:
    """Returns the nodes of a micro-batch that fetched nodes outside of the micro-batches read."""
    found, seen = set(), set[str]()
    stack = [r.node for r in program.outputs]
    while stack:
        name = stack.pop()
        if name in each:
            found.add(name)
        elif name not in seen:
            seen.add(name)
            stack += [r.node for r in program.by_name[name].inputs]
    return found


def in_stages_of_readers(program: Program, stages: Mapping[str, int], agreed: Mapping[str, str]) -> Program:
    """Moves the nodes that gather parts of an input between ranks, and have no stage, to the first stage that reads
    them.

    Args:
      agreed: stages of nodes on other ranks: a rank without rows does not read what it sends to them.
    """
    first = dict(agreed)  # node -> the first of the stages that read it
    moved: dict[str, Node] = {}
    for node in reversed(program.nodes):
        stage = stage_of(node.scope)
        if stage not in stages and node.name in first:
            stage = first[node.name]
            if node.op in COLLECTIVES:
                moved[node.name] = replace(node, scope=f"{stage}/{node.scope}".rstrip("/"))
        if stage in stages:
            for ref in node.inputs:
                first[ref.node] = min(stage, first.get(ref.node, stage), key=stages.__getitem__)
    return program.replace_nodes(tuple(moved.get(n.name, n) for n in program.nodes)) if moved else program


def _numbers(program: Program, stages: Mapping[str, int]) -> dict[str, int]:
    """Returns the stage number of each node; nodes added by lowering get their operands' stage, free nodes
    none.
    """
    at: dict[str, int] = {}
    free = free_nodes(program)
    for node in program.nodes:
        if node.name in free:
            continue
        own = stages.get(stage_of(node.scope))
        found = [own] if own is not None else [at[r.node] for r in node.inputs if r.node in at]
        if found:
            at[node.name] = max(found)
    return at


def _is_before(at: Mapping[str, int], a: str, b: str) -> bool:
    return a in at and b in at and at[a] < at[b]


def _circle(node: Node, other: str) -> PlanError:
    return PlanError(
        "a stage would wait for the backward pass of an earlier one",
        op=f"{node.name} ({node.op})",
        given=f"it reads {other}, which an earlier stage computes from what later stages send back",
        expected="forward passes in the order of the stages, backward passes in the opposite one",
        action="put this part of the model into the earlier stage",
    )


def phases_of_rank(
    program: Program,
    each: Collection[str],
    kind: Mapping[str, str],
    stages: Mapping[str, int],
) -> dict[str, str]:
    """Returns the phase, such as F0, of each node of a micro-batch in the program of one rank.

    Args:
      kind: see ``kinds``, of the nodes that the whole program has.
      stages: the stages of this rank -> number of the chunk. What belongs to none (receives, sends, what every stage
        makes for itself) is computed in the first phase that reads it, or else in the last one that it reads.
    """
    chunks = len(stages)
    order = [f"F{i}" for i in range(chunks)] + [f"{k}{i}" for k in "BW" for i in reversed(range(chunks))]
    number = {phase: i for i, phase in enumerate(order)}
    found: dict[str, int] = {}
    mine = [n for n in program.nodes if n.name in each]
    for node in mine:
        stage = stage_of(node.scope)
        if node.name in kind and stage in stages and node.op != "WhaleRecv":
            found[node.name] = number[f"{kind[node.name]}{stages[stage]}"]
    readers: dict[str, list[str]] = {}
    for node in mine:
        for ref in node.inputs:
            readers.setdefault(ref.node, []).append(node.name)
    for node in reversed(mine):
        known = [found[name] for name in readers.get(node.name, ()) if name in found]
        if node.name not in found and known:
            found[node.name] = min(known)
        elif node.name not in found and node.op == "WhaleRecv" and kind.get(node.name, "F") != "F":
            found[node.name] = number["B0"]  # received from a backward pass, and read after the last micro-batch
    for node in mine:
        before = [found[r.node] for r in node.inputs if r.node in found]
        found[node.name] = max([found.get(node.name, 0), *before])
    return {name: order[i] for name, i in found.items()}
