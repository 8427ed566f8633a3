"""Starts processes that run modules of the same Whale as this one, whatever the current folder is.

``python -m`` puts the current folder first on the path. In a checkout, that would be another Whale than the installed
one, perhaps one whose op library is not built.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

_HOME = Path(__file__).resolve().parents[1]
_SHOWN_LINES = 12
_PACKAGES = ("whale_ops", "cost_model")
# Python 3.10 has no -P; the empty name stands for the current folder.
_WITHOUT_FOLDER = (
    "import runpy, sys; sys.path.remove(''); del sys.argv[0]; "
    "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)


def module(name: str, *arguments: str, options: Sequence[str] = ()) -> list[str]:
    """Returns the command line that runs a module without the current folder on the path.

    Args:
        options: options of the interpreter, such as ``-u``.
    """
    first = ["-P", "-m"] if sys.version_info >= (3, 11) else ["-c", _WITHOUT_FOLDER]
    return [sys.executable, *options, *first, name, *arguments]


def environment() -> dict[str, str]:
    """Returns this process's environment, with PYTHONPATH extended so that child processes find the packages of a
    checkout.
    """
    found = dict(os.environ)
    if _HOME.name not in ("site-packages", "dist-packages"):
        rest = found.get("PYTHONPATH")
        found["PYTHONPATH"] = str(_HOME) if not rest else f"{_HOME}{os.pathsep}{rest}"
    return found


def last_lines(output: str) -> str:
    """Returns the last lines of a process's output, which usually contain the error."""
    return "\n".join(output.strip().splitlines()[-_SHOWN_LINES:])


def take_own_packages() -> None:
    """Imports the other packages of this Whale, before a script's folder comes first on the path: it may be another
    checkout.
    """
    for name in _PACKAGES:
        importlib.import_module(name)
