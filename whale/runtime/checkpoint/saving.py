"""Writes the parts of one checkpoint, in threads during the following steps or in the caller's thread, and passes
messages between the ranks that save.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import msgspec
import tensorflow as tf

from whale.errors import CheckpointError, CommError
from whale.runtime.checkpoint.folder import CheckpointFolder, find_mark, write_part
from whale.runtime.files import is_on_disk

# Seconds between two looks of the first rank for parts: on a disk, and in a store, which charges for each request.
_LOOK_EVERY_S, _LOOK_IN_STORE_EVERY_S = 0.02, 1.0


class Saving:
    """Represents a checkpoint that is being written: by ``start`` in a thread, or by ``write_parts`` in the caller's.

    Args:
      folder: on the first rank, which merges all ranks' parts into a checkpoint; None on other ranks.
      temporary: folder for the parts.
      path: of the finished checkpoint.
      shares: rank of this process -> the entries (key, spec, value) that it writes.
      writers: all ranks that write something.
    """

    def __init__(
        self,
        folder: CheckpointFolder | None,
        temporary: str,
        path: str,
        shares: dict[int, list[tuple[str, str, tf.Tensor]]],
        writers: list[int],
    ):
        self._folder, self._temporary, self._path, self._shares = folder, temporary, path, shares
        self._parts = [os.path.join(temporary, f"part-{rank}") for rank in writers]
        self._thread: threading.Thread | None = None
        self._own_written, self._all_written = threading.Event(), threading.Event()
        self._abandoned = self._installed = False
        self._error: BaseException | None = None

    def start(self) -> None:
        """Starts a thread that writes this process's parts and, on the first rank, merges all parts when they are
        there.
        """
        self._thread = threading.Thread(target=self._run, name="whale checkpoint", daemon=True)
        self._thread.start()

    def write_parts(self) -> None:
        """Writes the parts of this process's ranks; errors are raised by ``await_written``."""
        try:
            while self._shares:
                rank, share = self._shares.popitem()
                if share:
                    write_part(os.path.join(self._temporary, f"part-{rank}"), share)
        except Exception as error:
            self._error = error
        self._shares.clear()  # the snapshot: variables can be updated in place again
        self._own_written.set()

    def await_written(self) -> RankMessage:
        """Waits until this process's parts are written, and returns an empty message, which tells the other ranks that
        there was no error; raises the error if writing failed.
        """
        self._own_written.wait()
        if self._error is not None:
            raise self._error
        return RankMessage()

    def install(self) -> None:
        """Merges the parts of all ranks into a complete checkpoint on the first rank, and waits for that; called once
        all ranks have written.
        """
        self._all_written.set()
        if self._thread is not None:
            self._thread.join()
        elif self._folder is not None:
            self._install()
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        """Gives up the checkpoint, and removes its parts unless it is already complete."""
        self._abandoned = True
        self._all_written.set()
        if self._thread is not None:
            self._thread.join()
        if self._folder is not None and not self._installed:
            self._folder.discard(self._temporary)

    def _run(self) -> None:
        self.write_parts()
        if self._folder is None or self._error is not None:
            return
        # The first rank waits for marker files instead of messages: while steps run, no other thread may exchange.
        pause_s = _LOOK_EVERY_S if is_on_disk(self._path) else _LOOK_IN_STORE_EVERY_S
        while not all(map(tf.io.gfile.exists, map(find_mark, self._parts))):
            if self._all_written.wait(pause_s):
                break
        if not self._abandoned:
            self._install()

    def _install(self) -> None:
        assert self._folder is not None
        try:
            self._folder.install(self._temporary, self._parts, self._path)
            self._installed = True
        except Exception as error:
            self._folder.discard(self._temporary)
            self._error = error


class RankMessage(msgspec.Struct):
    """Represents a rank's message to the others when they save or restore together.

    Attributes:
      error: why this rank failed; "": it did not.
      digest: of the entries that all ranks are about to write; equal on all ranks if they save the same.
      temporary: from the first rank, the folder for parts.
      number: of the checkpoint that is about to be written, as in its path ``ckpt-NUMBER``.
      counter: value of the checkpoint's ``save_counter``.
      latest: from the first rank, the path of the newest complete checkpoint.
      checkpoints: from the first rank, the paths of those that are kept, oldest first.
      place: the folder or checkpoint that the rank is about to use; "" where it does not matter.
      host: name of the rank's host.
      sees_folder: whether the rank sees the temporary folder that the first rank has made.
    """

    error: str = ""
    digest: bytes = b""
    temporary: str = ""
    number: int = 0
    counter: int = 0
    latest: str | None = None
    checkpoints: list[str] = []
    place: str = ""
    host: str = ""
    sees_folder: bool = True


def encode_message(said: RankMessage) -> bytes:
    """Encodes a message for the other ranks."""
    return msgspec.msgpack.encode(said)


def decode_messages(everyone: Sequence[bytes]) -> list[RankMessage]:
    """Decodes the messages of all ranks, in order of ranks."""
    return [msgspec.msgpack.decode(one, type=RankMessage) for one in everyone]


def check_equal(said: Sequence[RankMessage]) -> None:
    """Raises an error if ranks are about to do different things.

    Raises:
      CommError: they save other objects, or use other folders or numbers; names the first rank that differs.
    """
    first = said[0]
    for rank, other in enumerate(said):
        if other.place != first.place:
            given = f"rank 0 uses {first.place}, rank {rank} uses {other.place}"
            raise _make_difference_error("the ranks use different checkpoints", given, "the same folder and checkpoint")
        if other.number != first.number:
            given = f"rank 0 saves number {first.number}, rank {rank} saves number {other.number}"
            raise _make_difference_error("the ranks save checkpoints of different numbers", given, "the same number")
        if other.digest != first.digest:
            what = "have checkpoints of different variables, or of variables with different layouts"
            raise _make_difference_error(
                "the ranks save different objects", f"rank 0 and rank {rank} {what}", "the same tf.train.Checkpoint"
            )


def refuse_folders_apart(said: Sequence[RankMessage], directory: str) -> None:
    """Raises an error if the folder of checkpoints is not the same folder on all hosts.

    Args:
      said: every rank's message, with ``host`` and ``sees_folder``.
      directory: path of the folder, for the message.

    Raises:
      CheckpointError: names the hosts on which it is another folder.
    """
    ranks = [rank for rank, one in enumerate(said) if not one.sees_folder]
    if ranks:
        others = ", ".join(dict.fromkeys(said[rank].host for rank in ranks))
        raise CheckpointError(
            f"the folder of checkpoints is not the same folder on {others}",
            given=f"{directory}: a file that rank 0 has written there on {said[0].host} does not exist on {others}",
            ranks=", ".join(map(str, ranks)),
            expected="a folder that all hosts of the run see at the same path: on a shared disk, such as NFS, or in a "
            "store (gs://, s3://)",
            action=f"pass such a folder to wh.CheckpointManager, or mount it on {others}",
        )


def _make_difference_error(message: str, given: str, expected: str) -> CommError:
    return CommError(
        message,
        given=given,
        expected=f"{expected} on every rank",
        action="call save and restore with the same objects, folder and number on every rank, at the same place",
    )
