"""Compiles a step of ``wh.function``: from its arguments to a callable that runs it on each batch
(``compile_step``).
"""

from __future__ import annotations

import contextlib
import contextvars
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import msgspec
import tensorflow as tf

import whale_ops
from whale.capture.attrs import SCOPE_ATTR
from whale.capture.captured import Captured, CapturedVariable, Traced
from whale.capture.function import Trace, trace_function
from whale.capture.sharded import IteratorReads, ShardedTensor
from whale.capture.signature import Arguments
from whale.distributed.device_exchange import connect_groups
from whale.distributed.faults import raise_comm_error
from whale.distributed.gpus import has_gpu
from whale.distributed.trace import open_span
from whale.errors import ProgramError
from whale.ir.collector import suspend_garbage_collection
from whale.ir.mesh import Tiles
from whale.ir.plan import Plan
from whale.ir.plan_text import format_bytes
from whale.ir.strategy import ChosenStrategy
from whale.ir.values import Dims
from whale.partition.pipeline.microbatches import can_keep_own_rows
from whale.partition.variable_use import VariableUse, find_variable_uses
from whale.passes.analysis.scopes import find_split_weights
from whale.passes.analysis.stages import has_stages
from whale.runtime.annotate import put_in_default_scope, put_in_named_scopes
from whale.runtime.compile import step_cache
from whale.runtime.compile.auto import SearchedAgain
from whale.runtime.compile.compile import (
    Compiled,
    bytes_under,
    compile_program,
    micro_batches_of,
    ready_step,
    search_again,
)
from whale.runtime.compile.cross_rank_checks import check_all_take
from whale.runtime.compile.forecast import MOST_MOVES, StepForecast, StepsTook
from whale.runtime.compile.lending import may_lend, share_cores
from whale.runtime.compile.offload import compute_device
from whale.runtime.compile.plan_cache import correct_strategy
from whale.runtime.compile.settings import settings_of
from whale.runtime.compile.step_cache import Ready
from whale.runtime.compile.step_call import callable_step
from whale.runtime.compile.tensorflow_functions import load_ops, lower_to_function
from whale.runtime.context import Context
from whale.runtime.input.equal_inputs import as_rows_of, compare_arguments
from whale.runtime.input.local_batches import gather_whole_batch, rows_of_run
from whale.runtime.input.traces import SharedTrace
from whale.runtime.loss_scale import find_loss_scale
from whale.runtime.replica_writes import wrap_with_replica_check
from whale.runtime.unsynchronized_training import gives_gradients
from whale.runtime.variables.deferred import capturing, make_trace_creator
from whale.runtime.variables.in_files import find_folder
from whale.runtime.variables.variable_store import find_given_tiles, refuse_other_tiles
from whale_ops.memory import trim


@dataclass(frozen=True)
class Step:
    """Represents a step that is compiled for one set of argument shapes, dtypes and Python values.

    Attributes:
      call: takes the tensors of a call and returns the user's structure of results.
      captured: the trace.
      plan: returns the plan.
      seconds: phase of compilation after tracing -> seconds.
      gathers: whether the step needs the whole batch, so that a batch of which each rank has its rows is all-gathered
        for each call.
      compiled: the result of compilation; None: an earlier run has lowered the step.
      is_first: whether the step gives variables that it creates their first values, and serves one call only.
      is_common: whether it serves several sizes of its arguments, which it does not know.
    """

    call: Callable[[list[Any]], Any]
    captured: Traced
    plan: Callable[[], Plan]
    seconds: Mapping[str, float]
    gathers: bool
    compiled: Compiled | None
    is_first: bool
    is_common: bool = False

    def own(self, tensors: Iterable[Any], context: Context) -> list[Any]:
        """Returns the tensors of a call as the lowered step takes them: of a batch this rank's rows, or all rows if the
        step ``gathers``.
        """
        if not self.gathers:
            return [rows_of_run(t, context) for t in tensors]
        return [
            as_rows_of(gather_whole_batch(t, name, context), t.local)
            if type(t) is ShardedTensor and rows_of_run(t, context) is not t
            else t
            for name, t in zip(self.captured.inputs, tensors)
        ]


# Whether steps that are called while a graph is captured become functions of their own in it, or are inlined.
_nested: contextvars.ContextVar[bool] = contextvars.ContextVar("whale_nested", default=False)


@contextlib.contextmanager
def captures_steps(nested: bool = False) -> Iterator[None]:
    """Makes steps that are called while a graph is built inside this context part of that graph.

    Args:
      nested: whether they become functions of their own in it, as in one process, because TensorFlow saves or shows the
        graph; otherwise Whale captures it, and they are inlined.
    """
    tokens = capturing.set(True), _nested.set(nested)
    try:
        yield
    finally:
        capturing.reset(tokens[0])
        _nested.reset(tokens[1])


def are_steps_nested() -> bool:
    """Returns True if steps become functions of their own in the graph that is being captured."""
    return _nested.get()


def tensors_of(arguments: Arguments, step: Step, context: Context, drawn: Sequence[Any] = ()) -> list[Any]:
    """Returns the tensors to pass to ``step.call``: the batches drawn for it, and then its arguments, converted to its
    dtypes.

    Args:
      drawn: tensors of batches that the step reads from iterators.
    """
    specs = step.captured.function.structured_input_signature[0]
    own = step.own([*drawn, *arguments.tensors], context)
    return own[: len(drawn)] + [
        t if isinstance(t, tf.Tensor) else tf.convert_to_tensor(t, dtype=spec.dtype)
        for t, spec in zip(own[len(drawn) :], specs)
    ]


def compile_step(
    fn: Callable[..., Any],
    arguments: Arguments,
    args: Any,
    kwargs: Any,
    context: Context,
    shared: SharedTrace,
    drawing: IteratorReads | None = None,
    shapes: Sequence[Dims | None] | None = None,
) -> Step:
    """Traces, plans and lowers the step ``fn(*args, **kwargs)``. Collective between processes.

    Args:
      arguments: ``args`` and ``kwargs``, flattened.
      shared: the trace that one process would use for them.
      drawing: draws the batches that ``fn`` reads from iterators; None: it reads none.
      shapes: of the arguments' tensors, with None for sizes that the step must not know; it then serves all of them,
        and every rank computes the whole batch. None: the arguments' own shapes.
    """
    with (
        open_span(context.trace, f"compile {getattr(fn, '__name__', 'function')}", "compile"),
        suspend_garbage_collection(),
    ):
        context.streams[shared.streams] = None
        found = _compile(fn, arguments, args, kwargs, context, shared, drawing, shapes)
        context.distributed = context.distributed or gives_gradients(found.captured)
        return replace(found, is_common=shapes is not None)


def _compile(
    fn: Callable[..., Any],
    arguments: Arguments,
    args: Any,
    kwargs: Any,
    context: Context,
    shared: SharedTrace,
    drawing: IteratorReads | None,
    shapes: Sequence[Dims | None] | None,
) -> Step:
    if context.planning.dry is None:
        for tensor in arguments.tensors:
            rows_of_run(tensor, context)

    def trace_step(mark_gradients: bool, drawing: IteratorReads | None) -> Trace:
        with captures_steps():
            found = trace_function(
                fn,
                args,
                kwargs,
                mark_gradients=mark_gradients,
                loss_scale=find_loss_scale(context),
                drawing=drawing,
                creator=make_trace_creator(context.should_defer),
                around=shared.trace_with_seed,
                shapes=shapes,
                open_shapes=shared.list_open_shapes(arguments.tensors),
            )
        shared.note_traced()
        return found

    with open_span(context.trace, "capture", "compile"):
        marks = (
            context.config["memory.recompute"]
            or context.config["mesh.auto_parallel"]
            or context.planning.auto is not None
        )
        trace = trace_step(bool(marks), drawing)
        if trace.is_first:
            trace = _check_first(trace, lambda: trace_step(bool(marks), drawing and drawing.repeat()), context)
    if context.config["memory.offload"] and context.planning.dry is None:
        compute_device(context.config)  # raises before any exchange
    tensors = [*(drawing.tensors if drawing is not None else ()), *arguments.tensors]
    local = {t.op.name: own.sizes for t, own in zip(trace.inputs, tensors) if isinstance(own, ShardedTensor)}
    parts = tuple(local)
    if shapes is not None:
        local = {}
    with open_span(context.trace, "look for a kept step", "compile"):
        layouts = context.variables.list_tiles(trace.variables)
        name, ready = step_cache.find(trace, local, layouts, context.programs, context)
        if not check_all_take(ready.agreed if ready is not None else "", trace.name, trace.inputs_description, context):
            ready = None
    if ready is None:
        return _lower(
            trace,
            local,
            parts,
            name,
            lambda: trace_step(True, drawing and drawing.repeat()),
            context,
            shared.streams,
            whole=shapes is not None,
        )
    return _take_ready(trace, ready, local, parts, layouts, name, context, shared.streams)


def _check_first(trace: Trace, again: Callable[[], Trace], context: Context) -> Trace:
    """Returns the trace to compile for a first call that initialises variables: ``trace``, or in a dry run a new trace,
    which is that of later calls.

    Raises:
      ProgramError: the run is elastic, so that the call might be repeated.
    """
    if context.elastic is not None:
        raise ProgramError(
            "a step creates variables whose first values depend on the step, and the run is elastic",
            op=trace.name,
            given="fault.elastic, under which ranks that are lost or join take a step again",
            expected="variables that are there before the first call",
            action="create the variables (an optimizer's by `optimizer.build(variables)`) before the first call",
        )
    return trace if context.planning.dry is None else again()


def _lower(
    trace: Trace,
    local: dict[str, tuple[int, ...]],
    parts: Collection[str],
    kept: str,
    traced: Callable[[], Trace],
    context: Context,
    streams: str,
    whole: bool,
) -> Step:
    """Plans and lowers a trace, and returns its step.

    Args:
      local: name of each input of which this rank gets only its own rows -> number of rows on every rank.
      parts: names of the inputs of which a call passes this rank's rows only, even if the step then gathers all rows.
      kept: the name under which the step is cached for later runs; "": it is not cached.
      traced: traces the step again, with the nodes of its backward pass marked.
      streams: prefix of the names of its random streams.
      whole: whether every rank computes the whole batch.
    """
    captured = _in_scopes(trace.read(), context)
    # A pipeline's stages cut micro-batches out of the whole batch. A saved plan with several axes was made for whole
    # batches, too, and may divide rows differently from the ranks' own rows; so may micro-batches.
    staged, saved = has_stages(captured.program), context.planning.saved
    gathers = (whole and bool(parts)) or (
        bool(local)
        and (
            staged
            or (saved is not None and saved.needs_whole_batches)
            or not can_keep_own_rows(captured.program, local.values(), micro_batches_of(captured.program, context))
        )
    )
    if gathers:
        local = {}
        context.scoping.stages_seen |= staged
    # A step without split scopes, such as an evaluation before the training, leaves weights whole.
    movable = find_split_weights(captured.program) if context.elastic is None else ()
    layouts = context.variables.list_tiles(captured.variables, movable)
    compiled = compile_program(
        captured.program, context, local, layouts, lambda: _in_scopes(traced().read(), context).program,
        in_files=_in_files(captured.variables), whole=whole,
    )  # fmt: skip
    uses = find_variable_uses(compiled.program, compiled.plan)
    if context.elastic is not None:
        context.elastic.check(uses, captured.variables)
    if context.planning.dry is None and context.size > 1:
        planned = {node: use.tiles for node, use in uses.items() if use.tiles is not None}
        refuse_other_tiles(captured.variables, layouts, planned)
    _adopt(captured.variables, uses, compiled.plan.offloaded, compiled.kinds, context)
    start_s = time.perf_counter()
    with open_span(context.trace, "functions", "compile"):
        load_ops(compiled.ranks)
        if compiled.plan.lent_threads:
            share_cores(context)
        tag = step_cache.new_tag(f"whale_{compiled.number}_{_identifier(compiled.program.name)}")
        threads = [0 if rank else compiled.plan.lent_threads for rank in context.ranks]
        function = lower_to_function(compiled.ranks, tag, streams, threads)
        ready = ready_step(compiled, function, uses, context, trace.inputs_description)
        ready = msgspec.structs.replace(ready, tag=tag, gathers=gathers, staged=staged, streams=streams)
        _connect(ready, context)
        _foresee(trace, ready, compiled.number, kept, local, whole, context)
        call = callable_step(captured, ready, function, lambda: compiled.plan, compiled.number, context, compiled.ranks)
    step_cache.keep(kept, ready, function, compiled.plan, context)
    seconds = {"read": captured.read_s, **compiled.seconds, "functions": time.perf_counter() - start_s}
    return _step(call, captured, ready, lambda: compiled.plan, parts, seconds, trace.is_first, context, compiled)


def _in_files(variables: Iterable[CapturedVariable]) -> frozenset[str]:
    return frozenset(v.node for v in variables if find_folder(v.variable))


def _take_ready(
    trace: Trace,
    ready: Ready,
    local: Mapping[str, tuple[int, ...]],
    parts: Collection[str],
    layouts: Mapping[str, Tiles],
    kept: str,
    context: Context,
    streams: str,
) -> Step:
    """Returns the step of a trace that an earlier run has lowered and cached. Collective between processes.

    Args:
      ready: the cached step.
      local, parts, kept, streams: as in ``_lower``.
      layouts: name of a variable's handle node -> layout of the variables that earlier programs have fixed.
    """
    start_s = time.perf_counter()
    number, context.programs = context.programs, context.programs + 1
    context.scoping.stages_seen |= ready.gathers and ready.staged
    tied, plan = trace.collect_ties(ready.variables), cache(ready.read_plan)
    here = {node: tiles for node, tiles in layouts.items() if node in ready.variables}

    def predict() -> dict[str, int]:
        program = _in_scopes(trace.read(), context).program
        return bytes_under(program, plan(), context, {} if ready.gathers else local, here, _in_files(tied.variables))

    step_cache.remember(ready, plan, predict, context)
    _adopt(tied.variables, ready.uses, ready.offloaded, ready.kinds, context)
    with open_span(context.trace, "functions", "compile"):
        if ready.communicates:
            whale_ops.load_ops()
        if ready.lends:
            share_cores(context)
        _connect(ready, context)
        _foresee(trace, ready, number, kept, {} if ready.gathers else local, False, context)
        call = callable_step(tied, ready, ready.function(streams), plan, number, context)
    seconds = {"kept": time.perf_counter() - start_s}
    return _step(call, tied, ready, plan, parts, seconds, trace.is_first, context)


def _connect(ready: Ready, context: Context) -> None:
    """Connects the groups of ranks whose GPUs exchange data in a step, before it runs; collective in each group."""
    if context.planning.dry is not None or len(context.comms) != 1 or not ready.connects:
        return
    try:
        connect_groups(ready.connects, context.comms[0], context.config["communication.backend"])
    except tf.errors.OpError as error:
        raise_comm_error(error, context)
        raise


def _foresee(
    trace: Trace,
    ready: Ready,
    number: int,
    kept: str,
    local: Mapping[str, tuple[int, ...]],
    whole: bool,
    context: Context,
) -> None:
    """Sets up the comparison of the first training program's steps with their prediction; does nothing if none was
    predicted. Collective.

    Args:
      number: index of the program among those compiled in this run; equal on all ranks.
      kept, local, whole: as in ``_lower``.
    """
    planning, auto = context.planning, context.planning.auto
    if auto is None or not auto.step_s or planning.dry is not None or planning.forecast is not None:
        return
    if not ready.trains or trace.is_first or not context.has_other_processes:
        return
    # On GPUs a call returns before its step has ended, so calls cannot be timed.
    on_gpu = b"1" if has_gpu() else b""
    if any(context.comms[0].allgather_bytes("whale/forecast/gpus", on_gpu, context.config["debug.check_timeout_s"])):
        return
    is_given = planning.saved is not None or planning.described is not None

    def search(took: StepsTook, is_near: bool) -> SearchedAgain:
        captured = _in_scopes(trace.read(), context)
        tiles = ((c.node, find_given_tiles(c)) for c in captured.variables)
        given = {node: found for node, found in tiles if found is not None}
        return search_again(
            captured.program, context, number, local, given, whole, (took.step_s, took.exchanges_s), is_near
        )

    def correct(chosen: ChosenStrategy | None) -> None:
        if chosen is not None and chosen.strategy == auto.strategy:
            step_cache.correct(kept, chosen, context)
            kept_step = ""
        else:
            kept_step = kept
        if context.rank == 0:
            correct_strategy(chosen, kept_step, context, settings_of(context))

    planning.forecast = StepForecast(
        number,
        auto.step_s,
        context.comms[0],
        search if context.config["mesh.auto_parallel"] and not is_given and planning.moves < MOST_MOVES else None,
        correct,
        lambda found: _predict_moving_s(found, context),
        may_lend(context) and not auto.strategy.lent_threads and not auto.compared,
    )


def _predict_moving_s(found: SearchedAgain, context: Context) -> tuple[float, str]:
    """Returns the seconds that it takes to move all variables to another strategy, and ""; or infinity and the reason
    why they cannot move.
    """
    whole_bytes, largest_bytes = context.variables.whole_bytes
    if context.variables.has_files:
        return math.inf, "embedding tables are stored in files of their ranks"
    if whole_bytes + 2 * largest_bytes > found.least_bytes:
        return (
            math.inf,
            f"all variables together ({format_bytes(whole_bytes)}) do not fit into one rank during the change",
        )
    return 2 * whole_bytes / found.bytes_per_s, ""  # they are gathered, and then broadcast as new variables are


def _adopt(
    variables: Sequence[CapturedVariable],
    uses: Mapping[str, VariableUse],
    on_host: Collection[str],
    kinds: Mapping[str, str],
    context: Context,
) -> None:
    with open_span(context.trace, "send variables", "compile"):
        new = [id(c.handle) for c in variables if not context.variables.is_owner_of(c.variable)]
        context.variables.adopt(variables, context, uses, on_host)
        if context.outside is not None:
            context.outside.forget_written(new)  # new variables have just got the first rank's values
        context.variables.classify(variables, kinds)


def _step(
    call: Callable[[list[Any]], Any],
    tied: Traced,
    ready: Ready,
    plan: Callable[[], Plan],
    parts: Collection[str],
    seconds: Mapping[str, float],
    is_first: bool,
    context: Context,
    compiled: Compiled | None = None,
) -> Step:
    """Creates the step around the callable of its lowered functions, and adds the comparisons between ranks that
    ``debug.check_inputs`` and ``debug.check_replicas`` ask for.

    Args:
      call: takes the tensors of a call, and runs the lowered functions.
      tied: the trace, with its variables and captures.
      parts: names of the inputs of which each rank passes its own rows, so that they are not compared.
      seconds: phase of compilation -> seconds.
      is_first: whether the step serves the first call only, because it creates variables.
      compiled: None: an earlier run has lowered the step.
    """
    call = compare_arguments(call, context, ready.program, tied.inputs, parts, dict(tied.captures))
    call = wrap_with_replica_check(call, context, ready.program, {id(v.handle) for v in tied.variables})
    trim()
    return Step(call, tied, plan, seconds, ready.gathers, compiled, is_first)


def _in_scopes(captured: Captured, context: Context) -> Captured:
    """Returns a captured program with the scopes of its variables, of the run and of its annotations."""
    return put_in_named_scopes(_with_scopes(captured, context), context)


def _with_scopes(captured: Captured, context: Context) -> Captured:
    """Returns a captured program in which variables have the scopes in which they were created (nodes that read one
    join it), and other nodes the run's default scope, if any.
    """
    program = captured.program
    scopes = {c.node: getattr(c.variable, SCOPE_ATTR, "") for c in captured.variables}
    if any(scopes.values()):
        variables = tuple(replace(v, scope=v.scope or scopes.get(v.node, "")) for v in program.variables)
        program = replace(program, variables=variables)
    program = put_in_default_scope(program, context)
    return captured if program is captured.program else replace(captured, program=program)


def _identifier(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)
