"""Reads how a script says that variables are to lie before a program uses them, by a LayoutMap for example."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from whale.capture.captured import CapturedVariable
from whale.errors import PlanError
from whale.ir.mesh import Tiles


def find_given_tiles(captured: CapturedVariable) -> Tiles | None:
    """Returns how the script says that the variable lies; None: it says nothing."""
    return getattr(captured.variable, "_whale_tiles", None)


def refuse_other_tiles(
    captured: Iterable[CapturedVariable], known: Mapping[str, Tiles], planned: Mapping[str, Tiles]
) -> None:
    """Refuses a plan under which a variable does not lie as the script says.

    Args:
      known: what planning was told of the variables, by handle node. One that a program has used before the script gave
        it a layout is known by another, and stays so.
      planned: of the variables that lie split.

    Raises:
      PlanError: with the first such variable.
    """
    for c in captured:
        given = find_given_tiles(c)
        if given is None or not given.cuts or known.get(c.node) != given:
            continue
        found = planned.get(c.node, Tiles())
        if found.cuts != given.cuts:
            where = str(found) if found.cuts else "whole, or on one stage only"
            raise PlanError(
                "a variable cannot lie as the script says",
                op=c.name,
                given=f"{given} by a LayoutMap; in the plan it is {where}",
                expected="a program in which all ranks of the mesh's axes have a part of it: without wh.stage",
                action="leave the variable out of the LayoutMap, or leave stages out",
            )
