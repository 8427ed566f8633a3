"""Runs a user's script inside one of Whale's tools just as Python would, and reports errors of the script as such."""

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
    """Sets ``sys.argv`` and ``sys.path`` inside the context as if Python had been started with ``script``."""
    argv, path = sys.argv, sys.path
    sys.argv, sys.path = [script, *args], [str(Path(script).resolve().parent), *path]
    try:
        yield
    finally:
        sys.argv, sys.path = argv, path


def make_relative(script: Sequence[str], plan: str) -> tuple[str, ...]:
    """Returns a script's path and arguments for a plan file, with the path relative to the folder of the plan file.

    So both files may be moved together. If they share only the root folder, the path is absolute.
    """
    folder, path = os.path.dirname(os.path.abspath(plan)), os.path.abspath(script[0])
    apart = os.path.commonpath((folder, path)) == os.sep
    return (path if apart else os.path.relpath(path, folder), *script[1:])


def locate(script: Sequence[str], plan: str) -> tuple[str, ...]:
    """Returns a script's path and arguments as read from a plan file, with the path relative to the current folder.

    The inverse of `make_relative`; an empty sequence gives an empty tuple.
    """
    folder = os.path.dirname(os.path.abspath(plan))
    return tuple(os.path.normpath(os.path.join(folder, part)) if not i else part for i, part in enumerate(script))


@contextmanager
def failures_told(script: str) -> Iterator[None]:
    """Turns an error that the script raises inside the context into a ProgramError, after printing its traceback.

    Frames of Whale are left out of the traceback. Errors of Whale pass unchanged; ``sys.exit(0)`` is no error.

    Raises:
      ProgramError: the script raised an error, or called ``sys.exit`` with a code other than 0.
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
        action=f"correct the script; `python {script}` fails in the same way, without Whale's tools",
    ) from None


def _format(error: BaseException) -> str:
    """Formats the traceback of an error; frames of Whale are included only if the error was raised in Whale."""
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
