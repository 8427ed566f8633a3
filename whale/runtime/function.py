"""``wh.function``: replaces tf.function around a train step, and divides the step over the ranks of the run."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.autograph.impl import api as autograph

from whale.capture.sharded import IteratorReads
from whale.capture.signature import Arguments, flatten_arguments, read_tracing_options
from whale.errors import ProgramError
from whale.ir.plan import Plan
from whale.runtime.compile.offload import has_compute_device
from whale.runtime.compile.step import Step, compile_step, tensors_of
from whale.runtime.context import Context, require_current
from whale.runtime.input.drawn import Source, batches_key, draw, reads_itself, sources
from whale.runtime.input.local_batches import local_arguments
from whale.runtime.input.many_sizes import are_processors, may_share_sizes
from whale.runtime.input.traces import SharedTrace, Traces
from whale.runtime.variables.deferred import capturing
from whale_ops.memory import trim

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
S = TypeVar("S")
_UNSPECIFIED = ag_ctx.ControlStatusCtx(ag_ctx.Status.UNSPECIFIED)


class Function(Generic[P, R]):
    """A step that runs on all ranks; see ``function``.

    Args:
      one_trace: whether one process serves all shapes of its arguments with one trace, so that random streams go on.
    """

    def __init__(self, fn: Callable[P, R], one_trace: bool = False):
        functools.update_wrapper(self, fn if hasattr(fn, "__name__") else getattr(fn, "python_function", fn))
        self._fn = fn
        self._python_function: Callable[..., Any] = getattr(fn, "python_function", fn)
        self._options = read_tracing_options(fn)
        self._one_trace, self._traces = one_trace, Traces(fn, one_trace)
        self._inside = _unwrap(fn, self._options)
        self._steps: dict[Hashable, Step] = {}
        self._quick: dict[Hashable, Step] = {}
        self._sources: dict[Hashable, tuple[Source, ...] | None] = {}  # None: read inside loops, where nothing is drawn
        self._context: weakref.ref[Context] | None = None
        self._division: tuple[int, ...] = ()  # that the steps were compiled for
        self._bound: weakref.WeakKeyDictionary[Any, Function[..., Any]] = weakref.WeakKeyDictionary()

    @overload
    def __get__(self, instance: None, owner: type) -> Function[P, R]: ...

    @overload
    def __get__(self: Function[Concatenate[S, Q], R], instance: S, owner: type | None = None) -> Function[Q, R]: ...

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Returns the step of an instance, for a method."""
        if instance is None:
            return self
        if instance not in self._bound:
            method = functools.partial(self._python_function, weakref.proxy(instance))
            bound: Any = method
            if self._options:
                relaxed = getattr(self._fn, "_reduce_retracing", False)
                bound = tf.function(method, reduce_retracing=relaxed, **self._options)
            self._bound[instance] = Function(bound, self._one_trace)
        return self._bound[instance]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Takes a step; compiles it first if its arguments have new shapes, types or Python values. Collective."""
        # AutoGraph rewrites this method, to which it comes by calls in other steps: it has to stay this short.
        return self._take(args, kwargs) if tf.executing_eagerly() else self._inside_graph(args, kwargs)

    def _take(self, args: Any, kwargs: Any) -> Any:
        context = self._attach()
        if context.elastic is not None:
            return context.elastic.retry(lambda *given: self._call(self._attach(), *given), args, kwargs)
        return self._call(context, args, kwargs)

    def _call(self, context: Context, args: Any, kwargs: Any) -> Any:
        if context.has_local_batch:
            args, kwargs = local_arguments(self._take_apart(args, kwargs), context)
        if not kwargs:  # tensors only, the usual case: found without taking the arguments apart
            try:
                quick: tuple[Any, ...] | None = tuple([(a._shape_tuple(), a.dtype) for a in args])
                step = self._quick.get(quick)
            except AttributeError:
                quick = step = None
            if step is not None:
                return step.call(step.own(args, context))
        arguments, step, drawn = self._find_step(args, kwargs, context, shares=True)
        result = step.call(tensors_of(arguments, step, context, drawn))
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
        """Returns the plan for these arguments (compiled now if they are new; collective between processes)."""
        return self._step(args, kwargs).plan()

    def compile_seconds(self, *args: P.args, **kwargs: P.kwargs) -> dict[str, float]:
        """Returns the seconds of each phase between the end of tracing and the first call, for these arguments."""
        return dict(self._step(args, kwargs).seconds)

    @property
    def python_function(self) -> Callable[P, R]:
        """Returns the function that this step was made of."""
        return self._python_function

    def _take_apart(self, args: Any, kwargs: Any, draws: bool = True) -> Arguments:
        return flatten_arguments(self._python_function, args, kwargs, self._options.get("input_signature"), draws)

    def _find_step(
        self, args: Any, kwargs: Any, context: Context, shares: bool = False
    ) -> tuple[Arguments, Step, list[Any]]:
        """Returns the arguments, the step compiled for them, and the tensors of batches that it reads from
        iterators.

        Args:
          shares: it may be the step that serves several sizes.
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
            return arguments, common, []
        drawing = IteratorReads(functools.partial(draw, context=context), batches)
        step = compile_step(self._fn, arguments, args, kwargs, context, shared, drawing)
        self._attach()  # earlier steps call variables where they were; to this one it makes no difference
        if reads_itself(step.captured, drawing, arguments):
            self._sources[kind] = None
            return self._find_reading_step(args, kwargs, context)
        self._sources[kind] = sources(drawing, arguments)
        self._steps[kind, batches_key(drawing.batches)] = step
        return arguments, step, drawing.tensors

    def _of_many_sizes(
        self, shared: SharedTrace, arguments: Arguments, args: Any, kwargs: Any, context: Context
    ) -> Step | None:
        """Returns the step that serves all sizes without one of their own; None: these sizes have one."""
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
            except Exception as error:  # of TensorFlow or the step's own, too: some steps have to know their sizes
                shared.sizes.refuse(name, error)
                return None
            self._attach()
        return shared.sizes.step

    def _find_reading_step(self, args: Any, kwargs: Any, context: Context) -> tuple[Arguments, Step, list[Any]]:
        """Does the same for a step whose loops read iterators given as arguments: every rank reads them."""
        arguments = self._take_apart(args, kwargs, draws=False)
        if arguments.key not in self._steps:
            step = compile_step(self._fn, arguments, args, kwargs, context, self._traces.find(arguments))
            self._attach()
            self._steps[arguments.key] = step
        return arguments, self._steps[arguments.key], []

    def _forget(self, step: Step, arguments: Arguments) -> None:
        """Forgets a step that was for the first call: what it has created is there. One process traces again, too."""
        self._steps = {key: known for key, known in self._steps.items() if known is not step}
        self._traces.forget(arguments)

    def _step(self, args: Any, kwargs: Any) -> Step:
        context = self._attach()
        if context.has_local_batch:
            args, kwargs = local_arguments(self._take_apart(args, kwargs), context)
        return self._find_step(args, kwargs, context)[1]

    def _attach(self) -> Context:
        """Returns the context; forgets steps that were compiled for an earlier one."""
        context = require_current(f"the step `{getattr(self, '__name__', 'function')}`")
        if self._context is None or self._context() is not context or self._division != context.division:
            self._steps.clear()
            self._quick.clear()
            self._sources.clear()
            if self._context is None or self._context() is not context:
                self._traces = Traces(self._fn, self._one_trace)
            self._context, self._division = weakref.ref(context), context.division
        return context

    def _inside_graph(self, args: Any, kwargs: Any) -> Any:
        """Calls the step while a graph is built: it becomes part of that program, if Whale captures it."""
        if not capturing.get():
            raise ProgramError(
                "a step of wh.function is called while TensorFlow builds a graph that Whale does not see",
                op=getattr(self, "__name__", "function"),
                given="a call inside tf.function",
                expected="a call from Python, or inside another wh.function",
                action="decorate the outer function with wh.function too",
            )
        return self._inside(*args, **kwargs)


def _unwrap(fn: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Returns the function that a graph calls: ``fn``, without its tf.function if that does nothing but trace."""
    plain = options.get("autograph", True) and all(v is None for k, v in options.items() if k != "autograph")
    if not plain:
        return fn
    # As a tf.function: AutoGraph rewrites it though it may leave the caller as it is.
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
    """Spreads a train or evaluation step over the ranks; use it where tf.function would stand.

    The step sees global values: its batch inputs are the global batch, of which each rank computes its share, and what
    it returns is what one device would return, on every rank. It is traced once for each set of argument shapes, dtypes
    and Python values; where one process has one trace for many shapes, most of them may share a program that every rank
    computes whole. A rank passes the whole batch, or its rows only: what ``wh.shard`` yields, or with
    ``batch.mode="local"`` a batch of its own; the global batch is then all of them in order of ranks.

    It takes the arguments of tf.function, which mean the same; those that it does not name below compute nothing else.

    Args:
      func: the step; a Python function, a method or a tf.function. None: a decorator with the other arguments.
      input_signature: a tf.TensorSpec for each argument, which is made a tensor of that dtype, and has to fit in shape.
        Unknown sizes take those of the arguments.
      autograph: whether Python's loops and conditions over tensors are traced as such; with
        ``experimental_autograph_options``.
      jit_compile: True: XLA compiles the step, in clusters between exchanges with other ranks; on processors without
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
