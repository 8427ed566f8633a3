"""Says in a sentence what limits a step, and what its likely seconds are, for the page of a plan."""

from __future__ import annotations

from whale.ir.plan_text import format_seconds

_LIMITS = {
    "compute": "Computing limits this step: kernels of {where} take {share} of it.",
    "communication": "Communication limits this step: in {share} of it {where} only sends, sums and waits.",
    "bubble": "Waiting limits this step: in {share} of it {where} waits for others; more micro-batches shorten that.",
    "update": "The update limits this step: the optimizer of {where} takes {share} of it.",
    "idle": "Idle time limits this step: in {share} of it {where} neither computes nor communicates.",
}


def describe_limit(
    part: str, seconds: float, step_s: float, where: str, communication_s: float, full: float | None
) -> str:
    """Returns a sentence or three: what takes most of the step, what a faster network could save, and how full devices
    are.

    Args:
      part: a key of ``_LIMITS``; seconds: of the step that it takes.
      where: the stage or the rank that takes longest.
      communication_s: of sending and summing that no kernel hides, without waits for others.
      full: the fullest device's memory in use, of its limit; None: there is no limit.
    """
    found = [_LIMITS[part].format(where=where, share=f"{seconds / step_s:.0%}")]
    if part != "communication":
        saved = communication_s / step_s
        found.append(
            f"A faster network saves at most {saved:.0%}." if saved >= 0.005 else "A faster network saves nothing."
        )
    if full is not None and full >= 0.005:
        found.append(f"The fullest device uses {full:.0%} of its memory.")
    return " ".join(found)


def describe_likely(likely_s: tuple[float, float] | None, compared_with: str) -> str:
    """Returns the interval of the seconds of a step in words, and what it comes of."""
    if likely_s is None:
        return "how far it may be off is not known: no steps of this kind were compared"
    low, high = map(format_seconds, likely_s)
    return f"likely {low} to {high}, as nine of ten {compared_with}"
