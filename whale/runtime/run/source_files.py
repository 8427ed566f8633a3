"""Keeps the Python that AutoGraph writes in the run's own folder: TensorFlow removes it at the end of a process
only.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from typing import Any

from tensorflow.python.autograph.pyct import loader

from whale.started import FILES_VARIABLE

_FOLDER = "python"
_FREE_BYTES = 1 << 24  # a folder in memory that is all but full stays as it is


def keep_sources_with_run(environment: Mapping[str, str] | None = None) -> None:
    """Has AutoGraph write, from now on, into the folder that `whale run` removes, if this process has one from it.

    A rank that is killed, as the others are after a fault, would leave its files in the temporary folder for ever.
    """
    folder = (os.environ if environment is None else environment).get(FILES_VARIABLE)
    if folder:
        loader.tempfile = _Files(os.path.join(folder, _FOLDER))


class _Files:
    """The part of the module ``tempfile`` that AutoGraph uses, with files in a given folder."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def NamedTemporaryFile(self, **options: Any) -> Any:
        try:
            os.makedirs(self._folder, mode=0o700, exist_ok=True)
            free = os.statvfs(self._folder)
            folder = self._folder if free.f_bavail * free.f_frsize >= _FREE_BYTES else None
        except OSError:
            folder = None
        return tempfile.NamedTemporaryFile(**{"dir": folder, **options})

    def __getattr__(self, name: str) -> Any:
        return getattr(tempfile, name)
