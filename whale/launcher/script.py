"""Runs the user's script inside a rank as Python itself would, and reports to the worker how it failed."""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import traceback
from types import ModuleType, TracebackType
from typing import Any

from whale import python
from whale.imports import Finder, Load
from whale.ir.collector import suspend_garbage_collection
from whale.launcher.protocol import CONSEQUENCE, TEXT_LIMIT

# Packages whose interface Whale provides itself -> what to do if a script imports one that is not installed.
_OWN_INTERFACES = {
    "horovod": "write whale.horovod for horovod (`import whale.horovod.tensorflow.keras as hvd`): the script then "
    "needs no Horovod; see docs/guides/horovod.md",
    "epl": "write `import whale.epl as epl`: the script then needs no EPL; see docs/guides/epl.md",
}


def run_script(target: str, arguments: list[str], as_module: bool, report: int) -> int:
    """Runs a script (or module) as ``__main__`` in this process, and returns its exit code.

    Args:
        target: path of the script, or name of the module if `as_module`.
        arguments: the script's arguments, which follow `target` in ``sys.argv``.
        as_module: whether to run it as by ``python -m``.
        report: file descriptor that receives one JSON object ``{type, message, traceback, code}`` if the script fails.

    Returns:
        0 if the script ended normally, the code given to ``sys.exit``, 130 after KeyboardInterrupt, 1 for any other
        exception.
    """
    sys.argv = [target, *arguments]
    python.take_own_packages()
    sys.meta_path.insert(0, Finder(("tensorflow",), _load_without_collections))
    # Python puts the script's directory first, or the current one for -m.
    sys.path.insert(0, os.getcwd() if as_module else os.path.dirname(os.path.abspath(target)))
    try:
        if as_module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(target, run_name="__main__")
    except SystemExit as end:
        return _find_exit_code(end, report)
    except BaseException as error:  # whatever ended the script is reported
        code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        sys.last_value = error  # as Python itself does, so that atexit handlers can tell a failure from a normal end
        sys.stdout.flush()
        _send(report, type(error), str(error), _describe(error), code)
        return code
    return 0


def _load_without_collections(load: Load, module: ModuleType) -> None:
    """Imports TensorFlow with the garbage collector suspended, which saves a fifth of the time and leaks next to
    nothing.

    Args:
        load: the import system's own function that executes a module.
        module: the module ``tensorflow``.
    """
    with suspend_garbage_collection():
        load(module)


def _find_exit_code(end: SystemExit, report: int) -> int:
    """Returns the exit code that Python gives a SystemExit, and reports it to the worker if it is not 0.

    None is 0, an integer is taken modulo 256, and anything else is printed and counts as 1.
    """
    sys.stdout.flush()
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        if end.code & 0xFF:
            _send(report, None, "", "", end.code & 0xFF)
        return end.code & 0xFF
    _send(report, SystemExit, str(end.code), f"{end.code}\n", 1)
    return 1


def _send(report: int, kind: type[BaseException] | None, message: str, text: str, code: int) -> None:
    name = "" if kind is None else kind.__qualname__
    if kind is not None and any(base.__qualname__ == CONSEQUENCE for base in kind.__mro__):
        name = CONSEQUENCE  # CommError may be raised as a subclass that is an error of TensorFlow, too
    # A long traceback keeps its end, where the cause stands.
    report_of = {"type": name, "message": message[:TEXT_LIMIT], "traceback": text[-TEXT_LIMIT:], "code": code}
    data = json.dumps(report_of, ensure_ascii=False).encode(errors="replace")  # file names need not be valid UTF-8
    while data:
        data = data[os.write(report, data) :]
    os.close(report)


def _describe(error: BaseException) -> str:
    """Formats an exception's traceback without the frames of Whale that started the script.

    Returns "" if the user has set ``sys.excepthook``, which is called instead.
    """
    frames = error.__traceback__
    while frames is not None and _is_ours(frames):
        frames = frames.tb_next
    error.__traceback__ = frames
    if sys.excepthook is not sys.__excepthook__:
        sys.excepthook(type(error), error, frames)
        return ""
    return "".join(traceback.format_exception(type(error), error, frames)) + _advise(error)


def _advise(error: BaseException) -> str:
    """Returns a line that names Whale's own interface, if the script failed because it imports ``horovod`` or ``epl``
    and the package is not installed; else "".
    """
    package = (getattr(error, "name", None) or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return f"  next: {_OWN_INTERFACES[package]}\n" if package in _OWN_INTERFACES else ""


def _is_ours(frames: TracebackType) -> bool:
    path: str = frames.tb_frame.f_code.co_filename
    own: set[Any] = {__file__, runpy.__file__, "<frozen runpy>", "<frozen importlib._bootstrap>"}
    return path in own
