"""Jobs placed on a cluster beside all schedules of them, on random instances."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from functools import cache
from itertools import combinations, product

from benchmarks.planner.monotone import KINDS, NETWORKS
from cost_model.cluster.cluster_file import Cluster, parse
from whale.errors import PlanError
from whale.planner import jobs

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
