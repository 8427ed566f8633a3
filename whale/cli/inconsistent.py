"""Reports files that contradict themselves: an error with their names, not a traceback of code that trusts them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from whale.errors import PlanError

_CONTRADICTIONS = (LookupError, ValueError, TypeError, ArithmeticError, AttributeError, AssertionError, RecursionError)


@contextmanager
def refuse_inconsistent(*paths: object) -> Iterator[None]:
    """Turns an unexpected error inside into a PlanError about the files, whose parts are valid but do not fit together.

    Raises:
        PlanError: something inside goes wrong that no error of Whale's explains.
    """
    try:
        yield
    except (*_CONTRADICTIONS, MemoryError, StopIteration) as error:
        raise PlanError(
            "what a file says does not fit together",
            given=", ".join(str(path) for path in paths if path),
            reason=f"{type(error).__name__}: {error}",
            expected="files as Whale's tools write them",
            action="make the file again; if it is as Whale wrote it, report this",
        ) from error
