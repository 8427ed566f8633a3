"""``wh.preempted``: whether a script should save and end, since its run will be ended."""

from __future__ import annotations

from whale.errors import ConfigError
from whale.runtime.run.context import current


def preempted() -> bool:
    """Whether the run has been told to end soon: by SIGTERM to `whale run`, or to the process of any rank; collective.

    All ranks get the same answer. They ask where nothing is half done, as after a step. If it is True, they save:

        if wh.preempted():
            manager.save()
            sys.exit(0)

    Raises:
      ConfigError: ``fault.notice_s`` is 0, so that SIGTERM ends the run at once.
      CommError: a rank does something else, or is gone.
    """
    context = current("wh.preempted()")
    if context.notice is None:
        raise ConfigError(
            "nobody waits for what this run would save when it is told to end",
            given="wh.preempted() with fault.notice_s = 0",
            expected="the seconds that the machine leaves between SIGTERM and the end",
            action='set it: wh.init({"fault.notice_s": 60}), or WHALE_FAULT_NOTICE_S=60',
        )
    notice = context.notice
    return context.survived(lambda: notice.reached(context))
