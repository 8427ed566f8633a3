"""Follows each call of ``fit``, so that ranks that do not leave it together hear where they are, and a likely cause."""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from whale.distributed.collective_call_check import call_together, tells_of_other_places
from whale.errors import CommError
from whale.runtime.context import Context

_CAUSE = (
    "a callback that stands on one rank only, or decides otherwise there (EarlyStopping, stop_training by the time or "
    "by a file)"
)
_ACTION = "give every rank the same callbacks; what one rank is to do alone stands inside of one: if wh.rank() == 0"


@dataclass
class FitProgress:
    """A call of ``fit`` that this rank is in.

    Attributes:
      call: the call, in words.
      steps: training steps that it has begun.
    """

    call: str
    steps: int = 0


_current: contextvars.ContextVar[FitProgress | None] = contextvars.ContextVar("_current", default=None)


def note_step() -> None:
    """Notes that the next training step of the current ``fit`` begins."""
    progress = _current.get()
    if progress is not None:
        progress.steps += 1


def describe_place() -> str:
    """Returns where in ``fit`` a call is made, in words; "" where it is made outside."""
    progress = _current.get()
    return "" if progress is None else f", inside of `fit` after {_steps(progress.steps)}"


@contextmanager
def follow_fit(call: str, context: Context) -> Iterator[None]:
    """Follows a call of ``fit``; at its end, waits until all ranks have come there. Collective between processes.

    Args:
      call: in words.

    Raises:
      CommError: another rank is still in it, or this one is while another is elsewhere.
    """
    if not context.has_other_processes or context.elastic is not None:
        yield  # of ranks that may go and come, each finds out by itself where the others are
        return
    progress = FitProgress(call)
    token = _current.set(progress)
    try:
        yield
    except CommError as error:
        if not tells_of_other_places(error):
            raise
        raise _make_apart_error(
            error, f"rank {context.rank} is still in {call}, at step {max(progress.steps, 1)}"
        ) from None
    finally:
        _current.reset(token)
    ended = f"the end of {call}, after {_steps(progress.steps)}"
    try:
        call_together(context, "the end of fit", ended, verb="come to")
    except CommError as error:
        if not tells_of_other_places(error):
            raise
        other = f"rank {1 - context.rank}" if context.size == 2 else "another rank"
        place = f"{other} is still in {call}, at step {progress.steps + 1}"
        raise _make_apart_error(error, place) from None


def _make_apart_error(error: CommError, place: str) -> CommError:
    """Returns the error of ranks of which some have left ``fit``, or are elsewhere in it."""
    return CommError(
        f"{place}, while another rank is elsewhere: a callback may stand on one rank only",
        given=error.message,
        **{"likely cause": _CAUSE},
        expected="all ranks take the same steps, and leave `fit` together",
        action=_ACTION,
    )


def _steps(count: int) -> str:
    return f"{count} step{'s' * (count != 1)}"
