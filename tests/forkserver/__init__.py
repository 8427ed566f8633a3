"""Processes for tests that are there already: forked from one that has imported TensorFlow and Whale.

``warm_python()`` and ``plain_python()`` are paths of programs that take the place of ``sys.executable``. A process that
they start differs from a real one in three things: modules are imported before the script asks for them, its start
cannot be watched, and signals that nobody can catch do not reach it. Tests of start-up, of the launcher and of faults
use ``sys.executable``.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER_VARIABLE = "FORKSERVER_FOLDER"  # set in the test session and all that it starts
PYTHON_VARIABLE = "FORKSERVER_PYTHON"
HASH_SEED_VARIABLE = "FORKSERVER_HASH_SEED"
_CLIENT = Path(__file__).with_name("client.py")


def open_folder() -> None:
    """Makes the folder in which servers listen, for this process and those that it starts; servers start when asked."""
    if FOLDER_VARIABLE in os.environ:
        return
    folder = Path(tempfile.mkdtemp(prefix="forkserver-"))
    (folder / "owner").write_text(str(os.getpid()))
    (folder / "sessions").mkdir()
    for kind in ("whale", "plain"):
        program = folder / f"python-{kind}"
        line = shlex.join([sys.executable, "-I", "-S", str(_CLIENT), sys.executable, str(folder), kind])
        program.write_text(f'#!/bin/sh\nexec {line} "$@"\n')
        program.chmod(0o755)
    os.environ[FOLDER_VARIABLE] = str(folder)
    os.environ[PYTHON_VARIABLE] = str(folder / "python-whale")
    os.environ[HASH_SEED_VARIABLE] = str(secrets.randbelow(1 << 32))


def close_folder() -> None:
    """Removes the folder, whereupon its servers end within a second."""
    folder = os.environ.pop(FOLDER_VARIABLE, None)
    for name in (PYTHON_VARIABLE, HASH_SEED_VARIABLE):
        os.environ.pop(name, None)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def warm_python() -> str:
    """Returns the program to start scripts with: that of this test session, or a real Python where there is none."""
    return os.environ.get(PYTHON_VARIABLE, sys.executable)


def plain_python() -> str:
    """Returns the same for scripts beside which others are compared: TensorFlow is imported, and nothing of Whale's."""
    folder = os.environ.get(FOLDER_VARIABLE)
    return sys.executable if folder is None else str(Path(folder, "python-plain"))


def processes_of(mark: str) -> list[int]:
    """Returns the live processes that were forked for a mark, and those that they have started."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is None:
        return []
    leaders = set()
    for path in Path(folder, "sessions").iterdir():
        try:
            if path.read_text() == mark:
                leaders.add(path.name)
        except OSError:
            continue
    found = []
    for path in Path("/proc").iterdir():
        if not path.name.isdecimal():
            continue
        try:
            # Behind the name, which may hold spaces: state, parent, group, session.
            fields = (path / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # ended while we looked
        if fields[3] in leaders and fields[0] != "Z":
            found.append(int(path.name))
    return found


def usage_of(test: str) -> list[dict[str, Any]]:
    """Returns what the processes took that have ended and were forked while a test ran: its name, `processor_s`."""
    folder = os.environ.get(FOLDER_VARIABLE)
    path = None if folder is None else Path(folder, "usage.jsonl")
    if path is None or not path.exists():
        return []
    # pytest gives the name with the phase behind it.
    return [one for one in map(json.loads, path.read_text().splitlines()) if one["test"].rpartition(" ")[0] == test]
