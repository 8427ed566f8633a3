"""Executes parts of a session's runs on rank 0 alone (reading data, writing files), and sends the values to all ranks.

Values are sent as bytes, and so is the error of a run that failed (``pack_values``, ``pack_error``, ``unpack_values``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import tensorflow as tf

from whale.capture.v1 import GraphCapture
from whale.distributed.trace import open_span
from whale.frontends.tf1.ranks_graph import RanksGraph, Run
from whale.frontends.tf1.variables import SessionVariables, list_used_names
from whale.ir.program import Program, remove_work
from whale.runtime.compile.compile import compile_alone
from whale.runtime.context import Context
from whale.runtime.input.local_batches import ELEMENT_TIMEOUT_S


class SingleRankRuns:
    """Runs parts of the user's graph in one process, without the other ranks.

    Args:
      captures: captures parts of the user's graph.
      variables: the session's variables.
      graph: the graph in which the ranks' programs run.
      lock: held during a capture, since queue runners use the graph at the same time as the main thread.
    """

    def __init__(
        self,
        context: Context,
        captures: GraphCapture,
        variables: SessionVariables,
        graph: RanksGraph,
        lock: threading.Lock,
    ) -> None:
        self._context, self._captures, self._variables = context, captures, variables
        self._graph, self._lock = graph, lock
        self._runs: dict[Hashable, Run] = {}
        self._used: dict[Hashable, list[str]] = {}

    def forget(self) -> None:
        """Drops all runs that were built, because variables have moved to other memory."""
        self._runs.clear()

    def run_on_first_rank(
        self,
        outputs: Sequence[tf.Tensor],
        feeds: Mapping[tf.Tensor, np.ndarray],
        options: Any,
        targets: Sequence[Any] | None = None,
        written: frozenset[str] = frozenset(),
        and_before: bool = False,
    ) -> list[np.ndarray]:
        """Runs a part of the graph on rank 0, and returns its values on every rank; collective.

        Args:
          outputs: the tensors to fetch.
          feeds: values of fed tensors.
          options: the RunOptions of Session.run.
          targets: operations to run.
          written: names of operations that have run already, and are left out.
          and_before: whether to leave out also what these operations depend on.

        Raises:
          tf.errors.OpError: rank 0's error, such as OutOfRangeError at the end of an iterator; raised on every rank.
        """
        context = self._context
        if not context.has_other_processes:
            return self.run(outputs, targets or (), feeds, (options, None), written, and_before)
        key = f"whale/element/{context.elements}"
        context.elements += 1
        comm = context.comms[0]
        if context.rank > 0:
            return unpack_values(comm.broadcast_bytes(key, None, 0, ELEMENT_TIMEOUT_S))
        try:
            values = self.run(outputs, targets or (), feeds, (options, None), written, and_before)
        except tf.errors.OpError as error:
            comm.broadcast_bytes(key, pack_error(error), 0, ELEMENT_TIMEOUT_S)
            raise
        comm.broadcast_bytes(key, pack_values(values), 0, ELEMENT_TIMEOUT_S)
        return values

    def find_variable_names(
        self,
        find: Callable[[Program], list[str]],
        wanted: Sequence[Any],
        feeds: Mapping[tf.Tensor, np.ndarray],
        written: frozenset[str] = frozenset(),
        and_before: bool = False,
    ) -> list[str]:
        """Returns the names of variables that ``find`` selects from the program of a run.

        Args:
          find: returns names of variables of a program, e.g. ``list_changed_names``.
          wanted: fetches and targets of the run.
          feeds: values of fed tensors.
          written: names of operations that are left out of the run.
          and_before: whether to leave out also what these operations depend on.
        """
        key = (find, run_key([], wanted, feeds), written)
        with self._lock:
            if key not in self._used:
                captured = self._captures.capture(wanted, {t: v.shape for t, v in feeds.items()})
                self._used[key] = find(remove_work(captured.program, written, and_before))
            return self._used[key]

    def run(
        self,
        fetches: Sequence[Any],
        targets: Sequence[Any],
        feeds: Mapping[tf.Tensor, np.ndarray],
        settings: tuple[Any, Any],
        written: frozenset[str] = frozenset(),
        and_before: bool = False,
    ) -> list[np.ndarray]:
        """Runs a part of the graph in this process only.

        Args:
          fetches: the tensors to fetch.
          targets: operations to run.
          feeds: values of fed tensors.
          settings: (RunOptions, RunMetadata) of Session.run.
          written: names of operations that have run already, and are left out.
          and_before: whether to leave out also what these operations depend on.
        """
        names = ", ".join(w.name for w in (*fetches, *targets))
        key = ("alone", run_key(fetches, targets, feeds), written)
        with open_span(self._context.trace, names, "input"):
            with self._lock:
                if key not in self._runs:
                    captured = self._captures.capture([*fetches, *targets], {t: v.shape for t, v in feeds.items()})
                    program = compile_alone(remove_work(captured.program, written, and_before), self._context)
                    on_host = self._variables.on_host
                    inputs, fed = captured.inputs, captured.fed
                    run = self._graph.run_of([program], "whale_alone", inputs, fed, alone=True, on_host=on_host)
                    self._runs[key], self._used[key] = run, list_used_names(program)
                self._variables.refuse_alone(self._used[key])
            return [np.asarray(v) for v in self._runs[key](feeds, settings)]


def run_key(fetches: Sequence[Any], targets: Sequence[Any], feeds: Mapping[tf.Tensor, np.ndarray]) -> Hashable:
    """Returns a key that is equal for runs with the same names of fetches, targets and feeds, and the same fed
    shapes.
    """
    shapes = tuple((t.name, v.shape) for t, v in feeds.items())
    return tuple(t.name for t in fetches), tuple(op.name for op in targets), shapes


class _Value(msgspec.Struct):
    """Represents an array in a message.

    Attributes:
      dtype: name of the dtype; "" for strings.
      shape: the array's shape.
      data: the memory of the numbers; or a list of strings.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes | list[bytes]


class _Message(msgspec.Struct):
    values: list[_Value] = []
    error_code: int = 0
    error: str = ""


def pack_values(values: Sequence[np.ndarray]) -> bytes:
    """Encodes arrays of numbers, booleans and byte strings; ``unpack_values`` is the inverse."""
    return msgspec.msgpack.encode(_Message([_pack_value(v) for v in values]))


def pack_error(error: tf.errors.OpError) -> bytes:
    """Encodes an error so that ``unpack_values`` raises one with the same class and message."""
    return msgspec.msgpack.encode(_Message(error_code=error.error_code, error=error.message or ""))


def unpack_values(data: bytes) -> list[np.ndarray]:
    """Decodes the arrays that ``pack_values`` has encoded.

    Raises:
      tf.errors.OpError: ``data`` comes from ``pack_error``.
    """
    message = msgspec.msgpack.decode(data, type=_Message)
    if message.error_code:
        raise tf.compat.v1.errors.exception_type_from_error_code(message.error_code)(None, None, message.error)
    return [_unpack_value(v) for v in message.values]


def _pack_value(value: np.ndarray) -> _Value:
    if value.dtype.kind in "OSU":
        strings = [bytes(s) if isinstance(s, bytes) else str(s).encode() for s in value.ravel()]
        return _Value("", value.shape, strings)
    return _Value(tf.as_dtype(value.dtype).name, value.shape, np.ascontiguousarray(value).tobytes())


def _unpack_value(value: _Value) -> np.ndarray:
    if isinstance(value.data, list):
        found = np.empty(value.shape, object)
        found.ravel()[:] = value.data
        return found
    return np.frombuffer(value.data, tf.as_dtype(value.dtype).as_numpy_dtype).reshape(value.shape)
