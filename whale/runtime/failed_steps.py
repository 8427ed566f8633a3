"""Lets a run continue after a step that failed and whose error the script caught: all ranks raise it, and connect anew.

An operation of the script (``tf.debugging.assert_less``, ``check_numerics``) may fail on one rank alone, for its rows.
The other ranks, which wait for its part, raise an error of the same class, so that one ``except`` clause works on every
rank. An exchange that was under way cannot be resumed: before the next step all ranks leave their communicator for
another one of the same name, under which the compiled steps find it. The ranks then compare which step they were at,
and their variables. An update that only some ranks have made ends the run.

Decision: 0206.
"""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

import whale_ops
from whale.distributed.connect import configure_communicator, connect_ranks
from whale.distributed.faults import find_exchange_error, raise_comm_error
from whale.distributed.ranks import TURN_TIMEOUT_S
from whale.distributed.stream_positions import gather_streams
from whale.errors import CommError
from whale.runtime.context import Context

_FAILED = re.compile(r"rank \d+ failed: (\w+Error): ")  # how `raise_comm_error` words another rank's failure


def raise_step_error(error: tf.errors.OpError, context: Context) -> None:
    """Raises the error that this rank's script should see for a failed step; returns if ``error`` itself is that error.

    Marks the run's communicators as left behind, so that the next step connects the ranks anew.

    Raises:
      CommError: as ``raise_comm_error``. If another rank's operation raised an error of TensorFlow, the error is of
        that class too.
    """
    if not context.comms or context.is_elastic or context.own_gpu is not None:
        raise_comm_error(error, context)
        return
    marked = find_exchange_error(error)
    told = None if marked is None else _FAILED.search(marked.message or "")
    kind = None if told is None else getattr(tf.errors, told.group(1), None)
    try:
        raise_comm_error(error, context)
    except CommError as exchange:
        if kind is None:
            raise
        context.comms = _LeftBehind(context)
        raise _with_class(kind)(exchange.message) from None
    context.comms = _LeftBehind(context)


class _LeftBehind(Sequence[Any]):
    """Stands in for the run's sequence of communicators after a failed step: the first access by index connects all
    ranks anew, puts the new communicators in its place, and returns the one asked for.
    """

    def __init__(self, context: Context) -> None:
        self._context, self._old = weakref.ref(context), context.comms

    def __getitem__(self, number: Any) -> Any:
        context = self._context()
        assert context is not None  # it owns this
        go_on(context)
        return context.comms[number]

    def __len__(self) -> int:
        return len(self._old)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._old)


@functools.cache
def _with_class(kind: type[tf.errors.OpError]) -> type[CommError]:
    """Returns a subclass of both CommError and TensorFlow's error class ``kind``: a rank raises it for an operation
    that has failed on another rank, so that ``except tf.errors.InvalidArgumentError`` catches it on all ranks.
    """

    def begin(self: Any, message: str) -> None:
        Exception.__init__(self, message)  # WhaleError and OpError have other arguments
        self.action, self.facts = None, {}
        self._node_def = self._op = None
        self._message, self._error_code = message, kind(None, None, "").error_code
        self._experimental_payloads = {}

    found = {"__init__": begin, "message": property(lambda error: error._message)}
    return type(kind.__name__, (CommError, kind), found)


def go_on(context: Context) -> None:
    """Connects all ranks anew if the latest step has failed; then collective. Otherwise returns at once.

    Raises:
      CommError: another rank does not continue, has failed at another step, or holds other values now.
    """
    if not isinstance(context.comms, _LeftBehind):
        return
    for comm in context.comms:
        if not comm.leave(context.config["debug.check_timeout_s"]) and context.has_other_processes:
            raise CommError(
                "a step failed, and not all ranks continue after it",
                given=f"rank {context.rank} takes another step; other ranks have not come to one",
                expected="a script that catches the step's error on every rank, and then takes another step",
                action="catch the error at the same place on every rank, or let it end the run",
            )
    if context.watch is None or not context.has_other_processes:
        context.comms = whale_ops.connect_in_process(
            context.comm_name, context.size, hosts=context.config.network.hosts
        )
    else:
        context.comms, context.apart = connect_ranks(context.comm_name, context.place, context.config, context.watch)
        context.watch.look_after(context.comms[0])
    for comm in context.comms:
        configure_communicator(comm, context.config)
        if context.trace is not None:
            comm.trace_start(context.trace.descriptor)
    context.planning.forecast = None  # it counts exchanges of the old communicator, and failed steps measure nothing
    if context.has_other_processes:
        _compare(context)
    context.variables.check(context, context.outside, "the step after a failed one")


def _compare(context: Context) -> None:
    comm = context.comms[0]
    said = comm.allgather_bytes("whale/failed_step", str(context.calls).encode(), TURN_TIMEOUT_S)
    if len(set(said)) > 1:
        raise CommError(
            "ranks have failed at different steps",
            given={rank: f"step call {count.decode()}" for rank, count in enumerate(said)},
            expected="the same step failing on every rank, and no rank that has finished it already",
            action="put checks that may fail (tf.debugging) first in the step, before its exchanges between ranks",
        )
    positions = gather_streams(comm, list(context.streams))
    if positions is None:
        raise CommError(
            "a step failed after some ranks had drawn random numbers for it, and others had not",
            given=f"{len(context.streams)} random streams, at other positions on some ranks",
            expected="random streams that all ranks can set to one position",
            action='set batch.random to "global", or put checks that may fail before the step draws',
        )
    whale_ops.set_streams(positions)
