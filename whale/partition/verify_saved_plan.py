"""Verifies that a plan from a file is legal for its program and can be executed, before it is used.

The check relies on the program, the plan and the sharding rules alone: sizes, the layout of every operation, messages
and collectives in all ranks' programs, and that ranks do not wait for each other in a cycle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter

from whale.errors import PlanError, WhaleError
from whale.ir.layout import Shard
from whale.ir.mesh import iterate_levels
from whale.ir.ops import EXCHANGES, POINT_TO_POINT
from whale.ir.plan import Plan
from whale.ir.program import Node, Program
from whale.partition.lower import lower_ranks
from whale.passes.normalize.inline import inline
from whale.passes.pass_manager import CHECKS
from whale.passes.plan_builder import expand
from whale.passes.settings import PlanSettings

_Moment = tuple[int, str, str]  # (rank, node, _BEGINS or _ENDS); nodes that are no exchanges have only an end
_BEGINS, _ENDS = "begins", "ends"
# Errors that code raises which assumes that its plan is consistent, if the plan is not.
CONTRADICTIONS = (
    LookupError, ValueError, TypeError, ArithmeticError, AttributeError, AssertionError, RecursionError, StopIteration,
)  # fmt: skip


def verify_saved_plan(program: Program, plan: Plan, settings: PlanSettings, path: str) -> list[Program]:
    """Verifies a plan that was read from a file and returns the programs of all ranks under it.

    Args:
      path: the file, for the error.

    Raises:
      PlanError: the plan is not legal for the program, or cannot be executed; the error lists all problems.
    """
    programs: list[Program] = []
    try:
        found = list_illegal(program, plan, settings)
        if not found:
            programs = [inline(one) for one in lower_ranks(program, plan, settings, range(plan.ranks))]
            found = check_exchanges(programs) or check_waits(programs)
    except PlanError as error:
        found = [format_in_a_line(error)]
    except CONTRADICTIONS as error:
        found = [f"it contradicts itself ({type(error).__name__}: {error})"]
    if found:
        raise PlanError(
            "the saved plan is not legal for its program",
            op=program.name,
            given=path,
            found="; ".join(found),
            expected="a plan as `whale plan -o FILE` wrote it, for the same script",
            action="make the plan again with `whale plan`",
        )
    return programs


def list_illegal(program: Program, plan: Plan, settings: PlanSettings) -> list[str]:
    """Lists the problems that can be found in a plan without lowering the program; [] if there are none."""
    found = check_sizes(program, plan) + check_stage_groups(plan)
    return found or check_layouts(program, plan, settings)


def format_in_a_line(error: WhaleError) -> str:
    """Formats an error's message and facts in one line, without the next action."""
    return "; ".join([error.message, *(f"{name}: {value}" for name, value in error.facts.items() if name != "action")])


def check_sizes(program: Program, plan: Plan) -> list[str]:
    """Lists the inputs that a plan divides and the program lacks, and plans with more micro-batches than rows.

    The number of rows is that of the largest batch input. If the plan divides no input, any dimension of an input may
    be the rows, so the largest dimension is the limit.

    Returns:
      a text for each problem; [] if there are none.
    """
    shapes = {name: program.by_name[name].outputs[0].shape or () for name in program.inputs}
    found, divided = [], []
    levels = [level for one in (plan, *plan.others) for level in iterate_levels(one)]
    for one in levels:
        for b in one.batch_inputs:
            shape = shapes.get(b.name, ())
            if isinstance(b.placement, Shard) and b.placement.dim < len(shape):
                divided.append(shape[b.placement.dim])
            else:
                found.append(
                    f"it divides the input {b.name} as {b.placement}, and the program has no such input"
                    " with this dimension"
                )
    sizes = divided or [size for shape in shapes.values() for size in shape]
    rows = max((size for size in sizes if size), default=1)
    for one in levels:
        if one.micro_batches < 1 or (one.micro_batches > rows and None not in divided):
            found.append(f"it has {one.micro_batches} micro-batches, and the inputs have at most {rows} rows")
    return found


def check_stage_groups(plan: Plan) -> list[str]:
    """Lists the problems of a plan's stage groups, mesh ranks and transfers.

    The groups must have all ranks from 0 on, each once, each group a plan for its number of ranks, and every transfer
    must be between two different groups.
    """
    found, count = [], len(plan.stage_groups)
    ranks = sorted(rank for group in plan.stage_groups for rank in group.ranks)
    if count and ranks != list(range(len(ranks))):
        found.append(f"the stages have the ranks {ranks}, not each of 0 to {len(ranks) - 1} once")
    if plan.rank_order and sorted(plan.rank_order) != list(range(plan.mesh_size)):
        found.append(f"the mesh has the ranks {list(plan.rank_order)}, not each of 0 to {plan.mesh_size - 1} once")
    plans = (plan, *plan.others)
    for group in plan.stage_groups:
        size = plans[group.plan].mesh_size if 0 <= group.plan < len(plans) else 0
        if size != len(group.ranks):
            found.append(
                f"the stage group {group.name} has {len(group.ranks)} ranks, and its plan (number {group.plan} of "
                f"{len(plans)}, from 0) is for {size}"
            )
    for edge in plan.edges:
        if not {edge.source, edge.target} <= set(range(count)) or edge.source == edge.target:
            found.append(
                f"{edge.ref} is sent from stage group {edge.source} to stage group {edge.target}, of {count} from 0 on"
            )
    return found


def check_layouts(program: Program, plan: Plan, settings: PlanSettings) -> list[str]:
    """Lists the operations whose strategy in the plan is not one that their sharding rule allows.

    The placements of variables and of the inputs' rows cannot be checked in all plans, since with stages or several
    axes other parts of the plan decide them; then they are taken from the plan as given.

    Returns:
      a text for each plan (of a kind of stage group) that has such an operation.
    """
    found = []
    expanded = expand(program, plan.expanded, settings)
    for one in (plan, *plan.others):
        if plan.stage_groups or plan.inner is not None:
            handles = {v.node for v in program.variables}
            passed = {n: s.outputs[0] for n, s in one.strategies[""].items() if n in handles}
            one = replace(one, variables=passed)
        if plan.inner is not None:
            rows = (replace(b, placement=one.strategies[""][b.name].outputs[0], local=True) for b in one.batch_inputs)
            one = replace(one, batch_inputs=tuple(rows))
        try:
            for refuse in CHECKS:
                refuse(expanded, one)
        except PlanError as error:
            found.append(format_in_a_line(error))
    return found


def check_exchanges(programs: Sequence[Program]) -> list[str]:
    """Lists sends that no rank receives, receives that no rank sends, and collectives in which ranks do not take part
    alike.

    Args:
      programs: the program of each rank, in the order of the ranks.
    """
    sent: Counter[tuple[str, int, int, str]] = Counter()
    received: Counter[tuple[str, int, int, str]] = Counter()
    collectives: dict[tuple[str, tuple[int, ...]], dict[int, list[str]]] = {}
    for rank, program in enumerate(programs):
        for node in program.nodes:
            if node.op not in EXCHANGES:
                continue
            key, peer = str(node.attrs.get("key", node.name)), int(node.attrs.get("peer", rank))
            if node.op == "WhaleSend":
                sent[key, rank, peer, _format_sizes(program, node)] += 1
            elif node.op == "WhaleRecv":
                received[key, peer, rank, _format_sizes(program, node)] += 1
            else:
                members = tuple(int(r) for r in node.attrs.get("ranks", ())) or tuple(range(len(programs)))
                there = collectives.setdefault((key, members), {})
                there.setdefault(rank, []).append(f"{node.op} of {_format_types(program, node)}")
    found = [
        f"rank {source} sends {key} ({what}) to rank {target}, which does not receive it"
        for key, source, target, what in (sent - received)
    ]
    found += [
        f"rank {target} waits for {key} ({what}) from rank {source}, which does not send it"
        for key, source, target, what in (received - sent)
    ]
    for (key, members), there in collectives.items():
        if missing := [rank for rank in members if rank not in there]:
            found.append(f"the collective {key} waits for ranks {missing} of {list(members)}, which do not take part")
        elif strangers := [rank for rank in there if rank not in members]:
            found.append(f"ranks {strangers} take part in the collective {key}, which is of ranks {list(members)}")
        elif unlike := [rank for rank in members if there[rank] != there[members[0]]]:
            ours, theirs = there[members[0]], there[unlike[0]]
            found.append(
                f"in the collective {key}, rank {members[0]} runs {', '.join(ours)}, and rank {unlike[0]} "
                f"{', '.join(theirs)}"
            )
    return found


def check_waits(programs: Sequence[Program]) -> list[str]:
    """Lists a cycle in which ranks wait for each other's exchanges, if there is one.

    A rank begins an exchange once its operands and control inputs are ready. An exchange, even a send, ends only after
    all participants have begun it, since large tensors are read out of the sender's memory. In a cycle each rank waits
    for an exchange that another one begins only after its own.
    """
    meetings: dict[tuple[object, ...], list[_Moment]] = {}
    met: dict[_Moment, tuple[object, ...]] = {}
    for rank, program in enumerate(programs):
        times: Counter[tuple[object, ...]] = Counter()
        for node in program.nodes:
            if node.op in EXCHANGES:
                key = _make_meeting_key(node, rank)
                meetings.setdefault((*key, times[key]), []).append((rank, node.name, _BEGINS))
                met[rank, node.name, _ENDS] = (*key, times[key])
                times[key] += 1
    order: TopologicalSorter[_Moment] = TopologicalSorter()
    for rank, program in enumerate(programs):
        for node in program.nodes:
            before = [(rank, name, _ENDS) for name in (*(r.node for r in node.inputs), *node.controls)]
            if (end := (rank, node.name, _ENDS)) in met:
                order.add((rank, node.name, _BEGINS), *before)
                order.add(end, *meetings[met[end]])
            else:
                order.add(end, *before)
    try:
        order.prepare()
    except CycleError as error:
        circle: list[_Moment] = error.args[1]  # each moment waits for the one before; the last one equals the first
        steps = [one for one in circle[:-1] if one[2] == _BEGINS or one in met]
        while steps[0] not in met:
            steps.append(steps.pop(0))
        pairs = zip(steps[::2], steps[1::2])
        waits = [f"rank {rank} begins {next_} only after {name}" for (rank, name, _), (_, next_, _) in pairs]
        return [f"ranks wait for each other: {'; '.join(waits)}"]
    return []


def _make_meeting_key(node: Node, rank: int) -> tuple[object, ...]:
    """Returns a key that identifies an exchange: equal on all ranks that take part in it, and different for any other
    one.
    """
    key = str(node.attrs.get("key", node.name))
    if node.op in POINT_TO_POINT:
        peer = int(node.attrs["peer"])
        return (key, rank, peer) if node.op == "WhaleSend" else (key, peer, rank)
    return (key, tuple(int(r) for r in node.attrs.get("ranks", ())))


def _format_sizes(program: Program, node: Node) -> str:
    t = node.outputs[0] if node.op == "WhaleRecv" else program.find_type(node.inputs[1])
    return str(t)


def _format_types(program: Program, node: Node) -> str:
    return ", ".join(program.find_type(r).dtype for r in node.inputs[1:])
