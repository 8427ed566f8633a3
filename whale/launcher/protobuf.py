"""Encodes protocol buffer messages by hand: the launcher has neither TensorFlow nor its messages."""

from __future__ import annotations

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # kinds of fields on the wire


def encode_varint(value: int) -> bytes:
    """Encodes a whole number that is not negative, seven bits a byte."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def encode_field(number: int, kind: int, payload: bytes) -> bytes:
    """Encodes a field, whose payload is encoded already as its wire type wants it."""
    return encode_varint(number << 3 | kind) + payload


def encode_number(at: int, value: int) -> bytes:
    """Encodes a field that is a whole number, 0 or more."""
    return encode_field(at, VARINT, encode_varint(value))


def encode_message(number: int, payload: bytes) -> bytes:
    """Encodes a field that is a message, or bytes."""
    return encode_field(number, BYTES, encode_varint(len(payload)) + payload)


def encode_string(number: int, content: str) -> bytes:
    """Encodes a field that is a text."""
    return encode_message(number, content.encode(errors="replace"))
