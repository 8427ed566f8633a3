"""How the ranks' bytes become lines."""

from __future__ import annotations

import os
import pty
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launcher.helpers import MEET, Launcher
from whale.launcher import script
from whale.launcher.job import output
from whale.launcher.job.output import Printer
from whale.launcher.protocol import HELLO_LIMIT_BYTES, FrameKind, Unpacker, pack

pytestmark = pytest.mark.core
Write = tuple[int, bytes]


@pytest.fixture
def printed(tmp_path: Path) -> Callable[..., bytes]:
    """Writes (rank, bytes) pairs to a printer and returns what came out. A pair (rank, b"") stands for a pause."""

    def play(*writes: Write, size: int = 2, colour: bool = False) -> bytes:
        path = tmp_path / "out"
        with path.open("wb") as file:
            printer = Printer(size, (file.fileno(), file.fileno()), colour=colour)
            for rank, data in writes:
                if data:
                    printer.write(rank, 0, data)
                else:
                    time.sleep(output.IDLE_S * 1.2)
                    printer.flush_idle()
            printer.close()
        return path.read_bytes()

    return play


PAUSE = (0, b"")


@pytest.mark.parametrize(
    ("writes", "expected"),
    [
        ([(0, b"one\ntwo\n")], b"[0] one\n[0] two\n"),
        ([(0, b"o"), (1, b"x\n"), (0, b"ne\n")], b"[1] x\n[0] one\n"),
        ([(0, b"dots .."), PAUSE, (0, b"..\n")], b"[0] dots ....\n"),
        ([(0, b"dots .."), PAUSE, (1, b"x\n"), (0, b"..\n")], b"[0] dots ..\n[1] x\n[0] ..\n"),
        ([(0, b"one"), PAUSE, (1, b"x\n"), (0, b"\n"), (0, b"two\n\n")], b"[0] one\n[1] x\n[0] two\n[0] \n"),
        ([(0, b"\r10 %"), (0, b"\r20 %"), (0, b"\n")], b"[0] \r[0] 10 %\r[0] 20 %\n"),
        ([(0, b"10 %\r"), PAUSE, (1, b"x\n"), (0, b"20 %\n")], b"[0] 10 %\r\n[1] x\n[0] 20 %\n"),
        ([(0, b"dos\r"), (0, b"\nend\r\n")], b"[0] dos\r\n[0] end\r\n"),
        ([(0, b"\n\n")], b"[0] \n[0] \n"),
        ([(1, b"no end")], b"[1] no end\n"),
        ([(0, b"\xff\xfe\n")], b"[0] \xff\xfe\n"),
        ([], b""),
    ],
)
def test_lines(printed: Callable[..., bytes], writes: list[Write], expected: bytes) -> None:
    assert printed(*writes) == expected


def test_prefixes_are_aligned_and_coloured(printed: Callable[..., bytes]) -> None:
    assert printed((3, b"x\n"), (11, b"y\n"), size=12) == b"[ 3] x\n[11] y\n"
    coloured = printed((0, b"x\n"), (1, b"y\n"), colour=True)
    assert re.fullmatch(rb"\x1b\[(\d+)m\[0\]\x1b\[0m x\n\x1b\[(?!\1)\d+m\[1\]\x1b\[0m y\n", coloured)


def test_a_line_without_end_is_written_in_parts(printed: Callable[..., bytes]) -> None:
    part = b"x" * 65536
    out = printed(*[(0, part)] * 64, (0, b"\n"))
    assert out == b"[0] " + part * 64 + b"\n"


def test_a_flood_of_equal_lines_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "SHOWN", 20)
    with (tmp_path / "out").open("wb") as file:
        printer = Printer(2, (file.fileno(), file.fileno()))
        for _ in range(1000):
            printer.write(1, 1, b"[warn] epoll_wait: Bad file descriptor\nother\n\n")
            printer.write(0, 0, b"same\n")  # what a script prints is its own affair
        printer.write(1, 1, b"new\n")
        printer.close()
    out = (tmp_path / "out").read_bytes()
    assert 20 <= out.count(b"epoll_wait") < 1000 and out.count(b"new") == 1 and out.count(b"same\n") == 1000
    assert out.splitlines()[-1].startswith(b"[1] whale run: ") and b" more lines like those above" in out


def test_frames_survive_any_cut() -> None:
    frames = [(FrameKind.STDOUT, b"abc"), (FrameKind.STDERR, b""), (FrameKind.SIGNAL, b'{"signal": 9}')]
    stream = b"".join(pack(kind, payload) for kind, payload in frames)
    for step in range(1, len(stream) + 1):
        unpacker = Unpacker()
        found = [frame for at in range(0, len(stream), step) for frame in unpacker.feed(stream[at : at + step])]
        assert found == frames


def test_what_is_no_frame_is_refused() -> None:
    with pytest.raises(ValueError, match="have at most 8 bytes"):
        Unpacker(limit_bytes=8).feed(pack(FrameKind.STDOUT, b"x" * 9))
    with pytest.raises(ValueError, match="71"):
        Unpacker().feed(b"GET /\0\0\0\0\0")


def test_on_a_terminal_prefixes_are_coloured_and_ctrl_c_ends_the_run(launcher: Launcher) -> None:
    pid, terminal = pty.fork()
    line = launcher.command(
        "-np", "2", launcher.script(MEET + "meet('a')\nprint('up')\nmeet('b')\nwait_for_a_signal()")
    )
    if pid == 0:
        os.chdir(launcher.folder)
        launcher.environment.pop("NO_COLOR", None)
        os.execve(line[0], line, launcher.environment)
    seen = b""
    while seen.count(b"up\r\n") < 2:
        seen += os.read(terminal, 4096)
    assert {b"\x1b[36m[0]\x1b[0m up\r\n", b"\x1b[33m[1]\x1b[0m up\r\n"} <= set(seen.splitlines(keepends=True))
    os.write(terminal, b"\x03")
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(terminal)
    assert status == 128 + signal.SIGINT


def test_output_may_arrive_together_with_the_greeting() -> None:
    unpacker = Unpacker(first_bytes=HELLO_LIMIT_BYTES)
    large = b"x" * 2 * HELLO_LIMIT_BYTES
    assert unpacker.feed(pack(FrameKind.HELLO, b"{}") + pack(FrameKind.STDOUT, large)) == [
        (FrameKind.HELLO, b"{}"),
        (FrameKind.STDOUT, large),
    ]
    with pytest.raises(ValueError, match="bytes arrived, and messages of ranks have at most"):
        Unpacker(first_bytes=HELLO_LIMIT_BYTES).feed(pack(FrameKind.STDOUT, large))


@pytest.mark.parametrize("name, says", [("horovod.tensorflow", "write whale.horovod"), ("epl", "whale.epl as epl")])
def test_a_package_whose_interface_whale_has_is_named(name: str, says: str) -> None:
    missing = ModuleNotFoundError(f"No module named {name!r}", name=name)
    assert says in script._describe(missing).splitlines()[-1]
    other = ModuleNotFoundError("No module named 'mine.horovod'", name="mine.horovod")
    assert "next" not in script._describe(other) and "next" not in script._describe(ValueError("horovod"))
