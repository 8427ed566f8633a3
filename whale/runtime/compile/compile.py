"""Compiles a captured program: normalises it, plans it, and creates the programs of this process's ranks
(``compile_program``).

Collective between processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from types import MappingProxyType

import msgspec

from whale.distributed.gpus import has_gpu
from whale.ir.collector import suspend_garbage_collection
from whale.ir.layout import Shard
from whale.ir.mesh import Tiles
from whale.ir.ops import ALL_REDUCE, ALL_REDUCES
from whale.ir.plan import Plan, strategy_of
from whale.ir.plan_text import format_plan
from whale.ir.program import Program
from whale.kernels.substitute import prepare_for_run, substitute_kernels
from whale.kernels.xla import XlaKernels
from whale.log import log
from whale.partition.lower import add_memory, decompose, lower_ranks, lower_shown_ranks
from whale.partition.pipeline.microbatch_loop import CALL
from whale.partition.variable_use import VariableUse
from whale.passes.analysis.axes import tiles_that_fit
from whale.passes.analysis.scopes import list_paths
from whale.passes.analysis.uses import variable_kinds
from whale.passes.memory.offload import TABLES, crossing_bytes, not_by_rows
from whale.passes.memory.step_bytes import step_bytes
from whale.passes.pass_manager import normalise
from whale.passes.resharding.on_devices import DEVICE_BACKENDS, device_groups, host_exchanges
from whale.passes.run_passes import PassObserver
from whale.passes.settings import FuseSettings, PlanSettings
from whale.passes.verify.explain import explain_undivided, explain_wide_weights
from whale.planner.graph_search.predict import complete
from whale.planner.graph_search.strategies import updates
from whale.runtime.compile.auto import Applied, SearchedAgain, project_for_plan, spread_program
from whale.runtime.compile.auto import search_again as search_strategy_again
from whale.runtime.compile.cross_rank_checks import agree_on_plan, compare_programs, make_plan
from whale.runtime.compile.exchanges import compare_exchanges
from whale.runtime.compile.memory_plan import Options, drop_files, options_text, refuse_what_does_not_fit
from whale.runtime.compile.offload import has_compute_device
from whale.runtime.compile.settings import settings_of
from whale.runtime.compile.step_cache import Ready
from whale.runtime.compile.tensorflow_functions import LoweredFunction, communicates
from whale.runtime.context import Context
from whale.runtime.scopes import find_micro_batches

# Device types under which TensorFlow registers XLA's kernels: for CPUs, and for GPUs (True).
_COMPILES_FOR = {False: "XLA_CPU_JIT", True: "XLA_GPU_JIT"}


@dataclass(frozen=True)
class Compiled:
    """Holds a program that is ready to be lowered to TensorFlow functions.

    Attributes:
      plan: agreed on by all ranks.
      program: normalised and expanded; the plan refers to its nodes.
      ranks: one program for each rank of this process.
      number: index of the program among those compiled in this run; equal on all ranks, and part of the keys of its
        messages.
      seconds: phase of compilation -> its seconds.
      whole: warning that the program is not divided; "": it is, or that was said before.
      on_device: message about embedding tables that are not kept in the host's memory; "": none.
      most_bytes: predicted peak memory of the rank of this process with most.
    """

    plan: Plan
    program: Program
    ranks: tuple[Program, ...]
    number: int
    seconds: Mapping[str, float]
    whole: str
    on_device: str
    most_bytes: float

    @cached_property
    def kinds(self) -> dict[str, str]:
        """Maps the handle node of each variable to its kind: "parameters", optimizer state or buffers."""
        return variable_kinds(self.program)


def compile_program(
    program: Program,
    context: Context,
    local: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    variables: Mapping[str, Tiles] = MappingProxyType({}),
    marked: Callable[[], Program] | None = None,
    movable: bool = False,
    in_files: Collection[str] = (),
    whole: bool = False,
) -> Compiled:
    """Normalises a captured program, compares it between ranks, plans it on rank 0, and creates this process's rank
    programs.

    Args:
      local: name of each input of which this rank gets only its own rows -> number of rows on every rank.
      variables: name of a variable's handle node -> layout of the variables that earlier programs have fixed.
      marked: returns the program captured again with the nodes of its backward pass marked, which recomputation needs;
        None: it cannot be captured that way.
      movable: whether variables may get another layout before the program runs, as in graphs of TensorFlow 1 sessions.
      in_files: names of the handle nodes of variables in files, which take no memory.
      whole: whether every rank computes the whole batch, because the program serves batches of many sizes.

    Raises:
      ProgramError: the ranks are about to run different programs; names the rank and the first difference.
      PlanError: the program cannot be divided as asked, or does not fit into the memory of a rank's device.
      CommError: a rank does not take part.
    """
    number, context.programs = context.programs, context.programs + 1
    clock = _Clock(context)
    if context.planning.dry is not None and context.planning.dry.passes is not None:
        context.planning.dry.passes.runs.clear()  # drops records of earlier programs, which are not what is planned
    settings = _settings(program, context, variables)
    if whole:
        settings = settings.but(batch__inputs=())
    lying = settings.split.tiles
    captured = project_for_plan(program, context)

    def options(limits: Sequence[float]) -> str:
        return options_text(settings, limits, captured, marked, has_compute_device())

    # Recomputation needs the marks of gradients, which steps that can be captured with them have under auto_parallel.
    recomputable = captured if marked is not None else None
    if context.planning.dry is not None:
        alone = settings.but(observer=PassObserver())  # the program that runs on one rank is not observed
        settings = settings.but(size=context.planning.dry.size, batch__local=local)
        _show(normalise(captured, settings), context, settings, number, recomputable, options)
        settings = alone
        program = normalise(captured, settings)
    else:
        program = normalise(captured, settings)
        settings = settings.but(batch__local=local)
    clock.lap("normalise")
    compare_programs(program, local, number, context)
    clock.lap("fingerprint")
    made = None
    if context.planning.dry is None:
        if movable and context.planning.auto is None:  # the search covers programs without stages, too
            settings = settings.but(split__tiles=tiles_that_fit(program, settings))
        # A session runs parts of a graph outside of Whale's own calls, and only these can run on lent cores.
        spread = _spread(program, settings, context, number, recomputable, options, lends=not movable)
        program, settings, made = spread.program, spread.settings, spread.plan
        if movable:
            made, settings = None, settings.but(split__tiles=tiles_that_fit(program, settings.but(split__tiles=lying)))
        clock.lap("choose")
    plan = agree_on_plan(program, number, context, settings, made)
    clock.lap("plan")
    if context.planning.meter is not None:
        context.planning.meter.note_plan(program, plan, settings)
    expanded = decompose(program, plan, settings)
    clock.lap("expand")
    undivided_text = "" if whole else _tell_if_whole(expanded, plan, context)
    _tell_of_wide_weights(expanded, plan, context)
    on_device = _tell_of_tables(program, plan, settings, context)
    what = f"`{program.name}` (program {number} of the run)"
    lowered = lower_ranks(program, plan, settings, context.ranks, context.comm_name, what, expanded)
    compare_exchanges(lowered, plan, number, context)
    _tell_of_backend(lowered[0], plan, settings, context)
    _tell_of_micro_batches(plan, settings, context)
    clock.lap("partition")
    settings = settings.but(fuse__declined=plan.declined)  # all ranks leave out what rank 0 has measured as slower
    if context.planning.kernels is not None:
        context.planning.kernels.note_program(lowered[0], settings)
    xla = _find_xla(lowered, settings.fuse, context)
    with suspend_garbage_collection():
        elastic = context.elastic is not None
        running = substitute_kernels(lowered, settings, elastic, xla)
        predicted = settings.but(observer=PassObserver())  # the observer sees only the program that runs
        lowered = running if xla is None else substitute_kernels(lowered, predicted, elastic)
    if settings.fuse != FuseSettings():
        clock.lap("fuse")
    comm = context.comm_name if context.size > 1 else ""
    ranks = prepare_for_run(running, settings, context.ranks, comm, number, has_gpu())
    lowered = [drop_files(one, in_files) for one in lowered]
    most_bytes = 0.0
    if context.planning.dry is None:
        most_bytes = refuse_what_does_not_fit(dict(zip(context.ranks, lowered)), context, number, settings, options)
    _remember(lowered, plan, context)
    if context.watch is not None and context.rank == 0:
        context.watch.tell_plan(program.name, lambda: format_plan(plan))
    context.distributed = context.distributed or any(updates(program, node) for node in program.nodes)
    clock.lap("memory")
    if context.planning.dry is None:
        spent = ", ".join(f"{name} {1e3 * s:.0f}" for name, s in clock.seconds.items() if s >= 1e-3)
        log.debug(f"{what} is compiled for {context.size} ranks in {sum(clock.seconds.values()):.3f} s (ms: {spent})")
    return Compiled(plan, expanded, ranks, number, clock.seconds, undivided_text, on_device, most_bytes)


def search_again(
    program: Program,
    context: Context,
    number: int,
    local: Mapping[str, tuple[int, ...]],
    given: Mapping[str, Tiles],
    whole: bool,
    took: tuple[float, float],
    is_near: bool,
) -> SearchedAgain:
    """Searches another strategy for a captured program that runs and whose steps were measured; collective.

    Args:
      program, local, whole: as in ``compile_program``.
      number: index of the program among those compiled in this run; equal on all ranks, and part of the keys of its
        messages.
      given: name of a variable's handle node -> layout that the script sets for a variable.
      took, is_near: as in ``whale.runtime.compile.auto.search_again``.

    Raises:
      PlanError: no strategy can run now.
    """
    settings = _settings(program, context, given).but(observer=PassObserver())
    if whole:
        settings = settings.but(batch__inputs=())
    normal = normalise(program, settings)
    return search_strategy_again(normal, settings.but(batch__local=local), context, number, program, took, is_near)


def _tell_if_whole(program: Program, plan: Plan, context: Context) -> str:
    """Warns once, on the first rank, if a program is not divided, so that every rank computes all of it, and returns
    the text. Returns "" if the program is divided, or if `auto_parallel` found that undivided is faster.
    """
    if context.planning.dry is not None or context.rank != 0 or plan.program in context.reports.whole:
        return ""
    chosen = context.planning.auto is not None and context.planning.auto.strategy.replicated
    if chosen or not (text := explain_undivided(program, plan)):
        return ""
    context.reports.whole.add(plan.program)
    log.warning(text)
    return text


def _tell_of_wide_weights(program: Program, plan: Plan, context: Context) -> None:
    """Logs once, on the first rank, which large weights should be sharded instead of replicated (by a scope
    ``wh.split``). Logs nothing if a search or a saved plan has decided about them.
    """
    decided = context.planning.auto is not None or context.planning.saved is not None
    if context.planning.dry is not None or context.rank != 0 or decided or plan.program in context.reports.wide:
        return
    if text := explain_wide_weights(program, plan):
        context.reports.wide.add(plan.program)
        log.info(text)


def _tell_of_tables(program: Program, plan: Plan, settings: PlanSettings, context: Context) -> str:
    """Logs once, on the first rank, which embedding tables are not kept in the host's memory, and which op needs all
    rows of each; returns the text or "".
    """
    if settings.memory.offload != TABLES or context.planning.dry is not None or context.rank != 0:
        return ""
    left = not_by_rows(program, plan.offloaded)
    why = "; ".join(f"{name}, for {op}" for name, op in left.items())
    text = (
        f'`{plan.program}` reads all rows of tables, so memory.offload="{TABLES}" does not move them to the host: {why}'
    )
    if not left or text in context.reports.on_device:
        return ""
    context.reports.on_device.add(text)
    log.info(text)
    return text


def _tell_of_backend(program: Program, plan: Plan, settings: PlanSettings, context: Context) -> None:
    """Logs on the first rank which exchanges the communication backend (Horovod, NCCL) leaves to Whale, or to
    the host.
    """
    backend = settings.exchange.backend
    if context.rank != 0 or context.planning.dry is not None:
        return
    if backend == "horovod" and (plan.stage_groups or plan.inner is not None):
        sums = [n.op for g in (program, *program.functions.values()) for n in g.nodes if n.op in ALL_REDUCES]
        given = sum(op != ALL_REDUCE for op in sums)
        log.info(
            f'communication.backend="horovod" carries out {given} of {len(sums)} all-reduces of `{plan.program}`, '
            "those over all ranks; Whale carries out those over some ranks"
        )
    if backend in DEVICE_BACKENDS and (left := list(host_exchanges(program))):
        shown = f"{len(left)} exchange{'s' * (len(left) != 1)} of `{plan.program}` through the host"
        log.info(f'communication.backend="{backend}" leaves {shown}: {"; ".join(sorted({one.why for one in left}))}')


def _tell_of_micro_batches(plan: Plan, settings: PlanSettings, context: Context) -> None:
    """Logs on the first rank that a step runs in more micro-batches than configured, and why."""
    asked = settings.time.micro_batches
    if context.rank == 0 and context.planning.dry is None and plan.micro_batches > asked:
        cut = {b.name: b.placement for b in plan.batch_inputs if isinstance(b.placement, Shard)}
        rows = ", ".join(f"{p.extent} of {name}" for name, p in cut.items())
        log.info(
            f"`{plan.program}` runs in {plan.micro_batches} micro-batches instead of {asked}, since scopes that gather "
            f"rows, and stages of unequal numbers of ranks, need micro-batches of equal size (in all {rows})"
        )


class _Clock:
    """Measures the seconds of each phase of compilation, and writes the phases to the trace."""

    def __init__(self, context: Context) -> None:
        self.seconds: dict[str, float] = {}
        self._trace, self._start_ns = context.trace, time.monotonic_ns()

    def lap(self, name: str) -> None:
        """Ends the phase ``name`` now, and begins the next one."""
        now_ns = time.monotonic_ns()
        self.seconds[name] = (now_ns - self._start_ns) * 1e-9
        if self._trace is not None:
            self._trace.write_past(name, "compile", self._start_ns, now_ns)
        self._start_ns = now_ns


def _settings(program: Program, context: Context, variables: Mapping[str, Tiles]) -> PlanSettings:
    """Returns the run's planner settings with the program's number of micro-batches and the given layouts of
    variables.
    """
    found = settings_of(context).but(split__tiles=variables)
    return found.but(time__micro_batches=micro_batches_of(program, context))


def micro_batches_of(program: Program, context: Context) -> int:
    """Returns the number of micro-batches into which a program cuts each rank's rows.

    Raises:
      PlanError: the program asks for several numbers.
    """
    # A step that is traced while a pipeline is entered belongs to it as well.
    return find_micro_batches(context, list_paths(program).union(context.scoping.scopes[-1:]))


def _spread(
    program: Program,
    settings: PlanSettings,
    context: Context,
    number: int,
    captured: Program | None,
    options: Options,
    lends: bool = False,
) -> Applied:
    """Returns the program and settings with the strategy of `auto_parallel` or of a described model applied; unchanged
    if the run has neither.
    """
    if (
        not context.config["mesh.auto_parallel"]
        and context.planning.auto is None
        and context.planning.described is None
    ):
        return Applied(program, settings)
    return spread_program(program, settings, context, number, captured, options, lends)


def _show(
    program: Program, context: Context, settings: PlanSettings, number: int, captured: Program | None, options: Options
) -> None:
    """Plans a program for the ranks of a dry run, and passes the plan to the tool that began the dry run
    (``DryRun.seen``). The program that the script then runs is planned separately, for one rank.
    """
    assert context.planning.dry is not None
    spread = _spread(program, settings, context, number, captured, options)
    program, settings = spread.program, spread.settings
    plan = make_plan(program, context, settings, spread.plan)
    ranks = lower_shown_ranks(program, plan, settings, lambda programs: _find_xla(programs, settings.fuse, context))
    plan = add_memory(plan, ranks, settings)
    found = context.planning.auto.strategy if context.planning.auto is not None else strategy_of(plan)
    plan = replace(plan, strategy=complete(found, settings), searched=context.planning.auto is not None)
    context.planning.dry.seen(plan, program, settings, ranks)


def _remember(lowered: Sequence[Program], plan: Plan, context: Context) -> None:
    """Records the predicted memory of the program's step in the run's context, where `wh.memory_report` reads it."""
    first = lowered[0]
    context.reports.predicted[plan.program] = cache(lambda: step_bytes(first, context.rank, context.size))
    if plan.offloaded:
        there, back = zip(*map(crossing_bytes, lowered))
        context.reports.offloaded[plan.program] = sum(there), sum(back)


def ready_step(
    compiled: Compiled, function: LoweredFunction, uses: dict[str, VariableUse], context: Context, inputs: str
) -> Ready:
    """Returns what is needed to call a compiled program, in the form that is cached for later runs.

    Args:
      function: the lowered functions.
      uses: name of a variable's handle node -> how the step uses a variable that not all ranks hold alike.
      inputs: describes the inputs in words.
    """
    plan, program = compiled.plan, compiled.program
    chosen = context.planning.auto
    return Ready(
        program=program.name,
        inputs=inputs,
        main=function.name,
        passed=function.inputs,
        handles=function.handles,
        outputs=function.outputs,
        variables=tuple(v.node for v in program.variables),
        uses=uses,
        kinds=compiled.kinds,
        offloaded=tuple(plan.offloaded),
        communicates=communicates(compiled.ranks),
        rolled=any(node.op == CALL for one in compiled.ranks for node in one.nodes),
        trains=any(updates(program, node) for node in program.nodes),
        most_bytes=compiled.most_bytes,
        crossing_bytes=context.reports.offloaded.get(program.name),
        whole=compiled.whole,
        on_device=compiled.on_device,
        lends=bool(plan.lent_threads),
        connects=device_groups(compiled.ranks[0]),
        matched=tuple(sorted(context.scoping.annotated)),
        chosen=msgspec.json.encode(chosen) if chosen is not None else b"",
    )


def bytes_under(
    program: Program,
    plan: Plan,
    context: Context,
    local: Mapping[str, tuple[int, ...]],
    variables: Mapping[str, Tiles],
    in_files: Collection[str],
) -> dict[str, int]:
    """Returns, by category, the predicted bytes of a captured program's step under ``plan``, on this process's first
    rank; not collective.

    Args:
      local, variables, in_files: as in ``compile_program``.
    """
    settings = _settings(program, context, variables).but(observer=PassObserver())
    captured, program = program, normalise(program, settings)
    settings = settings.but(batch__local=local)
    if context.planning.auto is not None:
        spread = spread_program(program, settings, context, 0, captured, lambda _: "")
        program, settings = spread.program, spread.settings
    lowered = substitute_kernels(lower_ranks(program, plan, settings, context.ranks[:1], context.comm_name), settings)
    return step_bytes(drop_files(lowered[0], in_files), context.rank, context.size)


def compile_alone(program: Program, context: Context) -> Program:
    """Compiles a program for one rank, without exchanges and without fused kernels; not collective."""
    settings = settings_of(context).but(fuse=FuseSettings())
    return prepare_for_run([normalise(program, settings)], settings, on_gpu=has_gpu())[0]


def _find_xla(programs: Iterable[Program], fuse: FuseSettings, context: Context) -> XlaKernels | None:
    """Returns XLA's kernels if XLA is to compile parts of these programs (``jit_compile=True``); else None.

    If TensorFlow has no XLA for the device, the first rank logs that once.
    """
    graphs = (graph for one in programs for graph in (one, *one.functions.values()))
    if not fuse.xla or not any(node.marks.compiled for graph in graphs for node in graph.nodes):
        return None
    on_gpu = has_gpu()
    if (found := read_xla_kernels(on_gpu)) is None and context.rank == 0 and not context.reports.without_xla:
        context.reports.without_xla = True
        device = "GPUs" if on_gpu else "processors"
        log.info(f"TensorFlow has no XLA for {device} here: functions with jit_compile=True run without XLA")
    return found


@cache
def read_xla_kernels(on_gpu: bool) -> XlaKernels | None:
    """Returns the ops and dtypes for which TensorFlow registers XLA kernels on a kind of device; None: it is built
    without XLA for it.
    """
    import tensorflow as tf
    from tensorflow.python.framework.kernels import get_all_registered_kernels

    with tf.init_scope():  # XLA registers its kernels when TensorFlow optimises a first function
        tf.function(lambda: tf.constant(0.0), autograph=False).get_concrete_function()()
    names: dict[int, str] = {}

    def name_type(number: int) -> str:
        if number not in names:
            names[number] = tf.as_dtype(number).name
        return names[number]

    kernels: dict[str, list[dict[str, frozenset[str]]]] = {}
    for kernel in get_all_registered_kernels().kernel:
        if kernel.device_type == _COMPILES_FOR[on_gpu]:
            allowed = {one.name: frozenset(map(name_type, one.allowed_values.list.type)) for one in kernel.constraint}
            kernels.setdefault(kernel.op, []).append(allowed)
    return XlaKernels(kernels, on_gpu) if kernels else None
