"""Runs a script inside one of Whale's tools as Python would, and reports failures of the script itself."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from whale.errors import ProgramError, WhaleError

_HOME = Path(__file__).resolve().parents[2]
_OURS = tuple(f"{_HOME / package}{os.sep}" for package in ("whale", "whale_ops", "cost_model"))
_STARTING = (runpy.__file__, "<frozen runpy>")


@contextmanager
def as_main(script: str, args: Sequence[str]) -> Iterator[None]:
    """Sets ``sys.argv`` and ``sys.path`` inside the context as if ``script`` had been started by Python."""
    argv, path = sys.argv, sys.path
    sys.argv, sys.path = [script, *args], [str(Path(script).resolve().parent), *path]
    try:
        yield
    finally:
        sys.argv, sys.path = argv, path


def make_relative(script: Sequence[str], plan: str) -> tuple[str, ...]:
    """Returns path and arguments of a script for a plan file: the path relative to the plan's folder.

    So both may move together. If they have only the root in common, the path is absolute.
    """
    folder, path = os.path.dirname(os.path.abspath(plan)), os.path.abspath(script[0])
    apart = os.path.commonpath((folder, path)) == os.sep
    return (path if apart else os.path.relpath(path, folder), *script[1:])


def locate(script: Sequence[str], plan: str) -> tuple[str, ...]:
    """Returns path and arguments from a plan file (see `make_relative`), with the path relative to the current
    folder; may be empty.
    """
    folder = os.path.dirname(os.path.abspath(plan))
    return tuple(os.path.normpath(os.path.join(folder, part)) if not i else part for i, part in enumerate(script))


@contextmanager
def failures_told(script: str) -> Iterator[None]:
    """Prints the traceback of an error that the script raises, without Whale's frames, and ends with one sentence.

    Raises:
      ProgramError: the script raised, or called ``sys.exit`` with a code; Whale's own errors pass.
    """
    try:
        yield
    except WhaleError:
        raise
    except SystemExit as end:
        if end.code in (None, 0):
            return
        reason = f"it called sys.exit({end.code!r})"
    except Exception as error:
        sys.stdout.flush()
        sys.stderr.write(_format(error))
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
    else:
        return
    raise ProgramError(
        f"{script} failed before its step could be planned",
        reason=reason,
        action=f"correct the script; `python {script}` alone fails in the same way",
    ) from None


def _format(error: BaseException) -> str:
    """Formats the traceback; Whale's frames are part of it only if Whale itself failed."""
    told = traceback.TracebackException.from_exception(error)
    one: traceback.TracebackException | None = told
    while one is not None:
        frames = [frame for frame in one.stack if frame.filename not in _STARTING]
        theirs = [frame for frame in frames if not frame.filename.startswith(_OURS)]
        if theirs and theirs[-1] is frames[-1]:
            frames = theirs
        one.stack = traceback.StackSummary.from_list(frames)
        one = one.__cause__ or one.__context__
    return "".join(told.format())
