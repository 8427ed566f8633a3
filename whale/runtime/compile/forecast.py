"""Compares what steps take with what `auto_parallel` predicted when it chose how to spread them.

The first rank says it once if they are far apart, as on another link or beside other programs; what was chosen is then
not kept for later runs, which measure and look anew.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from whale.ir.plan_text import format_bytes
from whale.log import log
from whale_ops import Communicator
from whale_ops.communicator import NO_EXCHANGES

_T = TypeVar("_T")
# So many steps are looked at, after the first ones, which compile and fault memory in. Steps are far off if they take
# so many times as long as predicted, and so much longer.
FIRST, STEPS = 4, 8
FAR, FAR_S = 2.0, 2e-3


@dataclass
class StepForecast:
    """The prediction for one program of a run, on the first rank.

    Attributes:
      number: of the program in this run.
      step_s: predicted seconds of a step.
      comm: whose counters say what exchanges took; None: there are none.
      forget: makes later runs look anew.
    """

    number: int
    step_s: float
    comm: Communicator | None
    forget: Callable[[], None]
    _times_s: list[float] = field(default_factory=list)
    _calls: int = 0
    _before: tuple[float, int] = (0.0, 0)

    def watch_steps(self, call: Callable[..., _T], name: str, number: int) -> Callable[..., _T]:
        """Returns the same callable, whose calls are timed if it is the program's."""
        if number != self.number:
            return call

        def take_step(*args: Any) -> _T:
            if len(self._times_s) >= STEPS:
                return call(*args)
            if self._calls == FIRST:
                self._before = self._count_exchanges()
            started_s = time.perf_counter()
            result = call(*args)
            took_s = time.perf_counter() - started_s
            self._calls += 1
            if self._calls > FIRST:
                self._times_s.append(took_s)
                if len(self._times_s) == STEPS:
                    self._compare(name)
            return result

        return take_step

    def _count_exchanges(self) -> tuple[float, int]:
        """Returns the seconds of exchanges so far, of which several may go on at a time, and the bytes sent."""
        found = [] if self.comm is None else [c for c in self.comm.counters() if not c.key.startswith(NO_EXCHANGES)]
        return sum(c.seconds for c in found), sum(c.wire_bytes for c in found)

    def _compare(self, name: str) -> None:
        usual_s = statistics.median(self._times_s)
        if usual_s <= FAR * self.step_s or usual_s - self.step_s <= FAR_S:
            return
        seconds, sent_bytes = (after - before for after, before in zip(self._count_exchanges(), self._before))
        share = min(1.0, seconds / sum(self._times_s))
        log.warning(
            f"auto_parallel: steps of `{name}` take {1e3 * usual_s:.4g} ms, where {1e3 * self.step_s:.4g} ms were "
            f"predicted; exchanges go on in {100 * share:.0f} % of it, in which this rank sends "
            f"{format_bytes(sent_bytes // STEPS)} a step: links or processors are slower than when the way was chosen "
            "(see `whale run -v` and `whale doctor`); it is not kept, and the next run looks for another one"
        )
        self.forget()
