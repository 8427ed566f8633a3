"""Exchanges what the ranks say about a checkpoint, and checks what of it has to be equal."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from whale.errors import CommError


class RankMessage(msgspec.Struct):
    """A rank's message to the others: an error, a digest of what it is about to write, and of the first its folder.

    Attributes:
      place: the folder, or the checkpoint, that it is about to use; "" where it does not matter.
      number: of the checkpoint that it is about to write.
    """

    error: str = ""
    digest: bytes = b""
    temporary: str = ""
    number: int = 0
    counter: int = 0
    latest: str | None = None
    checkpoints: list[str] = []
    place: str = ""


def encode_message(said: RankMessage) -> bytes:
    """Encodes a message for the other ranks."""
    return msgspec.msgpack.encode(said)


def decode_messages(everyone: Sequence[bytes]) -> list[RankMessage]:
    """Decodes what the ranks have said, in order of ranks."""
    return [msgspec.msgpack.decode(one, type=RankMessage) for one in everyone]


def check_equal(said: Sequence[RankMessage]) -> None:
    """Refuses ranks that are about to do different things.

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


def _make_difference_error(message: str, given: str, expected: str) -> CommError:
    return CommError(
        message,
        given=given,
        expected=f"{expected} on every rank",
        action="save and restore the same on every rank, at the same place of the script",
    )
