"""Puts the whole values of sharded variables behind their handles, for reads by TensorFlow's C++ code.

An eager operation with a variable as its operand (``tf.reduce_sum(w)``, ``tf.nn.relu(w)``) does not call the variable's
methods: TensorFlow's fast path takes its ``_handle`` and reads the memory behind it. For a sharded variable, or one
whose present value another rank holds, that memory does not have the value. Functions that are not steps read the
handles that they captured in the same way. Functions of datasets read them at any time, on threads of their own, so for
these an error says what to do instead.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import iterator_ops
from tensorflow.python.eager.polymorphic_function import concrete_function

from whale.errors import PlanError

_PARTS = "_whale_parts_behind"  # attribute of a handle: weak reference to the object with its variable's parts
_VARIABLES_OF_KERAS = "keras.src.backend.tensorflow.core"  # module: its variables pass a handle on
# Prefixes of Keras' modules that ask whether a variable has a handle, and give it to no operation.
_ASK_ONLY = ("keras.src.backend.", "keras.src.optimizers.optimizer", "tf_keras.src.optimizers.optimizer")
_READ = "_whale_resources_read"  # attribute of an iterator: the resources that functions of its dataset read


def note_parts(handle: Any, parts: Any) -> None:
    """Marks a handle as that of a sharded variable, so that reads by TensorFlow's C++ code first get the whole value.

    Args:
      handle: the variable's resource handle.
      parts: has ``bring_home``, which puts the whole value behind the handle, and ``name``.
    """
    setattr(handle, _PARTS, weakref.ref(parts))


def forget_noted(handle: Any) -> None:
    """Removes the mark of ``note_parts``, since the variable is whole again."""
    if hasattr(handle, _PARTS):
        delattr(handle, _PARTS)


def _iterate_parts(handles: Any) -> Iterator[Any]:
    for handle in handles:
        noted = getattr(handle, _PARTS, None)
        if noted is not None and (parts := noted()) is not None:
            yield parts


def watch_plain_functions() -> Callable[[], None]:
    """Makes TensorFlow's functions find whole values behind the handles that they captured, from now on; returns a
    function that ends this.

    Every rank has to call these functions, as it has to read variables.
    """
    call, begin = concrete_function.ConcreteFunction._call_flat, iterator_ops.OwnedIterator.__init__
    read = iterator_ops.OwnedIterator._next_internal

    @functools.wraps(call)
    def call_flat(self: Any, tensor_inputs: Any, captured_inputs: Any) -> Any:
        if tf.executing_eagerly():
            for parts in _iterate_parts(captured_inputs):
                parts.bring_home()
        return call(self, tensor_inputs, captured_inputs)

    @functools.wraps(begin)
    def init(self: Any, dataset: Any = None, *args: Any, **kwargs: Any) -> None:
        _refuse_sharded(self, dataset)
        begin(self, dataset, *args, **kwargs)

    @functools.wraps(read)
    def next_internal(self: Any) -> Any:
        if tf.executing_eagerly():  # a step may have sharded the variable since the iterator began
            _refuse_sharded(self, getattr(self, "_dataset", None))
        return read(self)

    def put_back() -> None:
        concrete_function.ConcreteFunction._call_flat = call
        iterator_ops.OwnedIterator.__init__ = begin
        iterator_ops.OwnedIterator._next_internal = read

    concrete_function.ConcreteFunction._call_flat = call_flat
    iterator_ops.OwnedIterator.__init__ = init
    iterator_ops.OwnedIterator._next_internal = next_internal
    return put_back


def _refuse_sharded(iterator: Any, dataset: tf.data.Dataset | None) -> None:
    """Raises an error if a function of the iterator's dataset reads a variable that is sharded by now.

    Args:
      dataset: what the iterator reads; None: an iterator made from another one's resource, of which that is not known.

    Raises:
      PlanError: see above.
    """
    read = iterator.__dict__.get(_READ)
    if read is None:  # found once: reads of batches are frequent
        read = list(_iterate_captured_resources(dataset)) if isinstance(dataset, tf.data.Dataset) else []
        iterator.__dict__[_READ] = read
    for op, handle in read:
        for parts in _iterate_parts([handle]):
            raise PlanError(
                "a dataset's function reads a variable of which every rank has a part",
                op=op,
                given=f"{parts.name} {list(parts.shape)}, which a training step has sharded",
                expected="whole variables: the function runs on a thread of the dataset's own, ahead of steps",
                action="call the model in the step, or on batches in the script's loop; or keep its weights whole: "
                "memory.zero=2, or a larger memory.zero_min_bytes",
            )


def _iterate_captured_resources(dataset: tf.data.Dataset) -> Iterator[tuple[str, Any]]:
    """Yields (op of a dataset, resource that a function of it captures) for a dataset and all that it is made from."""
    waiting, seen = [dataset], set()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        waiting += one._inputs()
        for wrapped in one._functions():
            for captured in wrapped.function.captured_inputs:
                if captured.dtype == tf.resource:
                    yield type(one).__name__.strip("_"), captured


def make_handle_properties(bring_home: Callable[[Any], None]) -> dict[str, property]:
    """Returns properties ``_handle`` and ``handle`` for a class of variables. They put the value behind the handle when
    an eager operation is about to use the memory there.

    TensorFlow's fast path takes ``_handle``. Scripts, and what TensorFlow 1 has for them (``scatter_update``, the
    optimizers), give ``handle`` to operations such as ``tf.raw_ops.ResourceGather``; those read and write the memory
    without a method of the variable. The rest of TensorFlow calls such operations in methods that are replaced, or asks
    a handle for its device and name only.

    Args:
      bring_home: puts the present value of a variable behind its handle, and keeps it there until the next step.
    """

    def get(self: Any) -> Any:
        # C++ has no frame of its own: the caller is the Python function of the operation, in a generated module.
        module = sys._getframe(1).f_code.co_filename.replace("\\", "/").rpartition("/")[2]
        if module.startswith("gen_") and module.endswith("_ops.py") and tf.executing_eagerly():
            bring_home(self)
        return self.__dict__["_handle"]

    def put(self: Any, handle: Any) -> None:
        self.__dict__["_handle"] = handle

    def get_for_operation(self: Any) -> Any:
        if tf.executing_eagerly() and _gives_handles(sys._getframe(1)):
            bring_home(self)
        return self.__dict__["_handle"]

    return {"_handle": property(get, put), "handle": property(get_for_operation)}


def _gives_handles(frame: types.FrameType | None) -> bool:
    """Returns True if the code that asks for a variable's handle may give it to an operation.

    Args:
      frame: of that code.
    """
    if frame is not None and frame.f_globals.get("__name__") == _VARIABLES_OF_KERAS:
        frame = frame.f_back
    module = "" if frame is None else frame.f_globals.get("__name__", "")
    if module.startswith(("tensorflow.python.ops.state_ops", "tensorflow.python.training.")):
        return "checkpoint" not in module and ".saving" not in module
    return not module.startswith(("tensorflow.", "whale.", "whale_ops.", *_ASK_ONLY))
