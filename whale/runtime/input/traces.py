"""Tells which calls of a step one process would serve with one trace, and for which sizes a step is compiled.

Whale plans a step for each set of shapes. TensorFlow traces anew for other shapes only if it knows the shapes; if not,
one trace serves many, and each of its random operations has one stream that goes on from call to call.

A plan is made for given sizes. Programs whose batches have many sizes (graphs, sentences, samples of a generator) would
spend more time compiling than training. So the first few sizes have plans of their own. The others share a program that
does not know its sizes, as in one process: every rank computes the whole batch, and nothing is compiled for a size that
may not come again. A size that keeps coming gets a plan.

Decisions: 0137, 0166.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context as tf_context
from tensorflow.python.eager.polymorphic_function import function_context
from tensorflow.python.framework import random_seed

from whale.capture.signature import Arguments
from whale.errors import CommError
from whale.ir.values import Dims
from whale.log import log
from whale.runtime.context import Context, make_unique_name
from whale.runtime.input.loop_sizes import keep_sizes_in_loops
from whale.runtime.input.python_values import PythonValues

_DIGITS = 8
_FIRST = 200  # priority of a variable creator that is called before the script's own
_SEEDS_OF_GRAPHS = random_seed._graph_to_seed_dict
_FINDS_SHAPES = ("scratch_graph", "keras_graph")  # in the names of graphs

# Of the present trace: the list of values drawn so far, and when it is traced again, an iterator over those to reuse.
_drawing: ContextVar[tuple[list[Any], Iterator[Any] | None] | None] = ContextVar("_drawing", default=None)

# Prefix of the streams of the present trace if it knows no sizes; "": it knows its sizes.
_without_sizes: ContextVar[str] = ContextVar("_without_sizes", default="")
OWN_PLANS = 2  # sizes that are compiled for when they first come: usual batches, and the last one of an epoch
OWN_AFTER = 8  # times that another size comes before it has a plan of its own


def new_streams() -> str:
    """Returns a unique prefix for the names of a trace's random streams; all prefixes have the same length."""
    return make_unique_name("whale_streams", _DIGITS)


class Relaxed:
    """Finds the trace that a tf.function with ``reduce_retracing`` would use, by asking a tf.function that computes
    nothing.

    Attributes:
      without_sizes: keys, as ``trace`` returns them, of the traces that do not know all sizes of their arguments.
      shapes: by key of such a trace, those of its inputs.
    """

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}
        self._known: dict[Hashable, Hashable] = {}
        self.without_sizes: set[Hashable] = set()  # traces that do not know all of them
        self.shapes: dict[Hashable, list[tf.TensorShape]] = {}

    def trace(self, kind: Hashable, specs: Sequence[Any]) -> Hashable:
        """Returns a key of the trace that TensorFlow would use for arguments of these types.

        Args:
          kind: all that distinguishes traces besides shapes.
          specs: tensors, arrays or type specs.
        """
        types = [s if isinstance(s, tf.TypeSpec) else tf.TensorSpec(s.shape, s.dtype) for s in specs]
        key = kind, repr(types)
        if key not in self._known:
            made = self._made.get(kind)
            if made is None:
                made = self._made[kind] = tf.function(lambda *tensors: None, reduce_retracing=True, autograph=False)
            # The function keeps its traces alive, so that no other graph gets the same `id`.
            graph = made.get_concrete_function(*types).graph
            self._known[key] = kind, id(graph)
            if not all(one.shape.is_fully_defined() for one in graph.inputs if one.dtype != tf.resource):
                self.without_sizes.add(self._known[key])
                self.shapes[self._known[key]] = [one.shape for one in graph.inputs]
        return self._known[key]


def _read_python_states() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state()


def _write_python_states(states: tuple[Any, ...]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])


class SharedTrace:
    """Holds the state that several of Whale's traces of a step share where plain TensorFlow would have a single trace:
    random streams, and Python values.

    Args:
      step: the function that is traced.
      has_sizes: whether TensorFlow's trace would know all sizes of its arguments.
      shapes: of the tensors among these, with None for sizes that the trace would not know; None: not known.

    Attributes:
      streams: prefix of the names of the random streams.
      sizes: the sizes with which the trace was called.
    """

    def __init__(self, step: Callable[..., Any], has_sizes: bool = True, shapes: Sequence[Any] | None = None) -> None:
        self.streams, self.sizes = new_streams(), SizesOfTrace()
        self._shapes = shapes
        self._apart = "" if has_sizes else self.streams
        self._step, self._values = step, PythonValues(None)
        self._has_created = False  # variables, in its latest run
        self._seed = tf_context.global_seed()
        self._drawn: list[Any] = []
        self._python = _read_python_states()
        self._is_known = False

    def note_traced(self) -> None:
        """Records that the first program has been traced: later ones get the random values that it has drawn
        (``once_in_a_trace``).
        """
        self._is_known = True

    def list_open_shapes(self, tensors: Sequence[Any]) -> list[Dims]:
        """Returns the shapes that TensorFlow's trace would know of a call's tensors; empty: it would know all sizes."""
        if not self._apart:
            return []
        if self._shapes is not None and len(self._shapes) == len(tensors):
            return [tuple(tf.TensorShape(shape).as_list()) for shape in self._shapes]
        return [(None, *t.shape[1:]) if len(t.shape) else () for t in tensors]  # of Keras: the rows of a batch

    @contextmanager
    def trace_with_seed(self) -> Iterator[None]:
        """Restores, around a trace, what the first program's trace found: the global seed, the random states of Python
        and NumPy, and Python values that the step can reach.

        After a later trace, all of these are again as before it. Functions called in a trace without sizes are traced
        for it alone, since traces that know sizes must not be reused.
        """
        _keep_nested_apart()
        keep_sizes_in_loops(_without_sizes.get)
        tf_ctx = tf_context.context()
        now, tf_ctx._seed = tf_ctx._seed, self._seed
        before, again = _read_python_states(), self._is_known
        if again:
            _write_python_states(self._python)
        else:
            self._drawn, self._python = [], before  # a step that creates variables runs twice in one process, too
        if not again or self._has_created:  # one process traces again, too, what has created variables
            self._values, self._has_created = PythonValues(self._step), False
        apart = _without_sizes.set(self._apart)
        token = _drawing.set((self._drawn, iter(self._drawn)) if self._is_known else (self._drawn, None))
        try:
            with self._values.put_back() if again else self._note_created():
                yield
        finally:
            _drawing.reset(token)
            _without_sizes.reset(apart)
            tf_ctx._seed = now
            if again:
                _write_python_states(before)

    def _note_created(self) -> AbstractContextManager[None]:
        def create(next_creator: Callable[..., Any], **wanted: Any) -> Any:
            self._has_created = True
            return next_creator(**wanted)

        graph = tf.compat.v1.get_default_graph()
        return graph._variable_creator_scope(create, priority=_FIRST)  # type: ignore[no-any-return]


@functools.cache
def _keep_nested_apart() -> None:
    """Makes a tf.function that is called inside a step without sizes have traces for this step alone, so that
    TensorFlow does not reuse a trace that was made for known sizes. Wraps TensorFlow's ``make_function_context`` once.
    """
    original = function_context.make_function_context

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        found, step = original(*args, **kwargs), _without_sizes.get()
        is_nested = not tf.executing_eagerly()  # and not the step itself, which is found from outside, too
        return found._replace(context=(found.context, step)) if step and is_nested else found

    function_context.make_function_context = make


def once_in_a_trace(draw: Callable[[], Any]) -> Any:
    """Returns ``draw()``, a random value that a step draws while it is traced. When Whale traces the step again for
    other sizes, returns the value of the first trace instead, since TensorFlow would trace and draw only once.

    What is drawn in a graph that only finds shapes belongs to no program: Keras makes such graphs again when a batch of
    another size comes, and one process, whose trace serves all sizes, does not.
    """
    tracing = _drawing.get()
    if tracing is None or is_finding_shapes():
        return draw()
    drawn, again = tracing
    for known in again or ():
        return known
    drawn.append(draw())
    return drawn[-1]


def is_finding_shapes() -> bool:
    """Returns True if Keras made the default graph, or one around it, to find shapes of layers: it is never run."""
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        if any(name in getattr(graph, "name", "") for name in _FINDS_SHAPES):
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


@contextmanager
def number_operations_anew() -> Iterator[None]:
    """Makes random operations without a seed, inside this context, get the seeds of a new graph's first operations,
    since TensorFlow derives these from their number.
    """
    graph = tf.compat.v1.get_default_graph()
    before = _SEEDS_OF_GRAPHS.get(graph, 0)
    _SEEDS_OF_GRAPHS[graph] = 0
    try:
        yield
    finally:
        _SEEDS_OF_GRAPHS[graph] = before


class Traces:
    """Holds the traces that tf.function would make of a step in a program of one process, so that Whale's steps draw
    the same random numbers as there.

    Args:
      step: the function of the step; perhaps a tf.function.
      one: True if one trace serves arguments of all shapes.
      has_sizes: whether the shapes of that one trace's inputs are fully known.
    """

    def __init__(self, step: Callable[..., Any], one: bool, has_sizes: bool = True) -> None:
        self._any_shape = one or getattr(step, "input_signature", None) is not None
        self._relaxed = Relaxed() if getattr(step, "_reduce_retracing", False) else None
        self._known: dict[Hashable, SharedTrace] = {}
        self._open: list[Any] = []  # keys of traces that do not know all sizes
        self._step, self._one_has_sizes = step, has_sizes

    def find(self, arguments: Arguments, shapes: Sequence[tf.TensorShape] | None = None) -> SharedTrace:
        """Returns the trace that one process would use for a call with these arguments; creates it if there is none.

        Args:
          shapes: of the arguments' tensors, as one process knows them; None: those of the arguments.
        """
        trace = self._key(arguments, shapes)
        if trace not in self._known:
            self._known[trace] = SharedTrace(self._step, self._has_sizes(trace), self._list_shapes(trace))
            if _is_open(trace):
                self._open.append(trace)
        return self._known[trace]

    def _list_shapes(self, trace: Any) -> Sequence[Any] | None:
        """Returns the shapes of tensors in a trace that does not know all of their sizes, where they are known."""
        signature = getattr(self._step, "input_signature", None)
        if signature is not None:
            flat = tf.nest.flatten(signature, expand_composites=True)
            return [getattr(spec, "shape", None) for spec in flat]
        if self._relaxed is not None and trace in self._relaxed.without_sizes:
            return self._relaxed.shapes[trace]
        return [one[2] for one in trace if _is_tensor(one)] if _is_open(trace) else None

    def _has_sizes(self, trace: Hashable) -> bool:
        if _is_open(trace):
            return False
        signature = getattr(self._step, "input_signature", None)
        if signature is not None:
            specs = tf.nest.flatten(signature, expand_composites=True)
            return all(spec.shape.is_fully_defined() for spec in specs if isinstance(spec, tf.TensorSpec))
        return self._one_has_sizes and (self._relaxed is None or trace not in self._relaxed.without_sizes)

    def forget(self, arguments: Arguments) -> None:
        """Forgets the trace for these arguments, because one process traces the next such call again; its random
        streams begin anew.
        """
        self._known.pop(self._key(arguments), None)

    def _key(self, arguments: Arguments, shapes: Sequence[tf.TensorShape] | None = None) -> Hashable:
        parts: list[Any] = [self._kind(one) for one in arguments.key]  # type: ignore[attr-defined]
        if shapes is not None and not self._any_shape and len(shapes) == sum(map(_is_tensor, parts)):
            rest = iter(shapes)
            parts = [(*one[:2], _list_sizes(next(rest))) if _is_tensor(one) else one for one in parts]
        trace: Hashable = tuple(parts)
        if self._relaxed is not None and not self._any_shape:
            fixed = tuple([one[:2] if _is_tensor(one) else one for one in parts])
            shapes = [one[2] for one in parts if _is_tensor(one)]
            dtypes = [one[1] for one in parts if _is_tensor(one)]
            trace = self._relaxed.trace(fixed, [tf.TensorSpec(s, d) for s, d in zip(shapes, dtypes)])
        elif trace not in self._known:
            trace = self._find_wider(trace)
        return trace

    def _find_wider(self, trace: Hashable) -> Hashable:
        """Returns the trace of fewest unknown sizes that serves what ``trace`` would, as TensorFlow finds it; ``trace``
        if there is none.
        """
        found = trace
        for other in self._open:
            if other in self._known and _serves(other, trace) and (found is trace or _serves(found, other)):
                found = other
        return found

    def _kind(self, entry: Any) -> Hashable:
        """Returns a part of the arguments' key without what traces do not depend on: how rows are divided among ranks
        and, if one trace serves all shapes, the shape.
        """
        if isinstance(entry, tuple) and entry and isinstance(entry[0], tf.TypeSpec):
            parts = tf.nest.flatten(entry[0], expand_composites=True)  # a sparse tensor's type has its shape
            return (type(entry[0]), *[part.dtype for part in parts]) if self._any_shape else entry[0]
        if not _is_tensor(entry):
            return entry  # type: ignore[no-any-return]
        shape = entry[2][0] if entry[0] == "part" else entry[2]
        return ("tensor", entry[1]) if self._any_shape else ("tensor", entry[1], tuple(shape))


def _is_tensor(entry: Any) -> bool:
    return isinstance(entry, tuple) and len(entry) == 3 and entry[0] in ("tensor", "part")


def _is_open(trace: Any) -> bool:
    """Returns True if some size of a tensor in the key of a trace is unknown."""
    tensors = [one for one in trace if _is_tensor(one)] if isinstance(trace, tuple) else []
    return any(one[2] is None or None in one[2] for one in tensors)


def _list_sizes(shape: tf.TensorShape) -> Dims | None:
    return None if shape.rank is None else tuple(shape.as_list())


def _serves(wide: Any, narrow: Any) -> bool:
    """Returns True if the trace of the key ``wide`` takes all arguments that that of ``narrow`` takes."""
    return len(wide) == len(narrow) and all(
        one[:2] == other[:2] and tf.TensorShape(other[2]).is_subtype_of(tf.TensorShape(one[2]))
        if _is_tensor(one) and _is_tensor(other)
        else one == other
        for one, other in zip(wide, narrow)
    )


def may_share_sizes(context: Context) -> bool:
    """Returns True if this run may use steps that every rank computes whole, for sizes that have no plan of their own.

    That is not possible if each rank passes its own rows or runs by itself, if steps have pipeline stages or
    micro-batches, if a plan is given or searched, and in elastic and dry runs.
    """
    planning = context.planning
    others = (planning.dry, planning.saved, planning.described, planning.own_programs, context.elastic)
    asked = context.config["mesh.auto_parallel"] or context.config["pipeline.micro_batches"] > 1
    return (
        context.size > 1
        and not any(one is not None for one in others)
        and not asked
        and not context.has_local_batch
        and not context.scoping.stages_seen
        and not context.solo
    )


def are_processors(has_device: bool, context: Context) -> bool:
    """Returns True if all ranks compute on CPUs; collective between processes.

    Kernels of GPUs may add in another order on each rank, so that what every rank computes whole would drift apart.

    Args:
      has_device: whether this rank computes on an accelerator.

    Raises:
      CommError: a rank does not take part.
    """
    if not context.has_other_processes:
        return not has_device
    mine, timeout_s = str(int(has_device)).encode(), context.config["debug.check_timeout_s"]
    said = context.comms[0].allgather_bytes(f"whale/sizes/{context.programs}", mine, timeout_s, "a step of many sizes")
    return all(one == b"0" for one in said)


class SizesOfTrace:
    """Counts the sizes with which one trace was called, and holds the step that serves sizes without a step of their
    own.

    Its answers depend only on the calls, so they are equal on all ranks.

    Attributes:
      shapes: of the arguments' tensors, with None for sizes that have differed so far.
      step: serves all of these shapes; None: it is not compiled yet.
    """

    def __init__(self) -> None:
        self._calls: Counter[Hashable] = Counter()
        self.shapes: tuple[Dims | None, ...] = ()
        self.step: Any = None
        self._refused = False

    def wants_own(self, key: Hashable, shapes: Sequence[Dims | None]) -> bool:
        """Records a call with these sizes; returns True if a step should be compiled for them.

        Args:
          key: of all that a step is compiled for.
          shapes: of the arguments' tensors.
        """
        self._calls[key] += 1
        widened = tuple(shapes) if not self.shapes else tuple(map(_widen, self.shapes, shapes))
        if widened != self.shapes:
            self.shapes, self.step = widened, None
        return self._refused or len(self._calls) <= OWN_PLANS or self._calls[key] >= OWN_AFTER

    def refuse(self, name: str, why: Exception | str) -> None:
        """Records that this trace cannot be compiled without sizes, so that each size gets a step of its own.

        Args:
          name: of the step, for the log.
          why: the reason.

        Raises:
          CommError: ``why`` itself, if the ranks have lost each other.
        """
        if isinstance(why, CommError):
            raise why
        self._refused = True
        reason = why if isinstance(why, str) else f"{type(why).__name__}: {why}"
        log.debug(f"the step `{name}` is compiled anew for each size of its arguments, since {reason}")


def _widen(known: Dims | None, new: Dims | None) -> Dims | None:
    if known is None or new is None or len(known) != len(new):
        return None
    return tuple(a if a == b else None for a, b in zip(known, new))
