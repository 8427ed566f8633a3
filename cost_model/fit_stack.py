"""Fits a software stack to measured steps: the values of some of its fields, their error, and the interval that
follows.

Fields are fitted as factors on the base stack's values, by least squares of log(predicted / measured) with a prior for
each factor (ridge regression), so that few rows move a field only as far as they support it. Of the candidates in
`FIELDS` only those are fitted that lower the error of rows that are left out. The error on unseen rows is estimated by
leaving out each row in turn, from the linearised fit (the hat matrix).

Decision: 0156.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import yaml

from cost_model.analytic.predict import predict
from cost_model.analytic.stacks import Compared, Stack, is_file, stack
from cost_model.validation.cases import Case, read, read_published_cluster
from cost_model.validation.intervals import compare, group_of
from whale.errors import ProgramError

# Candidates: the fields that share one factor, and the standard deviation of that factor's logarithm between software
# stacks (the prior). In order: the time of all kernels, memory traffic between products, host time per launch, per pass
# and per step.
FIELDS: dict[str, tuple[tuple[str, ...], float]] = {
    "kernel_time": (("kernel_time",), 0.3),
    "pointwise": (("pointwise_passes", "norm_bytes"), 0.7),
    "launches": (("host_us", "backward_host_us", "collective_host_us"), 0.7),
    "pass_host_us": (("pass_host_us",), 1.0),
    "step_ms": (("step_ms",), 1.5),
}
NOISE = 0.03  # of a measured step, relative
LEAST_ROWS = 5
STEP = 0.05  # of a factor's logarithm, for a slope
FIRST_STEP, LAST_STEP = 1.2, 0.01  # of a factor's logarithm, in a search
BETTER = 0.9  # a further field is fitted if it lowers the mean square of rows left out at least by this factor
MOST_CHANGE = 2.5  # of a factor's logarithm


@dataclass(frozen=True, slots=True)
class Fit:
    """Holds a fitted stack and its errors.

    Attributes:
        base: the stack that the fit started from.
        fields: fields that differ from the base, with their values.
        rows: the measured steps that it was fitted to.
        before: log(predicted / measured) of each row under the base.
        after: the same under the fitted stack.
        left_out: the same under the stack fitted without that row.
        compared: the interval of further steps, by efficiency curve.
    """

    base: Stack
    fields: Mapping[str, float]
    rows: Sequence[Case]
    before: Sequence[float]
    after: Sequence[float]
    left_out: Sequence[float]
    compared: Mapping[str, Compared]


def fit_rows(rows: Sequence[Case], base: Stack) -> Fit:
    """Fits a stack to measured rows, starting from `base`.

    Raises:
        ProgramError: there are fewer than five rows.
        WhaleError: a row cannot be predicted (its own error).
    """
    if len(rows) < LEAST_ROWS:
        raise ProgramError(
            "too few rows to fit a stack",
            given=f"{len(rows)} measured steps",
            expected=f"{LEAST_ROWS} or more, better ten",
            action="add rows of further measured steps to the table",
        )
    names = [name for name, (fields, _) in FIELDS.items() if getattr(base, fields[0]) > 0]
    before = _residuals(rows, base, {})
    factors: dict[str, float] = {}
    found = left_out = before
    while len(factors) < min(len(names), len(rows) // 3):
        tried = [_with(rows, base, factors, name, found) for name in names if name not in factors]
        best = min(tried, key=lambda one: _mean_square(one[2]))
        if _mean_square(best[2]) > BETTER * _mean_square(left_out):
            break
        factors, found, left_out = best
    curves: dict[str, list[float]] = {}
    for case, residual in zip(rows, left_out):
        curves.setdefault(group_of(case)[1], []).append(-residual)
    compared = {curve: compare(own) for curve, own in curves.items()}
    return Fit(base, _values(base, factors), rows, before, found, left_out, compared)


def _with(
    rows: Sequence[Case], base: Stack, start: Mapping[str, float], name: str, before: Sequence[float]
) -> tuple[dict[str, float], list[float], list[float]]:
    """Fits one more field, `name`, together with those already fitted (`start`).

    Uses coordinate search with long first steps: a pass takes the longer of two times, so a factor may have no effect
    until it is large.

    Returns:
        (logarithm of each field's factor, residuals under them, residuals of rows that are left out).
    """
    factors = {**start, name: 0.0}
    found, least, step = list(before), _loss(before, factors), FIRST_STEP
    while step > LAST_STEP:
        improved = False
        for field in factors:
            for by in (step, -step):
                tried = {**factors, field: factors[field] + by}
                if abs(tried[field]) > MOST_CHANGE:
                    continue
                residuals = _residuals(rows, base, tried)
                if (loss := _loss(residuals, tried)) < least:
                    factors, found, least, improved = tried, residuals, loss, True
                    break
        step = step if improved else step / 3
    slopes = _slopes(rows, base, factors, list(factors), found)
    return factors, found, _left_out(found, slopes, list(factors), factors)


def _loss(residuals: Sequence[float], factors: Mapping[str, float]) -> float:
    prior = sum((by / FIELDS[name][1]) ** 2 for name, by in factors.items())
    return sum((residual / NOISE) ** 2 for residual in residuals) + prior


def _values(base: Stack, factors: Mapping[str, float]) -> dict[str, float]:
    return {
        field: float(f"{getattr(base, field) * math.exp(by):.4g}")
        for name, by in factors.items()
        for field in FIELDS[name][0]
    }


def _residuals(rows: Sequence[Case], base: Stack, factors: Mapping[str, float]) -> list[float]:
    changed: Stack = msgspec.structs.replace(base, **_values(base, factors))
    found = []
    for case in rows:
        if case.error is not None:
            raise case.error
        step_s = predict(case.model, case.parallel, changed, read_published_cluster(case.cluster)).step_s
        found.append(math.log(step_s / case.measured_s))
    return found


Slopes = Mapping[str, Sequence[float]]


def _slopes(
    rows: Sequence[Case], base: Stack, factors: Mapping[str, float], names: Sequence[str], now: Sequence[float]
) -> dict[str, list[float]]:
    found = {}
    for name in names:
        moved = _residuals(rows, base, {**factors, name: factors.get(name, 0.0) + STEP})
        found[name] = [(b - a) / STEP for a, b in zip(now, moved)]
    return found


def _solve(
    residuals: Sequence[float], slopes: Slopes, names: Sequence[str], factors: Mapping[str, float]
) -> dict[str, float]:
    """Solves the ridge regression for the changes of the factors' logarithms, by Gaussian elimination.

    Args:
        residuals: log(predicted / measured) of each row.
        slopes: derivative of each row's residual by each factor's logarithm.
        names: the factors.
        factors: their present logarithms, which the prior pulls towards 0.
    """
    size = len(names)
    rows = [
        [
            *(sum(a * b for a, b in zip(slopes[one], slopes[other])) / NOISE**2 for other in names),
            -sum(a * e for a, e in zip(slopes[one], residuals)) / NOISE**2
            - factors.get(one, 0.0) / FIELDS[one][1] ** 2,
        ]
        for one in names
    ]
    for i, name in enumerate(names):
        rows[i][i] += 1 / FIELDS[name][1] ** 2
    for i in range(size):
        for j in range(size):
            if i != j:
                by = rows[j][i] / rows[i][i]
                rows[j] = [b - by * a for a, b in zip(rows[i], rows[j])]
    return {name: rows[i][size] / rows[i][i] for i, name in enumerate(names)}


def _left_out(
    residuals: Sequence[float], slopes: Slopes, names: Sequence[str], factors: Mapping[str, float]
) -> list[float]:
    """Returns the residual of each row under a fit to all other rows, linearised around the present factors."""
    found = []
    for i, residual in enumerate(residuals):
        others = {name: [*own[:i], *own[i + 1 :]] for name, own in slopes.items()}
        steps = _solve([*residuals[:i], *residuals[i + 1 :]], others, names, factors)
        found.append(residual + sum(steps[name] * slopes[name][i] for name in names))
    return found


def _mean_square(values: Sequence[float]) -> float:
    return sum(value * value for value in values) / len(values)


def _mean(values: Sequence[float]) -> str:
    return f"{100 * sum(abs(math.expm1(value)) for value in values) / len(values):.1f} %"


def format_fit(found: Fit, path: Path, name: str) -> str:
    """Formats a fitted stack as the YAML text of a stack file: base, changed fields, sources, and how far rows were
    off.
    """
    own = found.base.name
    data: dict[str, object] = {"name": name, "base": own, **found.fields}
    if any(case.model.experts for case in found.rows):
        data["compared_experts"] = True
    data["compared"] = {curve: msgspec.to_builtins(one) for curve, one in found.compared.items()}
    if found.fields:
        data["sources"] = {",".join(found.fields): f"fitted on {len(found.rows)} rows of {path.name}"}
    return yaml.safe_dump(data, sort_keys=False, width=120)


def describe_fit(found: Fit) -> str:
    """Formats a fit as text for a person: the errors of each row, the fields that changed, and the interval that
    follows.
    """
    width = max(len(case.label) for case in found.rows)
    lines = [f"{'row':{width}}  measured s  base %  fitted %  left out %"]
    for case, *errors in zip(found.rows, found.before, found.after, found.left_out):
        base, fitted, left_out = (100 * math.expm1(error) for error in errors)
        text = f"{case.label:{width}}  {case.measured_s:10.3f}  {base:+6.1f}  {fitted:+8.1f}  {left_out:+10.1f}"
        lines.append(text)
    for field, value in found.fields.items():
        lines.append(f"{field}: {value:g} instead of {getattr(found.base, field):g}")
    if not found.fields:
        lines.append(f"nothing is fitted: no field makes rows that are left out better than {found.base.name} is")
    lines.append(
        f"mean error of {len(found.rows)} rows: {_mean(found.before)} under {found.base.name}, "
        f"{_mean(found.after)} fitted, {_mean(found.left_out)} of rows that were left out"
    )
    for curve, one in found.compared.items():
        lines.append(f"nine of ten further steps on {curve} between {one.low:g} and {one.high:g} of the prediction")
    return "\n".join(lines)


def fit_file(path: Path, base: str, cluster: str | None, out: Path) -> str:
    """Fits a stack to a table of measured steps, writes the stack's file, and returns a description of the fit as text.

    Args:
        path: CSV table of the form that `validation/cases.py` reads.
        base: name of the package's stack that the fit starts from.
        cluster: cluster of rows that name none.
        out: the stack file to write; its name becomes the stack's.

    Raises:
        ProgramError: the file is no such table, or has fewer than five rows.
        PlanError, ClusterError: a row's plan is impossible, or its cluster is not known.
    """
    if is_file(base):
        raise ProgramError(
            "a stack cannot be fitted from a stack file: its base must be one of the package's stacks",
            given=base,
            expected="a name, e.g. megatron-core-bf16",
            action="name one by --stack, or leave --stack out for megatron-core-bf16",
        )
    _, rows = read(path, software=base, cluster=cluster, strict=True)
    found = fit_rows(rows, stack(base))
    out.write_text(format_fit(found, path, out.stem))
    return describe_fit(found)
