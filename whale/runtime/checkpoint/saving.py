"""Writes one checkpoint, in threads during the following steps or in the caller."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import msgspec
import tensorflow as tf

from whale.errors import CheckpointError, CommError
from whale.runtime.checkpoint.folder import CheckpointFolder, find_mark, write_part
from whale.runtime.files import is_on_disk

# How often the first rank looks for parts: on a disk, and in a store, which asks a price for each look.
_LOOK_EVERY_S, _LOOK_IN_STORE_EVERY_S = 0.02, 1.0


class Saving:
    """A checkpoint being written, by ``start`` in a thread, or by ``write_parts`` in the caller's.

    Args:
      folder: on the first rank, which combines all ranks' parts into a checkpoint; else None.
      shares: rank of this process -> the entries that it writes; writers: all ranks with something to write.
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
        """Starts a thread that writes."""
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
        """Waits until this process's parts are written, and returns this rank's message."""
        self._own_written.wait()
        if self._error is not None:
            raise self._error
        return RankMessage()

    def install(self) -> None:
        """Combines the parts, which all ranks have written, into a complete checkpoint, and waits for that."""
        self._all_written.set()
        if self._thread is not None:
            self._thread.join()
        elif self._folder is not None:
            self._check_complete()
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
        # The parts are awaited by their marks, not by a message: while steps run, ranks exchange nothing else.
        pause_s = _LOOK_EVERY_S if is_on_disk(self._path) else _LOOK_IN_STORE_EVERY_S
        while not all(map(tf.io.gfile.exists, map(find_mark, self._parts))):
            if self._all_written.wait(pause_s):
                break
        if not self._abandoned:
            self._check_complete()

    def _check_complete(self) -> None:
        assert self._folder is not None
        try:
            self._folder.install(self._temporary, self._parts, self._path)
            self._installed = True
        except Exception as error:
            self._folder.discard(self._temporary)
            self._error = error


class RankMessage(msgspec.Struct):
    """A rank's message to the others: an error, a digest of what it is about to write, and of the first its folder.

    Attributes:
      place: the folder, or the checkpoint, that it is about to use; "" where it does not matter.
      number: of the checkpoint that it is about to write.
      host: on which it runs; sees_folder: whether it sees there what the first rank has made.
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
            what = "have checkpoints of other variables, or of variables that lie otherwise"
            raise _make_difference_error(
                "the ranks save different objects", f"rank 0 and rank {rank} {what}", "the same tf.train.Checkpoint"
            )


def refuse_folders_apart(said: Sequence[RankMessage], directory: str) -> None:
    """Refuses a folder of checkpoints that is another one on some hosts.

    Raises:
      CheckpointError: names these hosts.
    """
    ranks = [rank for rank, one in enumerate(said) if not one.sees_folder]
    if ranks:
        others = ", ".join(dict.fromkeys(said[rank].host for rank in ranks))
        raise CheckpointError(
            f"the folder of checkpoints is not the same folder on {others}",
            given=f"{directory}: what rank 0 makes there on {said[0].host} is not seen on {others}",
            ranks=", ".join(map(str, ranks)),
            expected="a folder that all hosts of the run see at the same path: on a shared disk, such as NFS, or in a "
            "store (gs://, s3://)",
            action=f"give such a folder, or mount it on {others}",
        )


def _make_difference_error(message: str, given: str, expected: str) -> CommError:
    return CommError(
        message,
        given=given,
        expected=f"{expected} on every rank",
        action="save and restore the same on every rank, at the same place of the script",
    )
