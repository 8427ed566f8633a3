"""Goes over to another strategy within a run: variables, optimizer slots and random streams stay what they are.

Programs are compiled again for their next call. Elastic runs do the same by an agreement of theirs, as a rank may be
lost meanwhile (``whale.runtime.elastic.elastic_run``).

Decision: 0185.
"""

from __future__ import annotations

import whale_ops
from whale.distributed.stream_positions import DRAWN_APART, gather_streams
from whale.ir.strategy import ChosenStrategy
from whale.log import log
from whale.runtime.context import Context


def follow_forecast(context: Context) -> None:
    """Compares a run's steps with their prediction, after a step, and goes over to a better strategy if there is one.

    Collective when it is time to.

    Raises:
      CommError: a rank is gone.
    """
    if context.planning.forecast is not None and (chosen := context.planning.forecast.look()) is not None:
        go_over(context, chosen)


def go_over(context: Context, chosen: ChosenStrategy) -> None:
    """Makes all variables whole, and has programs be compiled anew under a strategy; collective between processes."""
    positions = gather_streams(context.comms[0], list(context.streams))
    if positions is None:
        if context.rank == 0:
            log.warning(DRAWN_APART)
        return
    context.variables.make_all_whole(context)
    whale_ops.set_streams(positions)
    context.planning.go_over(chosen)
    context.scoping.stages_seen = False
    context.reports.compiled_for.clear()
