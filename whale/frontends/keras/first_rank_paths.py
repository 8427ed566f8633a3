"""Lets all ranks find the files that rank 0 writes, even if each rank has another path for them.

Only rank 0 writes checkpoints and logs. A script that makes up a path in each process, e.g. with `tempfile.mkdtemp()`,
a process id or the time, has another path on each rank. The ranks exchange these paths when training begins, and when
they wait for rank 0 to finish writing. From then on they read at rank 0's path. The files are also linked into the
other ranks' folders, for scripts that open them on their own.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from whale.errors import CheckpointError
from whale.log import log
from whale.runtime.context import Context
from whale.runtime.files import is_on_disk, normalize_path

# Keras' callbacks that write, with the attribute that says where.
_CALLBACKS = {
    "ModelCheckpoint": "filepath",
    "BackupAndRestore": "backup_dir",
    "CSVLogger": "filename",
    "TensorBoard": "log_dir",
}


def list_kinds(callback: Any) -> set[str]:
    """Returns the names of Keras' own classes that a callback is an instance of, e.g. {"ModelCheckpoint",
    "Callback"}.
    """
    return {c.__name__ for c in type(callback).__mro__ if c.__module__.startswith(("keras.", "tf_keras."))}


def find_paths(callbacks: Any) -> list[tuple[str, str]]:
    """Returns (name of the callback class, path) for each of Keras' callbacks that writes files.

    Args:
      callbacks: the argument of ``fit``: None, a callback, a list of them, or a CallbackList.
    """
    given = getattr(callbacks, "callbacks", callbacks)
    found: list[tuple[str, str]] = []
    for callback in given if isinstance(given, (list, tuple)) else [given]:
        kinds = list_kinds(callback)
        found += [
            (kind, normalize_path(path))
            for kind, attribute in _CALLBACKS.items()
            if kind in kinds and isinstance(path := getattr(callback, attribute, None), (str, os.PathLike))
        ]
    return found


def pair_paths(everyone: Sequence[Sequence[tuple[str, str]]], context: Context) -> dict[str, str]:
    """Finds which of this rank's paths correspond to which of rank 0's, and records them in ``context.first_paths``.

    The lowest rank whose paths differ from rank 0's logs a warning, once.

    Args:
      everyone: for each rank, (name of the callback class or function that writes, its path) pairs.
      context: the run.

    Returns:
      This rank's path -> rank 0's path, for paths that differ.
    """
    pairs = [_pair(theirs, everyone[0]) for theirs in everyone]
    differs = next((rank for rank, found in enumerate(pairs) if found), None)
    if differs == context.rank and not context.first_paths:
        own, first = next(iter(pairs[differs].items()))
        log.warning(
            f"rank 0 writes to {first}, but the path on rank {differs} is {own}: all ranks will read what rank 0 "
            "writes; pass the same path on all ranks, for example from an argument of the script"
        )
    mine = pairs[context.rank]
    context.first_paths.update(mine)
    return mine


def have_differed(everyone: Sequence[Sequence[tuple[str, str]]]) -> bool:
    """Returns True if any rank has other paths than rank 0; the answer is equal on all ranks.

    Args:
      everyone: for each rank, (name of the callback class or function that writes, its path) pairs.
    """
    return any(_pair(theirs, everyone[0]) for theirs in everyone)


def move_backups(callbacks: Any, pairs: Mapping[str, str]) -> None:
    """Makes each BackupAndRestore of this rank use rank 0's folder.

    Args:
      callbacks: the argument of ``fit``.
      pairs: this rank's path -> rank 0's path.
    """
    given = getattr(callbacks, "callbacks", callbacks)
    for callback in given if isinstance(given, (list, tuple)) else [given]:
        if "BackupAndRestore" not in list_kinds(callback) or normalize_path(callback.backup_dir) not in pairs:
            continue
        own, first = os.fspath(callback.backup_dir), pairs[normalize_path(callback.backup_dir)]
        for name, value in list(vars(callback).items()):
            if isinstance(value, (str, os.PathLike)) and os.fspath(value).startswith(own):
                setattr(callback, name, first + os.fspath(value)[len(own) :])


def find_first_path(path: str, context: Context) -> str:
    """Returns the path at which rank 0 wrote what this rank calls ``path``; ``path`` itself if they do not differ.

    Raises:
      CheckpointError: there is nothing at either path.
    """
    for own, first in context.first_paths.items():
        if path == own or path.startswith(own + os.sep):
            found = first + path[len(own) :]
            if _is_there(found):
                return found
            if not _is_there(path):
                raise CheckpointError(
                    f"rank {context.rank} cannot find the files that rank 0 wrote",
                    given=f"rank 0 writes to {found}, rank {context.rank} reads {path}",
                    reason=f"neither exists on {socket.gethostname()}",
                    expected="a path that is the same on all ranks, in a folder that all hosts see",
                    action="pass the same path on all ranks, for example from an argument of the script, in a shared "
                    "folder",
                )
    return path


def link_written(pairs: Iterable[tuple[str, str]]) -> None:
    """Creates symbolic links in this rank's folders to the files that rank 0 wrote; existing files are kept.

    Args:
      pairs: (this rank's path, rank 0's path). Of a pattern such as ``model_{epoch}.keras`` the part before "{" counts.
    """
    for own, first in pairs:
        if not (is_on_disk(own) and is_on_disk(first)):
            continue  # object stores have no links; TensorFlow reads there, at rank 0's path
        try:
            _link(own.partition("{")[0], first.partition("{")[0])
        except OSError as error:
            log.warning(
                f"cannot link {own} to {first}, where rank 0 wrote: {error.strerror}; read {first} on all ranks instead"
            )


def _pair(theirs: Sequence[tuple[str, str]], firsts: Sequence[tuple[str, str]]) -> dict[str, str]:
    if [kind for kind, _ in theirs] != [kind for kind, _ in firsts]:
        return {}  # callbacks of one rank alone
    found: dict[str, str] = {}
    for (_, own), (_, first) in zip(theirs, firsts):
        if own != first:
            found[own] = first
            # Equal file names in different folders: map the folders, so that other files in them are found too.
            if os.path.basename(own) == os.path.basename(first):
                found.setdefault(os.path.dirname(own), os.path.dirname(first))
    return found


def _link(own: str, first: str) -> None:
    if os.path.isdir(first) and not first.endswith(os.sep):
        own, first = own + os.sep, first + os.sep
    folder, begin = os.path.split(first)
    if not os.path.isdir(folder):
        return
    own_folder, own_begin = os.path.split(own)
    os.makedirs(own_folder, exist_ok=True)
    for name in os.listdir(folder):
        if not name.startswith(begin):
            continue
        link = os.path.join(own_folder, own_begin + name[len(begin) :])
        if os.path.isfile(link) and not os.path.islink(link) and not os.path.getsize(link):
            os.remove(link)  # the empty file of a NamedTemporaryFile that was created for its name only
        if not os.path.lexists(link):
            os.symlink(os.path.join(folder, name), link)


def _is_there(path: str) -> bool:
    return tf.io.gfile.exists(path) or tf.io.gfile.exists(f"{path}.index")
