"""Checks that all ranks of a group have each exchange in the same phase of the step.

A phase is a function that runs once per micro-batch (forward, backward), or the main graph around these functions. If
one rank waits for an exchange in its forward pass, and the others reach it only in their backward pass, they deadlock
as soon as the others need data from that rank first. So the phases are compared before the first step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from whale.errors import REPORT_FAULT, PlanError
from whale.ir.ops import EXCHANGES, POINT_TO_POINT
from whale.ir.plan import Plan
from whale.ir.program import Node, Program, iterate_function_refs
from whale.partition.pipeline.microbatch_loop import CALL, find_phase
from whale.runtime.context import Context

# Phases of messages between two ranks outside of micro-batches: received before them, or sent after them.
BEFORE, AFTER = "the main graph, before its micro-batches", "the main graph, after its micro-batches"
MESSAGE = "a message between stages"  # which the receiving stage has in phases of its own
# Key of an exchange -> its ranks, and in how many micro-batches it is in each phase.
Phases = Mapping[str, tuple[Sequence[int], Mapping[str, int]]]


def compare_exchanges(programs: Sequence[Program], plan: Plan, number: int, context: Context) -> None:
    """Raises an error unless all ranks of each exchange have it in the same phases; collective between processes.

    Args:
      programs: of this process's ranks.
      number: index of the program among those compiled in this run; equal on all ranks, and part of the keys of its
        messages.

    Raises:
      PlanError: some ranks have an exchange in another phase.
      CommError: a rank does not take part.
    """
    if plan.micro_batches == 1 and plan.inner is None:
        return
    found = {rank: phases_of_exchanges(one, bool(plan.stage_groups)) for rank, one in zip(context.ranks, programs)}
    if context.has_other_processes:
        timeout_s = context.config["debug.check_timeout_s"]
        said = context.comms[0].allgather_bytes(
            f"whale/exchanges/{number}", msgspec.json.encode(found[context.rank]), timeout_s
        )
        kind = dict[str, tuple[list[int], dict[str, int]]]
        found = {rank: msgspec.json.decode(one, type=kind) for rank, one in enumerate(said)}
    refuse_unlike_phases(found)


def phases_of_exchanges(program: Program, stages: bool) -> dict[str, tuple[list[int], dict[str, int]]]:
    """Maps the key of each exchange of a rank's program to the ranks that take part in it, and to the phases in which
    this rank has it.

    Args:
      stages: whether the program has pipeline stages. Of their sends and receives it is told only that there are some,
        as each receiving stage has phases of its own for them.

    Returns:
      key -> (ranks, phase -> in how many micro-batches); the phase "" is the main graph.
    """
    found: dict[str, tuple[list[int], dict[str, int]]] = {}

    def look(graph: Program, phase: str, times: int) -> None:
        for node in graph.nodes:
            if node.op in EXCHANGES:
                ranks = (
                    [int(node.attrs["peer"])] if "peer" in node.attrs else list(map(int, node.attrs.get("ranks", ())))
                )
                key = str(node.attrs.get("key", node.name))  # Horovod's key is the node's name
                counts = found.setdefault(key, (ranks, {}))[1]
                if stages and node.op in POINT_TO_POINT:
                    counts[MESSAGE] = 1
                else:
                    counts[phase] = counts.get(phase, 0) + times
            if node.op != CALL:
                for _, func in iterate_function_refs(node):
                    look(program.functions[func.name], phase, times)

    look(program, "", 1)
    calls = [node for node in program.nodes if node.op == CALL]
    called = Counter((find_phase(node), func.name) for node in calls for _, func in iterate_function_refs(node))
    for (phase, name), times in called.items():
        look(program.functions[name], phase, times)
    for node in (*_find_sends_behind(program, calls), *_ahead(program, calls)):
        if node.op in POINT_TO_POINT and not stages:
            counts = found[str(node.attrs["key"])][1]
            counts.clear()
            counts[AFTER if node.op == "WhaleSend" else BEFORE] = 1
    return found


def _find_sends_behind(program: Program, calls: Sequence[Node]) -> list[Node]:
    """Returns the sends of the main graph that wait for a result of ``calls``, the nodes that call the functions of
    micro-batches.
    """
    late = {node.name for node in calls}
    for node in program.nodes:
        if not late.isdisjoint([*(r.node for r in node.inputs), *node.controls]):
            late.add(node.name)
    return [node for node in program.nodes if node.op == "WhaleSend" and node.name in late]


def _ahead(program: Program, calls: Sequence[Node]) -> list[Node]:
    """Returns the receives of the main graph on which one of ``calls``, the nodes that call the functions of
    micro-batches, depends.
    """
    stack, early = list(calls), set[str]()
    while stack:
        node = stack.pop()
        for name in (*(r.node for r in node.inputs), *node.controls):
            if name not in early:
                early.add(name)
                stack.append(program.by_name[name])
    return [node for node in program.nodes if node.op == "WhaleRecv" and node.name in early]


def refuse_unlike_phases(found: Mapping[int, Phases]) -> None:
    """Raises PlanError if ranks have an exchange in different phases, or some of its ranks do not have it.

    Args:
      found: rank -> what ``phases_of_exchanges`` has returned for it.
    """
    seen: set[str] = set()
    for rank, phases in found.items():
        for key, (ranks, counts) in phases.items():
            if key in seen:
                continue
            seen.add(key)
            for other in ranks or found:
                theirs = found[other].get(key, ((), {}))[1]
                if _meet(counts, theirs):
                    continue
                without = "leave out the mesh axis over which these ranks exchange"
                if not theirs:
                    raise PlanError(
                        "a rank would wait for an exchange in which another rank takes no part, and deadlock",
                        op=key,
                        given=f"rank {rank} has it in {_text(counts)}, rank {other} in none of its program",
                        expected="the exchange on every rank that takes part in it",
                        action=f"{without}; {REPORT_FAULT}",
                    )
                raise PlanError(
                    "ranks would exchange a tensor in different phases of a step, and deadlock",
                    op=key,
                    given=f"rank {rank} has it in {_text(counts)}, rank {other} in {_text(theirs)}",
                    expected="the same phase on every rank",
                    action=f"set pipeline.micro_batches=1, or {without}",
                )


def _meet(counts: Mapping[str, int], theirs: Mapping[str, int]) -> bool:
    """Returns True if two ranks reach the same exchange without a deadlock.

    They do if both have it in the same phases equally often. They also do if both have it in the main graph, unless one
    waits for it before its micro-batches and the other comes to it only after them.

    Args:
      counts: phase -> in how many micro-batches, of the exchange on one rank.
      theirs: the same on the other rank.
    """
    if {*counts, *theirs} <= {"", BEFORE, AFTER} and counts and theirs:
        return {*counts, *theirs} != {BEFORE, AFTER}
    return counts == theirs


def _text(counts: Mapping[str, int]) -> str:
    outside = {"": "no micro-batch", BEFORE: BEFORE, AFTER: AFTER, MESSAGE: MESSAGE}
    return ", ".join(outside.get(phase) or f"{phase} of {n} micro-batches" for phase, n in counts.items())
