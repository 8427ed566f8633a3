"""Implements ``wh.function``, which replaces tf.function around a train step and divides the step over the ranks of the
run.

A step that is called while TensorFlow builds a graph for its own purposes is traced like a plain function. Functions
that a dataset was given (for ``map``, ``filter`` or ``reduce``) run where rows are read, one element or batch at a
time: every reader computes them for the rows that it reads, as one process does. Keras calls layers in graphs of its
own to find shapes; these graphs are never run.

``get_concrete_function`` returns a trace that a script can save, convert or show: TensorFlow then gets the function for
one device. Called from Python, the trace is the step: all ranks compute it together, whatever parts of variables they
hold.

Within a run, steps may change to another strategy. Variables, optimizer slots and random streams keep their values, and
programs are compiled again at their next call. Elastic runs do the same by their own agreement, as a rank may be lost
meanwhile (``whale.runtime.elastic.elastic_run``).

Decision: 0185.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.autograph.impl import api as autograph
from tensorflow.python.eager.polymorphic_function import polymorphic_function
from tensorflow.python.eager.polymorphic_function.concrete_function import ConcreteFunction

import whale_ops
from whale.capture.open_sizes import find_open_shape
from whale.capture.sharded import IteratorReads
from whale.capture.signature import Arguments, describe_arguments, flatten_arguments, read_tracing_options
from whale.distributed.stream_positions import DRAWN_APART, gather_streams
from whale.errors import CaptureError, ProgramError
from whale.ir.plan import Plan
from whale.ir.strategy import ChosenStrategy
from whale.log import log
from whale.runtime.compile.offload import has_compute_device
from whale.runtime.compile.step import Step, are_steps_nested, captures_steps, compile_step, tensors_of
from whale.runtime.context import Context, find_running, require_current
from whale.runtime.input.drawn import Source, batches_key, draw, reads_itself, sources
from whale.runtime.input.local_batches import local_arguments
from whale.runtime.input.traces import (
    SharedTrace,
    Traces,
    are_processors,
    is_finding_shapes,
    may_share_sizes,
    number_operations_anew,
)
from whale.runtime.taped_calls import TapedCalls, may_be_recorded
from whale.runtime.variables.deferred import capturing
from whale_ops.memory import trim

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
S = TypeVar("S")
_UNSPECIFIED = ag_ctx.ControlStatusCtx(ag_ctx.Status.UNSPECIFIED)

# Attributes that are left out when a step is copied or pickled: they belong to this process's runs.
_OF_RUNS = (
    "_traces", "_inside", "_taped", "_called", "_steps", "_quick", "_sources", "_context", "_division", "_bound",
)  # fmt: skip
_TRACES_DATASETS = "tensorflow/python/data/ops/structured_function.py"


class Function(polymorphic_function.Function, Generic[P, R]):  # type: ignore[misc]
    """Represents a step that runs on all ranks, as ``wh.function`` returns it.

    It is also a tf.function for TensorFlow, which looks for that class when it saves, converts or tracks functions. To
    TensorFlow it is the function as written, for one process, with whole variables.

    Decision: 0181.

    Args:
      fn: a Python function, a method or a tf.function.
      one_trace: whether one process would use a single trace for all shapes of the arguments, so that its random
        streams go on from shape to shape.
      has_sizes: whether that trace knows all sizes of its arguments.
    """

    def __init__(self, fn: Callable[P, R], one_trace: bool = False, has_sizes: bool = True):
        functools.update_wrapper(self, fn if hasattr(fn, "__name__") else getattr(fn, "python_function", fn))
        self._fn, self._of_traces = fn, (one_trace, has_sizes)
        self._options = read_tracing_options(fn)
        python_function: Callable[..., Any] = getattr(fn, "python_function", fn)
        super().__init__(  # after `update_wrapper`, which may copy the traces of another function into this one
            python_function,
            str(getattr(python_function, "__name__", "function")),
            reduce_retracing=getattr(fn, "_reduce_retracing", False),
            experimental_attributes=getattr(fn, "_attributes", None),
            **self._options,
        )
        self._begin()

    def _begin(self) -> None:
        """Sets up empty caches of traces and compiled steps."""
        # Keras 2 asks `inspect.getfullargspec` for a layer's arguments, which takes an object with `__get__` for a
        # builtin unless it has a signature.
        with contextlib.suppress(TypeError, ValueError):  # some functions written in C have no signature
            self.__signature__ = inspect.signature(self._python_function)
        self._traces = Traces(self._fn, *self._of_traces)
        self._inside = _unwrap(self._fn, self._options)
        self._taped = TapedCalls(getattr(self, "__name__", "function"), self._call_inside, Function)
        self._called: dict[Hashable, tuple[SharedTrace, Any, Any]] = {}  # arguments that one process has a trace for
        self._steps: dict[Hashable, Step] = {}
        self._quick: dict[Hashable, Step] = {}
        self._sources: dict[Hashable, tuple[Source, ...] | None] = {}  # None: read inside loops, where nothing is drawn
        self._context: weakref.ref[Context] | None = None
        self._division: tuple[int, ...] = ()  # `Context.division` that the steps were compiled for
        self._bound: weakref.WeakKeyDictionary[Any, Function[..., Any]] = weakref.WeakKeyDictionary()

    @overload
    def __get__(self, instance: None, owner: type) -> Function[P, R]: ...

    @overload
    def __get__(self: Function[Concatenate[S, Q], R], instance: S, owner: type | None = None) -> Function[Q, R]: ...

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Returns, for a decorated method, the step that is bound to ``instance``; the same object each time."""
        if instance is None:
            return self
        if instance not in self._bound:
            method = functools.partial(self._python_function, weakref.proxy(instance))
            self._bound[instance] = Function(self._trace_alike(method), *self._of_traces)
        return self._bound[instance]

    def _trace_alike(self, python_function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns ``python_function`` wrapped in a tf.function with this step's options, or unchanged if the step was
        not made of a tf.function.
        """
        if not self._options:
            return python_function
        made: Any = tf.function(python_function, reduce_retracing=self._reduce_retracing, **self._options)
        return made  # type: ignore[no-any-return]

    def _decorate(self, decorator: Callable[..., Any]) -> None:
        super()._decorate(decorator)  # changes `_python_function`, and refuses it once there are traces
        self._fn = self._trace_alike(self._python_function)
        self._begin()

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return {name: value for name, value in state.items() if name not in _OF_RUNS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._begin()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs the step; compiles it first if its arguments have new shapes, dtypes or Python values. Collective."""
        # Kept short because AutoGraph rewrites this method when another step calls this one.
        return self._take(args, kwargs) if tf.executing_eagerly() else self._inside_graph(args, kwargs)

    def _take(self, args: Any, kwargs: Any) -> Any:
        context = self._attach()
        if context.elastic is not None:
            return context.elastic.retry(lambda *given: self._call_step(self._attach(), *given), args, kwargs)
        result = self._call_step(context, args, kwargs)
        if context.planning.forecast is not None:
            _follow_forecast(context)
        return result

    def _call_step(self, context: Context, args: Any, kwargs: Any) -> Any:
        if context.has_local_batch:
            args, kwargs = local_arguments(self._take_apart(args, kwargs), context)
        if not kwargs:  # tensors only, the usual case: found without taking the arguments apart
            try:
                quick: tuple[Any, ...] | None = tuple([(a._shape_tuple(), a.dtype) for a in args])
                step = self._quick.get(quick)
            except AttributeError:
                quick = step = None
            if step is not None:
                result = step.call(step.own(args, context))
                if may_be_recorded():
                    self._taped.record_call(step.captured, args, kwargs, result)
                return result
        arguments, step, drawn = self._find_step(args, kwargs, context, shares=True)
        result = step.call(tensors_of(arguments, step, context, drawn))
        if may_be_recorded():
            why = "it reads an iterator" if drawn else 'batch.mode is "local"' if context.has_local_batch else ""
            self._taped.record_call(step.captured, args, kwargs, result, why)
        if step.is_first:
            self._forget(step, arguments)
        elif (
            not kwargs
            and quick is not None
            and not step.is_common
            and len(args) == len(arguments.tensors)
            and len(step.captured.inputs) == len(args)
        ):
            self._quick[quick] = step
            trim()  # the first call of a step
        return result

    def plan(self, *args: P.args, **kwargs: P.kwargs) -> Plan:
        """Returns the plan of the step for these arguments; compiles the step if they are new. Collective between
        processes.
        """
        return self._step(args, kwargs).plan()

    def compile_seconds(self, *args: P.args, **kwargs: P.kwargs) -> dict[str, float]:
        """Returns the seconds of each phase of compilation after tracing, for these arguments; compiles the step if
        they are new.
        """
        return dict(self._step(args, kwargs).seconds)

    @property
    def python_function(self) -> Callable[P, R]:
        """Returns the Python function that this step runs."""
        return self._python_function  # type: ignore[no-any-return]

    def experimental_get_tracing_count(self) -> int:
        """Returns how many traces a tf.function in one process would have after the same calls."""
        return max(len(self._function_cache), len({id(shared) for shared, _, _ in self._called.values()}))

    def _get_concrete_function_garbage_collected(self, *args: Any, **kwargs: Any) -> Any:
        with captures_steps(nested=True), self._trace_as_one_process(args, kwargs):
            found = super()._get_concrete_function_garbage_collected(*args, **kwargs)
        _route_calls_to_step(found, self, args, kwargs)
        return found

    def _list_all_concrete_functions(self) -> Any:
        """Returns the traces that one process would have of all calls so far, of which a SavedModel is made."""
        for _, args, kwargs in list(self._called.values()):
            self.get_concrete_function(*args, **kwargs)
        return super()._list_all_concrete_functions()

    @contextlib.contextmanager
    def _trace_as_one_process(self, args: Any, kwargs: Any) -> Iterator[None]:
        """Traces the function inside of this context with what the trace found that one process would use, or makes
        this one the trace that later ones follow.
        """
        shared = self._find_shared_trace(args, kwargs)
        with nullcontext() if shared is None else shared.trace_with_seed():
            yield
        if shared is not None:
            shared.note_traced()

    def _find_shared_trace(self, args: Any, kwargs: Any) -> SharedTrace | None:
        """Returns the trace that a tf.function in one process would use for these arguments; None: some argument's rank
        is unknown, or the arguments do not fit the function.
        """
        signature = self._options.get("input_signature")
        if signature is not None and not args and not kwargs:
            args = tf.nest.map_structure(_with_sizes, tuple(signature))
        try:
            arguments = self._take_apart(args, kwargs, is_open=True)
        except (CaptureError, ValueError):  # of unknown rank
            return None
        known = self._called.get(arguments.key)
        shapes = list(map(find_open_shape, arguments.tensors))
        return self._traces.find(arguments, shapes) if known is None or not tf.executing_eagerly() else known[0]

    def _note_called(self, arguments: Arguments, shared: SharedTrace, args: Any, kwargs: Any) -> None:
        if arguments.key not in self._called:
            self._called[arguments.key] = shared, *describe_arguments(args, kwargs)

    def _take_apart(self, args: Any, kwargs: Any, draws: bool = True, is_open: bool = False) -> Arguments:
        signature = self._options.get("input_signature")
        return flatten_arguments(self._python_function, args, kwargs, signature, draws, is_open)

    def _find_step(
        self, args: Any, kwargs: Any, context: Context, shares: bool = False
    ) -> tuple[Arguments, Step, list[Any]]:
        """Finds the compiled step for these arguments, and compiles one if there is none.

        Args:
          shares: whether it may be the step that serves several sizes.

        Returns:
          the flattened arguments, the step, and the tensors of the batches that it reads from iterators.
        """
        arguments = self._take_apart(args, kwargs)
        kind = arguments.key
        known = self._sources.get(kind, ())
        if known is None:
            return self._find_reading_step(args, kwargs, context)
        batches = [draw(source.find(arguments), context) for source in known]
        step = self._steps.get((kind, batches_key(batches)))
        if step is not None:
            return arguments, step, tf.nest.flatten(batches, expand_composites=True)
        shared = self._traces.find(arguments)
        may_share = shares and may_share_sizes(context) and not any(self._sources.values())
        if may_share and (common := self._of_many_sizes(shared, arguments, args, kwargs, context)):
            self._note_called(arguments, shared, args, kwargs)
            return arguments, common, []
        _tell_if_functions_run_eagerly(context)
        drawing = IteratorReads(functools.partial(draw, context=context), batches)
        step = compile_step(self._fn, arguments, args, kwargs, context, shared, drawing)
        self._attach()  # forgets earlier steps if compiling this one has moved variables that they use
        if reads_itself(step.captured, drawing, arguments):
            self._sources[kind] = None
            return self._find_reading_step(args, kwargs, context)
        self._sources[kind] = sources(drawing, arguments)
        self._steps[kind, batches_key(drawing.batches)] = step
        self._note_called(arguments, shared, args, kwargs)
        return arguments, step, drawing.tensors

    def _of_many_sizes(
        self, shared: SharedTrace, arguments: Arguments, args: Any, kwargs: Any, context: Context
    ) -> Step | None:
        """Returns the step that serves arguments of any size (every rank then computes the whole batch); None if these
        arguments are to get a step that is compiled for their sizes.
        """
        shapes = [tuple(tensor.shape) for tensor in arguments.tensors]
        if shared.sizes.wants_own(arguments.key, shapes):
            return None
        if shared.sizes.step is None:
            name, unknown = getattr(self, "__name__", "function"), shared.sizes.shapes
            if not are_processors(has_compute_device(), context):
                shared.sizes.refuse(name, "ranks compute on GPUs")
                return None
            try:
                shared.sizes.step = compile_step(self._fn, arguments, args, kwargs, context, shared, None, unknown)
            except Exception as error:  # TensorFlow's and the script's errors too: some steps need known sizes
                shared.sizes.refuse(name, error)
                return None
            self._attach()
        return shared.sizes.step

    def _find_reading_step(self, args: Any, kwargs: Any, context: Context) -> tuple[Arguments, Step, list[Any]]:
        """Finds or compiles, like ``_find_step``, a step whose loops read iterators that are arguments: every rank
        reads them itself.
        """
        arguments = self._take_apart(args, kwargs, draws=False)
        if arguments.key not in self._steps:
            shared = self._traces.find(arguments)
            step = compile_step(self._fn, arguments, args, kwargs, context, shared)
            self._attach()
            self._steps[arguments.key] = step
            self._note_called(arguments, shared, args, kwargs)
        return arguments, self._steps[arguments.key], []

    def _forget(self, step: Step, arguments: Arguments) -> None:
        """Forgets a step that served the first call only, because the variables that it creates exist now; the next
        call is traced again, as in one process.
        """
        self._steps = {key: known for key, known in self._steps.items() if known is not step}
        self._traces.forget(arguments)

    def _step(self, args: Any, kwargs: Any) -> Step:
        context = self._attach()
        if context.has_local_batch:
            args, kwargs = local_arguments(self._take_apart(args, kwargs), context)
        return self._find_step(args, kwargs, context)[1]

    def _attach(self) -> Context:
        """Returns the context of the present run. Before that, forgets the compiled steps if they are of an earlier
        run, or if the ranks, their rows or the layouts of variables have changed since.
        """
        context = require_current(f"the step `{getattr(self, '__name__', 'function')}`")
        if self._context is None or self._context() is not context or self._division != context.division:
            self._steps.clear()
            self._quick.clear()
            self._sources.clear()
            if self._context is not None and self._context() is not context:  # None: it ran inside of other steps only
                self._traces = Traces(self._fn, *self._of_traces)
            self._context, self._division = weakref.ref(context), context.division
        return context

    @tf.autograph.experimental.do_not_convert  # type: ignore[misc]
    def _inside_graph(self, args: Any, kwargs: Any) -> Any:
        """Handles a call of the step while a graph is built.

        If Whale captures the graph, the step becomes a part of that program. If TensorFlow saves the graph, finds
        shapes by it or runs it on a dataset's rows, the step becomes an ordinary function in it.

        Raises:
          ProgramError: the graph is that of a tf.function around the step.
        """
        if are_steps_nested() or (not capturing.get() and _is_graph_without_steps()):
            with self._trace_as_one_process(args, kwargs):
                return polymorphic_function.Function.__call__(self, *args, **kwargs)
        if not capturing.get():
            raise ProgramError(
                "a step of wh.function is called while TensorFlow builds a graph that Whale does not see",
                op=getattr(self, "__name__", "function"),
                given="a call inside tf.function",
                expected="a call from Python, or inside another wh.function",
                action="decorate the outer function with wh.function too",
            )
        return self._call_inside(*args, **kwargs)

    @tf.autograph.experimental.do_not_convert  # type: ignore[misc]
    def _call_inside(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the step's function in the graph of another step, with the random numbers that it would draw in a graph
        of its own.
        """
        with number_operations_anew(), self._trace_as_one_process(args, kwargs):
            return self._inside(*args, **kwargs)


def _with_sizes(spec: Any) -> Any:
    """Returns a TensorSpec with 1 in place of each unknown size; a trace of an ``input_signature`` does not depend on
    the size.
    """
    if not isinstance(spec, tf.TensorSpec) or spec.shape.rank is None:
        return spec
    return tf.TensorSpec([1 if size is None else size for size in spec.shape], spec.dtype)


def _unwrap(fn: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Returns the function to call inside another graph: ``fn``, without its tf.function if that has no options but
    ``autograph``.
    """
    plain = options.get("autograph", True) and all(v is None for k, v in options.items() if k != "autograph")
    if not plain:
        return fn
    # AutoGraph rewrites the function as tf.function would, even if it leaves the caller unchanged.
    return autograph.tf_convert(getattr(fn, "python_function", fn), _UNSPECIFIED, user_requested=True)


@overload
def function(
    func: Callable[P, R],
    input_signature: Any = ...,
    autograph: bool = ...,
    jit_compile: bool | None = ...,
    reduce_retracing: bool = ...,
    experimental_implements: str | None = ...,
    experimental_autograph_options: Any = ...,
    experimental_attributes: Any = ...,
    experimental_relax_shapes: bool | None = ...,
    experimental_compile: bool | None = ...,
    experimental_follow_type_hints: bool | None = ...,
) -> Function[P, R]: ...


@overload
def function(
    func: None = ...,
    input_signature: Any = ...,
    autograph: bool = ...,
    jit_compile: bool | None = ...,
    reduce_retracing: bool = ...,
    experimental_implements: str | None = ...,
    experimental_autograph_options: Any = ...,
    experimental_attributes: Any = ...,
    experimental_relax_shapes: bool | None = ...,
    experimental_compile: bool | None = ...,
    experimental_follow_type_hints: bool | None = ...,
) -> Callable[[Callable[P, R]], Function[P, R]]: ...


def function(
    func: Callable[..., Any] | None = None,
    input_signature: Any = None,
    autograph: bool = True,
    jit_compile: bool | None = None,
    reduce_retracing: bool = False,
    experimental_implements: str | None = None,
    experimental_autograph_options: Any = None,
    experimental_attributes: Any = None,
    experimental_relax_shapes: bool | None = None,
    experimental_compile: bool | None = None,
    experimental_follow_type_hints: bool | None = None,
) -> Any:
    """Spreads a train or evaluation step over the ranks; use it in place of tf.function.

    The step sees global values: its batch inputs are the global batch, of which each rank computes its share, and it
    returns on every rank what one device would return. It is traced once for each set of argument shapes, dtypes and
    Python values; where one process has one trace for many shapes, most of them may share a program that every rank
    computes whole. A rank passes the whole batch, or only its rows: what ``wh.shard`` yields, or with
    ``batch.mode="local"`` a batch of its own; the global batch is then all of them in order of ranks.

    It takes the arguments of tf.function, with the same meaning; those that are not listed here change no results.

    Args:
      func: the step: a Python function, a method or a tf.function. None: returns a decorator with the other arguments.
      input_signature: a tf.TensorSpec for each argument; the argument is converted to its dtype, and must fit its
        shape. Unknown sizes take those of the arguments.
      autograph: whether Python's loops and conditions over tensors are traced as such; with
        ``experimental_autograph_options``.
      jit_compile: True: XLA compiles the parts of the step between exchanges with other ranks; on CPUs without matrix
        products and convolutions, for which other kernels are faster. ``experimental_compile`` is its older name.

    Raises:
      ClusterError: called before ``wh.init``.
      ProgramError: the ranks call different steps, or the step cannot be captured.
      CaptureError: an argument does not fit ``input_signature``.
      PlanError: the batch cannot be split as asked.
    """
    options = {
        "input_signature": input_signature,
        "autograph": None if autograph else False,
        "jit_compile": jit_compile,
        "reduce_retracing": reduce_retracing or None,
        "experimental_implements": experimental_implements,
        "experimental_autograph_options": experimental_autograph_options,
        "experimental_attributes": experimental_attributes,
        "experimental_relax_shapes": experimental_relax_shapes,
        "experimental_compile": experimental_compile,
        "experimental_follow_type_hints": experimental_follow_type_hints,
    }
    given = {name: value for name, value in options.items() if value is not None}
    if func is None:
        return functools.partial(function, **given)
    if isinstance(func, Function) or hasattr(func, "_whale_run"):  # its steps are spread already
        return func
    return Function(tf.function(func, **given) if given else func)


class _ConcreteStep(ConcreteFunction):  # type: ignore[misc]
    """Represents a trace of a step, as ``get_concrete_function`` returns it; a call from Python during a run runs the
    step on all ranks.
    """

    _whale_call: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not tf.executing_eagerly() or find_running() is None:
            return super().__call__(*args, **kwargs)
        return self._whale_call(args, kwargs)


def _route_calls_to_step(
    concrete: Any, step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Changes a trace so that calls of it from Python, during a run, call the step that it was traced from.

    Args:
      concrete: TensorFlow's ConcreteFunction; its class is changed.
      step: a ``wh.function``.
      args: positional arguments that the trace was requested with. Values that are not tensors are constants of the
        trace, and need not be passed again.
      kwargs: keyword arguments that it was requested with.
    """
    if isinstance(concrete, _ConcreteStep):
        return
    signature = inspect.signature(step.python_function)  # type: ignore[attr-defined]
    constants = {
        name: value
        for name, value in signature.bind_partial(*args, **kwargs).arguments.items()
        if signature.parameters[name].kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        and not any(isinstance(leaf, tf.Tensor | tf.TypeSpec | tf.Variable) for leaf in tf.nest.flatten(value))
    }

    def call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        given = signature.bind_partial(*args, **kwargs)
        given.arguments = {**constants, **given.arguments}
        return step(*given.args, **given.kwargs)

    concrete.__class__ = _ConcreteStep
    concrete._whale_call = call


def _is_graph_without_steps() -> bool:
    """Returns True if the graph under construction is one in which steps are plain functions: Keras finds shapes by it,
    or a dataset's function is traced.
    """
    if is_finding_shapes():
        return True
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.replace("\\", "/").endswith(_TRACES_DATASETS):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _follow_forecast(context: Context) -> None:
    """Compares the run's steps with their prediction after a step, and changes to a better strategy if one was found.

    Collective when it is time to compare.

    Raises:
      CommError: a rank is gone.
    """
    if context.planning.forecast is not None and (chosen := context.planning.forecast.look()) is not None:
        _change_strategy(context, chosen)


def _change_strategy(context: Context, chosen: ChosenStrategy) -> None:
    """Makes all variables whole on every rank, so that programs are compiled anew under ``chosen``; collective between
    processes.

    Does nothing but warn if random streams have diverged between ranks.
    """
    positions = gather_streams(context.comms[0], list(context.streams))
    if positions is None:
        if context.rank == 0:
            log.warning(DRAWN_APART)
        return
    context.variables.make_all_whole(context)
    whale_ops.set_streams(positions)
    context.planning.go_over(chosen)
    context.scoping.stages_seen = False
    context.reports.compiled_for.clear()


def _tell_if_functions_run_eagerly(context: Context) -> None:
    """Warns once, on the first rank, if the script has made tf.functions run eagerly, which steps do not."""
    if not tf.config.functions_run_eagerly() or context.rank != 0 or context.reports.not_eager:
        return
    context.reports.not_eager = True
    log.warning(
        "tf.config.run_functions_eagerly(True) leaves steps graphs, which Whale divides: Python in a step runs once "
        "for each trace, and not at each call; to debug a step eagerly, run the script without wh.init()"
    )
