"""Proves rules numerically: an op on the whole tensors against the op on simulated shards.

For every case (an op with attributes and operand shapes) the strategies that its rule gives are run on 2 and 3
coordinates with even, uneven and empty shares: a difference is a *wrong* rule. Placements that the rule does not allow
are tried as well: where the numbers agree nevertheless, for several draws, a strategy is *missing*. The method is that
of PyTorch DTensor's ``strategy_validation``. TensorFlow stays outside: the caller evaluates ops.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from whale.errors import RuleError
from whale.ir.layout import P_SUM, B, Partial, Placement, Replicate, Shard, divide_evenly, shard
from whale.ir.marks import NO_MARKS, Marks
from whale.ir.program import Node
from whale.ir.values import Dims, TensorType
from whale.sharding_rules.base import OpView, Strategy
from whale.sharding_rules.empty import find_known_outputs
from whale.sharding_rules.notation import FIRST_RANK, Line, parse
from whale.sharding_rules.registry import LineRule, find_rule, list_operand_terms

Evaluate = Callable[[str, Mapping[str, Any], Sequence[np.ndarray]], list[np.ndarray]]
_PARTIALS = ("sum", "max", "min", "prod")
_COMBINATIONS = 200


@dataclass(frozen=True, slots=True)
class Case:
    """An op to try: ``draw(seed)`` gives its operands; ``consts`` are the operand numbers that are constants.

    ``search``: also try what the rule forbids (not where the kernel ends the process on shapes that do not fit, or
    where numbers that agree would say nothing).
    """

    op: str
    draw: Callable[[int], list[np.ndarray]]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    consts: frozenset[int] = frozenset()
    note: str = ""
    search: bool = True
    marks: Marks = NO_MARKS

    def __str__(self) -> str:
        return f"{self.op} {self.note}".strip()


@dataclass(frozen=True, slots=True)
class Finding:
    """``kind`` is ``wrong`` (the rule allows it, the numbers differ) or ``missing`` (forbidden, the numbers agree)."""

    kind: str
    case: str
    strategy: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.case}: {self.strategy}" + (f"  ({self.detail})" if self.detail else "")


@dataclass(frozen=True, slots=True)
class Proof:
    """What came of one case: how many strategies were run, and what was found."""

    case: str
    strategies: int
    findings: tuple[Finding, ...]


def type_of(array: np.ndarray) -> TensorType:
    """The tensor type of an operand."""
    name = "string" if array.dtype.kind in "OSU" else array.dtype.name
    return TensorType(name, tuple(array.shape))


def view_of(case: Case, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], parts: int) -> OpView:
    """The case as its rule sees it."""
    node = Node("case", case.op, (), (), case.attrs, tuple(map(type_of, outputs)), marks=case.marks)
    return OpView(node, tuple(map(type_of, inputs)), parts, lambda i: inputs[i] if i in case.consts else None)


def views_that_know_less(op: OpView) -> Iterator[OpView]:
    """Yields views of which some sizes are unknown until the run: one alone, all that are equal to it, all but those;
    or all of one tensor, its rank included.
    """
    types = (*op.inputs, *op.outputs)

    def show(shapes: Sequence[Dims | None]) -> OpView:
        shown = [TensorType(t.dtype, shape) for t, shape in zip(types, shapes)]
        outputs, inputs = tuple(shown[len(op.inputs) :]), tuple(shown[: len(op.inputs)])
        return replace(op, node=replace(op.node, outputs=outputs), inputs=inputs)

    for i in (i for i, t in enumerate(types) if 0 not in (t.shape or ())):  # but what a kernel leaves empty
        yield show([None if i == j else t.shape for j, t in enumerate(types)])
    places = [(i, d) for i, t in enumerate(types) for d in range(len(t.shape or ()))]
    size = {(i, d): (types[i].shape or ())[d] for i, d in places}
    seen = set()
    for at in places:
        equal = frozenset(p for p in places if size[p] == size[at])
        for hidden in (frozenset({at}), equal, frozenset(places) - equal):
            if hidden not in seen:
                seen.add(hidden)
                yield show(
                    [
                        tuple(None if (i, d) in hidden else n for d, n in enumerate(t.shape or ()))
                        for i, t in enumerate(types)
                    ]
                )


def cut_array(array: np.ndarray, placement: Placement, parts: int, draw: np.random.Generator) -> list[np.ndarray]:
    """What each coordinate holds of ``array`` under ``placement``; partial parts are drawn at random.

    Raises:
      ValueError: the array cannot lie that way.
    """
    if isinstance(placement, Shard):
        return [np.take(array, placement.list_indices(i), axis=placement.dim) for i in range(len(placement.sizes))]
    if not isinstance(placement, Partial):
        return [array] * parts
    return _partial_parts(array, placement.op, parts, draw)


def _partial_parts(array: np.ndarray, op: str, parts: int, draw: np.random.Generator) -> list[np.ndarray]:
    if op in ("max", "min"):
        owner = draw.integers(0, parts, array.shape)
        if array.dtype.kind == "b":
            return [array & (owner == p) if op == "max" else array | (owner != p) for p in range(parts)]
        step = draw.integers(1, 5, array.shape) if array.dtype.kind in "iu" else draw.uniform(0.1, 2.0, array.shape)
        other = array - step.astype(array.dtype) if op == "max" else array + step.astype(array.dtype)
        return [np.where(owner == p, array, other).astype(array.dtype) for p in range(parts)]
    if array.dtype.kind not in "fciu":
        raise ValueError(f"{array.dtype} cannot be partial")
    if op == "prod":
        if array.dtype.kind in "iu":
            raise ValueError("integers have no factors")
        factors = [draw.uniform(0.5, 2.0, array.shape).astype(array.dtype) for _ in range(parts - 1)]
        return [*factors, (array / np.prod(factors, axis=0)).astype(array.dtype)]
    draws = [draw.integers(-5, 6, array.shape) if array.dtype.kind in "iu" else draw.normal(size=array.shape)
             for _ in range(parts - 1)]  # fmt: skip
    terms = [d.astype(array.dtype) for d in draws]
    return [*terms, (array - sum(terms)).astype(array.dtype)]


def unshard(parts: Sequence[np.ndarray], placement: Placement) -> np.ndarray:
    """The whole tensor that the coordinates' parts stand for."""
    if isinstance(placement, Shard):
        joined = np.concatenate(parts, axis=placement.dim)
        if placement.blocks == 1:
            return joined
        order = np.concatenate([placement.list_indices(i) for i in range(len(placement.sizes))])
        return np.take(joined, np.argsort(order), axis=placement.dim)
    if isinstance(placement, Partial):
        joined = np.stack(parts)
        if joined.dtype.kind == "b":
            return np.asarray(joined.any(0) if placement.op == "max" else joined.all(0))
        name = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}[placement.op]
        with np.errstate(over="ignore", invalid="ignore"):
            return name.reduce(joined, axis=0)
    return parts[0]


def agree(found: np.ndarray, expected: np.ndarray) -> bool:
    """Whether two results are the same up to rounding of their type."""
    if found.shape != expected.shape:
        return False
    if expected.dtype.kind not in "fc":
        return bool((found == expected).all())
    single = expected.dtype in (np.float32, np.complex64)
    limit = 2e-5 if single else 1e-10
    # The identities of max and min (infinite, or the largest number) say nothing about the size of the others.
    sizes = np.abs(expected)
    scale = float(np.max(sizes[np.isfinite(sizes) & (sizes < 1e30)], initial=1.0))
    return bool(np.allclose(found, expected, rtol=limit, atol=limit * scale, equal_nan=True))


def run_strategy(case: Case, rule: LineRule, op: OpView, inputs: Sequence[np.ndarray], strategy: Strategy,
                 evaluate: Evaluate, draw: np.random.Generator) -> list[np.ndarray]:  # fmt: skip
    """The outputs that the coordinates produce together under ``strategy``."""
    operands = [cut_array(x, p, op.parts, draw) for x, p in zip(inputs, strategy.inputs)]
    results: list[list[np.ndarray]] = []
    if len({_form(rule, op, strategy, at) for at in range(op.parts)}) > 1 and _is_even(strategy):
        raise ValueError("coordinates with parts of one size would run more than other values")
    for at in range(op.parts):
        known = find_known_outputs(op, strategy, at)
        if all(k is not None for k in known):
            results.append([k for k in known if k is not None])
            continue
        local = rule.local_op(op, strategy, at)
        mine = [local.consts.get(i, o[at]) for i, o in enumerate(operands)]
        for added in (local.added, local.moved):
            mine = [x + added[i] if i in added else x for i, x in enumerate(mine)]
        mine = [np.minimum(x, local.at_most[i]) if i in local.at_most else x for i, x in enumerate(mine)]
        window, inside = local.window, np.ones(0, bool)
        if window is not None:
            mine[window.indices], inside = window.to_local(mine[window.indices])
            if window.rows is not None:
                values = mine[window.rows]
                mine[window.rows] = values.reshape(-1, *values.shape[inside.ndim :])[inside.reshape(-1)]
                mine[window.indices] = mine[window.indices].reshape(-1, mine[window.indices].shape[-1])[
                    inside.reshape(-1)
                ]
            if window.masked is not None and window.masked >= 0:
                mine[window.masked] = window.select_masked(mine, inside)
        outs = evaluate(local.op or case.op, {**case.attrs, **local.attrs}, mine)
        if window is not None and window.masked == -1:
            outs = [window.zero_outside(outs[0], inside), *outs[1:]]
        if local.divide_by is not None:
            outs = [outs[0] / local.divide_by, *outs[1:]]
        if local.plus is not None:
            outs = [outs[0] + local.plus, *outs[1:]]
        results.append([o if k is None else k for o, k in zip(outs, known)])
    for j, placement in enumerate(strategy.outputs):
        if isinstance(placement, Replicate) and not all(agree(r[j], results[0][j]) for r in results):
            raise ValueError(f"output {j} differs between coordinates")
    return [unshard([r[j] for r in results], p) for j, p in enumerate(strategy.outputs)]


def _is_even(strategy: Strategy) -> bool:
    """Whether all coordinates have as much of every tensor."""
    cuts = [p for p in strategy.inputs + strategy.outputs if isinstance(p, Shard)]
    return all(p.smallest == p.largest and p.without_halo is p for p in cuts)


def _form(rule: LineRule, op: OpView, strategy: Strategy, coordinate: int) -> tuple[object, ...]:
    """What a coordinate runs, but for values."""
    known, local = find_known_outputs(op, strategy, coordinate), rule.local_op(op, strategy, coordinate)
    window = replace(local.window, offset=0) if local.window is not None else None
    operands = [tuple(side) for side in (local.attrs, local.consts, local.added, local.moved, local.at_most)]
    return tuple(k is None for k in known), local.op, local.blocks, *operands, window, local.divide_by


def _shares(size: int | None, parts: int) -> Iterator[tuple[int, ...]]:
    """Even, uneven, and empty shares of ``size``."""
    if size is None:
        return
    found = {divide_evenly(size, parts)}
    if size >= parts:
        found.add((size - size // 4 - (parts - 2), *(1,) * (parts - 2), size // 4))
        found.add((1, *divide_evenly(size - 1, parts - 1)))
    found.add((0, *divide_evenly(size, parts - 1)))
    found.add((*divide_evenly(size, parts - 1), 0))
    yield from sorted(s for s in found if sum(s) == size and min(s) >= 0)


def _splits(dim: int, size: int | None, parts: int) -> Iterator[Shard]:
    """The dimension as one run, and as several where it has a divisor."""
    for blocks in (1, 2, 3, 4):
        if size is not None and size % blocks == 0 and (blocks == 1 or size // blocks > 1):
            yield from (shard(dim, sizes, blocks) for sizes in _shares(size // blocks, parts))


def _proposals(rule: LineRule, op: OpView) -> list[Strategy]:
    """Every strategy that some placement of an operand, or a wanted output, brings about."""
    n, found = len(op.inputs), {}
    whole: list[Placement] = [B] * n

    def ask(current: Sequence[Placement], wanted: Sequence[Placement | None] = ()) -> None:
        for s in rule.strategies(op, current, wanted):
            found[s.inputs, s.outputs] = s

    ask(whole)
    for kind in _PARTIALS:
        ask([Partial(kind)] * n)
        for i in range(n):
            ask([*whole[:i], Partial(kind), *whole[i + 1 :]])
    for i, t in enumerate(op.inputs):
        for d, size in enumerate(t.shape or ()):
            for cut in _splits(d, size, op.parts):
                ask([*whole[:i], cut, *whole[i + 1 :]])
    for j, t in enumerate(op.outputs if rule.produces_any else ()):
        for d, size in enumerate(t.shape or ()):
            for cut in _splits(d, size, op.parts):
                ask(whole, [None] * j + [cut])
    return list(found.values())


def prove(case: Case, evaluate: Evaluate, *, missing: bool = True) -> Proof:
    """Runs everything that the rule of ``case.op`` allows, and with ``missing`` what it forbids.

    Raises:
      KeyError: the op has no rule.
    """
    rule = find_rule(case.op)
    if rule is None:
        raise KeyError(case.op)
    inputs = case.draw(0)
    whole = evaluate(case.op, case.attrs, inputs)
    findings: list[Finding] = []
    count = 0
    allowed: set[tuple[str, ...]] = set()
    for parts in (2, 3):
        op = view_of(case, inputs, whole, parts)
        run = set()
        for view in (op, *(views_that_know_less(op) if parts == 2 else ())):
            known = "" if view is op else f" of {' '.join(map(str, (*view.inputs, *view.outputs)))}"
            line = rule.write_line(view)
            try:
                proposals = [] if line == FIRST_RANK else _proposals(rule, view)
            except RuleError as error:
                findings.append(Finding("wrong", str(case), line + known, " ".join(str(error).split())))
                continue
            if view is op and parts == 2:
                allowed.update(_kinds(strategy.inputs) for strategy in proposals)
            for strategy in proposals:
                edits = (str(strategy), _edits(rule, view, strategy))
                if edits in run:
                    continue
                run.add(edits)
                count += 1
                try:
                    got = run_strategy(case, rule, view, inputs, strategy, evaluate, np.random.default_rng(1))
                    bad = [j for j, (g, w) in enumerate(zip(got, whole)) if not agree(g, w)]
                    detail = f"outputs {bad} differ" if bad else ""
                except Exception as error:  # whatever a kernel raises makes the strategy wrong
                    detail = f"{type(error).__name__}: {str(error)[:90]}"
                if detail:
                    findings.append(Finding("wrong", str(case), str(strategy) + known, detail))
    if missing and case.search:
        op = view_of(case, inputs, whole, 2)
        line = rule.write_line(op)
        findings += _find_missing(case, evaluate, allowed, parse(line) if line != FIRST_RANK else None)
    return Proof(str(case), count, tuple(findings))


def _edits(rule: LineRule, op: OpView, strategy: Strategy) -> str:
    """Returns what the coordinates run in place of the op, in words."""
    each = [(find_known_outputs(op, strategy, at), rule.local_op(op, strategy, at)) for at in range(op.parts)]
    return repr(each)


def _kinds(placements: Sequence[Placement]) -> tuple[str, ...]:
    """Placements without sizes."""
    return tuple(f"S({p.dim})" if isinstance(p, Shard) else str(p) for p in placements)


def _combinations(inputs: Sequence[np.ndarray], fixed: Sequence[bool]) -> Iterator[tuple[Placement, ...]]:
    """Placements to try: operands cut or whole, or partial sums or whole; two at most at once where there are many.

    Partial maxima pass through whatever is monotone, which is seldom of use: they are proved, not searched for.
    """
    choices: list[list[Placement]] = []
    for array, whole in zip(inputs, fixed):
        cuts: list[Placement] = [shard(d, divide_evenly(n, 2)) for d, n in enumerate(array.shape) if n > 1]
        choices.append([B] if whole or array.dtype.kind in "OSU" else [B, *cuts])
    yield from _products(choices)
    partial = [not whole and array.dtype.kind in "fc" and array.size > 0 for array, whole in zip(inputs, fixed)]
    yield from _products([[B, P_SUM] if may else [B] for may in partial])


def _products(choices: Sequence[Sequence[Placement]]) -> Iterator[tuple[Placement, ...]]:
    many = math.prod(len(c) for c in choices) > _COMBINATIONS
    for combination in itertools.product(*choices):
        moved = sum(p is not B for p in combination)
        if moved and not (many and moved > 2):
            yield combination


def _find_missing(case: Case, evaluate: Evaluate, allowed: set[tuple[str, ...]], line: Line | None) -> list[Finding]:
    inputs = case.draw(0)
    terms = list_operand_terms(line, len(inputs)) if line is not None else []
    fixed = [i in case.consts or (i < len(terms) and terms[i].kind == "role") for i in range(len(inputs))]
    read = [i for i in range(len(inputs)) if i >= len(terms) or not terms[i].unread]
    known = {tuple(kinds[i] for i in read) for kinds in (*allowed, ("B",) * len(inputs))}
    found: list[Finding] = []
    for combination in _combinations(inputs, fixed):
        kinds = _kinds(combination)
        # How an operand lies whose values are not read brings nothing.
        if kinds in allowed or (len(read) < len(inputs) and tuple(kinds[i] for i in read) in known):
            continue
        result = _agreeing(case, evaluate, combination, (0, 7, 8, 9, 10))
        if result is not None:
            found.append(Finding("missing", str(case), f"{' '.join(_kinds(combination))} -> {' '.join(result)}"))
    return found


def _agreeing(
    case: Case, evaluate: Evaluate, combination: Sequence[Placement], seeds: Sequence[int]
) -> list[str] | None:
    """Placements of the outputs in which the local results make up the whole for every draw; None: there are none."""
    common: list[set[str]] | None = None
    for seed in seeds:
        inputs = case.draw(seed)
        draw = np.random.default_rng(seed + 11)
        try:
            operands = [cut_array(x, p, 2, draw) for x, p in zip(inputs, combination)]
            parts = [evaluate(case.op, case.attrs, [o[at] for o in operands]) for at in range(2)]
            whole = evaluate(case.op, case.attrs, inputs)
        except Exception:  # a kernel that refuses the shards settles it
            return None
        fits = [_fitting([p[j] for p in parts], w) for j, w in enumerate(whole)]
        common = fits if common is None else [a & b for a, b in zip(common, fits)]
        if not all(common):
            return None
    return [sorted(c)[0] for c in common or []]


def _fitting(parts: list[np.ndarray], whole: np.ndarray) -> set[str]:
    found: set[str] = set()
    if all(agree(p, whole) for p in parts):
        found.add("B")
    options: list[Placement] = [shard(d, ()) for d in range(whole.ndim)]
    options += [Partial(k) for k in ("sum", "max", "min")]
    for placement in options:
        try:
            if agree(unshard(parts, placement), whole):
                found.update(_kinds([placement]))
        except (ValueError, TypeError):
            continue
    return found
