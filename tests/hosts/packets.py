"""Filters of packets at a device of this network namespace: loss, cuts, firewalls.

They are programs of the kernel (eBPF, attached by tcx links of Linux 6.6 or newer), made here instruction by
instruction: no package has to be installed for them. A filter is there as long as its descriptor is open, so that
nothing is left of it when its process is gone.
"""

from __future__ import annotations

import ctypes
import os
import platform
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

_BPF = {"x86_64": 321, "aarch64": 280}  # the number of the system call
_PROG_LOAD, _LINK_CREATE = 5, 28
_SCHED_CLS, _TCX_INGRESS, _TCX_EGRESS = 3, 46, 47
_NEXT, _DROP = -1, 2  # what a program says of a packet
_RANDOM, _LOAD_BYTES = 7, 26  # helpers of the kernel
# Places in a frame of TCP over IPv4 whose header has no options.
_KIND_AT, _PROTOCOL_AT, _PORTS_AT = 12, 23, 34
_IPV4, _TCP = 0x0800, 6


@dataclass(frozen=True, slots=True)
class Rules:
    """Describes what becomes of packets on a link, in both directions.

    Attributes:
        cut: none comes through.
        loss: the part of them that is lost, in each direction.
        ports: only TCP from or to these ports comes through; (): all does. ARP always comes through.
    """

    cut: bool = False
    loss: float = 0.0
    ports: tuple[int, ...] = ()


def attach(rules: Rules, device: str) -> list[int]:
    """Attaches filters to both directions of a device; returns descriptors, with which they end.

    Raises:
        OSError: the kernel has no such filters, or this process may not make them.
    """
    index, program = socket.if_nametoindex(device), _load(_assemble(rules))
    found: list[int] = []
    try:
        for direction in (_TCX_INGRESS, _TCX_EGRESS):
            found.append(_call(_LINK_CREATE, struct.pack("IIII", program, index, direction, 0).ljust(64, b"\0")))
    except OSError:
        for link in found:
            os.close(link)
        raise
    finally:
        os.close(program)
    return found


def _assemble(rules: Rules) -> list[bytes]:
    """Returns the program: jumps to "let" (unless lost) and "drop" are resolved at the end."""
    lines: list[tuple[int, int, int, int | str, int]] = [(0xBF, 6, 1, 0, 0)]  # r6 = r1: the packet

    def load(at: int, size: int) -> None:
        """Copies bytes of the packet to the stack, of which those at -8 are read."""
        lines.extend(
            [(0xBF, 1, 6, 0, 0), (0xB7, 2, 0, 0, at), (0xBF, 3, 10, 0, 0), (0x07, 3, 0, 0, -8), (0xB7, 4, 0, 0, size)]
        )
        lines.append((0x85, 0, 0, 0, _LOAD_BYTES))

    if rules.cut:
        return [_pack(0xB7, 0, 0, 0, _DROP), _pack(0x95, 0, 0, 0, 0)]
    if rules.ports:
        load(_KIND_AT, 2)
        lines += [(0x69, 2, 10, -8, 0), (0x55, 2, 0, "let", socket.htons(_IPV4))]
        load(_PROTOCOL_AT, 1)
        lines += [(0x71, 2, 10, -8, 0), (0x55, 2, 0, "drop", _TCP)]
        load(_PORTS_AT, 4)
        for where in (-8, -6):
            lines.append((0x69, 2, 10, where, 0))
            lines += [(0x15, 2, 0, "let", socket.htons(port)) for port in rules.ports]
        lines.append((0x05, 0, 0, "drop", 0))
    ends = {"let": len(lines)}
    if rules.loss:
        threshold = struct.unpack("i", struct.pack("I", int(rules.loss * 0xFFFFFFFF)))[0]
        lines += [(0x85, 0, 0, 0, _RANDOM), (0xA6, 0, 0, "drop", threshold)]  # compared as 32 bits without a sign
    ends["drop"] = len(lines) + 2
    for answer in (_NEXT, _DROP):
        lines += [(0xB7, 0, 0, 0, answer), (0x95, 0, 0, 0, 0)]
    return [
        _pack(code, target, source, ends[to] - place - 1 if isinstance(to, str) else to, value)
        for place, (code, target, source, to, value) in enumerate(lines)
    ]


def _pack(code: int, target: int, source: int, offset: int, value: int) -> bytes:
    """Returns one instruction."""
    return struct.pack("<BBhi", code, source << 4 | target, offset, value)


def _load(instructions: Sequence[bytes]) -> int:
    """Has the kernel verify a program; returns its descriptor."""
    text = ctypes.create_string_buffer(b"".join(instructions))
    license_, log = ctypes.create_string_buffer(b"GPL"), ctypes.create_string_buffer(1 << 14)
    head = struct.pack("IIQQ", _SCHED_CLS, len(instructions), ctypes.addressof(text), ctypes.addressof(license_))
    head += struct.pack("IIQII16sII", 1, len(log), ctypes.addressof(log), 0, 0, b"", 0, _TCX_INGRESS)
    try:
        return _call(_PROG_LOAD, head.ljust(128, b"\0"))
    except OSError as error:
        error.strerror = f"{error.strerror}: {log.value.decode(errors='replace')}"
        raise


def _call(command: int, attributes: bytes) -> int:
    """Makes the system call `bpf`; returns a descriptor."""
    library, content = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(attributes, len(attributes))
    found = int(library.syscall(_BPF[platform.machine()], command, content, len(attributes)))
    if found < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found
