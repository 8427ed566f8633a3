"""Lets each rank keep what a dataset yields in files of its own: ``cache(file)``, ``snapshot`` and ``save`` of tf.data.

TensorFlow writes these files for one process. If a second process uses the same path, it fails, takes half-written
files for complete, or deletes them, as scripts do with files of an earlier run. So in a run of several processes each
writes to a temporary folder of its own. Complete files that already exist at the script's path are read by all ranks.
What should outlast the run, the first rank puts at the script's path: saved datasets at once, a cache when the process
ends.

Decision: 0148.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import tensorflow as tf

from whale.log import log
from whale.runtime.context import Context, find_running
from whale.runtime.files import is_on_disk

_Dataset = tf.compat.v2.data.Dataset
_INDEX = ".index"  # suffix of a cache's index file, which exists once the cache is complete


def install() -> None:
    """Replaces ``cache``, ``snapshot``, ``save`` and ``load`` of tf.data; the replacements act as the originals unless
    a run of several processes goes on.
    """
    if hasattr(_Dataset.cache, "_whale_original"):
        return
    for name, new in (("cache", _cache), ("snapshot", _snapshot), ("save", _save)):
        _replace(name, new)
    load = _Dataset.load

    @functools.wraps(load)
    def load_own(path: Any, *args: Any, **kwargs: Any) -> Any:
        files = _find_files(find_running())
        return load(path if files is None else files.find_saved(path), *args, **kwargs)

    _Dataset.load = staticmethod(load_own)


class OwnFiles:
    """Manages the files in which one process keeps what its datasets yield, until the process ends.

    Args:
      rank: of the process.

    Attributes:
      kept: whether caches hold what all ranks read, so that the first rank's cache is kept for later runs.
    """

    def __init__(self, rank: int) -> None:
        self._rank, self._process = rank, os.getpid()
        self._folders: dict[int, str] = {}  # by device
        self._caches: dict[str, str] = {}
        self._saved: dict[str, str] = {}
        self.kept = True
        atexit.register(self.end)

    def name_cache(self, path: str) -> str:
        """Returns the path at which this process caches what the script wants cached at ``path``; ``path`` itself if a
        complete cache is there.
        """
        if os.path.exists(path + _INDEX):
            return path  # complete: it is only read
        key = os.path.abspath(path)
        if key not in self._caches:
            self._caches[key] = self.name_new(path)
        return self._caches[key]

    def name_new(self, path: str) -> str:
        """Returns an unused path in this process's folder, on the same device as ``path``."""
        return os.path.join(tempfile.mkdtemp(dir=self._find_folder(path)), os.path.basename(path) or "data")

    def name_tensor(self, path: tf.Tensor) -> tf.Tensor:
        """Returns a string tensor with this process's path for a path that is known only when the dataset is read; ""
        (memory) stays "".
        """
        flat = tf.strings.regex_replace(path, "[^A-Za-z0-9._-]", "_")
        folder = tempfile.mkdtemp(dir=self._find_folder(os.path.join(tempfile.gettempdir(), "any")))
        own = tf.strings.join([folder, "/", flat])
        return tf.where(tf.equal(path, ""), path, own)

    def note_saved(self, path: str, own: str) -> None:
        """Records that this process has saved at ``own`` what the script wants at ``path``; on the first rank, links it
        there as well.
        """
        self._saved[os.path.abspath(path)] = own
        if self._rank == 0:
            shutil.rmtree(path, ignore_errors=True)
            with suppress(OSError):  # another rank removes what was there: ``end`` looks again
                _link_tree(own, path)

    def find_saved(self, path: Any) -> Any:
        """Returns the path at which this process has saved what the script saved at ``path``; ``path`` itself if it has
        not.
        """
        text = _read_text(path)
        return path if text is None else self._saved.get(os.path.abspath(text), path)

    def end(self) -> None:
        """Moves what outlasts the run to the script's paths, on the first rank, and removes this process's folders."""
        if os.getpid() != self._process:
            return  # this is a fork of the process
        atexit.unregister(self.end)
        if self._rank == 0:
            for path, own in self._saved.items():
                if not os.path.exists(path):
                    _link_tree(own, path)
            for path, own in self._caches.items():
                if self.kept and os.path.exists(own + _INDEX) and not os.path.exists(path + _INDEX):
                    _move_cache(own, path)
        for folder in self._folders.values():
            shutil.rmtree(folder, ignore_errors=True)

    def _find_folder(self, path: str) -> str:
        """Returns this process's folder on the device of ``path``: in the folder for temporary files if that is on the
        device, else beside ``path``.
        """
        parent = os.path.dirname(os.path.abspath(path))
        while not os.path.isdir(parent):
            parent = os.path.dirname(parent)
        device = os.stat(parent).st_dev
        if device not in self._folders:
            among = tempfile.gettempdir()
            beside = parent if os.stat(among).st_dev != device else among
            self._folders[device] = tempfile.mkdtemp(prefix=f".whale-rank{self._rank}-", dir=beside)
        return self._folders[device]


def _find_files(context: Context | None) -> OwnFiles | None:
    """Returns the files of this process; None if it is the only one of the run, trains alone, or runs a program of its
    own.
    """
    if context is None or not context.has_other_processes or context.solo or context.planning.own_programs is not None:
        return None
    if not isinstance(context.own_files, OwnFiles):
        context.own_files = OwnFiles(context.rank)
    return context.own_files


def _replace(name: str, new: Callable[..., Any]) -> None:
    original = getattr(_Dataset, name)

    @functools.wraps(original)
    def call_original_or_new(dataset: Any, *args: Any, **kwargs: Any) -> Any:
        context = find_running()
        files = _find_files(context)
        if context is None or files is None:
            return original(dataset, *args, **kwargs)
        return new(context, files, functools.partial(original, dataset), *args, **kwargs)

    call_original_or_new._whale_original = original  # type: ignore[attr-defined]
    setattr(_Dataset, name, call_original_or_new)


def _cache(
    context: Context, files: OwnFiles, original: Callable[..., Any], filename: Any = "", *args: Any, **kwargs: Any
) -> Any:
    text = _read_text(filename)
    if text is None:
        return original(files.name_tensor(filename), *args, **kwargs)
    own = files.name_cache(text) if _is_named_on_disk(text) else _name_remote(text, context)
    _tell("caches", text, own, context)
    return original(own, *args, **kwargs)


def _snapshot(
    context: Context, files: OwnFiles, original: Callable[..., Any], path: Any, *args: Any, **kwargs: Any
) -> Any:
    text = _read_text(path)
    if text is None:
        return original(files.name_tensor(path), *args, **kwargs)
    own = files.name_new(text) if _is_named_on_disk(text) else _name_remote(text, context)
    _tell("takes a snapshot of", text, own, context)
    return original(own, *args, **kwargs)


def _save(context: Context, files: OwnFiles, original: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
    text = _read_text(path)
    if text is None or not _is_named_on_disk(text):
        return original(path, *args, **kwargs)
    own = files.name_new(text)
    found = original(own, *args, **kwargs)
    files.note_saved(text, own)
    return found


def _read_text(path: Any) -> str | None:
    """Returns a path as text; None if it is a tensor whose value is known only when the dataset is read."""
    known = tf.get_static_value(path) if tf.is_tensor(path) else path
    return None if known is None else os.fsdecode(known.item() if hasattr(known, "item") else known)


def _is_named_on_disk(path: str) -> bool:
    return bool(path) and is_on_disk(path)


def _name_remote(path: str, context: Context) -> str:
    return f"{path}-rank{context.rank}-of-{context.size}" if path else path


def _tell(what: str, path: str, own: str, context: Context) -> None:
    if own != path and context.rank == 0:
        log.info(f"each rank {what} a dataset in files of its own, in place of {path}")


def _link_tree(source: str, target: str) -> None:
    def link(one: str, other: str) -> None:
        try:
            os.link(one, other)
        except OSError:  # the file system has no links
            shutil.copyfile(one, other)

    shutil.copytree(source, target, copy_function=link, dirs_exist_ok=True)


def _move_cache(own: str, path: str) -> None:
    """Moves a complete cache to ``path``; its index last, since that marks it as complete."""
    folder, begin = os.path.split(own)
    with suppress(OSError):  # there is no folder for it any more
        for name in sorted(os.listdir(folder), key=lambda n: n.endswith(_INDEX)):
            if name.startswith(begin):
                shutil.move(os.path.join(folder, name), path + name[len(begin) :])
