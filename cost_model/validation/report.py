"""Reports errors of predictions as text: a line per row, then one line per table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cost_model.analytic.evaluate import likely_s
from cost_model.analytic.stacks import stack
from cost_model.analytic.transformer_model import stack_of
from cost_model.cluster.pools import Machines
from cost_model.validation.cases import Case, Published, read_published_cluster
from whale.errors import WhaleError


@dataclass(frozen=True, slots=True)
class Result:
    """Holds a measured step with its prediction.

    Attributes:
        case: the measured step.
        predicted_s: predicted seconds of the step.
        likely_s: interval in which nine of ten measured steps with this prediction are expected.
        problem: why the step could not be predicted; "": it could.
        fits: whether all ranks have enough memory, by the prediction.
        peak_gb: predicted peak memory in GB of the rank that needs most.
    """

    case: Case
    predicted_s: float
    likely_s: tuple[float, float] = (0.0, 0.0)
    problem: str = ""
    fits: bool = True
    peak_gb: float = 0.0

    @property
    def inside(self) -> bool:
        """Returns True if the measured step is in the interval `likely_s`."""
        return self.likely_s[0] <= self.case.measured_s <= self.likely_s[1]

    @property
    def error(self) -> float:
        """Returns the relative error: 0.05 means that the prediction is 5 % too long."""
        return self.predicted_s / self.case.measured_s - 1


def results(cases: Sequence[Case]) -> list[Result]:
    """Predicts all cases; a case that cannot be predicted gets a result whose `problem` says why."""
    found = []
    for case in cases:
        try:
            one = case.predict()
            likely = likely_s(
                stack_of(stack(case.stack), case.model),
                one.strategy,
                Machines(read_published_cluster(case.cluster)),
                one.step_s,
            )
            found.append(Result(case, one.step_s, likely, fits=one.evaluation.fits, peak_gb=one.peak_bytes / 1e9))
        except WhaleError as error:
            found.append(Result(case, 0.0, problem=" ".join(str(error).split())))
    return found


def mape(found: Sequence[Result]) -> float:
    """Returns the mean absolute error of the predictions, relative (0.05: 5 %)."""
    return sum(abs(one.error) for one in found) / len(found)


def maximum(found: Sequence[Result]) -> float:
    """Returns the largest absolute error of the predictions, relative."""
    return max(abs(one.error) for one in found)


def kendall_tau(found: Sequence[Result]) -> float:
    """Returns Kendall's tau-b between predicted and measured order of rows: 1 if they agree, -1 if they are
    opposite.
    """
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


def group_by_size(found: Sequence[Result]) -> dict[str, list[Result]]:
    """Groups rows by `Case.size`; plans are ranked within a group."""
    groups: dict[str, list[Result]] = {}
    for one in found:
        groups.setdefault(one.case.size, []).append(one)
    return groups


def choice_loss(found: Sequence[Result]) -> float:
    """Returns by how much the plan that is predicted fastest is slower than the one measured fastest, relative."""
    chosen = min(found, key=lambda one: one.predicted_s)
    return chosen.case.measured_s / min(one.case.measured_s for one in found) - 1


def table(title: str, found: Sequence[Result]) -> str:
    """Formats one line per row: label, seconds measured and predicted, error in percent, interval; `*`: outside of
    it.
    """
    width = max(len(one.case.label) for one in found)
    lines = [title, f"  {'row':{width}}  measured s  predicted s  error %  nine of ten s"]
    for one in found:
        case = one.case
        text = f"  {case.label:{width}}  {case.measured_s:10.3f}  "
        if one.problem:
            lines.append(f"{text}not predicted: {one.problem}")
            continue
        low_s, high_s = one.likely_s
        text += f"{one.predicted_s:11.3f}  {100 * one.error:+7.1f}  {low_s:.3f} to {high_s:.3f}"
        text += "" if one.inside else " *"
        if case.peak_gb:
            more = 100 * (one.peak_gb / case.peak_gb - 1)
            text += f", peak {case.peak_gb:.2f} GB, predicted {one.peak_gb:.2f} ({more:+.1f} %)"
        lines.append(text if one.fits else f"{text} does not fit into memory")
    return "\n".join(lines)


def summary(table: Published, found: Sequence[Result], left_out: Sequence[bool] | None = None) -> str:
    """Formats the errors of one table as a line: MAPE, maximum, rows inside their intervals.

    Tables in which plans are ranked also get Kendall's tau and the choice's loss for each size of model.

    Args:
        left_out: whether each row is inside the interval that is calibrated on all other rows; None: the stacks' own
            intervals count.
    """
    lacking, found = [one for one in found if one.problem], [one for one in found if not one.problem]
    if not found:
        return f"{table.name}: none of {len(lacking)} rows could be predicted"
    text = f"{table.name}: {len(found)} rows, MAPE {100 * mape(found):.2f} %, maximum {100 * maximum(found):.2f} %"
    inside = sum(one.inside for one in found) if left_out is None else sum(left_out)
    text += f", {inside} in {'their intervals' if left_out is None else 'the interval of the other rows'}"
    if peaks := [abs(one.peak_gb / one.case.peak_gb - 1) for one in found if one.case.peak_gb]:
        text += f"; peak memory of {len(peaks)} rows: MAPE {100 * sum(peaks) / len(peaks):.2f} %"
    if misfits := sum(not one.fits for one in found):
        text += f"; {misfits} ran and do not fit into memory, by the prediction"
    text += f"; {len(lacking)} could not be predicted" if lacking else ""
    if table.ranked:
        groups = {size: group for size, group in group_by_size(found).items() if len(group) > 2}
        taus = ", ".join(f"{size}B {kendall_tau(group):.2f}" for size, group in groups.items())
        losses = ", ".join(f"{size}B {100 * choice_loss(group):.1f}" for size, group in groups.items())
        text += f"; Kendall tau {taus}; first choice slower than the best by % {losses}"
    return text


def page(rows: str, lines: str) -> str:
    """Returns the documentation's page (Markdown) with the summaries `lines` and all `rows`."""
    return (
        "# Predicted and published step times\n\n"
        "Written by `python -m cost_model.validation --out docs`; [the cost model](guides/cost_model.md) explains. A\n"
        "row's label: tensor-parallel ranks t, pipeline stages p, data-parallel ranks d, chunks per stage v, size of\n"
        "a micro-batch x micro-batches b, recompute. A negative error is a prediction that is too short. Nine of ten\n"
        "steps are expected in the interval of the last column; `*`: the measured one is not there. The lines of\n"
        "tables count how many rows lie in the interval that is calibrated without them.\n\n"
        f"```\n{lines}\n\n{rows}\n```\n\n![Predicted against measured step time, one dot per row](validation.svg)\n"
    )
