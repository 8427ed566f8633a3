"""Defines predictions of one training step under a strategy, in the same form for all evaluators.

A described model is evaluated by formulas and a schedule (`cost_model.analytic.evaluate`), a program by simulating
the ranks' programs (`cost_model.graph.predict`).
"""

from __future__ import annotations

import msgspec


class RankPrediction(msgspec.Struct, frozen=True):
    """What a rank, or each of `count` equal ones, does and holds in a step.

    Attributes:
        end_s: when its step ends; compute_s: its kernels; exchange_s: its communication, without waiting.
        peak_bytes: the most that it holds; resident_bytes: what it holds between steps.
        limit_bytes: of its device; 0: not known.
        name: of its stage and device, where several ranks are one entry.
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
    """The prediction of a step, and the hardware that it is for.

    Attributes:
        where: a cluster of the catalogue, or a measured machine.
        step_s: the whole step; compute_s, communication_s, bubble_s and update_s add up to it.
        compute_s: kernels of the busiest stage, or of the slowest rank.
        communication_s: what that sends and sums and no kernel hides; bubble_s: in which it waits for others.
        update_s: of the optimizer, after the last pass; a program's is among its kernels.
        lacking_bytes: by how much the fullest device is too small; not positive: all have room, or nobody asked.
        likely_s: nine of ten steps lie between; None: such steps were not compared.
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
        """Tells whether all devices have room."""
        return self.lacking_bytes <= 0

    @property
    def parts_s(self) -> dict[str, float]:
        """Returns the seconds of a step by what they go to; they add up to it."""
        return {
            "compute": self.compute_s,
            "communication": self.communication_s,
            "bubble": self.bubble_s,
            "update": self.update_s,
        }
