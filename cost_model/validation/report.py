"""Reports errors of predictions as text: a line per row, then one line per table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cost_model.validation.cases import Case, Published
from whale.errors import ProgramError, WhaleError


@dataclass(frozen=True, slots=True)
class Result:
    """A case with its prediction."""

    case: Case
    predicted_s: float

    @property
    def error(self) -> float:
        """Returns the relative error: 0.05 means that the prediction is 5 % too long."""
        return self.predicted_s / self.case.measured_s - 1


def results(cases: Sequence[Case]) -> list[Result]:
    """Predicts all cases; raises an error that names a case that cannot be predicted."""
    found = []
    for case in cases:
        try:
            found.append(Result(case, case.predict().step_s))
        except WhaleError as error:
            raise ProgramError(f"the row {case.label} cannot be predicted", given=str(error)) from error
    return found


def mape(found: Sequence[Result]) -> float:
    """Returns the mean of the errors' absolute values."""
    return sum(abs(one.error) for one in found) / len(found)


def maximum(found: Sequence[Result]) -> float:
    """Returns the largest of the errors' absolute values."""
    return max(abs(one.error) for one in found)


def kendall_tau(found: Sequence[Result]) -> float:
    """Returns Kendall's tau-b between predicted and measured order."""
    agree = differ = tied_x = tied_y = 0
    for i, one in enumerate(found):
        for other in found[:i]:
            x = one.predicted_s - other.predicted_s
            y = one.case.measured_s - other.case.measured_s
            if x == 0 and y == 0:
                continue
            if x == 0:
                tied_x += 1
            elif y == 0:
                tied_y += 1
            elif (x > 0) == (y > 0):
                agree += 1
            else:
                differ += 1
    total = ((agree + differ + tied_x) * (agree + differ + tied_y)) ** 0.5
    return (agree - differ) / total if total else 1.0


def by_size(found: Sequence[Result]) -> dict[str, list[Result]]:
    """Groups rows by size of the model; plans are ranked within a group."""
    groups: dict[str, list[Result]] = {}
    for one in found:
        groups.setdefault(one.case.size, []).append(one)
    return groups


def choice_loss(found: Sequence[Result]) -> float:
    """Returns by how much the plan that is predicted best is slower than the one measured best."""
    chosen = min(found, key=lambda one: one.predicted_s)
    return chosen.case.measured_s / min(one.case.measured_s for one in found) - 1


def table(title: str, found: Sequence[Result]) -> str:
    """Formats one line per row: the run, seconds measured and predicted, error in percent."""
    width = max(len(one.case.label) for one in found)
    lines = [title, f"  {'row':{width}}  measured s  predicted s  error %"]
    for one in found:
        case = one.case
        lines.append(
            f"  {case.label:{width}}  {case.measured_s:10.3f}  {one.predicted_s:11.3f}  {100 * one.error:+7.1f}"
        )
    return "\n".join(lines)


def summary(table: Published, found: Sequence[Result]) -> str:
    """Formats one line: MAPE and maximum error in percent; for plans also Kendall's tau and the choice's loss, by
    size.
    """
    text = f"{table.name}: {len(found)} rows, MAPE {100 * mape(found):.2f} %, maximum {100 * maximum(found):.2f} %"
    if table.ranked:
        groups = {size: group for size, group in by_size(found).items() if len(group) > 2}
        taus = ", ".join(f"{size}B {kendall_tau(group):.2f}" for size, group in groups.items())
        losses = ", ".join(f"{size}B {100 * choice_loss(group):.1f}" for size, group in groups.items())
        text += f"; Kendall tau {taus}; first choice slower than the best by % {losses}"
    return text


def page(rows: str, lines: str) -> str:
    """Returns the docs' page with all rows."""
    return (
        "# Predicted and published step times\n\n"
        "Written by `python -m cost_model.validation --out docs`; [the cost model](guides/cost_model.md) explains. A\n"
        "row's label: tensor-parallel ranks t, pipeline stages p, data-parallel ranks d, chunks per stage v, size of\n"
        "a micro-batch x micro-batches b, recompute. A negative error is a prediction that is too short.\n\n"
        f"```\n{lines}\n\n{rows}\n```\n\n![Predicted against measured step time, one dot per row](validation.svg)\n"
    )
