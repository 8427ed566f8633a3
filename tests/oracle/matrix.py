"""The runs of the oracle: case x dtype x optimizer x spread, and a sample in which every pair of values meets."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from tests.zoo.case import BATCH, Case


@dataclass(frozen=True, slots=True, order=True)
class Spread:
    """How the batch of 8 rows is divided: `shares` rows per rank, or as evenly as possible when empty."""

    ranks: int
    shares: tuple[int, ...] = ()

    @property
    def kind(self) -> str:
        if not self.shares:
            return "even"
        return "empty" if 0 in self.shares else "uneven"

    def __str__(self) -> str:
        return f"{self.ranks}" + (f":{'-'.join(map(str, self.shares))}" if self.shares else "")


SPREADS = (
    Spread(1),
    Spread(2),
    Spread(2, (5, 3)),
    Spread(2, (0, 8)),
    Spread(3),
    Spread(3, (1, 3, 4)),
    Spread(3, (5, 3, 0)),
    Spread(4),
    Spread(4, (3, 1, 2, 2)),
    Spread(4, (4, 0, 3, 1)),
)


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the matrix.

    Attributes:
        flavour: which Keras the worker processes have.
        gradients: the step returns its gradients as well.
        scope: what the model is inside: `replica` (which must be the same as nothing, ""), `split`, `split:2` for
            groups of two ranks that split. `+zero1` behind it: the optimizer's state lies split; `+zero3`: weights
            as well; `+micro:4`: in so many micro-batches; `+recompute`: activations are computed again; `+xla`: XLA
            compiles the step, in clusters. `named:both`: scopes by the names of its layers and variables
            (tests/oracle/named.py).
    """

    case: Case = field(compare=False)
    name: str
    flavour: str
    dtype: str
    optimizer: str
    spread: Spread
    gradients: bool = True
    scope: str = ""

    def __str__(self) -> str:
        extra = ("" if self.gradients else "-no_gradients") + (f"-{self.scope}" if self.scope else "")
        return f"{self.flavour}-{self.name}-{self.dtype}-{self.optimizer}-{self.spread}{extra}"

    @property
    def arguments(self) -> str:
        """What `python -m tests.oracle` is given to make this run alone."""
        given = f"--case {self.name} --flavour {self.flavour} --dtype {self.dtype} --optimizer {self.optimizer}"
        shares = f" --shares {','.join(map(str, self.spread.shares))}" if self.spread.shares else ""
        scope = f" --scope={self.scope}" if self.scope else ""
        return f"{given} --ranks {self.spread.ranks}{shares}{scope}{'' if self.gradients else ' --no-gradients'}"

    def factors(self) -> dict[str, object]:
        """The values whose pairs a sample covers."""
        return {
            "case": self.name,
            "dtype": self.dtype,
            "optimizer": self.optimizer,
            "ranks": self.spread.ranks,
            "kind": self.spread.kind,
            "gradients": self.gradients,
            "scope": self.scope,
        }


def all_runs(
    cases: Iterable[Case],
    flavour: str,
    spreads: Sequence[Spread] = SPREADS,
    gradients: Sequence[bool] = (True,),
    scopes: Sequence[str] = ("",),
) -> list[Run]:
    """Every run of the cases that this Keras can have."""
    return [
        Run(case, case.name, flavour, *values)
        for case in cases
        if flavour in case.flavours
        for values in itertools.product(case.dtypes, case.optimizers, spreads, gradients, scopes)
        if not ("+zero" in values[-1] and case.name.startswith("tf1_"))  # sessions: tests.zero, and test_scopes
    ]


# Columns of the table under `wh.split`: over all ranks, and over groups of two ranks.
UNDER_SPLIT = (
    ("split", Spread(2)),
    ("split", Spread(2, (5, 3))),
    ("split", Spread(3)),
    ("split", Spread(4)),
    ("split:2", Spread(4)),
)


def runs_under_split(cases: Iterable[Case], flavour: str) -> list[Run]:
    """Float64: a case's first optimizer in every column, its second one with uneven rows and over groups."""
    return [
        Run(case, case.name, flavour, "float64", optimizer, spread, scope=scope)
        for case in cases
        if flavour in case.flavours and "float64" in case.dtypes
        for number, optimizer in enumerate(case.optimizers[:2])
        for scope, spread in UNDER_SPLIT
        if number == 0 or spread.shares or scope != "split"
    ]


# What a drawn run's model is inside, and what is set beside it; most runs have little of both.
_DRAWN_SCOPES = ("", "", "", "replica", "split", "split:2", "sequence:2", "stage:2", "stage:3")
_DRAWN_EXTRAS = (("", "", "", "+zero1", "+zero3"), ("", "", "", "+micro:2", "+micro:3", "+micro:7"),
                 ("", "", "", "+recompute"), ("", "", "", "", "+xla"))  # fmt: skip


def draw_runs(cases: Sequence[Case], flavours: Sequence[str], count: int, seed: int) -> list[Run]:
    """Draws runs that are in no table: any rows for each rank, scopes, what may stand beside them; sorted by case."""
    generator, found = random.Random(seed), []
    while len(found) < count:
        flavour, case = generator.choice(flavours), generator.choice(cases)
        if flavour not in case.flavours or (case.heavy and generator.random() < 0.5):
            continue
        dtype = "float64" if "float64" in case.dtypes and generator.random() < 0.9 else generator.choice(case.dtypes)
        scope = generator.choice(_DRAWN_SCOPES)
        # Groups of two have an even number of ranks, and stages as many as there are ranks at least.
        ranks = generator.choice((2, 4) if ":2" in scope else (3, 4) if scope == "stage:3" else (1, 2, 3, 4))
        marks = sorted(generator.randint(0, BATCH) for _ in range(ranks - 1))
        shares = tuple(b - a for a, b in zip([0, *marks], [*marks, BATCH])) if generator.random() < 0.5 else ()
        scope += "".join(generator.choice(extras) for extras in _DRAWN_EXTRAS)
        optimizer, gradients = generator.choice(case.optimizers), generator.random() < 0.8
        if scope.startswith("sequence"):  # of a recurrence, which has an order, little can be divided along it
            case = replace(case, least_split_fraction=0.0)
        found.append(Run(case, case.name, flavour, dtype, optimizer, Spread(ranks, shares), gradients, scope))
    return sorted(dict.fromkeys(found), key=lambda run: (run.flavour, run.name, run.dtype, run.optimizer))


# With which factors a case is paired; a heavy case's traces cost seconds each.
_PAIRED = {False: ("dtype", "optimizer", "ranks", "kind"), True: ("dtype", "optimizer")}


def _pairs(run: Run) -> set[tuple[object, ...]]:
    factors = run.factors()
    others = [name for name in factors if name != "case"]
    found: set[tuple[object, ...]] = {(a, factors[a], b, factors[b]) for a, b in itertools.combinations(others, 2)}
    # One rank has nothing to spread: it is paired with everything but each single case.
    if run.spread.ranks > 1:
        found |= {("case", run.name, other, factors[other]) for other in _PAIRED[run.case.heavy]}
    return found


def pairwise(runs: Sequence[Run], seed: int, beside: Sequence[Run] = ()) -> list[Run]:
    """A small sample in which each pair of factor values that occurs in `runs` occurs (greedy, in random order).

    Pairs of the runs ``beside``, which are made in any case, are not looked for once more.
    """
    generator = random.Random(seed)
    left = set().union(*(_pairs(run) for run in runs)) - set().union(*(_pairs(run) for run in beside))
    chosen: list[Run] = []
    by_case: dict[str, list[Run]] = {}
    for run in runs:
        by_case.setdefault(run.name, []).append(run)
    while left:
        # Candidates of the cases that still lack something: a random run of a finished case seldom adds a pair.
        lacking = sorted({str(pair[1]) for pair in left if pair[0] == "case"}) or sorted(by_case)
        pool = by_case[lacking[0]] if len(lacking) < len(by_case) or len(by_case) == 1 else runs
        candidates = generator.sample(pool, min(len(pool), 80))
        best = max(candidates, key=lambda run: len(_pairs(run) & left))
        gained = _pairs(best) & left
        if not gained:
            best = next(run for run in runs if _pairs(run) & left)
            gained = _pairs(best) & left
        left -= gained
        chosen.append(best)
    order = {name: index for index, name in enumerate(by_case)}
    return sorted(chosen, key=lambda run: (order[run.name], run.dtype, run.optimizer, run.spread))
