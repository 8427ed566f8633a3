"""Attacks on the port on which `whale run` listens: each must leave the run as it was."""

from __future__ import annotations

import json
import random
import socket
import struct
import time
from collections.abc import Callable

from tests.launcher.helpers import MEET, PATIENCE_S, Launcher, wait_for_line
from whale.launcher.protocol import FrameKind, pack

IDLE_CONNECTIONS = 1000
_HELLO = {"rank": 0, "size": 2, "host": "elsewhere", "pid": 1, "clock": ""}
# How long an attack's connection stays when the launcher does not close it.
_HOLD_S = 0.2
SCRIPT = MEET + (
    "first = dict(v.partition('=')[::2] for v in open('/proc/self/environ', errors='replace').read().split(chr(0)))\n"
    "place = first['WHALE_LAUNCHER_ADDRESS'], first['WHALE_LAUNCHER_TOKEN']\n"
    "print('listens', *place) if rank == 0 else None\n"
    "meet('a')\n"
    "while not os.path.exists('attacked'): time.sleep(0.02)\n"
    "print('goes on')\n"
)


class Port:
    """The launcher's port, and the token of its run for attacks from inside."""

    def __init__(self, address: str, token: str) -> None:
        self._place = address.rpartition(":")[0], int(address.rpartition(":")[2])
        self.token = token.encode()

    def connect(self) -> socket.socket:
        return socket.create_connection(self._place, timeout=10)

    def send(self, data: bytes) -> None:
        """Sends bytes on a connection of their own, and waits until the other side closes it, or for a moment."""
        with self.connect() as connection:
            try:
                connection.sendall(data)
                connection.settimeout(_HOLD_S)
                connection.recv(1)
            except OSError:
                pass


def _brackets(port: Port) -> None:
    port.send(pack(FrameKind.HELLO, b"[" * 4090))


def _brackets_with_a_token(port: Port) -> None:
    for payload in (b"[" * 4090, b'{"rank":' + b"[" * 4000, b'{"more":' + b'{"a":' * 800):
        port.send(port.token + pack(FrameKind.HELLO, payload))


def _idle_connections(port: Port) -> None:
    held = []
    for _ in range(IDLE_CONNECTIONS):
        held.append(port.connect())
    time.sleep(_HOLD_S)
    for connection in held:
        connection.close()


def _wrong_token(port: Port) -> None:
    greeting = pack(FrameKind.HELLO, _HELLO)
    for token in (b"0" * 32, b"\xff" * 32, port.token[:-1] + b"x", port.token[::-1]):
        port.send(token + greeting)


def _slow_token(port: Port) -> None:
    held = [port.connect() for _ in range(8)]
    for _ in range(8):
        for connection in held:
            connection.sendall(b"0")
        time.sleep(0.05)
    for connection in held:
        connection.close()


def _long_frames(port: Port) -> None:
    port.send(struct.pack("!BI", FrameKind.HELLO, 0xFFFFFFFF) + b"x" * 4096)
    port.send(port.token + struct.pack("!BI", FrameKind.HELLO, 0xFFFFFFFF) + b"x" * 4096)


def _other_protocols(port: Port) -> None:
    for data in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 64):
        port.send(data)


def _resets(port: Port) -> None:
    for _ in range(500):
        connection = port.connect()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()


def _noise(port: Port) -> None:
    generator = random.Random(24)
    for _ in range(200):
        with port.connect() as connection:
            try:
                connection.sendall(generator.randbytes(generator.randrange(1, 5000)))
            except OSError:
                pass


def _wrong_greetings_with_a_token(port: Port) -> None:
    changes: dict[str, tuple[object, ...]] = {"rank": (0, 7, -1, 0.5, "0", 10**400), "size": (3,), "host": ([1],)}
    wrong = [{name: value} for name, values in changes.items() for value in values]
    wrong += [{"pid": None}, {"clock": {}}]
    for change in wrong:
        port.send(port.token + pack(FrameKind.HELLO, json.dumps({**_HELLO, **change}).encode()))
    for kind in FrameKind:
        port.send(port.token + pack(kind, b"{}"))
    port.send(port.token + b"\x00\x00\x00\x00\x00")
    port.send(port.token + pack(FrameKind.HELLO, b"\xff\xfe"))


ATTACKS: dict[str, Callable[[Port], None]] = {
    "a greeting of 4,090 brackets": _brackets,
    "the same with the run's token": _brackets_with_a_token,
    "1,000 idle connections": _idle_connections,
    "greetings with wrong tokens": _wrong_token,
    "tokens that come a byte at a time": _slow_token,
    "frames of 4 GiB": _long_frames,
    "other protocols": _other_protocols,
    "500 connections that are reset": _resets,
    "200 connections with noise": _noise,
    "malformed greetings with the run's token": _wrong_greetings_with_a_token,
}


def attack(launcher: Launcher, attacks: dict[str, Callable[[Port], None]]) -> tuple[list[str], dict[str, float]]:
    """Attacks one run of two ranks, one attack after the other; the ranks go on only after the last.

    Returns:
        (everything that is not as it must be, attack -> seconds that it took).
    """
    took_s: dict[str, float] = {}
    with launcher.start("-np", "2", launcher.script(SCRIPT)) as process:
        _, _, address, token = wait_for_line(process, "listens")[-1].split()
        port, problems = Port(address, token), []
        for name, act in attacks.items():
            start_s = time.monotonic()
            try:
                act(port)
            except OSError as error:
                problems.append(f"{name}: {error}")
            took_s[name] = time.monotonic() - start_s
            if process.poll() is not None:
                problems.append(f"{name}: the run has ended with code {process.returncode}")
                break
        (launcher.folder / "attacked").touch()
        output, errors = process.communicate(timeout=PATIENCE_S)
        if process.returncode != 0 or output.count("goes on") != 2 or "Traceback" in errors:
            problems.append(f"the run ends with code {process.returncode}: {output}{errors}")
    return problems + [f"a process is left: {line}" for line in launcher.left_behind()], took_s
