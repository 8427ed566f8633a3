"""Reads what the first rank wrote where it wrote it, on ranks that call its place by paths of their own.

A script that makes up a path in each process (`tempfile.mkdtemp()`, a process number, the time) gives every rank
another one, and only the first rank writes. The ranks exchange such paths where they are together anyway: when a
training begins, and when they wait for what the first rank has written. From then on the first rank's path is read, and
what lies there is linked into the other ranks' folders, for scripts that read files themselves.
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
    """Returns the names of Keras' own classes that a callback is an instance of."""
    return {c.__name__ for c in type(callback).__mro__ if c.__module__.startswith(("keras.", "tf_keras."))}


def find_paths(callbacks: Any) -> list[tuple[str, str]]:
    """Returns (what writes, its path) for Keras' callbacks that write.

    Args:
      callbacks: None, a callback, several, or a list that Keras made of them.
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
    """Pairs the paths of this rank with the first rank's, and says once that they differ, for the first rank of which
    they do.

    Args:
      everyone: what each rank's callbacks, or calls, write and where.

    Returns:
      own path -> the first rank's, where they differ on this rank.
    """
    pairs = [_pair(theirs, everyone[0]) for theirs in everyone]
    differs = next((rank for rank, found in enumerate(pairs) if found), None)
    if differs == context.rank and not context.first_paths:
        own, first = next(iter(pairs[differs].items()))
        log.warning(
            f"rank 0 writes to {first}, and rank {differs} calls that {own}: what rank 0 writes, all ranks read there; "
            "with a path that is made once for all ranks nothing has to be guessed"
        )
    mine = pairs[context.rank]
    context.first_paths.update(mine)
    return mine


def have_differed(everyone: Sequence[Sequence[tuple[str, str]]]) -> bool:
    """Tells whether any rank has paths of its own; equal on all ranks."""
    return any(_pair(theirs, everyone[0]) for theirs in everyone)


def move_backups(callbacks: Any, pairs: Mapping[str, str]) -> None:
    """Lets each BackupAndRestore of this rank read and write where the first rank's does."""
    given = getattr(callbacks, "callbacks", callbacks)
    for callback in given if isinstance(given, (list, tuple)) else [given]:
        if "BackupAndRestore" not in list_kinds(callback) or normalize_path(callback.backup_dir) not in pairs:
            continue
        own, first = os.fspath(callback.backup_dir), pairs[normalize_path(callback.backup_dir)]
        for name, value in list(vars(callback).items()):
            if isinstance(value, (str, os.PathLike)) and os.fspath(value).startswith(own):
                setattr(callback, name, first + os.fspath(value)[len(own) :])


def find_first_path(path: str, context: Context) -> str:
    """Returns where the first rank wrote what this rank calls ``path``; ``path`` if it is no other place.

    Raises:
      CheckpointError: nothing is at either place.
    """
    for own, first in context.first_paths.items():
        if path == own or path.startswith(own + os.sep):
            found = first + path[len(own) :]
            if _is_there(found):
                return found
            if not _is_there(path):
                raise CheckpointError(
                    "what rank 0 wrote is not to be found on another rank",
                    given=f"rank 0 writes to {found}, rank {context.rank} reads {path}",
                    reason=f"neither exists on {socket.gethostname()}",
                    expected="a path that is the same on all ranks, in a folder that all hosts see",
                    action="make the path once, for example from an argument of the script, in a shared folder",
                )
    return path


def link_written(pairs: Iterable[tuple[str, str]]) -> None:
    """Links what the first rank wrote into this rank's own folders, where nothing is in the way.

    Args:
      pairs: own paths and the first rank's; of patterns such as ``{epoch}.keras`` the part before them counts.
    """
    for own, first in pairs:
        if not (is_on_disk(own) and is_on_disk(first)):
            continue  # a store has no links, and what is read there is read by TensorFlow, at the first rank's place
        try:
            _link(own.partition("{")[0], first.partition("{")[0])
        except OSError as error:
            log.warning(f"what rank 0 wrote to {first} cannot be linked to {own}: {error.strerror}")


def _pair(theirs: Sequence[tuple[str, str]], firsts: Sequence[tuple[str, str]]) -> dict[str, str]:
    if [kind for kind, _ in theirs] != [kind for kind, _ in firsts]:
        return {}  # callbacks of one rank alone
    found: dict[str, str] = {}
    for (_, own), (_, first) in zip(theirs, firsts):
        if own != first:
            found[own] = first
            # Files of one name in folders of two names: the folders are meant, with all else in them.
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
            os.remove(link)  # of a NamedTemporaryFile, made for its name
        if not os.path.lexists(link):
            os.symlink(os.path.join(folder, name), link)


def _is_there(path: str) -> bool:
    return tf.io.gfile.exists(path) or tf.io.gfile.exists(f"{path}.index")
