"""Offers ranked by time and cost, and jobs packed on one cluster."""

from __future__ import annotations

import math
import random
from itertools import chain
from pathlib import Path
from typing import cast

import pytest

from benchmarks.planner.jobs import compare_offers, enumerate_schedules
from cost_model.cluster import cluster_file
from whale.errors import ClusterError, PlanError
from whale.ir.strategy import ParallelStrategy
from whale.planner import ask, jobs, offers
from whale.planner.analytic_search.candidates import Constraints
from whale.planner.jobs import Placing
from whale.planner.offers import Answer, Offer, Wanted
from whale.planner.report.planfile import PlanFile

DESCRIBED = "gpt:layers=16,hidden=4096,heads=32,sequence=1024,batch=256"
HOST = "{{name: {device}, count: {count}, devices: [{{type: {device}, count: 4}}], networks: {{ib: {{nics: 1}}}}}}"
OFFERS = """offers:
  - {name: slow, cluster: slow.yaml, price_per_hour: 10.0}
  - {name: fast, cluster: fast.yaml, price_per_hour: 90.0}
  - {name: tiny, cluster: {name: tiny, hosts: [{name: t, devices: [{type: t4, count: 1, memory_gb: 1}]}]}}
"""


def _cluster(*kinds: tuple[str, int]) -> str:
    hosts = ", ".join(HOST.format(device=device, count=count) for device, count in kinds)
    return f"{{name: some, networks: {{ib: {{type: infiniband-hdr-200}}}}, hosts: [{hosts}]}}"


def test_offers_are_ranked_by_time_and_the_cheapest_is_named(tmp_path: Path) -> None:
    (tmp_path / "slow.yaml").write_text(_cluster(("v100-sxm2-32gb", 1)))
    (tmp_path / "fast.yaml").write_text(_cluster(("h100-sxm-80gb", 1)))
    (tmp_path / "offers.yaml").write_text(OFFERS)
    transformer, batch = ask.describe(DESCRIBED)
    assert batch is not None
    found = offers.read_offers(str(tmp_path / "offers.yaml"))
    answers = offers.rank(found, batch, transformer, None, "megatron-2022", Constraints(budget_s=0.2))
    assert [a.name for a in answers] == ["fast", "slow", "tiny"]
    assert answers[2].plan is None and "fits" in answers[2].why
    fast, slow = answers[0], answers[1]
    assert fast.plan is not None and slow.plan is not None
    cheapest = min((fast, slow), key=lambda a: a.cost_per_million_rows)
    expected = cheapest.price_per_hour / 3600 * cheapest.plan.predicted.step_s / batch * 1e6  # type: ignore[union-attr]
    assert cheapest.cost_per_million_rows == pytest.approx(expected)
    row = next(line for line in offers.format_ranking(answers, Wanted()) if "cheapest" in line)
    assert row.startswith(cheapest.name)


class _Plan:
    """A plan of 10 rows in so many seconds."""

    batch = 10
    strategy = ParallelStrategy()

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s


def _answer(step_s: float, **facts: float) -> Answer:
    return Answer((Offer(f"of {step_s:g} s", {}, **facts),), cast("PlanFile", _Plan(step_s)))  # type: ignore[arg-type]


def test_the_cheapest_by_a_deadline_and_the_soonest_for_the_money_are_taken() -> None:
    """36,000 rows at 10 rows a second take an hour."""
    fast = _answer(1.0, price_per_hour=100.0)
    slow = _answer(4.0, price_per_hour=10.0)
    late = _answer(0.5, price_per_hour=100.0, startup_hours=3.0, startup_price=7.0)
    spot = _answer(2.0, price_per_hour=5.0, interruptions_per_hour=0.5, hours_per_interruption=1.0)
    lost = _answer(0.1, interruptions_per_hour=2.0, hours_per_interruption=0.5)
    assert (fast.hours(36000), slow.cost(36000)) == (1.0, 40.0)
    assert (late.hours(36000), late.cost(36000)) == (3.5, 357.0)
    assert (spot.hours(36000), spot.cost(36000)) == (4.0, 20.0)  # half of the time is lost
    assert lost.hours(1) == float("inf") and lost.rows_per_s == 0.0
    answers = [fast, slow, late, spot, lost]

    def taken(**wanted: float) -> Answer | None:
        return offers.choose(answers, Wanted(36000, **wanted))

    assert taken() is fast and taken(deadline_hours=2.0) is fast
    assert taken(deadline_hours=4.0) is spot and taken(money=50.0) is spot and taken(money=400.0) is fast
    assert taken(deadline_hours=0.5) is None and taken(deadline_hours=2.0, money=50.0) is None
    none = offers.format_ranking(answers, Wanted(36000, deadline_hours=0.5))[-1]
    assert "ends soonest, after 1.00 hours" in none and "costs least, 20.00" in none
    with pytest.raises(PlanError, match="--rows"):
        Wanted(money=3.0)


@pytest.mark.parametrize("seed", [0, 1])
def test_no_set_of_offers_is_better_than_the_chosen_one(seed: int) -> None:
    """All 100 deals: python -m benchmarks.planner offers."""
    found, best = compare_offers(seed, 0.02)
    assert found == pytest.approx(best)


def test_offers_that_go_together_are_one_cluster(tmp_path: Path) -> None:
    one = f"{{name: a, together: x, price_per_hour: 2, cluster: {_cluster(('v100-sxm2-32gb', 1))}}}"
    other = f"{{name: b, together: x, price_per_hour: 3, cluster: {_cluster(('a100-sxm-80gb', 2))}}}"
    path = tmp_path / "offers.yaml"
    path.write_text(f"offers: [{one}, {other}]")
    found = offers.read_offers(str(path))
    assert [[offer.name for offer in several] for several, _ in found] == [["a"], ["b"], ["a", "b"]]
    several, cluster = found[2]
    assert [(host.name, host.count) for host in cluster.hosts] == [("a-v100-sxm2-32gb", 1), ("b-a100-sxm-80gb", 2)]
    assert Answer(several, None).price_per_hour == 5.0
    path.write_text(f"offers: [{one}, {other.replace('hdr-200', 'edr-100')}]")
    with pytest.raises(ClusterError, match="unlike networks"):
        offers.read_offers(str(path))


@pytest.mark.parametrize("seed", range(4))
def test_jobs_end_as_early_as_by_enumeration(seed: int) -> None:
    """Hours by which further hosts help less and less; `python -m benchmarks.planner jobs` has plans of models."""
    r = random.Random(seed)
    count, whole = r.randint(2, 4), (r.randint(1, 3), r.randint(1, 2))
    work, lost, fits = ([r.uniform(1, 9) for _ in range(count)], [r.uniform(0, 0.5) for _ in range(count)], r.random())

    def at_least(job: int, hosts: tuple[int, ...]) -> float:
        return work[job] / (hosts[0] + 2.5 * hosts[1])

    def hours(job: int, hosts: tuple[int, ...]) -> float:
        asked.add((job, hosts))
        if job == 0 and sum(hosts) < 2 and fits < 0.5:
            return float("inf")
        return at_least(job, hosts) + lost[job] * sum(hosts)

    asked: set[tuple[int, tuple[int, ...]]] = set()
    found = Placing(count, whole, (1, 1), hours, at_least).best()
    plans = len(asked)
    best = enumerate_schedules(count, whole, hours)
    assert found is not None and found.hours == pytest.approx(best)
    assert plans <= len(asked)
    runs = list(found.runs())
    assert sorted(run.job for run in runs) == list(range(count)) and max(run.end for run in runs) == pytest.approx(best)
    for at in (run.start for run in runs):  # nobody has a host that another one has
        for kind, most in enumerate(whole):
            assert sum(run.hosts[kind] for run in runs if run.start <= at < run.end * (1 - 1e-12)) <= most


def test_jobs_are_placed_on_the_hosts_of_a_cluster() -> None:
    small = "gpt:layers=4,hidden=512,heads=8,sequence=128,vocabulary=1024,batch=8"
    some = [jobs.Job("short", small, 1e5), jobs.Job("long", small, 4e5)]
    machines = cluster_file.parse(_cluster(("a100-sxm-80gb", 2), ("v100-sxm2-32gb", 1)))
    placed = jobs.place(some, machines, "megatron-2022", 0.05)
    assert {one.job.name for one in placed} == {"short", "long"}
    assert all(one.plan.problems() == [] for one in placed)
    last = max(one.end for one in placed)
    assert jobs.placement(placed, machines)[-1] == f"All end within {last:.2f} hours"
    tiny = cluster_file.parse("{name: tiny, hosts: [{name: t, devices: [{type: t4, count: 1, memory_gb: 1}]}]}")
    with pytest.raises(PlanError, match="does not fit on the cluster"):
        jobs.place([jobs.Job("large", DESCRIBED, 1e5)], tiny, "megatron-2022", 0.05)


def test_many_jobs_and_hosts_go_in_bundles() -> None:
    assert jobs.bundled([1.0, 9.0, 2.0]) == [[0], [1], [2]]
    many = jobs.bundled([float(n) for n in range(1, 10)])
    assert len(many) == jobs.MOST_BUNDLES and sorted(chain(*many)) == list(range(9))
    assert jobs.steps_of((4, 4)) == (1, 1)
    steps = jobs.steps_of((64, 10))
    assert math.prod(-(-n // step) + 1 for n, step in zip((64, 10), steps)) <= jobs.MOST_STATES


def test_a_file_that_is_none_of_offers_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text("offers: [{nam: x}]")
    with pytest.raises(PlanError, match="cannot be read"):
        offers.read_offers(str(path))
