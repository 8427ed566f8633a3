"""Writes TensorBoard's event files without TensorFlow: a folder for each rank, with scalars and texts.

A file is a row of records (length, its checksum, data, their checksum); a record is an ``Event`` of
tensorflow/core/util/event.proto.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from typing import BinaryIO

from whale.errors import ClusterError
from whale.launcher.protobuf import FIXED32, FIXED64, encode_field, encode_message, encode_number, encode_string

_DT_STRING = 7


class EventFiles:
    """The event files of a run, open from construction to ``close``; a rank's file is made with its first record.

    Args:
        folder: what TensorBoard is given as ``--logdir``.

    Raises:
        ClusterError: it cannot be made, or written to.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._files: dict[int, BinaryIO] = {}
        self._error: OSError | None = None
        try:
            os.makedirs(folder, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise PermissionError("no permission")
        except OSError as error:
            raise ClusterError(
                "TensorBoard's files cannot be written",
                given=f"--logdir {folder}",
                reason=error,
                expected="a folder, or a place where one can be made",
                action="correct the path",
            ) from error

    def write_scalars(self, rank: int, step: int, values: Mapping[str, float]) -> None:
        """Writes values of a rank at a step, by tag."""
        found = [
            encode_string(1, tag) + encode_field(2, FIXED32, struct.pack("<f", value)) for tag, value in values.items()
        ]
        self._write(rank, step, found)

    def write_text(self, rank: int, tag: str, text: str) -> None:
        """Writes a text of a rank, which TensorBoard shows as it is under Text."""
        shown = "\n".join(f"    {line}" for line in text.splitlines())  # Markdown leaves indented lines alone
        tensor = encode_number(1, _DT_STRING) + encode_message(2, b"") + encode_string(8, shown)
        metadata = encode_message(1, encode_string(1, "text"))
        self._write(rank, 0, [encode_string(1, tag) + encode_message(8, tensor) + encode_message(9, metadata)])

    def format_summary(self) -> str:
        """Says in a sentence what was written."""
        if not self._files and self._error is None:
            return f"nothing for TensorBoard is in {self._folder}: no rank has run a step that Whale distributes"
        text = f"scalars and plans are in {self._folder}: tensorboard --logdir {self._folder}"
        return text if self._error is None else f"{text}; then they could not be written: {self._error}"

    def close(self) -> None:
        """Closes the files."""
        for file in self._files.values():
            file.close()

    def _write(self, rank: int, step: int, values: list[bytes]) -> None:
        """Writes values; an error (a full disk) is kept for `format_summary` and does not end the run."""
        if self._error is not None:
            return
        try:
            if rank not in self._files:
                self._files[rank] = self._open(rank)
            event = (
                _encode_now()
                + encode_number(2, step)
                + encode_message(5, b"".join(encode_message(1, v) for v in values))
            )
            self._files[rank].write(_encode_record(event))
        except OSError as error:
            self._error = error

    def _open(self, rank: int) -> BinaryIO:
        folder = os.path.join(self._folder, f"rank{rank}")
        os.makedirs(folder, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}.whale"
        file = open(os.path.join(folder, name), "wb", buffering=0)
        file.write(_encode_record(_encode_now() + encode_string(3, "brain.Event:2")))
        return file


def _encode_now() -> bytes:
    return encode_field(1, FIXED64, struct.pack("<d", time.time()))


def _encode_record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _compute_checksum(length) + data + _compute_checksum(data)


def _make_crc_table() -> list[int]:
    table = list(range(256))
    for i in table:
        for _ in range(8):
            table[i] = table[i] >> 1 ^ (0x82F63B78 if table[i] & 1 else 0)
    return table


_CRC32C = _make_crc_table()


def _compute_checksum(data: bytes) -> bytes:
    """Returns the CRC-32C, masked as in TensorFlow's records (tensorflow/core/lib/hash/crc32c.h)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC32C[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
