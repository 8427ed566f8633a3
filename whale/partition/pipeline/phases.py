"""Assigns the nodes of a micro-batch to the forward and the backward pass of their stage, by the graph's structure.

Backward nodes are those that depend on a tensor which a later stage sent back, and those that neither a later stage nor
a fetch needs: the gradients with which the last stage begins. Weight gradients (W) are backward nodes for which no
earlier stage waits.
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
    """Returns F (forward), B (backward) or W (weight gradients) for each node of a micro-batch.

    Args:
      program: the whole program, with all stages.
      each: the nodes that are computed for each micro-batch.
      stages: stage -> its number in the order in which data pass the stages.
      weights_apart: True to tell weight gradients (W) from the rest of the backward pass; False: they are B.
      agreed: node -> F, B or W, as found on ranks with rows. A rank without rows does not read what it sends to them,
        so that its own program does not show for what such a node is needed.

    Raises:
      PlanError: stages wait for each other in a way that no schedule allows.
    """
    at = _numbers(program, stages)
    mine = [n for n in program.nodes if n.name in each]
    back = {name for name, kind in agreed.items() if kind != "F"}
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
    """Adds to ``forward`` the nodes from which a fetched value of all micro-batches, such as a loss or metric, is
    computed.

    A value whose computation an earlier stage also waits for belongs to the backward pass and is left there: fetching a
    gradient norm must not make backward passes forward ones. The one exception is the fetched value of the last stage
    that takes the fewest nodes, which is the loss.
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
    """Returns the nodes of a micro-batch that are fetched, or that nodes after the micro-batches read for a fetched
    value.
    """
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


def give_stages(program: Program, stages: Mapping[str, int], agreed: Mapping[str, str]) -> Program:
    """Moves collectives that have no stage to the first stage that reads them, such as gathers of an input's shards,
    and those that no stage reads, such as gathers of fetched rows, to the last stage that computes their operands.

    Args:
      stages: stage -> its number in the order in which data pass the stages.
      agreed: node -> stage, as found on ranks with rows. A rank without rows does not read what it sends to them, and
        computes nothing of what it gathers.
    """
    first = dict(agreed)  # node -> the first of the stages that read it
    moved: dict[str, Node] = {}

    def move(node: Node, stage: str) -> None:
        moved[node.name] = replace(node, scope=f"{stage}/{node.scope}".rstrip("/"))

    for node in reversed(program.nodes):
        stage = stage_of(node.scope)
        if stage not in stages and node.name in first:
            stage = first[node.name]
            if node.op in COLLECTIVES:
                move(node, stage)
        if stage in stages:
            for ref in node.inputs:
                first[ref.node] = min(stage, first.get(ref.node, stage), key=stages.__getitem__)
    named, computed = list(stages), _numbers(program, stages)
    for node in program.nodes:
        if node.op in COLLECTIVES and node.name in computed and node.name not in moved:
            if stage_of(node.scope) not in stages:
                move(node, named[computed[node.name]])
    return program.replace_nodes(tuple(moved.get(n.name, n) for n in program.nodes)) if moved else program


def _numbers(program: Program, stages: Mapping[str, int]) -> dict[str, int]:
    """Returns the stage number of each node: of its scope's stage, or else the largest number of its operands. Free
    nodes have none.
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
        given=f"the operation reads {other}, which an earlier stage computes from what later stages send back",
        expected="forward passes in the order of the stages, backward passes in the opposite one",
        action="build this operation under the wh.stage scope of the earlier stage",
    )


def phases_of_rank(
    program: Program,
    each: Collection[str],
    kind: Mapping[str, str],
    stages: Mapping[str, int],
) -> dict[str, str]:
    """Returns the phase, such as F0 (forward pass of chunk 0), of each node of a micro-batch in one rank's program.

    Args:
      each: the nodes that are computed for each micro-batch.
      kind: the result of ``kinds`` for the whole program.
      stages: stage of this rank -> number of its chunk. A node of no stage (a receive, a send, a node that every stage
        has) is computed in the first phase that reads it, or else in the last phase whose results it reads.
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
            found[node.name] = number["B0"]  # sent by a backward pass, and read only after the last micro-batch
    for node in mine:
        before = [found[r.node] for r in node.inputs if r.node in found]
        found[node.name] = max([found.get(node.name, 0), *before])
    return {name: order[i] for name, i in found.items()}
