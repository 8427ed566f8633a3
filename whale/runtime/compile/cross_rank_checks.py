"""Checks, before a program runs, that all ranks have the same one, and sends them rank 0's plan.

compare_programs    compares fingerprints of the program, and names the first difference
agree_on_plan       plans on rank 0, and broadcasts the plan or the error

Decisions: 0021, 0178.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from whale.distributed.collective_call_check import describe_likely_cause
from whale.distributed.ranks import PLAN_TIMEOUT_S
from whale.errors import REPORT_FAULT, PlanError, ProgramError
from whale.ir.fingerprint import compute_fingerprint, list_constants, list_node_digests
from whale.ir.plan import Plan, plan_from_json
from whale.ir.program import Program
from whale.log import log_while_running
from whale.partition.lower import make_any_plan
from whale.partition.verify_saved_plan import verify_saved_plan
from whale.passes.settings import PlanSettings
from whale.replicas import Sketch, differ_by_rounding
from whale.runtime.compile.plan_cache import keep_plan, load_plan
from whale.runtime.context import Context
from whale.runtime.variables.compared import make_sketch


class _Mark(msgspec.Struct):
    """Represents what a rank tells the others about the program that it is about to compile.

    Attributes:
      name: of the program.
      fingerprint: of the normalised program.
      local: name of each input of which the rank passes only its own rows -> number of rows on every rank.
    """

    name: str
    fingerprint: str
    local: dict[str, tuple[int, ...]]


def compare_programs(program: Program, local: Mapping[str, tuple[int, ...]], number: int, context: Context) -> None:
    """Raises an error unless every rank has the same program, with its batch passed in the same way; collective between
    processes.

    If ranks may round differently, constants may differ in their last bits, such as results of numpy.exp on processors
    with other vector widths.

    Args:
      local: name of each input of which this rank passes only its own rows -> number of rows on every rank.
      number: index of the program among those compiled in this run; equal on all ranks, and part of the keys of its
        messages.

    Raises:
      ProgramError: the ranks are about to run different programs; names the rank and the first difference.
      CommError: a rank does not take part.
    """
    if not context.has_other_processes:
        return
    mark = compute_fingerprint(program)
    comm, timeout_s = context.comms[0], context.config["debug.check_timeout_s"]
    mark_of_this = msgspec.json.encode(_Mark(program.name, mark, dict(local)))
    before = context.reports.compiled_for.get(program.name, "")
    purpose = _purpose(program.name, _inputs(program), number, before)
    said = comm.allgather_bytes(f"whale/program/{number}", mark_of_this, timeout_s, purpose)
    context.reports.compiled_for[program.name] = _inputs(program)
    marks = [msgspec.json.decode(m, type=_Mark) for m in said]
    if all(m.fingerprint == marks[0].fingerprint for m in marks):
        for rank, said_by in enumerate(marks):
            if said_by.local != marks[0].local:
                raise ProgramError(
                    "the ranks pass a step's batch in different ways",
                    op=program.name,
                    given=f"rank 0 passes {_pass_mark(marks[0])}, rank {rank} passes {_pass_mark(said_by)}",
                    expected="the whole batch, or a part of it with the same shares, on every rank",
                    action="use wh.shard for the same arguments on every rank",
                )
        return
    rows = list_node_digests(program)
    types = {f"{node.name} ({node.op})": ", ".join(map(str, node.outputs)) for node in program.nodes}
    mine = msgspec.json.encode([(what, digest.hex(), types.get(what, "")) for what, digest in rows])
    others = [
        msgspec.json.decode(o, type=list[tuple[str, str, str]])
        for o in comm.allgather_bytes(f"whale/program/{number}/nodes", mine, timeout_s)
    ]
    if context.rounds_otherwise and _differ_in_rounded_constants(program, others, number, context):
        return
    rank = next(r for r, m in enumerate(marks) if m.fingerprint != marks[0].fingerprint)
    first, other = others[0], others[rank]
    at = next((i for i, (a, b) in enumerate(zip(first, other)) if a != b), min(len(first), len(other)))
    described = [rows[at][0] if at < len(rows) else "(no more nodes)" for rows in (first, other)]
    cause = _cause(described, context)
    if described[0] == described[1] and first[at][2] != other[at][2]:
        described = [f"{d} of {row[at][2]}" for d, row in zip(described, (first, other))]
    elif described[0] == described[1]:
        described = [f"{d} with other attributes, operands or types" for d in described]
    raise ProgramError(
        "the ranks are about to run different programs",
        given=f"rank 0 runs {marks[0].name}, rank {rank} runs {marks[rank].name}",
        **{"first difference": f"node {at}: rank 0 has {described[0]}; rank {rank} has {described[1]}"},
        **({"likely cause": cause} if cause else {}),
        expected="the same program, inputs' shapes and fetches on every rank",
        action="remove what depends on the rank (wh.rank(), host names, unseeded randomness) from step and fetches",
    )


class _Constant(msgspec.Struct):
    """Represents a rank's message about a constant whose value differs between ranks bit for bit.

    Attributes:
      sketch: a few sums of its elements, by which other ranks recognise values that differ only by rounding; None: the
        dtype does not round.
    """

    dtype: str
    shape: tuple[int, ...]
    sketch: Sketch | None


def _differ_in_rounded_constants(
    program: Program, said: Sequence[Sequence[tuple[str, str, str]]], number: int, context: Context
) -> bool:
    """Returns True if the ranks' programs are equal except for the last bits of constants; collective.

    Args:
      said: for every rank, the (node, digest, types) rows of its program.
    """
    known = list_constants(program)
    differing = {row[0] for other in said for row, first in zip(other, said[0]) if row != first}
    if any([row[0] for row in other] != [row[0] for row in said[0]] for other in said) or not differing <= known.keys():
        return False
    mine = {
        what: _Constant(known[what].dtype, known[what].shape, make_sketch(known[what].numpy()))
        for what in sorted(differing)
    }
    everyone = [
        msgspec.json.decode(one, type=dict[str, _Constant])
        for one in context.comms[0].allgather_bytes(
            f"whale/program/{number}/constants", msgspec.json.encode(mine), context.config["debug.check_timeout_s"]
        )
    ]
    first = everyone[0]
    return all(
        (one.dtype, one.shape) == (first[what].dtype, first[what].shape)
        and one.sketch is not None
        and (own := first[what].sketch) is not None
        and differ_by_rounding(own, one.sketch)
        for other in everyone
        for what, one in other.items()
    )


def _cause(nodes: Sequence[str], context: Context) -> str:
    """Returns the likely reason why two ranks' nodes, given as "name (op)", differ; "": probably the arguments' shapes,
    which the error shows.
    """
    if nodes[0] != nodes[1]:
        return describe_likely_cause(context, names=True)
    return describe_likely_cause(context) if context.other_hashes or not nodes[0].endswith("(Placeholder)") else ""


def _pass_mark(mark: _Mark) -> str:
    return ", ".join(f"parts of {name} with shares {list(sizes)}" for name, sizes in mark.local.items()) or "no parts"


def check_all_take(mark: str, name: str, inputs: str, context: Context) -> bool:
    """Returns True if every rank has the next program in its cache, from the same joint compilation, so that all can
    use it; False on every rank otherwise. Collective between processes.

    Args:
      mark: digest that identifies the compilation of this rank's cached program (``Ready.agreed``); "": it has none.
      name: of the program.
      inputs: its inputs in words, for errors of ranks that make another call.

    Raises:
      CommError: a rank does not take part.
    """
    if context.has_other_processes:
        number, before = context.programs, context.reports.compiled_for.get(name, "")
        purpose, timeout_s = _purpose(name, inputs, number, before), context.config["debug.check_timeout_s"]
        said = context.comms[0].allgather_bytes(f"whale/kept/{number}", mark.encode(), timeout_s, purpose)
        mark = mark if all(other == mark.encode() for other in said) else ""
    if mark:
        context.reports.compiled_for[name] = inputs
    return bool(mark)


def _purpose(name: str, inputs: str, number: int, before: str) -> str:
    """Describes the program that a rank is about to compile, for the errors of ranks that make another call.

    Args:
      name: of the program.
      inputs: its inputs in words.
      number: index of the program among those compiled in this run.
      before: the inputs with which a program of this name was compiled last; "": it was not.
    """
    known = f", which was compiled for ({before}) before" if before else ""
    return f"the compilation of program {number}, `{name}` ({inputs}){known}"


def _inputs(program: Program) -> str:
    return ", ".join(f"{name}: {program.by_name[name].outputs[0]}" for name in program.inputs)


def make_plan(program: Program, context: Context, settings: PlanSettings, made: Plan | None = None) -> Plan:
    """Returns the plan for a program: the saved one if it is for this program, else one cached by an earlier run, else
    a new one.

    Args:
      made: the new plan, if a search has made it already.

    Raises:
      PlanError: the saved plan is not legal for the program, or no plan can be made.
    """
    saved = context.planning.saved.find_plan(program, settings) if context.planning.saved is not None else None
    if context.planning.saved is None or saved is None:
        if (kept := load_plan(program, context, settings)) is not None:
            return replace(kept, declined=settings.fuse.declined)
        plan = made
        if plan is None:
            with log_while_running(f"planning `{program.name}` ({len(program.nodes)} operations)"):
                plan = make_any_plan(program, settings)
        keep_plan(program, context, settings, plan)
        return replace(plan, declined=settings.fuse.declined)
    verify_saved_plan(program, saved, settings, context.planning.saved.path)
    return saved


def agree_on_plan(
    program: Program, number: int, context: Context, settings: PlanSettings, made: Plan | None = None
) -> Plan:
    """Makes a plan on rank 0 and returns it on every rank; if planning fails there, raises the error on every rank.

    Args:
      made: as in ``make_plan``.
    """
    if not context.has_other_processes:
        return make_plan(program, context, settings, made)
    comm, timeout_s = context.comms[0], context.config["debug.check_timeout_s"]
    planning = f"the planning of program {number}, `{program.name}` (rank 0 is planning)"
    if context.rank == 0:
        try:
            plan = make_plan(program, context, settings, made)
        except Exception as e:
            comm.broadcast_bytes(f"whale/plan/{number}", b"E" + str(e).encode(), 0, timeout_s, planning)
            raise
        comm.broadcast_bytes(f"whale/plan/{number}", b"P" + plan.to_json(), 0, timeout_s, planning)
        return plan
    data = comm.broadcast_bytes(f"whale/plan/{number}", None, 0, max(timeout_s, PLAN_TIMEOUT_S), planning)
    if data[:1] == b"E":
        raise PlanError(
            f"rank 0 could not make a plan: {data[1:].decode()}",
            action=f"do what rank 0's error above says next; if it says nothing, {REPORT_FAULT}",
        )
    return plan_from_json(data[1:])
