"""What ranks tell each other about what they are to exchange: that all ranks of a group have it, in the same phase.

A rank that waits for the others in its forward pass, while these come to it in their backward pass, would wait for
ever if what these need first comes from that rank. So this is compared before the first step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from whale.errors import PlanError
from whale.ir.ops import EXCHANGES, POINT_TO_POINT
from whale.ir.plan import Plan
from whale.ir.program import Program
from whale.runtime.run.context import Context

# Key of an exchange -> its ranks, and the functions that it is in.
Phases = Mapping[str, tuple[Sequence[int], Sequence[str]]]


def compare_exchanges(programs: Sequence[Program], plan: Plan, number: int, context: Context) -> None:
    """The same phases on all ranks of each exchange; collective between processes.

    Raises:
      PlanError: some ranks have it in another phase.
      CommError: a rank does not take part.
    """
    if plan.micro_batches == 1 and plan.inner is None:
        return
    found = dict(zip(context.ranks, map(phases_of_exchanges, programs)))
    if context.between_processes:
        timeout_s = context.config["check.timeout_s"]
        said = context.comms[0].allgather_bytes(
            f"whale/exchanges/{number}", msgspec.json.encode(found[context.rank]), timeout_s
        )
        found = {
            rank: msgspec.json.decode(one, type=dict[str, tuple[list[int], list[str]]]) for rank, one in enumerate(said)
        }
    refuse_unlike_phases(found)


def phases_of_exchanges(program: Program) -> dict[str, tuple[list[int], list[str]]]:
    """Key of each collective of a rank's program -> its ranks, and the functions that it is in; "" for none."""
    found: dict[str, tuple[list[int], list[str]]] = {}
    for name, graph in (("", program), *program.functions.items()):
        for node in graph.nodes:
            if node.op in EXCHANGES and node.op not in POINT_TO_POINT:
                ranks = list(map(int, node.attrs.get("ranks", ())))
                key = str(node.attrs.get("key", node.name))  # Horovod's is the name
                found.setdefault(key, (ranks, []))[1].append(name)
    return found


def refuse_unlike_phases(found: Mapping[int, Phases]) -> None:
    """Raises PlanError where ranks that share an exchange have it in unlike phases, or some have it not."""
    seen: set[str] = set()
    for rank, phases in found.items():
        for key, (ranks, names) in phases.items():
            if key in seen:
                continue
            seen.add(key)
            for other in ranks or found:
                theirs = found[other].get(key, ((), ()))[1]
                if sorted(names) != sorted(theirs):
                    raise PlanError(
                        "ranks would exchange a tensor in unlike phases of a step, and wait for each other",
                        op=key,
                        given=f"rank {rank} has it in {_text(names)}, rank {other} in {_text(theirs)}",
                        expected="the same phase on every rank",
                        action="set pipeline.num_micro_batch=1, or leave out the axis whose ranks these are",
                    )


def _text(names: Sequence[str]) -> str:
    return ", ".join(name or "no micro-batch" for name in names) or "none"
