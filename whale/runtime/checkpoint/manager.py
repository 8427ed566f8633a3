"""Implements ``wh.CheckpointManager``: all ranks write a checkpoint in TensorFlow's format in parallel, each its share.

Decision: 0044.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import tensorflow as tf
from tensorflow.python.checkpoint.graph_view import ObjectGraphView

from whale.distributed.ranks import WRITE_TIMEOUT_S
from whale.distributed.trace import open_span
from whale.errors import CheckpointError
from whale.log import log
from whale.runtime.checkpoint import reading as checkpoint_reading
from whale.runtime.checkpoint.folder import CheckpointFolder, find_begun
from whale.runtime.checkpoint.gathering import refuse_different_copies
from whale.runtime.checkpoint.saving import (
    RankMessage,
    Saving,
    check_equal,
    decode_messages,
    encode_message,
    refuse_folders_apart,
)
from whale.runtime.checkpoint.shares import choose_writers, compute_digest, list_entries, read_snapshot
from whale.runtime.context import Context, require_current
from whale.runtime.files import is_on_disk, normalize_path, refuse_unknown_store
from whale.runtime.variables.checkpoint_regions import find_variable

_Result = TypeVar("_Result")


class CheckpointManager:
    """Replaces tf.train.CheckpointManager, with the same calls, which every rank makes at the same place.

    Every rank writes its share: its part of a sharded variable, and an equal share of the bytes of other variables. The
    result is one checkpoint in TensorFlow's format. It loads under any other plan and number of ranks, and in plain
    TensorFlow with tf.train.Checkpoint; checkpoints of plain TensorFlow load here. A rank reads only the parts that it
    holds.

    A checkpoint counts once it is complete. If the run is killed before, the previous one is the latest. All ranks must
    see the directory; it is used by one run at a time.

    Args:
      checkpoint: a tf.train.Checkpoint of objects that every rank has. The random states of Python and NumPy and of
        TensorFlow's global generator are saved with it.
      directory: where the checkpoints are: a path, or a URI of a store that TensorFlow knows (``gs://bucket/run``).
      max_to_keep: number of checkpoints to keep; None for all.
      keep_checkpoint_every_n_hours, checkpoint_name, step_counter, checkpoint_interval, init_fn: as in
        tf.train.CheckpointManager.
      asynchronous: ``save`` returns when the values are copied; threads write them during the following steps. An error
        is raised by the next ``save``, ``wait`` or ``restore``, or by ``wh.shutdown``.

    Raises:
      ClusterError: made before ``wh.init``.
      CheckpointError: no tf.train.Checkpoint is given, TensorFlow does not know the store, or the first rank cannot use
        the directory.
      ValueError: ``max_to_keep`` is not positive, or an interval without a counter.
    """

    def __init__(
        self,
        checkpoint: tf.train.Checkpoint,
        directory: str | os.PathLike[str],
        max_to_keep: int | None,
        keep_checkpoint_every_n_hours: float | None = None,
        checkpoint_name: str = "ckpt",
        step_counter: Any = None,
        checkpoint_interval: int | None = None,
        init_fn: Callable[[], object] | None = None,
        *,
        asynchronous: bool = False,
    ):
        self._context: Context = require_current("wh.CheckpointManager")
        if not isinstance(checkpoint, (tf.train.Checkpoint, tf.compat.v1.train.Checkpoint)):
            raise CheckpointError(
                "the first argument of wh.CheckpointManager is not a tf.train.Checkpoint",
                given=f"an object of type {type(checkpoint).__name__}",
                expected="a tf.train.Checkpoint of the objects to save",
                action="write wh.CheckpointManager(tf.train.Checkpoint(model=model, optimizer=optimizer), folder, ...)",
            )
        if max_to_keep is not None and max_to_keep <= 0:
            raise ValueError(f"max_to_keep must be positive or None, not {max_to_keep}")
        if checkpoint_interval is not None and step_counter is None:
            raise ValueError(
                f"checkpoint_interval={checkpoint_interval} needs a step_counter; pass the variable of steps"
            )
        refuse_unknown_store(os.fspath(directory))
        self._checkpoint, self._name = checkpoint, checkpoint_name
        self._directory = os.fspath(directory) if is_on_disk(os.fspath(directory)) else normalize_path(directory)
        self._step_counter, self._interval, self._init_fn = step_counter, checkpoint_interval, init_fn
        self._place = normalize_path(directory)
        self._last_step: int | None = None
        self._said_left_out = False
        self._asynchronous = asynchronous
        self._folder: CheckpointFolder | None = None
        self._saving: Saving | None = None
        self._is_seen = False  # whether all ranks see the folder that the first one writes to
        keep_every_s = keep_checkpoint_every_n_hours and keep_checkpoint_every_n_hours * 3600.0

        def open_folder() -> RankMessage:
            if self._context.rank == 0:
                self._folder = CheckpointFolder(self._directory, checkpoint_name, max_to_keep, keep_every_s)
                self._folder.clean()
            return self._read_folder_state()

        self._open, self._state = open_folder, RankMessage()
        self._left: int | None = None  # `Context.lost_count` when the folder was opened
        self._context.retry_after_loss(self._follow)
        self._context.hooks.before_shutdown.append(self.wait)

    @property
    def checkpoint(self) -> tf.train.Checkpoint:
        """Returns the tf.train.Checkpoint that this manager saves and restores."""
        return self._checkpoint

    @property
    def directory(self) -> str:
        """Returns the directory of the checkpoints."""
        return self._directory

    @property
    def checkpoint_interval(self) -> int | None:
        """Returns the least number of steps of ``step_counter`` between two checkpoints; None: every ``save`` writes
        one.
        """
        return self._interval

    @property
    def checkpoints(self) -> list[str]:
        """Returns the paths of the complete checkpoints that are kept, oldest first; equal on all ranks."""
        return list(self._state.checkpoints)

    @property
    def latest_checkpoint(self) -> str | None:
        """Returns the path of the newest complete checkpoint, equal on all ranks; None if there is none. A checkpoint
        that threads still write is not complete.
        """
        return self._state.latest

    def save(self, checkpoint_number: Any = None, check_interval: bool = True) -> str | None:
        """Writes a checkpoint; every rank calls it at the same place.

        Args:
          checkpoint_number: number of the checkpoint, an integer or a variable; default ``checkpoint.save_counter``,
            which counts the calls in any case.
          check_interval: whether to write nothing before ``checkpoint_interval`` steps have passed since the last one.

        Returns:
          the checkpoint's path; it is complete unless the manager is asynchronous. None if none was written.

        Raises:
          CheckpointError: a rank cannot write its share (on every rank, with the reason). Earlier checkpoints are
            intact, and training can go on.
          CommError: the ranks save different things, or one is gone.
        """
        self.wait()
        if not self._is_time(check_interval):
            return None
        saves = int(self._checkpoint.save_counter)
        return self._context.retry_after_loss(lambda: self._save(checkpoint_number, saves))

    def _save(self, checkpoint_number: Any, saves: int) -> str:
        """Writes a checkpoint with this number; sets ``save_counter`` to ``saves + 1``, also when the call is repeated
        after a loss of ranks.
        """
        self._follow()
        context = self._context
        with open_span(context.trace, "save checkpoint", "checkpoint"):
            counter = self._checkpoint.save_counter
            counter.assign(saves + 1)
            shares: dict[int, list[tuple[str, str, tf.Tensor]]] = {}
            writers: list[int] = []

            def begin() -> RankMessage:
                entries = list_entries(self._checkpoint, context)
                writers.extend(choose_writers(entries, context.size))
                shares.update((rank, read_snapshot(entries, writers, rank)) for rank in context.ranks)
                number = int(counter if checkpoint_number is None else checkpoint_number)
                temporary = self._folder.begin() if self._folder is not None else ""
                return RankMessage(
                    "", compute_digest(entries, writers), temporary, number, int(counter), place=self._place
                )

            saved = ObjectGraphView(self._checkpoint).breadth_first_traversal()[0]
            refuse_different_copies(saved, context, self._format_purpose("begun"))
            if context.rank == 0 and not self._said_left_out:
                self._said_left_out = is_left_out(saved, self._directory)
            first = self._act_together("begun", begin)[0]
            self._see_folder(first.temporary)
            counter.assign(first.counter)
            path = os.path.join(self._directory, f"{self._name}-{first.number}")
            self._saving = Saving(self._folder, first.temporary, path, shares, sorted(set(writers)))
            if self._asynchronous:
                self._saving.start()
            else:
                self._saving.write_parts()
                self.wait()
        return path

    def _see_folder(self, temporary: str) -> None:
        """Checks, before the first checkpoint of this set of ranks, that all ranks see the temporary folder that the
        first rank has just made.

        Raises:
          CheckpointError: the directory is another one on some hosts.
        """
        if self._is_seen:
            return
        mine = RankMessage(host=socket.gethostname(), sees_folder=tf.io.gfile.exists(find_begun(temporary)))
        said = self._act_together("seen", lambda: mine)
        try:
            refuse_folders_apart(said, self._place)
        except CheckpointError:
            if self._folder is not None:
                self._folder.discard(temporary)
            raise
        self._is_seen = True

    def wait(self) -> None:
        """Waits until the checkpoint that threads are writing is complete; every rank calls it. Returns at once if
        there is none.

        Raises:
          CheckpointError: the checkpoint could not be written.
          CommError: a rank is gone.
        """
        self._context.retry_after_loss(self._wait)

    def _wait(self) -> None:
        self._follow()
        saving, self._saving = self._saving, None
        if saving is None:
            return
        try:
            self._act_together("written", saving.await_written)
        except BaseException:
            self._abandon(saving)
            raise

        def install() -> RankMessage:
            saving.install()
            return self._read_folder_state()

        self._state = self._act_together("installed", install)[0]

    def restore(self, path: str | None) -> Any:
        """Restores a checkpoint of any origin on every rank; each rank reads only the parts that it holds.

        Args:
          path: of a checkpoint, as in ``checkpoints``; None restores nothing.

        Returns:
          the status of tf.train.Checkpoint.restore (``assert_consumed()`` and the like).

        Raises:
          CheckpointError: the checkpoint is missing or damaged; names the damaged files and tensors.
        """
        self.wait()
        if path is None:
            return self._checkpoint.restore(None)
        status = None

        def read() -> RankMessage:
            nonlocal status
            status = checkpoint_reading.restore(self._checkpoint, os.fspath(path), self._context)
            return RankMessage(place=normalize_path(path))

        def restore_values() -> None:
            self._follow()
            self._act_together("restored", read)

        with open_span(self._context.trace, "restore checkpoint", "checkpoint"):
            self._context.retry_after_loss(restore_values)
        return status

    def restore_or_initialize(self, fallback: bool = False) -> str | None:
        """Restores the newest complete checkpoint on every rank and returns its path; if there is none, calls
        ``init_fn`` and returns None.

        Args:
          fallback: if a checkpoint is damaged, the first rank warns, and the previous one is restored. To find out, the
            first rank reads all of a checkpoint before the ranks restore it.

        Raises:
          CheckpointError: as ``restore``; with ``fallback``, when all checkpoints are damaged.
        """
        self.wait()
        path = self.latest_checkpoint
        if path is not None and fallback:
            path = self._find_newest_whole(path)
        if path is not None:
            self.restore(path)
            if self._interval is not None:
                self._last_step = int(self._step_counter)
        elif self._init_fn is not None:
            self._init_fn()
        return path

    def _follow(self) -> None:
        """Adapts to a changed set of ranks in an elastic run: opens the folder of checkpoints again on the rank that is
        the first one now, and gives up a checkpoint that is being written.

        Collective if the set of ranks has changed; else returns at once.
        """
        if self._left == self._context.lost_count:
            return
        self._left, self._folder, self._is_seen = self._context.lost_count, None, False
        if self._saving is not None:  # ranks that were to write some of its parts are gone
            self._abandon(self._saving)
            self._saving = None
        self._state = self._act_together("opened", self._open)[0]

    def _abandon(self, saving: Saving) -> None:
        saving.abandon()
        if self._asynchronous and self._context.elastic is not None and self._context.rank == 0:
            log.warning(
                f"the checkpoint that was being written to {self._directory} is given up if it was not complete; "
                "the next save writes another one"
            )

    def _find_newest_whole(self, latest: str) -> str:
        """Returns the newest checkpoint of which every tensor can be read; the first rank reads it, and warns of newer
        ones that are damaged.
        """

        def look() -> RankMessage:
            if self._context.rank != 0:
                return RankMessage()
            older = [path for path in reversed(self._state.checkpoints) if path != latest]
            return RankMessage(latest=checkpoint_reading.find_newest_whole([latest, *older]))

        found = self._context.retry_after_loss(lambda: self._act_together("looked through", look)[0].latest)
        assert found is not None  # otherwise `find_newest_whole` raised
        return found

    def _is_time(self, check_interval: bool) -> bool:
        if self._interval is None:
            return True
        step, last = int(self._step_counter), self._last_step
        if last is not None and (step == last or (check_interval and step < last + self._interval)):
            return False
        self._last_step = step
        return True

    def _read_folder_state(self) -> RankMessage:
        if self._folder is None:
            return RankMessage(place=self._place)
        return RankMessage(latest=self._folder.latest, checkpoints=list(self._folder.kept), place=self._place)

    def _format_purpose(self, when: str) -> str:
        return f"a checkpoint in {self._directory} that is to be {when}"

    def _act_together(self, when: str, act: Callable[[], RankMessage]) -> list[RankMessage]:
        """Calls ``act`` on every rank, and exchanges the resulting messages; collective.

        Args:
          when: what is done to the checkpoint, a participle ("begun", "written") for keys and messages.

        Returns:
          every rank's message, in order of ranks.

        Raises:
          CheckpointError: on every rank, if ``act`` failed on one of them.
          CommError: the ranks are about to do different things.
        """
        context, failure = self._context, None
        try:
            mine = act()
        except Exception as error:  # sent to the other ranks, and raised below
            failure, mine = error, RankMessage(error=f"{type(error).__name__}: {error}"[:2000])
        said = [mine]
        if context.has_other_processes:
            purpose = self._format_purpose(when)
            key = f"whale/checkpoint/{when}"
            said = decode_messages(
                context.comms[0].allgather_bytes(key, encode_message(mine), WRITE_TIMEOUT_S, purpose)
            )
        failed = [rank for rank, other in enumerate(said) if other.error]
        if not failed:
            check_equal(said)
            return said
        if failure is not None and not isinstance(failure, (OSError, tf.errors.OpError)):
            raise failure
        raise CheckpointError(
            f"a checkpoint could not be {when}",
            given=self._directory,
            ranks=", ".join(map(str, failed)),
            reason=said[failed[0]].error,
            expected="a directory with room that every rank can use",
            action="remove the cause that `reason` names, and save again; earlier checkpoints are intact",
        ) from failure


def is_left_out(saved: Iterable[Any], where: str) -> bool:
    """Warns if weights of saved models and layers are missing in the checkpoint, and returns True then.

    Args:
      saved: all objects of a checkpoint.
      where: its directory, for the message.
    """
    saved = list(saved)
    known = {id(v) for v in map(find_variable, saved) if v is not None}
    missing: dict[str, None] = {}
    for holder in saved:
        if hasattr(type(holder), "add_weight"):
            with contextlib.suppress(ValueError):  # Keras 2: it has not been built
                missing.update(
                    (getattr(w, "path", w.name), None) for w in holder.weights if id(find_variable(w)) not in known
                )
    if missing:
        log.warning(
            f"{len(missing)} weights of a model are not in the checkpoint in {where}, {next(iter(missing))} for one: "
            "tf.train.Checkpoint does not see layers that a Keras 3 model has in a list. Make each an attribute of the "
            "model, or name them: tf.train.Checkpoint(model=model, layers=list(model.layers))"
        )
    return bool(missing)
