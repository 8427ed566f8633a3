"""Manages a folder of checkpoints: the complete ones, which the file ``checkpoint`` lists, and the one being written.

The folder is on a disk or in a store. A checkpoint is written to a temporary subfolder. When it is complete, its files
get their final names, the index last, and then the file ``checkpoint`` is replaced. If the process is killed in
between, earlier checkpoints remain; leftovers are removed when the next checkpoint begins.

Decision: 0164.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
import uuid
from collections.abc import Iterable, Sequence

import tensorflow as tf
from google.protobuf import text_format
from tensorflow.python.training.checkpoint_state_pb2 import CheckpointState

from whale.errors import CheckpointError
from whale.log import log
from whale.runtime.files import (
    duplicate,
    is_on_disk,
    list_names,
    move_files,
    read_text,
    remove,
    remove_folder,
    sync_to_disk,
    write_text,
)

_STATE_CHARACTERS = 1 << 24
_TEMPORARY = ".writing-"
_DATA = re.compile(r"(?P<prefix>.+)\.data-\d{5}-of-\d{5}")


class CheckpointFolder:
    """Manages the checkpoints ``name-1``, ``name-2``, ... in ``directory``; used by one process at a time.

    Args:
      directory: of the checkpoints; created if missing.
      name: prefix of their files.
      max_to_keep: how many to keep; None for all.
      keep_every_s: of the checkpoints that are removed, those at least so many seconds apart are kept for good; None:
        none are.

    Attributes:
      kept: path -> time of writing (seconds since 1970) of the complete checkpoints, oldest first.
      latest: path of the newest one; None: there is none.

    Raises:
      CheckpointError: the file ``checkpoint`` names one that is not in this folder.
    """

    def __init__(self, directory: str, name: str, max_to_keep: int | None, keep_every_s: float | None) -> None:
        self.directory, self.name = directory, name
        self._max_to_keep, self._keep_every_s = max_to_keep, keep_every_s
        self.kept: dict[str, float] = {}
        self.latest: str | None = None
        self._preserved_at = time.time() - 1.0
        tf.io.gfile.makedirs(directory)
        self._read_state()

    def _read_state(self) -> None:
        """Reads the file ``checkpoint``; if that is missing or damaged, finds the complete checkpoints by their data
        files.
        """
        path = os.path.join(self.directory, "checkpoint")
        try:
            state = text_format.Parse(read_text(path, _STATE_CHARACTERS), CheckpointState())
            if not state.model_checkpoint_path:
                raise ValueError("the file names no checkpoint")
        except tf.errors.NotFoundError:
            self._take_files(f"{path} is missing")
        except (ValueError, RecursionError, text_format.ParseError) as error:
            self._take_files(f"{path} cannot be read ({str(error) or type(error).__name__})")
        else:
            self._take(state)

    def _take(self, state: CheckpointState) -> None:
        now = time.time()
        self.latest = self._find_path(state.model_checkpoint_path)
        self._preserved_at = min(state.last_preserved_timestamp, now)
        times = state.all_model_checkpoint_timestamps or [now] * len(state.all_model_checkpoint_paths)
        for path, written in zip(state.all_model_checkpoint_paths, times):
            if not state.last_preserved_timestamp or written > self._preserved_at:
                self.kept[self._find_path(path)] = min(written, now)

    def _find_path(self, name: str) -> str:
        """Returns the path in this folder of a checkpoint that the file ``checkpoint`` names; the folder may have been
        moved.

        Raises:
          CheckpointError: the checkpoint is in another folder. No files outside of this folder are read, written or
            removed.
        """
        base = os.path.basename(name)
        path = os.path.join(self.directory, base)
        inside = os.path.normpath(os.path.join(self.directory, name)) == os.path.normpath(path)
        moved = (os.path.isabs(name) or not is_on_disk(name)) and tf.io.gfile.exists(f"{path}.index")
        if base in ("", ".", "..") or "\0" in base or not (inside or moved):
            raise CheckpointError(
                "the file `checkpoint` names a checkpoint that is not in its folder",
                given=f"{name!r} in {os.path.join(self.directory, 'checkpoint')}",
                expected="names of checkpoints in the same folder",
                action="remove that file: the complete checkpoints of the folder are then found without it",
            )
        return path

    def _take_files(self, why: str) -> None:
        """Finds the complete checkpoints by their files, in the order of their numbers; warns with the reason
        ``why``.
        """
        numbers: dict[int, str] = {}
        for name in list_names(self.directory):
            found = re.fullmatch(rf"{re.escape(self.name)}-(\d{{1,18}})\.index", name)
            path = os.path.join(self.directory, name.removesuffix(".index"))
            if found and self._is_complete(path):
                numbers[int(found[1])] = path
        self.kept = {numbers[n]: tf.io.gfile.stat(f"{numbers[n]}.index").mtime_nsec / 1e9 for n in sorted(numbers)}
        self.latest = next(reversed(self.kept), None)
        if self.kept:
            log.warning(
                f"{why}; {len(self.kept)} complete checkpoints were found by their data files, and the file is written "
                "again at the next save"
            )

    def _is_complete(self, path: str) -> bool:
        """Returns True if all data files of a checkpoint exist: their names contain their count, as in
        ``.data-00000-of-00002``.
        """
        data = self._list_files(path)[1:]
        return bool(data) and all(int(name[-5:]) == len(data) for name in data)

    def begin(self) -> str:
        """Removes leftovers of killed runs, and returns a new temporary folder for the parts of a checkpoint."""
        self.clean()
        temporary = os.path.join(self.directory, f"{_TEMPORARY}{uuid.uuid4().hex[:12]}")
        tf.io.gfile.makedirs(temporary)
        _write_mark(find_begun(temporary))
        return temporary

    def clean(self) -> None:
        """Removes temporary folders, and data files of this name that have no index: they are of unfinished
        checkpoints.
        """
        names = list_names(self.directory)
        indices = {name.removesuffix(".index") for name in names if name.endswith(".index")}
        for name in names:
            path, data = os.path.join(self.directory, name), _DATA.fullmatch(name)
            if name.startswith(_TEMPORARY):
                remove_folder(path)
            elif data and data["prefix"].startswith(f"{self.name}-") and data["prefix"] not in indices:
                remove(path)

    def install(self, temporary: str, parts: Sequence[str], path: str) -> None:
        """Merges the parts into the checkpoint ``path``, and removes checkpoints beyond ``max_to_keep``.

        Args:
          temporary: the folder that ``begin`` returned; removed at the end.
          parts: prefixes of the parts that the ranks have written.

        Raises:
          OSError, tf.errors.OpError: the checkpoint cannot be written; earlier checkpoints are unchanged.
        """
        try:
            self._install(temporary, parts, path)
        except BaseException:
            self.kept, self.latest = {}, None
            self._read_state()
            raise

    def _install(self, temporary: str, parts: Sequence[str], path: str) -> None:
        # The index is written, or moved, last: without an index the data files count as unfinished.
        if is_on_disk(path):
            merged = os.path.join(temporary, "merged", os.path.basename(path))
            _merge(parts, merged)
            sync_to_disk(f"{merged}.index")
            aside = self._set_aside(path)
            move_files(os.path.dirname(merged), self.directory, ".index")
        else:  # a store renames by copying: merging right to the final path copies once instead of twice
            aside = self._set_aside(path)
            _merge(parts, path)
        self.kept.pop(path, None)
        self.kept[path], self.latest = time.time(), path
        self._write_state()
        if aside is not None:
            self._delete(aside)
        if self._sweep():
            self._write_state()
        remove_folder(temporary)

    def discard(self, temporary: str) -> None:
        """Removes the temporary folder of a checkpoint that was given up."""
        with contextlib.suppress(tf.errors.OpError):
            remove_folder(temporary)

    def _set_aside(self, path: str) -> str | None:
        """Renames a checkpoint that is about to be replaced, so that a complete one exists at every moment.

        Returns:
          the path under which it is kept until the new one is complete; None if there was no complete one.
        """
        if path not in self.kept:
            self._delete(path)
            return None
        aside = f"{path}.replaced"
        self._delete(aside)
        for name in reversed(self._list_files(path)):
            duplicate(name, f"{aside}{name[len(path) :]}")
        self.kept = {aside if p == path else p: t for p, t in self.kept.items()}
        self.latest = aside if self.latest == path else self.latest
        self._write_state()
        self._delete(path)
        del self.kept[aside]
        return aside

    def _sweep(self) -> bool:
        removed = False
        while self._max_to_keep and len(self.kept) > self._max_to_keep:
            path, written = next(iter(self.kept.items()))
            del self.kept[path]
            removed = True
            if self._keep_every_s is not None and written - self._keep_every_s >= self._preserved_at:
                self._preserved_at = written
                continue
            self._delete(path)
        return removed

    def _list_files(self, path: str) -> list[str]:
        """Returns the paths of the index and data files of a checkpoint, the index first."""
        own = os.path.basename(path)
        names = [
            name
            for name in list_names(self.directory)
            if name == f"{own}.index" or ((found := _DATA.fullmatch(name)) and found["prefix"] == own)
        ]
        return [os.path.join(self.directory, name) for name in sorted(names, key=lambda n: not n.endswith(".index"))]

    def _delete(self, path: str) -> None:
        for name in self._list_files(path):
            remove(name)

    def _write_state(self) -> None:
        """Writes the file ``checkpoint`` anew; it names checkpoints by relative paths, so that the folder can
        be moved.
        """
        state = CheckpointState(
            model_checkpoint_path=os.path.basename(self.latest or ""),
            all_model_checkpoint_paths=[os.path.basename(path) for path in self.kept],
            all_model_checkpoint_timestamps=list(self.kept.values()),
            last_preserved_timestamp=self._preserved_at,
        )
        write_text(os.path.join(self.directory, "checkpoint"), str(state))


def write_part(prefix: str, entries: Iterable[tuple[str, str, tf.Tensor]]) -> None:
    """Writes one rank's share of a checkpoint under ``prefix``, and then the marker file that tells the first rank it
    is complete.

    Args:
      entries: (key, shape and slice, value) of each tensor, as the op SaveV2 takes them.

    Raises:
      OSError, tf.errors.OpError: the share cannot be written.
    """
    keys, specs, tensors = zip(*entries)
    tf.raw_ops.SaveV2(prefix=prefix, tensor_names=keys, shape_and_slices=specs, tensors=tensors)
    sync_to_disk(f"{prefix}.data-00000-of-00001")
    sync_to_disk(f"{prefix}.index")
    _write_mark(find_mark(prefix))


def find_mark(prefix: str) -> str:
    """Returns the path of the marker file that exists once the part ``prefix`` is complete."""
    return f"{prefix}.done"


def find_begun(temporary: str) -> str:
    """Returns the path of a file that ``begin`` puts into the temporary folder, since stores have no empty folders;
    other ranks look for it to see whether they share the folder.
    """
    return os.path.join(temporary, "begun")


def _write_mark(path: str) -> None:
    with tf.io.gfile.GFile(path, "w") as file:
        file.write("")


def _merge(parts: Sequence[str], path: str) -> None:
    """Merges the ranks' parts into one checkpoint: renames their data files, and then writes a common index."""
    tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=list(parts), destination_prefix=path, delete_old_dirs=False)
