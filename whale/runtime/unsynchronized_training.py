"""Reports, at the end of a run, that it has trained but that Whale has distributed nothing."""

from __future__ import annotations

import sys

from whale.errors import ProgramError
from whale.runtime.context import Context

_MOST = 5


def find_unsynchronized_training(context: Context) -> ProgramError | None:
    """Returns the error of a run in which every rank has trained by itself; None where that is not so, or was asked
    for.
    """
    outside = context.outside
    if outside is None or context.solo or context.distributed or not outside.trained:
        return None
    found = [
        what + (f" ({', '.join(list(names)[:_MOST])}{', ...' * (len(names) > _MOST)})" if names else "")
        for what, names in outside.trained.items()
    ]
    more = f"; and {len(found) - _MOST} more" if len(found) > _MOST else ""
    facts = {"trained on every rank": "; ".join(found[:_MOST]) + more}
    if beside := _describe_other_distribution():
        facts["beside it"] = beside
    return ProgramError(
        f"Whale has distributed nothing: each of the {context.size} ranks has trained alone",
        **facts,
        expected="steps of wh.function, runs of wh.Session, or Keras' fit after wh.init()",
        action="make what is named a wh.function (in the place of tf.function), or a wh.Session; wh.init(solo=True) if "
        "every rank is to train alone",
    )


def _describe_other_distribution() -> str:
    """Returns a sentence about what else distributes in this process, or ""."""
    for name in ("horovod.tensorflow", "horovod.tensorflow.keras", "horovod.keras"):
        found = sys.modules.get(name)
        try:
            if found is not None and found.size() > 1:
                return (
                    "Horovod runs: what hvd.DistributedOptimizer or a factor of hvd.size() averages, Whale does not see"
                )
        except ValueError:  # it was imported, and not started
            continue
    return ""
