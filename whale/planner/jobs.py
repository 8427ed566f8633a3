"""Places several jobs on the hosts of one cluster so that the last one ends early.

jobs:
  - {name: small, describe: "gpt:layers=24,hidden=2048,heads=16,batch=512", rows: 1000000}
  - {name: large, describe: "gpt:layers=48,hidden=8192,heads=64,batch=1024", rows: 200000}

Jobs run side by side, each on hosts of its own, or in turn on the same ones, or both: some hosts may take one job after
the other while others do something else. A schedule of jobs on hosts is one job; or two schedules one after the other
on these hosts; or two at once, each on a part of them. Of all such schedules the shortest is found (`Placing`); jobs
and hosts go in bundles where there are too many for that.

Decision: 0159.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from cost_model.analytic.stacks import stack
from cost_model.analytic.transformer_model import TransformerModel
from cost_model.cluster.cluster_file import Cluster
from cost_model.cluster.pools import Machines
from whale.errors import PlanError
from whale.ir.plan_text import format_seconds
from whale.planner import ask
from whale.planner.analytic_search.candidates import Constraints
from whale.planner.analytic_search.estimate import peak_rates
from whale.planner.offers import SECONDS_PER_HOUR, decode
from whale.planner.report.planfile import PlanFile

MOST_BUNDLES = 6  # of jobs that are placed
MOST_STATES = 40  # numbers of hosts of each kind that are told apart
ROUNDING = 1e-9  # part of the hours by which a schedule must be shorter

Hosts = tuple[int, ...]  # of each kind of the cluster
Hours = Callable[[int, Hosts], float]  # (job, hosts) -> its hours there; infinite: it does not fit


class Job(msgspec.Struct, forbid_unknown_fields=True):
    """A model by its description, with its batch, and the number of rows to train on."""

    name: str
    describe: str
    rows: float


class _Jobs(msgspec.Struct, forbid_unknown_fields=True):
    jobs: list[Job]


@dataclass(frozen=True)
class Run:
    """One job of a schedule: its number, hosts, and hours from the beginning of all."""

    job: int
    hosts: Hosts
    start: float
    end: float


@dataclass(frozen=True)
class Schedule:
    """Jobs on hosts: one, or two schedules one after the other or at once.

    Attributes:
        hours: until all have ended.
        job, hosts: of one job; None: there are two schedules.
    """

    hours: float
    hosts: Hosts
    job: int | None = None
    first: Schedule | None = None
    second: Schedule | None = None
    in_turn: bool = False

    def runs(self, start: float = 0.0) -> Iterator[Run]:
        """Yields the jobs with their hosts and hours."""
        if self.job is not None:
            yield Run(self.job, self.hosts, start, start + self.hours)
        elif self.first is not None and self.second is not None:
            yield from self.first.runs(start)
            yield from self.second.runs(start + self.first.hours if self.in_turn else start)


class Placing:
    """Finds the shortest schedule of jobs on hosts, and asks for as few plans as that needs.

    Args:
        jobs: the number of jobs.
        hosts: of each kind.
        steps: of each kind of hosts, the least number that a job gets more or fewer.
        hours: a job's hours on some hosts.
        at_least: what a job takes at least there, which costs nothing to know.
    """

    def __init__(self, jobs: int, hosts: Hosts, steps: Hosts, hours: Hours, at_least: Hours) -> None:
        self.jobs, self.hosts, self.steps = jobs, hosts, steps
        self._hours, self._at_least = hours, at_least
        self._known: dict[tuple[int, Hosts], tuple[Schedule | None, float]] = {}

    def best(self) -> Schedule | None:
        """Returns the shortest schedule of all jobs; None: one of them fits nowhere."""
        return self.shortest((1 << self.jobs) - 1, self.hosts, math.inf)

    def shortest(self, jobs: int, hosts: Hosts, below: float) -> Schedule | None:
        """Returns the shortest schedule of some jobs (a set of bits), if it takes less than `below` hours."""
        found, looked = self._known.get((jobs, hosts), (None, 0.0))
        if found is not None:
            return found if found.hours < below else None
        if looked >= below or self._bound(jobs, hosts) >= below:
            return None
        best: Schedule | None = None
        limit = below
        for some, own in self._ways(jobs, hosts):
            if some == jobs:
                one = self._alone(jobs.bit_length() - 1, hosts, limit)
            elif own is None:
                one = self._in_turn(some, jobs & ~some, hosts, limit)
            else:
                one = self._at_once(some, jobs & ~some, own, hosts, limit)
            if one is not None:
                best, limit = one, one.hours * (1 - ROUNDING)
        self._known[jobs, hosts] = best, below
        return best

    def _bound(self, jobs: int, hosts: Hosts) -> float:
        """Returns hours that no schedule of these jobs on these hosts falls below: as if all of a job's work were
        divided over all hosts without loss, one job after the other.
        """
        return sum(self._at_least(job, hosts) for job in range(self.jobs) if jobs >> job & 1)

    def _ways(self, jobs: int, hosts: Hosts) -> Iterator[tuple[int, Hosts | None]]:
        """Yields (some of the jobs, the hosts that they get) of each schedule; None: all of them, before the others."""
        if jobs & (jobs - 1) == 0:
            yield jobs, None
            return
        yield from ((some, None) for some in _parts(jobs))
        yield from itertools.product(_parts(jobs), self._divisions(hosts))

    def _divisions(self, hosts: Hosts) -> Iterator[Hosts]:
        """Yields the numbers of hosts of each kind that one part may get, some but not all."""
        for own in itertools.product(*(range(0, n + 1, step) for n, step in zip(hosts, self.steps))):
            if any(own) and own != hosts:
                yield own

    def _alone(self, job: int, hosts: Hosts, below: float) -> Schedule | None:
        hours = self._hours(job, hosts)
        return Schedule(hours, hosts, job) if hours < below else None

    def _in_turn(self, some: int, others: int, hosts: Hosts, below: float) -> Schedule | None:
        first = self.shortest(some, hosts, below - self._bound(others, hosts))
        if first is None:
            return None
        second = self.shortest(others, hosts, below - first.hours)
        if second is None:
            return None
        return Schedule(first.hours + second.hours, hosts, None, first, second, in_turn=True)

    def _at_once(self, some: int, others: int, own: Hosts, hosts: Hosts, below: float) -> Schedule | None:
        rest = tuple(a - b for a, b in zip(hosts, own))
        # What looks longer is asked for first: if it is too long, nothing need be known of the other one.
        parts = sorted(((some, own), (others, rest)), key=lambda part: -self._bound(*part))
        if self._bound(*parts[0]) >= below:
            return None
        found = []
        for jobs, where in parts:
            one = self.shortest(jobs, where, below)
            if one is None:
                return None
            found.append(one)
        return Schedule(max(one.hours for one in found), hosts, None, found[0], found[1])


def _parts(jobs: int) -> Iterator[int]:
    """Yields the subsets of a set of bits that have its lowest one, but not the set itself."""
    lowest, rest = jobs & -jobs, jobs & (jobs - 1)
    some = rest
    while some:
        some = (some - 1) & rest
        yield lowest | some


@dataclass(frozen=True)
class Placed:
    """A job with its number of hosts of each kind, its plan on these, and its hours from the beginning of all."""

    job: Job
    hosts: Hosts
    plan: PlanFile
    start: float
    end: float


def read_jobs(path: str) -> list[Job]:
    """Reads the jobs of a file.

    Raises:
        PlanError: the file cannot be read, or does not list jobs.
    """
    jobs = decode(path, _Jobs, "jobs: [{name: ..., describe: gpt:layers=..., rows: ...}]").jobs
    if not jobs or len({job.name for job in jobs}) < len(jobs):
        raise PlanError("jobs need names of their own, and at least one is needed", given=path)
    return jobs


class Plans:
    """The plans of jobs on some of a cluster's hosts, each made once."""

    def __init__(self, jobs: Sequence[Job], cluster: Cluster, software: str, budget_s: float) -> None:
        self.jobs, self.cluster, self.software = jobs, cluster, software
        self.limits = Constraints(budget_s=budget_s)
        self.known: dict[tuple[int, Hosts], PlanFile | None] = {}
        self.described = []
        for job in jobs:
            transformer, batch = ask.describe(job.describe)
            if batch is None:
                raise PlanError("a job's batch is not known", given=job.describe, action="add batch=ROWS")
            self.described.append((transformer, batch))
        self.whole = tuple(host.count for host in cluster.hosts)
        self.rates = [self._host_rates(number) for number in range(len(jobs))]

    def plan(self, number: int, hosts: Hosts) -> PlanFile | None:
        """Returns a job's plan on `hosts` of each kind; None: no strategy fits."""
        key = number, hosts
        if key not in self.known:
            chosen = [msgspec.structs.replace(h, count=n) for h, n in zip(self.cluster.hosts, hosts) if n]
            transformer, batch = self.described[number]
            self.known[key] = None
            if chosen:
                part = msgspec.structs.replace(self.cluster, hosts=chosen)
                try:
                    self.known[key] = ask.plan(part, batch, transformer, None, self.software, self.limits)
                except PlanError:
                    pass
        return self.known[key]

    def hours(self, number: int, hosts: Hosts) -> float:
        """Returns a job's hours on `hosts` of each kind; infinite: no strategy fits."""
        plan = self.plan(number, hosts)
        if plan is None:
            return math.inf
        return self.jobs[number].rows / plan.batch * plan.step_s / SECONDS_PER_HOUR

    def at_least(self, number: int, hosts: Hosts) -> float:
        """Returns the hours of a job on hosts that lose nothing."""
        speed = sum(rate * n for rate, n in zip(self.rates[number], hosts))
        return self.jobs[number].rows / speed / SECONDS_PER_HOUR if speed else math.inf

    def _host_rates(self, number: int) -> list[float]:
        """Returns at most how many rows of a job a host of each kind trains in a second."""
        transformer, batch = self.described[number]
        machines = Machines(self.cluster)
        rates = peak_rates(TransformerModel(transformer, stack(self.software), machines), machines, batch)
        return [
            sum(rates.get((e.device.name, e.share), 0.0) * e.count for e in host.devices) for host in self.cluster.hosts
        ]


def place(jobs: Sequence[Job], cluster: Cluster, software: str, budget_s: float = 0.2) -> list[Placed]:
    """Returns the jobs with their hosts and hours in the schedule that ends first, in the order in which they begin.

    Args:
        budget_s: of the search for one plan.

    Raises:
        PlanError: a job fits nowhere.
    """
    plans = Plans(jobs, cluster, software, budget_s)
    bundles = bundled([plans.at_least(number, plans.whole) for number in range(len(jobs))])

    def hours(bundle: int, hosts: Hosts) -> float:
        return sum(plans.hours(job, hosts) for job in bundles[bundle])

    def at_least(bundle: int, hosts: Hosts) -> float:
        return sum(plans.at_least(job, hosts) for job in bundles[bundle])

    best = Placing(len(bundles), plans.whole, steps_of(plans.whole), hours, at_least).best()
    if best is None:
        lost = next(
            (job for n, job in enumerate(jobs) if plans.plan(n, plans.whole) is None),
            jobs[0],
        )
        raise PlanError(
            "a job does not fit on the cluster",
            given=f"{lost.name} on all hosts of {cluster.name}",
            expected="enough memory for every job, if it has all hosts to itself",
            action="leave it out, or add hosts",
        )
    found = []
    for run in best.runs():
        at = run.start
        for job in bundles[run.job]:
            plan = plans.plan(job, run.hosts)
            assert plan is not None
            found.append(Placed(jobs[job], run.hosts, plan, at, at + plans.hours(job, run.hosts)))
            at = found[-1].end
    return sorted(found, key=lambda one: one.start)


def bundled(hours: Sequence[float]) -> list[list[int]]:
    """Returns the jobs' numbers in at most `MOST_BUNDLES` bundles, whose jobs run in turn: the shortest together."""
    bundles = [[number] for number in range(len(hours))]
    while len(bundles) > MOST_BUNDLES:
        bundles.sort(key=lambda own: sum(hours[job] for job in own))
        bundles[:2] = [bundles[0] + bundles[1]]
    return bundles


def steps_of(hosts: Hosts) -> Hosts:
    """Returns in what steps hosts of each kind are divided, so that there are at most `MOST_STATES` numbers of them."""
    steps = [1] * len(hosts)
    while math.prod(-(-n // step) + 1 for n, step in zip(hosts, steps)) > MOST_STATES:
        most = max(range(len(hosts)), key=lambda kind: hosts[kind] / steps[kind])
        if steps[most] >= hosts[most]:
            break
        steps[most] = min(hosts[most], 2 * steps[most])
    return tuple(steps)


def placement(placed: Sequence[Placed], cluster: Cluster) -> list[str]:
    """Formats a row for each job: its hosts, step time, and when it begins and ends."""
    rows = [f"{'job':20} {'hosts':32} {'step':>10} {'begins':>10} {'ends':>10}  plan"]
    for one in placed:
        hosts = ", ".join(f"{n} {host.name}" for n, host in zip(one.hosts, cluster.hosts) if n)
        rows.append(
            f"{one.job.name[:20]:20} {hosts[:32]:32} {format_seconds(one.plan.step_s):>10} {one.start:>10.2f} "
            f"{one.end:>10.2f}  {one.plan.strategy.format_summary()}"
        )
    return [*rows, f"All end within {max(one.end for one in placed):.2f} hours"]
