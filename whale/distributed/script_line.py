"""Finds the line of the user's script that is running, for messages and for seeds."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

_LIBRARIES = (str(Path(__file__).parents[1]) + os.sep, os.path.dirname(os.__file__) + os.sep)
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}", "__autograph_generated_file", "<")


def find_script_line() -> str:
    """Returns file name and line of the innermost frame outside libraries, such as "train.py:12", or ""."""
    frame: Any = sys._getframe(1)
    while frame is not None and is_of_library(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def is_of_library(path: str) -> bool:
    """Returns True if a source file belongs to Python, to an installed package or to Whale."""
    return path.startswith(_LIBRARIES) or any(part in path for part in _INSTALLED)
