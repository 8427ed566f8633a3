"""What ranks tell each other about a schedule: that each sum over ranks is part of the same phase on all of them.

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

Phases = Mapping[str, Sequence[str]]  # key of an exchange -> the functions that it is in


def compare_exchanges(programs: Sequence[Program], plan: Plan, number: int, context: Context) -> None:
    """The same phases on all ranks of each exchange; collective between processes.

    Raises:
      PlanError: some ranks have it in another phase.
      CommError: a rank does not take part.
    """
    if plan.micro_batches == 1:
        return
    found = dict(zip(context.ranks, map(phases_of_exchanges, programs)))
    if context.between_processes:
        timeout_s = context.config["check.timeout_s"]
        said = context.comms[0].allgather_bytes(
            f"whale/exchanges/{number}", msgspec.json.encode(found[context.rank]), timeout_s
        )
        found = {rank: msgspec.json.decode(one, type=dict[str, list[str]]) for rank, one in enumerate(said)}
    refuse_unlike_phases(found)


def phases_of_exchanges(program: Program) -> dict[str, list[str]]:
    """Key of each collective of a rank's program -> the functions of micro-batches that it is in; "" for none."""
    found: dict[str, list[str]] = {}
    for name, graph in (("", program), *program.functions.items()):
        for node in graph.nodes:
            if node.op in EXCHANGES and node.op not in POINT_TO_POINT:
                found.setdefault(str(node.attrs["key"]), []).append(name)
    return found


def refuse_unlike_phases(found: Mapping[int, Phases]) -> None:
    """Raises PlanError where ranks that share an exchange have it in unlike phases."""
    first: dict[str, tuple[int, Sequence[str]]] = {}
    for rank, phases in found.items():
        for key, names in phases.items():
            other, theirs = first.setdefault(key, (rank, names))
            if sorted(names) != sorted(theirs):
                raise PlanError(
                    "ranks would exchange a tensor in unlike phases of a micro-batch, and wait for each other",
                    op=key,
                    given=f"rank {other} has it in {_text(theirs)}, rank {rank} in {_text(names)}",
                    expected="the same phase on every rank",
                    action="set pipeline.num_micro_batch=1, or leave out the axis whose ranks these are",
                )


def _text(names: Sequence[str]) -> str:
    return ", ".join(name or "no micro-batch" for name in names)
