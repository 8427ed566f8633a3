"""Placements that a script gives variables before a program uses them, by a LayoutMap for example."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from whale.capture.captured import CapturedVariable
from whale.errors import PlanError
from whale.ir.layout import Placement, Split


def given_placement(captured: CapturedVariable) -> Placement | None:
    """The placement that the script gave the variable; None: it gave none."""
    return getattr(captured.variable, "_whale_placement", None)


def refuse_other_placements(
    captured: Iterable[CapturedVariable], known: Mapping[str, Placement], planned: Mapping[str, Placement]
) -> None:
    """Refuses a plan under which a variable does not lie as the script says.

    Args:
      known: what planning was told of the variables, by handle node. One that a program has used before the script gave
        it a placement is known by another, and stays so.
      planned: of the variables that lie split.

    Raises:
      PlanError: with the first such variable.
    """
    for c in captured:
        given = given_placement(c)
        if isinstance(given, Split) and known.get(c.node) == given and planned.get(c.node) != given:
            raise PlanError(
                "a variable cannot lie as the script says",
                op=c.name,
                given=f"{given} by a LayoutMap; in the plan it is {planned.get(c.node, 'whole, or on one stage only')}",
                expected="a program in which all ranks of the mesh's axis have a part of it: without wh.stage",
                action="leave the variable out of the LayoutMap, or leave stages out",
            )
