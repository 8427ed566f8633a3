"""A stage group's part of a program, axis by axis: what a group runs is lowered without the rest of the program."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from whale.ir.layout import Strategy
from whale.ir.plan import Plan
from whale.ir.program import Program
from whale.partition.axis_partitioner import AxisPartitioner
from whale.passes.lay_out import expand
from whale.passes.order import plan_of_part

# A part as ranks with some first coordinates run it, and these -> how tensors come in and go out over the next axis.
Ends = Callable[[Program, tuple[int, ...]], Mapping[str, Strategy]]


class StagePartitioner(AxisPartitioner):
    """The levels of a part. Its plans are those of the whole program, as far as the part goes.

    Where ranks run what those with the first coordinates run, but for values, they keep to the plan of these, whatever
    the rest of the program is there.
    """

    def __init__(self, whole: AxisPartitioner, part: Program, ends: Ends):
        """
        Args:
          whole: the levels of the program that the part is of; part: as no axis has divided it yet.
        """
        super().__init__(part, whole.settings, whole.axes, whole.rows, whole.models)
        self.whole, self.ends = whole, ends

    def program(self, at: tuple[int, ...]) -> Program:
        """What the ranks with these first coordinates run of the part."""
        if at not in self._programs:
            self._programs[at] = self.lowered(at)
        return self._programs[at]

    def plan(self, at: tuple[int, ...]) -> Plan:
        """The plan of the axis after these coordinates, of the part."""
        if at not in self._plans:
            one = (0,) * len(at) if self.is_like_first(at) else at
            model, settings = self.whole.plan(one), self.whole.settings_at(one)
            expanded = self._expanded[at] = expand(self.program(at), model.expanded, settings)
            self._plans[at] = plan_of_part(self.seen(expanded, len(at)), settings, model, self.ends(expanded, at))
        return self._plans[at]

    def all_compute(self) -> bool:
        """Whether no rank has constants where others compute, in any part of the program."""
        return self.whole.all_compute()
