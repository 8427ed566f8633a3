"""Runs the user's script inside a rank as Python itself would, and reports how it failed."""

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

# What scripts import of libraries whose interface Whale has.
_OWN_INTERFACES = {
    "horovod": "write whale.horovod for horovod (`import whale.horovod.tensorflow.keras as hvd`): the script then runs "
    "without it; see docs/guides/horovod.md",
    "epl": "write `import whale.epl as epl`: the script then runs without it; see docs/guides/epl.md",
}


def run_script(target: str, arguments: list[str], as_module: bool, report: int) -> int:
    """Runs a script (or module) as ``__main__`` in this process.

    Args:
        target: path of the script, or name of the module if ``as_module``.
        arguments: what follows it in ``sys.argv``.
        report: file descriptor that receives one JSON object ``{type, message, traceback, code}`` if the script fails.

    Returns:
        The exit code of the script: 0, that of ``sys.exit``, 130 after an interrupt, 1 for any other exception.
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
        sys.last_value = error  # as Python itself does; what runs at exit can tell a failure from an end
        sys.stdout.flush()
        _send(report, type(error), str(error), _describe(error), code)
        return code
    return 0


def _load_without_collections(load: Load, module: ModuleType) -> None:
    """Loads TensorFlow without garbage collection: its 3,000 modules leave no cycles worth a fifth of the time."""
    with suspend_garbage_collection():
        load(module)


def _find_exit_code(end: SystemExit, report: int) -> int:
    """Returns Python's exit code of a SystemExit: 0 for None, a number itself, 1 for anything else, which it prints."""
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
        name = CONSEQUENCE  # also where it is of TensorFlow's class, for a script that catches it
    # The cause stands at the end of a traceback.
    report_of = {"type": name, "message": message[:TEXT_LIMIT], "traceback": text[-TEXT_LIMIT:], "code": code}
    data = json.dumps(report_of, ensure_ascii=False).encode(errors="replace")  # names of files may be no text
    while data:
        data = data[os.write(report, data) :]
    os.close(report)


def _describe(error: BaseException) -> str:
    """Formats the traceback without the frames that started the script; "" if a hook of the user's has printed it."""
    frames = error.__traceback__
    while frames is not None and _is_ours(frames):
        frames = frames.tb_next
    error.__traceback__ = frames
    if sys.excepthook is not sys.__excepthook__:
        sys.excepthook(type(error), error, frames)
        return ""
    return "".join(traceback.format_exception(type(error), error, frames)) + _advise(error)


def _advise(error: BaseException) -> str:
    """Returns what to import in the place of a package that is not there, where Whale has its interface; else ""."""
    package = (getattr(error, "name", None) or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return f"  next: {_OWN_INTERFACES[package]}\n" if package in _OWN_INTERFACES else ""


def _is_ours(frames: TracebackType) -> bool:
    path: str = frames.tb_frame.f_code.co_filename
    own: set[Any] = {__file__, runpy.__file__, "<frozen runpy>", "<frozen importlib._bootstrap>"}
    return path in own
