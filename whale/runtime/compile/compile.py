"""Captured program -> plan -> the programs of this process's ranks. Collective between processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType

import msgspec

from whale.errors import PlanError, ProgramError
from whale.ir.collector import no_garbage_collection
from whale.ir.fingerprint import fingerprint, node_digests
from whale.ir.layout import Placement
from whale.ir.plan import Plan, plan_from_json
from whale.ir.program import Node, Program, Ref
from whale.lowering.compiled import compile_marked
from whale.lowering.emit import HOROVOD_ALL_REDUCE
from whale.lowering.local import localise
from whale.passes.facts.rank_groups import refuse_groups
from whale.passes.facts.scopes import all_paths
from whale.passes.facts.stages import places_of
from whale.passes.memory.footprint import CATEGORIES, variable_kinds
from whale.passes.memory.offload import crossing_bytes, offload, offloaded
from whale.passes.order import expand, normalise
from whale.passes.settings import (
    BatchSettings,
    ExchangeSettings,
    MemorySettings,
    PlanSettings,
    PrecisionSettings,
    SplitSettings,
    TimeSettings,
    ZeroSettings,
)
from whale.runtime.compile.auto import spread_program
from whale.runtime.compile.memory_plan import limit_bytes, options_text, predicted, refuse_what_does_not_fit
from whale.runtime.compile.mesh import lower_mesh, plan_program
from whale.runtime.compile.micro_batches import in_micro_batches
from whale.runtime.compile.offload import has_compute_device
from whale.runtime.compile.stage_groups import lower_places, plan_places
from whale.runtime.run.context import Context
from whale.runtime.run.scopes import one_number

_MOST_RANKS_SHOWN = 8


@dataclass(frozen=True)
class Compiled:
    """A program that is ready to be lowered to TensorFlow.

    Attributes:
      plan: what every rank agreed on.
      program: normalised, expanded; what the plan speaks of.
      ranks: one program for each rank of this process.
      number: of the program in this run, equal on all ranks.
      seconds: where the time of compiling went.
    """

    plan: Plan
    program: Program
    ranks: tuple[Program, ...]
    number: int
    seconds: Mapping[str, float]

    @property
    def kinds(self) -> dict[str, str]:
        """Handle node -> parameters, slots or buffers."""
        return variable_kinds(self.program)


def plan_settings(context: Context) -> PlanSettings:
    """The planner's view of the run."""
    config = context.config
    if config["communication.wire_dtype"] and config.zero_level:
        raise PlanError(
            "gradients that are divided with the optimizer's state are sent as they are",
            given=f'communication.wire_dtype="{config["communication.wire_dtype"]}", zero.level={config.zero_level}',
            expected="one of the two",
            action="leave communication.wire_dtype or zero.level out",
        )
    if config["pipeline.num_stages"] and not config["auto_parallel"]:
        raise PlanError(
            "a number of stages is for auto_parallel to keep to; without it stages are those of the program",
            given=f"pipeline.num_stages={config['pipeline.num_stages']}, auto_parallel=False",
            expected="auto_parallel=True, or wh.stage in the program",
            action="set auto_parallel, or leave pipeline.num_stages out",
        )
    return PlanSettings(
        size=context.size,
        batch=BatchSettings(
            shares=tuple(config["replica.shares"]),
            marked=tuple(config["batch.inputs"]),
            local_statistics=not config["sync_batch_norm"],
            local_streams=config["random"] == "local",
        ),
        split=SplitSettings(ranks=config["split.ranks"]),
        zero=ZeroSettings(config.zero_level, config["zero.min_bytes"], config["zero.ahead"]),
        time=TimeSettings(
            micro_batches=config["pipeline.num_micro_batch"],
            schedule=config["pipeline.schedule"],
            local_statistics=config["pipeline.micro_batch_statistics"],
        ),
        memory=MemorySettings(
            recompute=config["gradient_checkpoint.type"],
            offload=config["offload.level"],
            limit_bytes=config["memory.limit_bytes"],
        ),
        precision=PrecisionSettings(config["amp.dtype"] if config["amp.level"] == "O1" else ""),
        exchange=ExchangeSettings(
            group_bytes=config["communication.group_bytes"],
            backend=config["communication.backend"],
            wire_dtype=config["communication.wire_dtype"],
        ),
        dump=config["dump"] if context.rank == 0 else "",
    )


def compile_program(
    program: Program,
    context: Context,
    local: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    variables: Mapping[str, Placement] | None = None,
    marked: Callable[[], Program] | None = None,
) -> Compiled:
    """Normalises, compares between ranks, plans on rank 0, and makes this process's rank programs.

    Args:
      local: inputs of which this rank is given its own rows only, with the rows of every rank.
      variables: how variables lie that earlier programs have fixed, by handle node; None: all lie whole, whatever the
        scopes say, because this run cannot hold them split.
      marked: captures the program with its gradients marked; None: it cannot.

    Raises:
      ProgramError: the ranks are about to run different programs; names the rank and the first difference.
      PlanError: the program cannot be spread as asked, or does not fit into the memory of a rank's device.
      CommError: a rank does not take part.
    """
    number, context.programs = context.programs, context.programs + 1
    times: dict[str, float] = {}
    start_ns = time.monotonic_ns()

    def lap(name: str) -> None:
        nonlocal start_ns
        now_ns = time.monotonic_ns()
        times[name] = (now_ns - start_ns) * 1e-9
        if context.trace is not None:
            context.trace.past(name, "compile", start_ns, now_ns)
        start_ns = now_ns

    settings = plan_settings(context).but(split__known=variables or {}, split__at_rest=variables is not None)
    # A step that is traced while a pipeline is entered belongs to it as well.
    number_of_parts = one_number(context, all_paths(program).union(context.scopes[-1:]))
    settings = settings.but(time__micro_batches=number_of_parts)
    as_captured = program
    program = normalise(program, settings)
    lap("normalise")

    def options(limit: float) -> str:
        return options_text(settings, limit, as_captured, marked, lower_first_ranks, has_compute_device())

    # Recomputation needs the marks of gradients, which steps that can be captured with them have under auto_parallel.
    again = (lambda changed: normalise(as_captured, changed)) if marked is not None else None
    if context.dry is not None:
        settings_of_dry, dry = settings.but(size=context.dry.size, batch__local=local), program
        if context.config["auto_parallel"] or context.auto is not None:
            dry, settings_of_dry = spread_program(program, settings_of_dry, context, number, again, options, dry=True)
        spread = with_memory(dry, _made_plan(dry, context, settings_of_dry), settings_of_dry)
        if context.auto is not None:
            spread = replace(spread, choice=msgspec.json.encode(context.auto).decode())
        context.dry.seen(spread, dry, settings_of_dry)
    else:
        settings = settings.but(batch__local=local)
    mark = fingerprint(program)
    if context.between_processes:
        _compare(program, mark, local, number, context)
    lap("fingerprint")
    if (context.config["auto_parallel"] or context.auto is not None) and context.dry is None:
        program, settings = spread_program(program, settings, context, number, again, options)
        lap("choose")
    plan = _agreed_plan(program, number, context, settings)
    lap("plan")
    if context.meter is not None:
        context.meter.planned(program, plan, settings)
    expanded = expand(program, plan.expanded, settings)
    lap("expand")
    what = f"`{program.name}` (program {number} of the run)"
    with no_garbage_collection():
        lowered = lower_ranks(program, expanded, plan, settings, context.ranks, context.comm_name, what)
        ranks = tuple(compile_marked(_with_number(r, number)) for r in lowered)
    lap("localise")
    if context.dry is None:
        limit, _ = limit_bytes(context.config, context.local_ranks)
        refuse_what_does_not_fit(dict(zip(context.ranks, lowered)), context, number, settings, lambda: options(limit))
    context.predicted[program.name] = cache(lambda: predicted(lowered[0], context.rank, context.size))
    if plan.offloaded:
        there, back = zip(*map(crossing_bytes, lowered))
        context.offloaded[program.name] = sum(there), sum(back)
    lap("memory")
    return Compiled(plan, expanded, ranks, number, times)


def lower_ranks(
    program: Program,
    expanded: Program,
    plan: Plan,
    settings: PlanSettings,
    ranks: Sequence[int],
    comm: str,
    what: str,
) -> list[Program]:
    """What ``ranks`` run: the expanded program, made local and cut into micro-batches where there are any."""
    if plan.places:
        lowered = lower_places(expanded, plan, ranks, comm, what, settings)
    elif plan.inner is not None:
        lowered = lower_mesh(program, plan, settings, ranks, comm, what)
    else:
        lowered = [localise(expanded, plan, rank, comm, what) for rank in ranks]
    if plan.micro_batches > 1 and not plan.places:
        lowered = [in_micro_batches(p, plan, rank, settings) for p, rank in zip(lowered, ranks)]
    return [offload(p, plan.offloaded) for p in lowered] if plan.offloaded else lowered


def with_memory(program: Program, plan: Plan, settings: PlanSettings) -> Plan:
    """``plan`` with the bytes that its ranks will hold; of many ranks, the first ones."""
    with no_garbage_collection():
        ranks = _first_ranks(program, plan, settings)
        each = [predicted(lowered, rank, settings.size) for rank, lowered in ranks.items()]
    return replace(plan, memory={name: tuple(f[name] for f in each) for name in CATEGORIES})


def lower_first_ranks(settings: PlanSettings, captured: Program) -> dict[int, Program]:
    """What the first ranks would run of a program that is planned in this process alone.

    Raises:
      PlanError: it cannot be spread so.
    """
    program = normalise(captured, settings)
    return _first_ranks(program, make_any_plan(program, settings), settings)


def _first_ranks(program: Program, plan: Plan, settings: PlanSettings) -> dict[int, Program]:
    ranks = range(min(settings.size, _MOST_RANKS_SHOWN))
    expanded = expand(program, plan.expanded, settings)
    return dict(zip(ranks, lower_ranks(program, expanded, plan, settings, ranks, "", plan.program)))


def compile_alone(program: Program, context: Context) -> Program:
    """The program as one rank runs it alone; not collective."""
    return compile_marked(normalise(program, plan_settings(context)))


def _with_number(program: Program, number: int) -> Program:
    """Keys are unique in a plan; the program's number makes them unique in the run. Horovod's is the node's name."""

    def of_graph(graph: Program) -> Program:
        renamed = {n.name: f"{n.name}_of_{number}" for n in graph.nodes if n.op == HOROVOD_ALL_REDUCE}

        def of_ref(ref: Ref) -> Ref:
            return Ref(renamed[ref.node], ref.index) if ref.node in renamed else ref

        def of_node(n: Node) -> Node:
            if n.op.startswith("Whale") and "key" in n.attrs and n.op != "WhaleCheck":
                n = replace(n, attrs={**n.attrs, "key": f"{number}:{n.attrs['key']}"})
            if n.name in renamed or not renamed.keys().isdisjoint(r.node for r in n.inputs):
                n = replace(n, name=renamed.get(n.name, n.name), inputs=tuple(map(of_ref, n.inputs)))
            return n

        nodes = tuple(map(of_node, graph.nodes))
        if not renamed:
            return graph.with_nodes(nodes)
        effects = tuple(renamed.get(name, name) for name in graph.effects)
        return replace(graph, nodes=nodes, outputs=tuple(map(of_ref, graph.outputs)), effects=effects)

    main = of_graph(program)
    return replace(main, functions={name: of_graph(body) for name, body in program.functions.items()})


class _Mark(msgspec.Struct):
    """What a rank says before it compiles: which program comes next, and that it compiled the ones before.

    ``local`` are the inputs of which it brings its own rows only, with the rows of every rank.
    """

    name: str
    fingerprint: str
    local: dict[str, tuple[int, ...]]


def _compare(program: Program, mark: str, local: Mapping[str, tuple[int, ...]], number: int, context: Context) -> None:
    comm, timeout_s = context.comms[0], context.config["check.timeout_s"]
    mark_of_this = msgspec.json.encode(_Mark(program.name, mark, dict(local)))
    said = comm.allgather_bytes(f"whale/program/{number}", mark_of_this, timeout_s, _purpose(program, number))
    marks = [msgspec.json.decode(m, type=_Mark) for m in said]
    if all(m.fingerprint == marks[0].fingerprint for m in marks):
        for rank, said_by in enumerate(marks):
            if said_by.local != marks[0].local:
                raise ProgramError(
                    "the ranks pass a step's batch in different ways",
                    op=program.name,
                    given=f"rank 0 passes {_passed(marks[0])}, rank {rank} passes {_passed(said_by)}",
                    expected="the whole batch, or a part of it with the same shares, on every rank",
                    action="use wh.shard for the same arguments on every rank",
                )
        return
    rows = node_digests(program)
    mine = msgspec.json.encode([(what, digest.hex()) for what, digest in rows])
    others = [
        msgspec.json.decode(o, type=list[tuple[str, str]])
        for o in comm.allgather_bytes(f"whale/program/{number}/nodes", mine, timeout_s)
    ]
    rank = next(r for r, m in enumerate(marks) if m.fingerprint != marks[0].fingerprint)
    first, other = others[0], others[rank]
    at = next((i for i, (a, b) in enumerate(zip(first, other)) if a != b), min(len(first), len(other)))
    described = [rows[at][0] if at < len(rows) else "(no more nodes)" for rows in (first, other)]
    if described[0] == described[1]:
        described = [f"{d} with other attributes, operands or types" for d in described]
    raise ProgramError(
        "the ranks are about to run different programs",
        given=f"rank 0 runs {marks[0].name}, rank {rank} runs {marks[rank].name}",
        **{"first difference": f"node {at}: rank 0 has {described[0]}; rank {rank} has {described[1]}"},
        expected="the same program, inputs' shapes and fetches on every rank",
        action="remove what depends on the rank (wh.rank(), host names, unseeded randomness) from step and fetches",
    )


def _passed(mark: _Mark) -> str:
    return ", ".join(f"parts of {name} with shares {list(sizes)}" for name, sizes in mark.local.items()) or "no parts"


def _purpose(program: Program, number: int) -> str:
    """What a rank is about to compile, for the others' errors when they are somewhere else."""
    inputs = [f"{name}: {program.by_name[name].outputs[0]}" for name in program.inputs]
    return f"the compilation of program {number}, `{program.name}` ({', '.join(inputs)})"


def make_any_plan(program: Program, settings: PlanSettings) -> Plan:
    """The plan of a normalised program, in stages where it has some.

    Raises:
      PlanError: see ``plan_program`` and ``plan_places``.
    """
    places = places_of(program, settings.size)
    unable = {
        "wh.stage": bool(places),
        f"split.ranks={settings.split.ranks}": 0 < settings.split.ranks < settings.size,
        f"pipeline.num_micro_batch={settings.time.micro_batches}": settings.time.micro_batches > 1,
    }
    refuse_groups(program, settings.size, unable)
    on_host = offloaded(program, settings.memory.offload)
    if on_host and not settings.split.at_rest:
        raise PlanError(
            "a session's variables cannot lie in the host's memory beside an accelerator",
            given=f'offload.level="{settings.memory.offload}"',
            expected="no offload.level, or a step that is a wh.function",
            action="leave offload.level out, or write the step as a wh.function",
        )
    plan = plan_places(program, settings, places) if places else plan_program(program, settings)
    return replace(plan, offloaded=on_host)


def _made_plan(program: Program, context: Context, settings: PlanSettings) -> Plan:
    """The saved plan where it is this program's, else a new one."""
    saved = context.saved.of(program, settings) if context.saved is not None else None
    return saved if saved is not None else make_any_plan(program, settings)


def _agreed_plan(program: Program, number: int, context: Context, settings: PlanSettings) -> Plan:
    """Rank 0's plan on every rank; when planning fails there, the same error on every rank."""
    if not context.between_processes:
        return _made_plan(program, context, settings)
    comm, timeout_s = context.comms[0], context.config["check.timeout_s"]
    if context.rank == 0:
        try:
            plan = _made_plan(program, context, settings)
        except Exception as e:
            comm.broadcast_bytes(f"whale/plan/{number}", b"E" + str(e).encode(), 0, timeout_s)
            raise
        comm.broadcast_bytes(f"whale/plan/{number}", b"P" + plan.to_json(), 0, timeout_s)
        return plan
    data = comm.broadcast_bytes(f"whale/plan/{number}", None, 0, max(timeout_s, 600.0))
    if data[:1] == b"E":
        raise PlanError(f"rank 0 could not make a plan: {data[1:].decode()}")
    return plan_from_json(data[1:])
