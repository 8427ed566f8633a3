"""Lets a run go on after a step that failed and whose error the script caught: all ranks raise it, and connect anew.

What an operation of the script raises (``tf.debugging.assert_less``, ``check_numerics``) may be met by one rank alone,
at its rows. The others, which wait for its part, raise an error of the same class, so that one ``except`` is every
rank's. An exchange that was under way cannot be taken up again: before the next step all ranks leave their communicator
for another one of the same name, under which the compiled steps find it. They compare then at which step they were,
and their variables: an update that only some ranks had made ends the run.

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

_FAILED = re.compile(r"rank \d+ failed: (\w+Error): ")  # as `raise_comm_error` tells it


def raise_step_error(error: tf.errors.OpError, context: Context) -> None:
    """Raises what this rank's script is to see of a step that failed; returns if that is the error itself.

    Raises:
      CommError: as ``raise_comm_error``; of TensorFlow's class too, if another rank's operation raised one of its
        errors.
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
    """A run's communicators after a failed step: taking one by its number has all ranks connect anew first."""

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
    """Returns the class of errors that another rank has raised: a CommError, and what the other rank's is."""

    def begin(self: Any, message: str) -> None:
        Exception.__init__(self, message)  # WhaleError and OpError have other arguments
        self.action, self.facts = None, {}
        self._node_def = self._op = None
        self._message, self._error_code = message, kind(None, None, "").error_code
        self._experimental_payloads = {}

    found = {"__init__": begin, "message": property(lambda error: error._message)}
    return type(kind.__name__, (CommError, kind), found)


def go_on(context: Context) -> None:
    """Connects all ranks anew if the latest step has failed; collective then.

    Raises:
      CommError: another rank does not go on, has failed at another step, or holds other values now.
    """
    if not isinstance(context.comms, _LeftBehind):
        return
    for comm in context.comms:
        if not comm.leave(context.config["debug.check_timeout_s"]) and context.has_other_processes:
            raise CommError(
                "a step failed, and not all ranks go on after it",
                given=f"rank {context.rank} takes another step; others have not come to one",
                expected="scripts that catch the error of a step on all ranks",
                action="catch it where every rank does, or let it end the run",
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
    context.planning.forecast = None  # it counts exchanges of the old communicator, and steps that fail are no measure
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
            expected="streams that ranks can set to one position",
            action='set batch.random to "global", or check operands before the step draws',
        )
    whale_ops.set_streams(positions)
