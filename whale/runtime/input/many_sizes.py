"""Decides for which sizes of its arguments a step is compiled, where one process serves all sizes with one trace.

A plan is made for given sizes. Programs whose batches have many (graphs, sentences, the samples of a generator) would
compile more than they train. So the first few sizes have plans of their own, and the others share a program that does
not know its sizes, as one process has: every rank computes the whole batch, and nothing is compiled for a size that may
not come again. One that keeps coming gets a plan.

Decision: 0166.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

from whale.errors import CommError
from whale.ir.values import Dims
from whale.log import log
from whale.runtime.context import Context

OWN_PLANS = 2  # sizes that are compiled for when they first come: usual batches, and the last one of an epoch
OWN_AFTER = 8  # times that another size comes before it has a plan of its own


def may_share_sizes(context: Context) -> bool:
    """Tells whether steps of this run may be computed whole by every rank, where sizes have no plan of their own.

    Not so where a rank has rows of its own, where a plan is given or searched for, and where a step may be taken again
    by fewer ranks.
    """
    planning = context.planning
    others = (planning.dry, planning.saved, planning.described, planning.own_programs, context.elastic)
    asked = context.config["mesh.auto_parallel"] or context.config["pipeline.micro_batches"] > 1
    return (
        context.size > 1
        and not any(one is not None for one in others)
        and not asked
        and not context.has_local_batch
        and not context.scoping.stages_seen
        and not context.solo
    )


def are_processors(has_device: bool, context: Context) -> bool:
    """Tells whether all ranks compute on processors; collective between processes.

    Kernels of GPUs may add up in another order on each rank, so that what every rank computes whole would drift apart.

    Args:
      has_device: whether this rank computes on a GPU.

    Raises:
      CommError: a rank does not take part.
    """
    if not context.has_other_processes:
        return not has_device
    mine, timeout_s = str(int(has_device)).encode(), context.config["debug.check_timeout_s"]
    said = context.comms[0].allgather_bytes(f"whale/sizes/{context.programs}", mine, timeout_s, "a step of many sizes")
    return all(one == b"0" for one in said)


class SizesOfTrace:
    """The sizes with which the steps of one trace were called, and the step that serves those without their own.

    What it answers depends on the calls alone, so it is equal on all ranks.

    Attributes:
      shapes: of the arguments' tensors, with None for sizes that have differed so far.
      step: serves all of these shapes; None: there is none yet.
    """

    def __init__(self) -> None:
        self._calls: Counter[Hashable] = Counter()
        self.shapes: tuple[Dims | None, ...] = ()
        self.step: Any = None
        self._refused = False

    def wants_own(self, key: Hashable, shapes: Sequence[Dims | None]) -> bool:
        """Notes a call with these sizes; tells whether a step is compiled for them.

        Args:
          key: of all that a step is compiled for.
          shapes: of the arguments' tensors.
        """
        self._calls[key] += 1
        widened = tuple(shapes) if not self.shapes else tuple(map(_widen, self.shapes, shapes))
        if widened != self.shapes:
            self.shapes, self.step = widened, None
        return self._refused or len(self._calls) <= OWN_PLANS or self._calls[key] >= OWN_AFTER

    def refuse(self, name: str, why: Exception | str) -> None:
        """Notes that no step may be computed without its sizes: each gets a step of its own.

        Raises:
          CommError: that is why: the ranks have lost each other.
        """
        if isinstance(why, CommError):
            raise why
        self._refused = True
        log.debug(f"`{name}` is compiled for each size of its arguments: {type(why).__name__}: {why}")


def _widen(known: Dims | None, new: Dims | None) -> Dims | None:
    if known is None or new is None or len(known) != len(new):
        return None
    return tuple(a if a == b else None for a, b in zip(known, new))
