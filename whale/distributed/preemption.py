"""Takes SIGTERM as a notice that the run will end soon, so that scripts can save first (`wh.preempted()`)."""

from __future__ import annotations

import signal
import threading
from types import FrameType

from whale.distributed.ranks import WRITE_TIMEOUT_S, Ranks
from whale.errors import ConfigError


class PreemptionNotice:
    """Catches the first SIGTERM, which then does not end this process; after it, or after ``stop``, SIGTERM acts as
    before.

    Raises:
      ConfigError: this is not the main thread; Python handles signals in no other.
    """

    def __init__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "with fault.notice_s, wh.init has to be called in the main thread, where Python handles SIGTERM",
                given=f"fault.notice_s, and wh.init in the thread {threading.current_thread().name!r}",
                expected="wh.init in the main thread",
                action="call wh.init in the main thread, or leave fault.notice_s out",
            )
        self._told = False
        self._before = signal.signal(signal.SIGTERM, self._hear)

    def has_reached(self, ranks: Ranks) -> bool:
        """Returns True if SIGTERM has come to any rank; collective, so that all ranks get the same answer."""
        if not ranks.has_other_processes:
            return self._told
        purpose = "wh.preempted(), which every rank has to call"
        said = ranks.comms[0].allgather_bytes("whale/preempted", b"%d" % self._told, WRITE_TIMEOUT_S, purpose)
        return any(map(int, said))

    def stop(self) -> None:
        """Restores the previous handler of SIGTERM."""
        signal.signal(signal.SIGTERM, self._before)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._told = True
        self.stop()
