"""Who cannot show the run's token does nothing to it, and who can, but speaks nonsense, does nothing either."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.attack.control_port import ATTACKS, attack
from tests.launcher.helpers import PATIENCE_S, Launcher
from whale import token_listener
from whale.launcher import connection as connection_of_worker
from whale.launcher.protocol import ADDRESS_VARIABLE, WELCOME
from whale.token_listener import STRANGERS, TokenListener, keep_alive

TOKEN = "0123456789abcdef" * 2


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_a_run_goes_on_under_ten_attacks(tmp_path: Path) -> None:
    problems, took_s = attack(Launcher(tmp_path), ATTACKS)
    assert problems == [] and len(took_s) == 10


class _Loop:
    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=4 * STRANGERS)
        self.listener.setblocking(False)
        self.welcomed: list[socket.socket] = []
        self.door = TokenListener(self.listener, TOKEN, self.selector, self._welcome)

    def _welcome(self, connection: socket.socket, _: bytes) -> None:
        connection.sendall(WELCOME)
        self.welcomed.append(connection)

    def connect(self) -> socket.socket:
        return socket.create_connection(self.listener.getsockname())

    def turn(self, until: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not until():
            assert time.monotonic() < deadline_s
            for key, _ in self.selector.select(0.01):
                key.data()
            self.door.look()

    @property
    def held(self) -> int:
        return len(self.selector.get_map()) - 1


@pytest.fixture
def loop() -> Iterator[_Loop]:
    made = _Loop()
    yield made
    made.door.close()
    for connection in made.welcomed:
        connection.close()
    made.listener.close()
    made.selector.close()


def _is_closed(connection: socket.socket) -> bool:
    connection.settimeout(0.01)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def test_the_token_lets_in_and_nothing_else_does(loop: _Loop) -> None:
    with loop.connect() as friend, loop.connect() as enemy:
        friend.sendall(TOKEN[:5].encode())
        enemy.sendall(TOKEN[:-1].encode() + b"x")
        loop.turn(lambda: _is_closed(enemy))
        assert loop.welcomed == []
        friend.sendall(TOKEN[5:].encode() + b"more")
        loop.turn(lambda: len(loop.welcomed) == 1)
        assert loop.welcomed[0].recv(10) == b"more" and loop.held == 0
        assert friend.recv(10) == WELCOME


def test_a_flood_holds_few_connections_and_keeps_nobody_out(loop: _Loop) -> None:
    flood = [loop.connect() for _ in range(3 * STRANGERS)]
    friend = loop.connect()
    friend.sendall(TOKEN.encode())
    loop.turn(lambda: len(loop.welcomed) == 1)
    assert loop.held <= STRANGERS
    for connection in (*flood, friend):
        connection.close()


def test_a_worker_that_a_flood_has_pushed_out_comes_again(loop: _Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADDRESS_VARIABLE, f"127.0.0.1:{loop.listener.getsockname()[1]}")
    pushed_out: list[socket.socket] = []

    def late(connection: socket.socket) -> None:
        """Lets a flood come between the worker's connection and its token, once."""
        if not pushed_out:
            while not loop.held:
                time.sleep(0.01)
            pushed_out.extend(loop.connect() for _ in range(2 * STRANGERS))
            while not _is_closed(connection):
                pass
            connection.settimeout(PATIENCE_S)
        keep_alive(connection)

    monkeypatch.setattr(connection_of_worker, "keep_alive", late)
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(connection_of_worker.connect, TOKEN)
        loop.turn(connecting.done)
        with connecting.result() as connection:
            assert pushed_out and len(loop.welcomed) == 1
            loop.welcomed[0].sendall(b"frames")
            assert connection.recv(10) == b"frames"
    for connection in pushed_out:
        connection.close()


def test_strangers_have_a_deadline_each(loop: _Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_listener, "TOKEN_S", 0.05)
    with loop.connect() as first:
        loop.turn(lambda: loop.held == 1)
        assert loop.door.deadlines_s[0] <= time.monotonic() + 0.05
        loop.turn(lambda: _is_closed(first))
    assert loop.held == 0 and loop.door.deadlines_s == []


def test_without_descriptors_strangers_make_room(loop: _Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    with loop.connect() as idle, loop.connect() as friend:
        loop.turn(lambda: loop.held == 2)

        def refuse() -> None:
            raise OSError(24, "Too many open files")

        class NoMore:
            accept = staticmethod(refuse)

        monkeypatch.setattr(loop.door, "_listener", NoMore())
        with loop.connect():
            loop.turn(lambda: _is_closed(idle) and _is_closed(friend))
        assert loop.held == 0
