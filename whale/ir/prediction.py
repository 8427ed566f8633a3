"""Defines the prediction of one training step under a strategy, in one form for all evaluators.

A model described by hyper-parameters is evaluated by formulas and a schedule (`cost_model.analytic.evaluate`); a
captured program by simulating the ranks' programs (`cost_model.graph.predict`).
"""

from __future__ import annotations

import msgspec


class RankPrediction(msgspec.Struct, frozen=True):
    """Holds the predicted time and memory of one rank in a step, or of each of `count` equal ranks.

    Attributes:
        end_s: time from the beginning of the step until the rank ends, in seconds.
        compute_s: seconds in kernels.
        exchange_s: seconds in communication, without waiting for other ranks.
        peak_bytes: largest number of bytes that the rank holds at once.
        resident_bytes: bytes that the rank holds between steps.
        limit_bytes: memory of the rank's device; 0 if unknown.
        count: number of ranks that the entry stands for.
        name: stage and device of the ranks, if the entry stands for several.
    """

    end_s: float
    compute_s: float
    exchange_s: float
    peak_bytes: int
    resident_bytes: int
    limit_bytes: int = 0
    count: int = 1
    name: str = ""


class Prediction(msgspec.Struct, frozen=True):
    """Holds the prediction of a step. Compute, communication, bubble and update seconds add up to ``step_s``.

    Attributes:
        where: the hardware: a cluster of the catalogue, or a measured machine.
        step_s: seconds of the whole step.
        ranks: predictions of single ranks.
        likely_s: (low, high) seconds within which nine of ten measured steps lie; None if no steps were compared.
        compute_s: seconds in kernels, of the busiest stage or the slowest rank.
        communication_s: seconds in which that stage or rank communicates and no kernel hides it.
        bubble_s: seconds in which it waits for other ranks.
        update_s: seconds of the optimizer after the last backward pass; 0 for captured programs, where kernels include
          it.
        lacking_bytes: bytes by which the fullest device is too small; not positive if all fit, or if memory was not
          checked.
    """

    where: str
    step_s: float
    ranks: tuple[RankPrediction, ...] = ()
    likely_s: tuple[float, float] | None = None
    compute_s: float = 0.0
    communication_s: float = 0.0
    bubble_s: float = 0.0
    update_s: float = 0.0
    lacking_bytes: float = 0.0

    @property
    def fits(self) -> bool:
        """Returns True if the step fits into the memory of all devices."""
        return self.lacking_bytes <= 0

    @property
    def parts_s(self) -> dict[str, float]:
        """Returns the seconds of the step by activity: compute, communication, bubble and update; they add up to
        ``step_s``.
        """
        return {
            "compute": self.compute_s,
            "communication": self.communication_s,
            "bubble": self.bubble_s,
            "update": self.update_s,
        }
