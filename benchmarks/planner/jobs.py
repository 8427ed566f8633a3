"""Jobs placed on a cluster beside all schedules of them, and offers beside all sets of them, on random instances."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import chain, combinations, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from benchmarks.planner.monotone import KINDS, NETWORKS
from cost_model.cluster.cluster_file import Cluster, parse
from whale.errors import PlanError
from whale.planner import ask, jobs, offers
from whale.planner.analytic_search.candidates import Constraints

Hosts = tuple[int, ...]
ROUNDING = 1e-6


def enumerate_schedules(count: int, hosts: Hosts, hours: Callable[[int, Hosts], float]) -> float:
    """Returns the end of the shortest schedule of so many jobs, one after the other and at once, by all divisions."""

    @cache
    def best(some: frozenset[int], hosts: Hosts) -> float:
        if len(some) == 1:
            return hours(next(iter(some)), hosts)
        found = float("inf")
        for size in range(1, len(some)):
            for first in map(frozenset, combinations(sorted(some), size)):
                found = min(found, best(first, hosts) + best(some - first, hosts))
                for own in product(*(range(n + 1) for n in hosts)):
                    rest = tuple(a - b for a, b in zip(hosts, own))
                    if any(own) and any(rest):
                        found = min(found, max(best(first, own), best(some - first, rest)))
        return found

    return best(frozenset(range(count)), hosts)


def case(seed: int) -> tuple[list[jobs.Job], Cluster]:
    """Draws two to four small models and a cluster of one or two kinds of hosts."""
    r = random.Random(f"jobs {seed}")
    rows = "".join(
        f"- {{name: {kind}, count: {r.randint(1, 3)}, devices: [{{type: {kind}, count: {r.choice((1, 2, 4))}}}],"
        " networks: {f: {nics: 1}}}\n"
        for kind in r.sample(KINDS, r.randint(1, 2))
    )
    cluster = parse(f"name: drawn\nnetworks: {{f: {{type: {r.choice(NETWORKS)}}}}}\nhosts:\n{rows}")
    found = []
    for number in range(r.randint(2, 4)):
        layers, hidden = r.choice(((4, 512), (8, 1024), (12, 1024)))
        text = f"gpt:layers={layers},hidden={hidden},heads=8,sequence=256,vocabulary=8192,batch={r.choice((8, 16, 24))}"
        found.append(jobs.Job(f"job {number}", text, r.choice((1e5, 3e5, 1e6))))
    return found, cluster


def compare(seed: int, budget_s: float) -> tuple[float, float]:
    """Returns the hours until all jobs of a case have ended, as they are placed and at best; infinite: none fits."""
    some, cluster = case(seed)
    plans = jobs.Plans(some, cluster, "megatron-2022", budget_s)
    best = enumerate_schedules(len(some), plans.whole, plans.hours)
    try:
        placed = jobs.place(some, cluster, "megatron-2022", budget_s)
    except PlanError:
        return float("inf"), best
    return max(one.end for one in placed), best


def place_jobs(options: argparse.Namespace) -> None:
    """Counts the cases in which the jobs end as early as by any schedule."""
    optimal, worst, seed, count = 0, 0.0, options.first, 0
    while count < options.count:
        found, best = compare(seed, options.budget)
        seed += 1
        if found == best == float("inf"):
            continue
        count += 1
        optimal += found <= best * (1 + ROUNDING)
        worst = max(worst, found / best - 1)
        if found > best * (1 + ROUNDING) or options.verbose:
            print(f"case {seed - 1}: {found:.4f} hours, {best:.4f} at best", flush=True)
    print(f"{count} cases: {optimal} optimal, the worst {worst:.1%} longer")


@dataclass(frozen=True)
class Deal:
    """Offers to choose from, a model, and what is wanted of them: rows by a deadline, or for some money."""

    listed: list[dict[str, Any]]
    text: str
    rows: float
    deadline_hours: float | None
    money: float | None


def deal(seed: int) -> Deal:
    """Draws two to five offers, of which some go together, and a deadline, a budget or both that leave a choice."""
    r = random.Random(f"offers {seed}")
    listed = []
    for number in range(r.randint(2, 5)):
        kind, hosts, each = r.choice(KINDS), r.randint(1, 3), r.choice((1, 2, 4))
        listed.append(
            {
                "name": f"offer {number}",
                "cluster": {
                    "name": f"offer {number}",
                    "networks": {"f": {"type": NETWORKS[0]}},
                    "hosts": [
                        {"name": kind, "count": hosts, "devices": [{"type": kind, "count": each}],
                         "networks": {"f": {"nics": 1}}}
                    ],
                },
                "price_per_hour": round(hosts * each * r.uniform(0.5, 4.0), 2),
                "startup_hours": r.choice((0.0, 0.2, 1.0)),
                "startup_price": r.choice((0.0, 5.0)),
                "interruptions_per_hour": r.choice((0.0, 0.0, 0.1, 0.5)),
                "together": r.choice(("", "a", "a", "b")),
            }
        )  # fmt: skip
    text = f"gpt:layers=8,hidden=1024,heads=8,sequence=256,vocabulary=8192,batch={r.choice((16, 24, 64))}"
    limits = r.choice(((1, 0), (0, 1), (1, 1)))
    return Deal(
        listed,
        text,
        r.choice((1e5, 1e6)),
        round(10 ** r.uniform(-1, 1.5), 3) if limits[0] else None,
        round(10 ** r.uniform(0.3, 2.5), 2) if limits[1] else None,
    )


def compare_offers(seed: int, budget_s: float) -> tuple[float, float]:
    """Returns the money of a deal's offers (the hours, without a deadline), as they are chosen and at best.

    Infinite: no set of them is as wanted.
    """
    one = deal(seed)
    transformer, batch = ask.describe(one.text)
    assert batch is not None
    limits = Constraints(budget_s=budget_s)
    with TemporaryDirectory() as folder:
        path = Path(folder, "offers.yaml")
        path.write_bytes(msgspec.yaml.encode({"offers": one.listed}))
        answers = offers.rank(offers.read_offers(str(path)), batch, transformer, None, "megatron-2022", limits)
    wanted = offers.Wanted(one.rows, one.deadline_hours, one.money)
    chosen = offers.choose(answers, wanted)
    by_names = {frozenset(offer.name for offer in answer.offers): answer.plan for answer in answers}
    best = float("inf")
    for some in chain.from_iterable(combinations(one.listed, n) for n in range(1, len(one.listed) + 1)):
        if len(some) > 1 and (not some[0]["together"] or len({offer["together"] for offer in some}) > 1):
            continue
        plan = by_names[frozenset(offer["name"] for offer in some)]  # a set that was left out is a KeyError
        lost = sum(0.5 * offer["interruptions_per_hour"] for offer in some)
        if plan is None or lost >= 1:
            continue
        hours = max(offer["startup_hours"] for offer in some) + one.rows / batch * plan.step_s / (1 - lost) / 3600
        money = sum(offer["startup_price"] + offer["price_per_hour"] * hours for offer in some)
        if hours <= (one.deadline_hours or float("inf")) and money <= (one.money or float("inf")):
            best = min(best, hours if one.deadline_hours is None else money)
    if chosen is None:
        return float("inf"), best
    return (chosen.hours(one.rows) if one.deadline_hours is None else chosen.cost(one.rows)), best


def choose_offers(options: argparse.Namespace) -> None:
    """Counts the deals in which no set of offers is better than the chosen one."""
    optimal = none = 0
    for seed in range(options.first, options.first + options.count):
        found, best = compare_offers(seed, options.budget)
        none += found == float("inf")
        if found == best or found <= best * (1 + ROUNDING):
            optimal += 1
        else:
            print(f"deal {seed}: {found:.4f}, {best:.4f} at best", flush=True)
    print(f"{options.count} deals: {optimal} optimal, in {none} of which no offer is as wanted")
