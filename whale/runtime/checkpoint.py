"""``wh.CheckpointManager``: checkpoints of variables that all ranks hold, written by one rank and read by all."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import msgspec
import tensorflow as tf

from whale.errors import CommError
from whale.runtime.context import Context, current
from whale.runtime.trace import span

_WRITE_TIMEOUT_S = 3600.0  # writing a large model may take its time; fault.stall_s says who is waited for


class _State(msgspec.Struct):
    """What the first rank found or did: its checkpoints, the number of the next, or its error."""

    saved: str | None = None
    checkpoints: list[str] = []
    counter: int = 0
    error: str = ""


class CheckpointManager:
    """Takes the place of tf.train.CheckpointManager: the same calls, made by every rank at the same place.

    The first rank writes, all ranks read the same checkpoint: of two ranks that write one checkpoint side by side, each
    takes away the other's files. A checkpoint counts once it is complete: TensorFlow writes under another name, and
    names it in the file ``checkpoint`` at the end, so a run that is killed meanwhile finds the one before.

    All ranks must see the directory.

    Args:
      checkpoint: a tf.train.Checkpoint of objects that every rank has.
      directory: where the checkpoints are.
      max_to_keep: number of checkpoints to keep; None for all.
      options: further arguments of tf.train.CheckpointManager, by name.

    Raises:
      ClusterError: made before ``wh.init``.
      CommError: the first rank cannot use the directory.
    """

    def __init__(
        self,
        checkpoint: tf.train.Checkpoint,
        directory: str | os.PathLike[str],
        max_to_keep: int | None,
        **options: Any,
    ):
        self._context: Context = current("wh.CheckpointManager")
        self._checkpoint = checkpoint
        self._directory = os.fspath(directory)
        self._manager: Any = None
        self._state = _State()

        def make() -> None:
            self._manager = tf.train.CheckpointManager(checkpoint, self._directory, max_to_keep, **options)

        self._on_first_rank(make, "the opening of")

    @property
    def checkpoint(self) -> tf.train.Checkpoint:
        """What is saved and restored."""
        return self._checkpoint

    @property
    def directory(self) -> str:
        """Where the checkpoints are."""
        return self._directory

    @property
    def checkpoints(self) -> list[str]:
        """Paths of the checkpoints that are kept, oldest first; equal on all ranks."""
        return list(self._state.checkpoints)

    @property
    def latest_checkpoint(self) -> str | None:
        """Path of the newest complete checkpoint, or None; equal on all ranks."""
        return self._state.checkpoints[-1] if self._state.checkpoints else None

    def save(self, checkpoint_number: Any = None, **options: Any) -> str | None:
        """Writes a checkpoint on the first rank; every rank calls it, and returns once it is complete.

        Args:
          checkpoint_number: as in tf.train.CheckpointManager.save; so are further arguments.

        Returns:
          The checkpoint's path, or None if none was written.

        Raises:
          CommError: the first rank could not write it (there, what TensorFlow raised).
        """
        with span(self._context.trace, "save checkpoint", "checkpoint"):
            # The first rank reads what it writes; reading a variable that lies split takes all ranks.
            self._context.variables.bring_home()
            state = self._on_first_rank(lambda: self._manager.save(checkpoint_number, **options), "the writing to")
        if self._context.rank > 0:
            self._checkpoint.save_counter.assign(state.counter)
        self._context.variables.settle()
        return state.saved

    def restore_or_initialize(self) -> str | None:
        """Restores the newest complete checkpoint on every rank. Returns its path, or None if there is none."""
        path = self.latest_checkpoint
        if path is not None:
            with span(self._context.trace, "restore checkpoint", "checkpoint"):
                self._checkpoint.restore(path)
        return path

    def _on_first_rank(self, action: Callable[[], str | None], what: str) -> _State:
        """Acts on the first rank; gives every rank the state afterwards, or an error if the first rank has one."""
        context = self._context
        # Nobody reads an older checkpoint any more when the first rank may take it away.
        self._exchange("before", what, b"")
        if context.rank > 0:
            state = msgspec.msgpack.decode(self._exchange("after", what, b"")[0], type=_State)
        else:
            try:
                saved = action()
            except (tf.errors.OpError, OSError) as error:
                self._exchange("after", what, msgspec.msgpack.encode(_State(error=f"{type(error).__name__}: {error}")))
                raise
            state = _State(saved, list(self._manager.checkpoints), int(self._checkpoint.save_counter))
            self._exchange("after", what, msgspec.msgpack.encode(state))
        if state.error:
            raise CommError(
                "the first rank cannot use the directory of checkpoints",
                given=self._directory,
                reason=state.error,
                expected="a directory that all ranks can read and the first can write",
                action="look at the first rank's error",
            )
        self._state = state
        return state

    def _exchange(self, when: str, what: str, data: bytes) -> list[bytes]:
        if not self._context.between_processes:
            return [data]
        purpose = f"{what} the checkpoints in {self._directory}"
        return self._context.comms[0].allgather_bytes(f"whale/checkpoint/{when}", data, _WRITE_TIMEOUT_S, purpose)
