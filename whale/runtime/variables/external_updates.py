"""Tracks changes of variables outside of the run's programs: every rank makes them by itself, so that copies may
diverge.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.python.client.session import BaseSession
from tensorflow.python.eager.backprop import GradientTape
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.ops import gen_resource_variable_ops, gen_training_ops
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable, ResourceVariable, _UnreadVariable

from whale.distributed.script_line import find_script_line
from whale.runtime.variables.deferred import capturing, find_deferred

# Methods of variables that update a value, as training does, and those that replace it by any other.
_ADDS = tuple(name for name in dir(BaseResourceVariable) if name.startswith(("assign_", "scatter_", "batch_scatter_")))
_GIVES = ("assign", "_restore_from_tensors", "_strided_slice_assign")
# A variable that is assigned this often after a gradient was computed counts as trained by a loop of the script.
_OFTEN = 3
# Name of TensorFlow's own function that initialises variables created in a tf.function; it does not train.
_FIRST_VALUES = "initialize_variables"
_TRAINS = ("ResourceApply", "ResourceSparseApply", "Apply", "SparseApply")


@dataclass
class TrackedVariable:
    """Represents a trainable floating-point variable that was created, or written to, since the run began; recorded by
    ``ExternalUpdates``.

    Attributes:
      variable: weak reference to it.
      name: its name.
      trained: whether it was trained outside of the run's programs.
      given: how many times the script has assigned a value to it.
    """

    variable: weakref.ref[tf.Variable]
    name: str
    trained: bool = False
    given: int = 0


class ExternalUpdates:
    """Tracks changes of variables outside of the run's programs, from its creation to ``take_back``, by wrapping
    methods of TensorFlow. The comparisons of replicas, and the report of training that Whale did not distribute, use
    it.

    Attributes:
      written: Python's ``id`` of the handle of each variable that was written to eagerly since ``forget_written`` (a
        dict used as an ordered set).
      trained: what has trained, in words -> names of the variables, if known (an ordered set).
    """

    def __init__(self) -> None:
        self.written: dict[int, None] = {}
        self.trained: dict[str, dict[str, None]] = {}
        self._made: dict[int, TrackedVariable] = {}
        self._sessions: set[tuple[int, ...]] = set()
        self._differentiated = False  # whether a gradient was computed beside the run's programs
        self._replaced: list[tuple[Any, str, Any]] = []
        self._put(BaseResourceVariable, "__init__", self._wrap_init)
        for kind in (BaseResourceVariable, ResourceVariable):  # the subclass overrides some of the methods
            for name in (*_ADDS, *_GIVES):
                if name in vars(kind):
                    self._put(kind, name, functools.partial(self._wrap_write, name in _ADDS))
        self._put(GradientTape, "gradient", self._wrap_gradient)
        self._put(BaseSession, "_do_run", self._wrap_run)
        for module, call in (("pywrap_tfe", "TFE_Py_FastPathExecute"), ("_op_def_library", "_apply_op_helper")):
            passed_on = _OpListener(getattr(gen_training_ops, module), call, self._note_optimizer)
            self._replaced.append((gen_training_ops, module, getattr(gen_training_ops, module)))
            setattr(gen_training_ops, module, passed_on)

    def take_back(self) -> None:
        """Ends the tracking, and restores TensorFlow's methods."""
        for where, name, original in reversed(self._replaced):
            setattr(where, name, original)
        self._replaced.clear()

    def iterate_held(
        self, other_than: Collection[int], only: Collection[int] | None
    ) -> Iterator[tuple[str, tf.Tensor, bool]]:
        """Yields (name, value, whether it was trained) of the tracked variables that have a value, in the order of
        their creation.

        Args:
          other_than: Python's ``id`` of the handle of each variable to leave out.
          only: Python's ``id`` of the handle of each variable to consider; None: all.
        """
        for key, made in list(self._made.items()):
            variable = made.variable()
            if variable is None or key in other_than or (only is not None and key not in only):
                continue
            handle = variable._handle
            if find_deferred(variable) is None and bool(gen_resource_variable_ops.var_is_initialized_op(handle)):
                value = gen_resource_variable_ops.read_variable_op(handle, variable.dtype)
                yield made.name, value, made.trained

    def forget_written(self, handles: Iterable[int] | None = None) -> None:
        """Forgets the writes so far.

        Args:
          handles: Python's ``id`` of the handle of each variable whose writes are forgotten, because it has got another
            value since; None: all.
        """
        for key in list(self.written if handles is None else handles):
            self.written.pop(key, None)

    # -- what is noted

    def _put(self, where: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        original = getattr(where, name)
        self._replaced.append((where, name, original))
        setattr(where, name, functools.wraps(original)(wrap(original)))

    def _wrap_init(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def init(variable: Any, *args: Any, **kwargs: Any) -> None:
            original(variable, *args, **kwargs)
            if type(variable) is not _UnreadVariable:
                self._find_tracked(variable)

        return init

    def _wrap_write(self, adds: bool, original: Callable[..., Any]) -> Callable[..., Any]:
        def write(variable: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(variable, *args, **kwargs)
            if not capturing.get():
                self._note_written(variable, adds)
            return result

        return write

    def _wrap_gradient(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def gradient(*args: Any, **kwargs: Any) -> Any:
            self._differentiated = self._differentiated or not capturing.get()
            return original(*args, **kwargs)

        return gradient

    def _wrap_run(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def do_run(session: Any, handle: Any, targets: Any, fetches: Any, *args: Any, **kwargs: Any) -> Any:
            wanted = (id(session.graph), *map(id, targets), *map(id, fetches))
            if wanted not in self._sessions:
                self._sessions.add(wanted)
                if names := _list_trained([*targets, *(f.op for f in fetches)]):
                    self._note_trained(f"a {type(session).__name__} run{_format_place()}", names)
            return original(session, handle, targets, fetches, *args, **kwargs)

        return do_run

    def _note_written(self, variable: Any, adds: bool) -> None:
        key = id(variable._handle)
        made = self._find_tracked(variable)
        if tf.executing_eagerly():
            self.written[key] = None
        if made is None:
            return
        if tf.executing_eagerly():
            made.given += 1
            if adds or (made.given >= _OFTEN and self._differentiated):
                made.trained = True
                self._note_trained(f"updates{_format_place()}", [made.name])
        elif adds or self._differentiated:
            made.trained = True
            self._note_trained_in_function([made.name])

    def _note_optimizer(self, op: str, handle: Any) -> None:
        """Records that an operation of a TensorFlow optimizer is run, or built in a graph."""
        if capturing.get():
            return
        made = self._made.get(id(handle))
        names = [] if made is None else [made.name]
        if made is not None:
            made.trained = True
        if tf.executing_eagerly():
            self.written[id(handle)] = None
            self._note_trained(f"{op}{_format_place()}", names)
        else:
            self._note_trained_in_function(names)

    def _note_trained_in_function(self, names: Iterable[str]) -> None:
        """Records that a tf.function is traced that writes to variables; does nothing in graphs of TensorFlow 1, which
        are inspected when they run.
        """
        graph, outermost = tf.compat.v1.get_default_graph(), None
        while isinstance(graph, FuncGraph):
            graph, outermost = graph.outer_graph, graph
        if outermost is not None and outermost.name != _FIRST_VALUES:
            self._note_trained(f"the tf.function `{outermost.name}`{_format_place(', called at')}", names)

    def _note_trained(self, what: str, names: Iterable[str]) -> None:
        if tf.distribute.has_strategy():
            what += f", under {type(tf.distribute.get_strategy()).__name__}"
        self.trained.setdefault(what, {}).update(dict.fromkeys(names))

    def _find_tracked(self, variable: Any) -> TrackedVariable | None:
        """Returns the record of a variable, created if necessary; None if the variable is not trainable or not of
        floating point.
        """
        handle = getattr(variable, "_handle", None)
        if not isinstance(handle, tf.__internal__.EagerTensor):
            return None
        key = id(handle)
        found = self._made.get(key)
        if (
            found is None
            and variable.trainable
            and variable.dtype.is_floating
            and type(variable) is not _UnreadVariable
        ):
            forget = functools.partial(self._forget, key)
            found = self._made[key] = TrackedVariable(weakref.ref(variable, forget), variable.name.partition(":")[0])
        return found

    def _forget(self, key: int, _: Any) -> None:
        self._made.pop(key, None)
        self.written.pop(key, None)


class _OpListener:
    """Stands in for a module that TensorFlow's generated op functions call, in order to observe one of its functions.

    Args:
      module: the module; all other names are passed on to it.
      call: name of the function that is observed.
      hear: called with the op's name and the variable's handle, for ops of optimizers.
    """

    def __init__(self, module: Any, call: str, hear: Callable[[str, Any], None]) -> None:
        self._module, self._hear = module, hear
        setattr(self, call, functools.partial(self._wrap_heard, getattr(module, call)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def _wrap_heard(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        op = next(arg for arg in args if isinstance(arg, str))
        if op.startswith(_TRAINS):
            self._hear(op, kwargs["var"] if "var" in kwargs else args[3])
        return original(*args, **kwargs)


def _format_place(before: str = " at") -> str:
    """Returns ``before`` and the line of the script that makes the present call; "" if no frame of this thread is in
    the script.
    """
    line = find_script_line()
    return f"{before} {line}" if line else ""


def _list_trained(ops: Collection[tf.Operation]) -> list[str]:
    """Returns the names of the variables that an optimizer updates when a session runs these operations."""
    found: dict[str, None] = {}
    seen, left = {op.name for op in ops}, list(ops)
    while left:
        op = left.pop()
        if op.type.startswith(_TRAINS):
            found[op.inputs[0].op.name] = None
        for other in (*(t.op for t in op.inputs), *op.control_inputs):
            if other.name not in seen:
                seen.add(other.name)
                left.append(other)
    return sorted(found)
