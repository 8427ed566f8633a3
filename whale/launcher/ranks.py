"""What the launcher knows about each rank, and how a run ended."""

from __future__ import annotations

import hmac
import json
import signal
import socket
from dataclasses import dataclass, field
from typing import Any

from whale.launcher.protocol import HELLO_LIMIT_BYTES, Kind, Unpacker, pack

# Errors of this name are what a rank gets when another one is gone: never the cause.
_CONSEQUENCE = "CommError"


@dataclass(frozen=True, slots=True)
class Failure:
    """How a rank failed.

    Attributes:
        rank: which one.
        code: exit code for the whole run.
        reason: what happened, as the end of a sentence that starts with "rank 1".
        error_type: name of the Python exception, or "".
        traceback: text to show, or "".
        signal: the signal that killed the rank, or 0.
    """

    rank: int
    code: int
    reason: str
    error_type: str = ""
    traceback: str = ""
    signal: int = 0

    @property
    def is_consequence(self) -> bool:
        """Whether this failure only says that another rank is gone."""
        return self.error_type == _CONSEQUENCE


def raised(rank: int, report: dict[str, Any]) -> Failure:
    """The failure that a worker's FAILURE frame describes."""
    code, kind = report["code"], report["type"]
    if not kind:
        return Failure(rank, code, f"failed: exit code {code}")
    first_line = report["message"].strip().partition("\n")[0]
    what = f"{kind}: {first_line}" if first_line else kind
    return Failure(rank, code, f"failed: {what} (exit code {code})", kind, report["traceback"])


def ended(rank: int, status: dict[str, int]) -> Failure | None:
    """The failure that a worker's EXIT frame describes, or None for exit code 0."""
    if status["signal"]:
        reason = f"was killed by {signal_name(status['signal'])}"
        return Failure(rank, status["code"], reason, signal=status["signal"])
    if status["code"]:
        return Failure(rank, status["code"], f"failed: exit code {status['code']}")
    return None


def lost(rank: int, host: str) -> Failure:
    """The failure of a rank whose worker is gone without a word."""
    return Failure(rank, 1, f"was lost: its connection from {host} broke, the process was killed or the host is gone")


def signal_name(number: int) -> str:
    """For example SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def cause(failures: list[Failure]) -> Failure:
    """The failure that the others follow from: the first that is no consequence, else the first."""
    return next((failure for failure in failures if not failure.is_consequence), failures[0])


@dataclass(slots=True)
class RankLink:
    """The connection to one worker, and what it has reported.

    Attributes:
        rank: known after the greeting.
        raised: its script has reported how it failed; the exit code that follows is no news.
        exited: its script has ended, or the worker is lost.
        hidden: what the rank wrote to stderr after another rank's failure.
    """

    connection: socket.socket
    unpacker: Unpacker = field(default_factory=lambda: Unpacker(HELLO_LIMIT_BYTES))
    rank: int | None = None
    host: str = ""
    raised: bool = False
    exited: bool = False
    hidden: bytearray = field(default_factory=bytearray)

    def greet(self, kind: Kind, payload: bytes, token: str, size: int) -> int | None:
        """Handles the first frame: the rank, or None when it does not come from a worker of this run."""
        try:
            hello = json.loads(payload)
            known = kind is Kind.HELLO and hmac.compare_digest(str(hello["token"]), token)
            if not known or hello["size"] != size or not 0 <= hello["rank"] < size:
                return None
            self.rank, self.host = int(hello["rank"]), str(hello["host"])
        except (ValueError, KeyError, TypeError):
            return None
        self.unpacker.limit_bytes = None
        return self.rank

    def send_signal(self, number: int) -> None:
        """Asks the worker to send a signal to its script; nothing if it is gone."""
        try:
            self.connection.sendall(pack(Kind.SIGNAL, {"signal": int(number)}))
        except OSError:
            # A broken connection is seen, and reported, where it is read.
            pass
