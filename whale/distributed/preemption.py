"""Takes SIGTERM as a notice that the run is to end soon, so that its scripts can save first."""

from __future__ import annotations

import signal
import threading
from types import FrameType

from whale.distributed.ranks import WRITE_TIMEOUT_S, Ranks
from whale.errors import ConfigError


class PreemptionNotice:
    """Hears SIGTERM, which does not end this process, until ``stop``. A second SIGTERM does.

    Raises:
      ConfigError: not in the main thread, in which alone Python hears of signals.
    """

    def __init__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "SIGTERM is heard in the main thread only",
                given="fault.notice_s, and wh.init in another thread",
                expected="wh.init in the main thread",
                action="call wh.init there, or leave fault.notice_s out",
            )
        self._told = False
        self._before = signal.signal(signal.SIGTERM, self._hear)

    def has_reached(self, ranks: Ranks) -> bool:
        """Tells whether SIGTERM has come to any rank; collective."""
        if not ranks.has_other_processes:
            return self._told
        purpose = "wh.preempted(), which every rank has to call"
        said = ranks.comms[0].allgather_bytes("whale/preempted", b"%d" % self._told, WRITE_TIMEOUT_S, purpose)
        return any(map(int, said))

    def stop(self) -> None:
        """Restores what SIGTERM did before."""
        signal.signal(signal.SIGTERM, self._before)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._told = True
        self.stop()
