"""Calibrates the intervals of predictions on published rows: split conformal prediction with scores scaled by group.

A group is the rows of one stack on devices of one efficiency curve. Its centre is the mean of log(measured /
predicted), drawn towards 0; its scale is their spread, drawn towards that of all groups (`PRIOR_ROWS` rows of prior
weight each). A row's score is its distance from the centre divided by the scale, both computed without that row. The
interval reaches as many scales as cover nine of ten scores (Vovk, "Cross-conformal predictors", 2015; Papadopoulos et
al., "Normalized nonconformity measures", 2008): scores of all groups of fewer than `FEW_ROWS` rows, of all groups of
fewer than `OWN_ROWS`, or, for larger groups, of the group alone.

A row on which a constant was fitted counts as it would be predicted without it (`FITTED`): the constant is refitted on
the other rows, to first order.

Decision: 0155.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import msgspec

from cost_model.analytic import stacks
from cost_model.analytic.stacks import Compared, Stack, curve_of
from cost_model.hardware import catalogue
from cost_model.hardware.catalogue import Efficiency
from cost_model.kernels import compute
from cost_model.kernels.interval import PART
from cost_model.validation import cases
from cost_model.validation.cases import Case, read_published_cluster
from cost_model.validation.report import Result

PRIOR_ROWS = 3.0  # with 2 to 5, as many rows are inside the intervals
OWN_ROWS = 19  # groups from this size on have a quantile of their own: it is then not just the outermost row
FEW_ROWS = 10  # smaller groups know their scale less well, so rows are off by more scales, as in Student's distribution
STEP = 0.02  # relative change of a fitted constant, to find the slope of predictions by it

Group = tuple[str, str]  # (stack, efficiency curve)


@dataclass(frozen=True, slots=True)
class Fitted:
    """Represents a constant that was fitted on some of the published rows.

    Attributes:
        field: name of a field of a stack, or of a device's efficiency curve.
        owner: name of that stack or curve.
        uses: returns True for rows that the constant was fitted on.
        dtype: key of the value, if the field is a mapping by dtype; "": it is a number.
    """

    field: str
    owner: str
    uses: Callable[[Case], bool]
    dtype: str = ""


def _on(curve: str, software: str) -> Callable[[Case], bool]:
    return lambda case: case.stack.startswith(software) and group_of(case)[1] == curve


FITTED = (
    Fitted("pointwise_passes", "deepspeed-2022", lambda case: case.stack == "deepspeed-2022"),
    Fitted("matmul_fractions", "volta", _on("volta", "tensorflow"), "float32"),
    Fitted("matmul_fractions", "ampere-sxm", _on("ampere-sxm", "tensorflow"), "tf32"),
)


def group_of(case: Case) -> Group:
    """Returns the (stack, efficiency curve) of a row; different devices of one job form a curve of their own."""
    hosts = read_published_cluster(case.cluster).hosts
    return case.stack, curve_of(entry.device for host in hosts for entry in host.devices)


def unseen_residuals(found: Sequence[Result]) -> list[float]:
    """Returns log(measured / predicted) of every row, corrected as if no constant had been fitted on that row."""
    rows = [one.case for one in found]
    seen = [_residual(one.case, one.predicted_s) for one in found]
    moved = list(seen)
    for constant in FITTED:
        own = [i for i, case in enumerate(rows) if constant.uses(case)]
        if len(own) < 2:
            continue
        with _changed(constant, 1 + STEP):
            slopes = {i: (_residual(rows[i], rows[i].predict().step_s) - seen[i]) / STEP for i in own}
        squares = sum(slope * slope for slope in slopes.values())
        products = sum(slopes[i] * seen[i] for i in own)
        for i in own:  # least squares on the other rows
            rest = squares - slopes[i] ** 2
            change = -(products - slopes[i] * seen[i]) / rest if rest > 0 else 0.0
            now = -products / squares if squares > 0 else 0.0
            moved[i] += slopes[i] * (change - now)
    return moved


def _residual(case: Case, predicted_s: float) -> float:
    return math.log(case.measured_s / predicted_s)


def _changed(constant: Fitted, times: float) -> mock._patch[object]:
    """Returns a context manager in which a fitted constant has `times` its value."""
    if not constant.dtype:
        one = stacks.stack(constant.owner)
        changed: Stack = msgspec.structs.replace(one, **{constant.field: times * getattr(one, constant.field)})
        return mock.patch.object(cases, "stack", lambda name: changed if name == one.name else stacks.stack(name))
    curves: Mapping[str, Efficiency] = catalogue.load_efficiencies()
    curve = curves[constant.owner]
    fractions = {**getattr(curve, constant.field)}
    fractions[constant.dtype] *= times
    new = msgspec.structs.replace(curve, **{constant.field: fractions})
    return mock.patch.object(compute, "load_efficiencies", lambda: {**curves, constant.owner: new})


@dataclass(frozen=True, slots=True)
class _Spread:
    """Holds the centre and the scale of a group's residuals, and the number of its rows."""

    centre: float
    scale: float
    count: int


def _spread(residuals: Sequence[float], prior: float) -> _Spread:
    count = len(residuals)
    centre = sum(residuals) / (count + PRIOR_ROWS)
    squares = sum((e - centre) ** 2 for e in residuals) + PRIOR_ROWS * (prior**2 + centre**2)
    variance = squares / (count + PRIOR_ROWS)
    return _Spread(centre, math.sqrt(variance * (1 + 1 / (count + PRIOR_ROWS))), count)


def _prior(groups: Mapping[Group, Sequence[float]]) -> float:
    """Returns the scale of a group without rows: the median of all groups' scales, as outliers make some wide."""
    each = sorted(math.sqrt(sum(e * e for e in own) / len(own)) for own in groups.values())
    return each[len(each) // 2]


def _quantile(scores: Sequence[float]) -> float:
    """Returns the value that the next score does not exceed with a probability of `PART`; the largest if scores are
    too few.
    """
    ordered = sorted(scores)
    return ordered[min(len(ordered), math.ceil((len(ordered) + 1) * PART)) - 1]


# What `find_common` returns for the package's rows, used for users' own stacks: the scale of a group without rows, and
# how many scales nine of ten rows are off at most, in groups of fewer than `FEW_ROWS` rows and in larger ones.
COMMON_SCALE, COMMON_REACH = 0.06, (2.393, 1.741)

Reach = tuple[float, float]


def compare(residuals: Sequence[float], prior: float = COMMON_SCALE, common: Reach = COMMON_REACH) -> Compared:
    """Returns the interval of one group.

    Args:
        residuals: log(measured / predicted) of rows that the stack was not fitted on.
        prior: scale of a group without rows.
        common: how many scales the interval of a small group reaches (see `find_common`).
    """
    spread = _spread(residuals, prior)
    own = len(residuals) >= OWN_ROWS
    shared = common[len(residuals) >= FEW_ROWS]
    reach = (_quantile(_scores(residuals, prior)) if own else shared) * spread.scale
    low, high = (math.exp(spread.centre + sign * reach) for sign in (-1, 1))
    return Compared(len(residuals), min(1.0, round(low, 3)), max(1.0, round(high, 3)))


def find_common(residuals: Mapping[Group, Sequence[float]]) -> tuple[float, Reach]:
    """Returns the figures that groups with few rows share: (scale of a group without rows, reaches of intervals).

    A reach is the number of scales within which nine of ten scores lie. There are two: one for groups of fewer than
    `FEW_ROWS` rows, and one for groups of fewer than `OWN_ROWS`; larger groups have reaches of their own. Each is the
    quantile of the scores of all groups of that size. If these groups have fewer than `OWN_ROWS` rows together, it is
    the quantile over all groups, or the largest of these groups' scores if that is more.
    """
    prior = _prior(residuals)
    scores = [(len(own), score) for own in residuals.values() for score in _scores(own, prior)]
    every = _quantile([score for _, score in scores])
    found = []
    for least, most in ((1, FEW_ROWS), (FEW_ROWS, OWN_ROWS)):
        alike = [score for count, score in scores if least <= count < most]
        found.append(_quantile(alike) if len(alike) >= OWN_ROWS else max([every, *alike]))
    return prior, (found[0], found[1])


def calibrate(residuals: Mapping[Group, Sequence[float]]) -> dict[Group, Compared]:
    """Returns the interval of each group.

    Args:
        residuals: log(measured / predicted) of the rows of each group.
    """
    prior, common = find_common(residuals)
    return {group: compare(own, prior, common) for group, own in residuals.items()}


def _scores(residuals: Sequence[float], prior: float) -> list[float]:
    """Returns the score of each row of a group, by centre and scale of the group's other rows."""
    found = []
    for i, residual in enumerate(residuals):
        spread = _spread([*residuals[:i], *residuals[i + 1 :]], prior)
        found.append(abs(residual - spread.centre) / spread.scale)
    return found


def left_out(residuals: Mapping[Group, Sequence[float]]) -> dict[Group, list[bool]]:
    """Returns, for each row of each group, whether it is inside the interval that is calibrated on all other rows."""
    found = {}
    for group, own in residuals.items():
        inside = []
        for i, residual in enumerate(own):
            others = {**residuals, group: [*own[:i], *own[i + 1 :]]}
            known = {g: rows for g, rows in others.items() if rows}
            if group not in known:
                inside.append(abs(residual) <= _quantile_of_none(known))
                continue
            one = calibrate(known)[group]
            inside.append(one.low <= math.exp(residual) <= one.high)
        found[group] = inside
    return found


def _quantile_of_none(residuals: Mapping[Group, Sequence[float]]) -> float:
    prior, common = find_common(residuals)
    return common[0] * _spread([], prior).scale


def grouped(found: Sequence[Result]) -> dict[Group, list[float]]:
    """Returns the residuals of all rows by group, in the order of the rows."""
    groups: dict[Group, list[float]] = {}
    for one, residual in zip(found, unseen_residuals(found), strict=True):
        groups.setdefault(group_of(one.case), []).append(residual)
    return groups


def each_left_out(tables: Sequence[Sequence[Result]]) -> list[list[bool]]:
    """Returns, for each row of each table, whether it is inside the interval that is calibrated on all other rows."""
    inside = {group: iter(own) for group, own in left_out(grouped([one for own in tables for one in own])).items()}
    return [[next(inside[group_of(one.case)]) for one in own] for own in tables]


def written(text: str, compared: Mapping[str, Compared]) -> str:
    """Returns the text of a stack file with its `compared` entries replaced.

    Args:
        text: the file's present text.
        compared: intervals by efficiency curve.
    """
    each = "".join(
        f"  {curve}: {{rows: {one.rows}, low: {one.low}, high: {one.high}}}\n"
        for curve, one in sorted(compared.items())
    )
    text = re.sub(r"^compared:.*\n(?:  [\w+-]+: \{rows.*\n)*", "", text, flags=re.M)
    if not each:
        return text
    head, mark, sources = text.partition("sources:\n")
    return f"{head}compared:\n{each}{mark}{sources}"


def write(folder: Path, found: Mapping[Group, Compared]) -> None:
    """Writes intervals into the stack files of a folder; a stack without one loses those that it had."""
    for path in sorted(folder.glob("*.yaml")):
        own = {curve: one for (name, curve), one in found.items() if name == path.stem}
        path.write_text(written(path.read_text(), own))
