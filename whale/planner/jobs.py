"""Places several training jobs on the hosts of one cluster so that the last one ends as early as possible.

jobs:
  - {name: small, describe: "gpt:layers=24,hidden=2048,heads=16,batch=512", rows: 1000000}
  - {name: large, describe: "gpt:layers=48,hidden=8192,heads=64,batch=1024", rows: 200000}

Jobs run side by side on different hosts, one after the other on the same hosts, or both. A schedule is built
recursively: it is one job; or two schedules one after the other on the same hosts; or two schedules at the same time,
each on a part of the hosts. `Placing` finds the shortest of all such schedules. Where there are too many jobs or hosts
for that, jobs and hosts are bundled.

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

MOST_BUNDLES = 6  # most jobs that are placed one by one; of more jobs, the shortest are bundled
MOST_STATES = 40  # most different parts of the hosts that are tried
BUDGET_S = 0.2  # seconds of work for each search of a plan
ROUNDING = 1e-9  # a schedule has to be shorter by this part to count as shorter

Hosts = tuple[int, ...]  # number of hosts of each kind, in the order of the cluster file
Hours = Callable[[int, Hosts], float]  # (job, hosts) -> its hours there; infinite: it does not fit


class Job(msgspec.Struct, forbid_unknown_fields=True):
    """Represents one entry of a jobs file: a described model with its batch, and how many rows to train on in all."""

    name: str
    describe: str
    rows: float


class _Jobs(msgspec.Struct, forbid_unknown_fields=True):
    jobs: list[Job]


@dataclass(frozen=True)
class Run:
    """Represents one job in a schedule: the job's number, its hosts, and its start and end in hours after the
    schedule's start.
    """

    job: int
    hosts: Hosts
    start: float
    end: float


@dataclass(frozen=True)
class Schedule:
    """Represents a schedule on some hosts: one job, or two schedules one after the other or at the same time.

    Attributes:
        hours: duration until the last job ends.
        hosts: number of hosts of each kind that the schedule uses.
        job: number of the job; None: the schedule consists of `first` and `second`.
        in_turn: `second` begins when `first` ends; False: both begin at the same time.
    """

    hours: float
    hosts: Hosts
    job: int | None = None
    first: Schedule | None = None
    second: Schedule | None = None
    in_turn: bool = False

    def runs(self, start: float = 0.0) -> Iterator[Run]:
        """Yields every job of the schedule with its hosts, start and end; the schedule starts at `start` hours."""
        if self.job is not None:
            yield Run(self.job, self.hosts, start, start + self.hours)
        elif self.first is not None and self.second is not None:
            yield from self.first.runs(start)
            yield from self.second.runs(start + self.first.hours if self.in_turn else start)


class Placing:
    """Finds the shortest schedule of jobs on hosts with as few calls of `hours`, which each cost a search, as possible.

    Args:
        jobs: the number of jobs.
        hosts: number of hosts of each kind.
        steps: for each kind, hosts are divided between jobs in multiples of this.
        hours: (job, hosts) -> the job's hours on these hosts.
        at_least: (job, hosts) -> a lower bound of these hours that is cheap to compute.
    """

    def __init__(self, jobs: int, hosts: Hosts, steps: Hosts, hours: Hours, at_least: Hours) -> None:
        self.jobs, self.hosts, self.steps = jobs, hosts, steps
        self._hours, self._at_least = hours, at_least
        self._known: dict[tuple[int, Hosts], tuple[Schedule | None, float]] = {}

    def best(self) -> Schedule | None:
        """Returns the shortest schedule of all jobs; None: one of them fits nowhere."""
        return self.shortest((1 << self.jobs) - 1, self.hosts, math.inf)

    def shortest(self, jobs: int, hosts: Hosts, below: float) -> Schedule | None:
        """Returns the shortest schedule of a set of jobs on some hosts; None: there is none of less than `below` hours.

        Args:
            jobs: bit mask: bit i stands for job i.
        """
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
        """Returns a lower bound of the hours of any schedule: each job runs on all hosts without loss, one job after
        the other.
        """
        return sum(self._at_least(job, hosts) for job in range(self.jobs) if jobs >> job & 1)

    def _ways(self, jobs: int, hosts: Hosts) -> Iterator[tuple[int, Hosts | None]]:
        """Yields (first part of the jobs, hosts of that part) for each way to divide a set of jobs in two.

        None instead of hosts: both parts use all hosts, one after the other; these ways come first. A single job is not
        divided.
        """
        if jobs & (jobs - 1) == 0:
            yield jobs, None
            return
        yield from ((some, None) for some in _parts(jobs))
        yield from itertools.product(_parts(jobs), self._divisions(hosts))

    def _divisions(self, hosts: Hosts) -> Iterator[Hosts]:
        """Yields the parts of the hosts, as numbers of each kind, that the first of two simultaneous schedules may
        get.
        """
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
        # The part that looks longer comes first: if it is too long, the other part need not be planned.
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
    """Yields the proper subsets of a bit mask that contain its lowest bit, so that each division in two comes once."""
    lowest, rest = jobs & -jobs, jobs & (jobs - 1)
    some = rest
    while some:
        some = (some - 1) & rest
        yield lowest | some


@dataclass(frozen=True)
class Placed:
    """Represents a placed job: its hosts of each kind, its plan on them, and its start and end in hours."""

    job: Job
    hosts: Hosts
    plan: PlanFile
    start: float
    end: float


def read_jobs(path: str) -> list[Job]:
    """Reads a jobs file.

    Raises:
        PlanError: the file cannot be read, lists no jobs, or gives two jobs the same name.
    """
    jobs = decode(path, _Jobs, "jobs: [{name: ..., describe: gpt:layers=..., rows: ...}]").jobs
    if not jobs or len({job.name for job in jobs}) < len(jobs):
        raise PlanError(
            "a jobs file lists no jobs, or two of the same name",
            given=f"{path}: {', '.join(job.name for job in jobs) or 'no jobs'}",
            expected="at least one job, each with a name of its own",
            action="give every job another `name`",
        )
    return jobs


class Plans:
    """Plans jobs on parts of a cluster, and caches the plans."""

    def __init__(self, jobs: Sequence[Job], cluster: Cluster, software: str, budget_s: float) -> None:
        self.jobs, self.cluster, self.software = jobs, cluster, software
        self.limits = Constraints(budget_s=budget_s)
        self.known: dict[tuple[int, Hosts], PlanFile | None] = {}
        self.described = []
        for job in jobs:
            transformer, batch = ask.describe(job.describe)
            if batch is None:
                raise PlanError(
                    "the description of a job has no global batch",
                    given=f"{job.name}: {job.describe}",
                    expected="batch=ROWS in the description",
                    action="add ,batch=ROWS to `describe`",
                )
            self.described.append((transformer, batch))
        self.whole = tuple(host.count for host in cluster.hosts)
        self.rates = [self._host_rates(number) for number in range(len(jobs))]

    def plan(self, number: int, hosts: Hosts) -> PlanFile | None:
        """Returns the plan of job `number` on `hosts` hosts of each kind; None: no strategy fits."""
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
        """Returns the hours of job `number` on `hosts` hosts of each kind; infinite: no strategy fits."""
        plan = self.plan(number, hosts)
        if plan is None:
            return math.inf
        return self.jobs[number].rows / plan.batch * plan.step_s / SECONDS_PER_HOUR

    def at_least(self, number: int, hosts: Hosts) -> float:
        """Returns a lower bound of a job's hours: every host trains at its peak rate, without any loss; needs no
        search.
        """
        speed = sum(rate * n for rate, n in zip(self.rates[number], hosts))
        return self.jobs[number].rows / speed / SECONDS_PER_HOUR if speed else math.inf

    def _host_rates(self, number: int) -> list[float]:
        """Returns the most rows per second of a job that one host of each kind can train."""
        transformer, batch = self.described[number]
        machines = Machines(self.cluster)
        rates = peak_rates(TransformerModel(transformer, stack(self.software), machines), machines, batch)
        return [
            sum(rates.get((e.device.name, e.share), 0.0) * e.count for e in host.devices) for host in self.cluster.hosts
        ]


def place(jobs: Sequence[Job], cluster: Cluster, software: str, budget_s: float = BUDGET_S) -> list[Placed]:
    """Returns the placed jobs of the shortest schedule, in the order in which they start.

    Args:
        budget_s: seconds of work for each search of a plan.

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
            expected="every job fits into memory when it has all hosts to itself",
            action=f"leave {lost.name} out of the jobs file, or add hosts to the cluster file",
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
    """Groups jobs into at most `MOST_BUNDLES` bundles whose jobs run one after the other; the shortest jobs are
    grouped.

    Args:
        hours: lower bound of each job's hours on all hosts.

    Returns:
        the numbers of the jobs in each bundle.
    """
    bundles = [[number] for number in range(len(hours))]
    while len(bundles) > MOST_BUNDLES:
        bundles.sort(key=lambda own: sum(hours[job] for job in own))
        bundles[:2] = [bundles[0] + bundles[1]]
    return bundles


def steps_of(hosts: Hosts) -> Hosts:
    """Returns for each kind of host the multiple in which hosts are divided, so that there are at most `MOST_STATES`
    parts.
    """
    steps = [1] * len(hosts)
    while math.prod(-(-n // step) + 1 for n, step in zip(hosts, steps)) > MOST_STATES:
        most = max(range(len(hosts)), key=lambda kind: hosts[kind] / steps[kind])
        if steps[most] >= hosts[most]:
            break
        steps[most] = min(hosts[most], 2 * steps[most])
    return tuple(steps)


def placement(placed: Sequence[Placed], cluster: Cluster) -> list[str]:
    """Formats a table with one line per job (hosts, step time, start and end in hours, strategy), and a last line."""
    rows = [f"{'job':20} {'hosts':32} {'step':>10} {'begins':>10} {'ends':>10}  plan"]
    for one in placed:
        hosts = ", ".join(f"{n} {host.name}" for n, host in zip(one.hosts, cluster.hosts) if n)
        rows.append(
            f"{one.job.name[:20]:20} {hosts[:32]:32} {format_seconds(one.plan.step_s):>10} {one.start:>10.2f} "
            f"{one.end:>10.2f}  {one.plan.strategy.format_summary()}"
        )
    return [*rows, f"All end within {max(one.end for one in placed):.2f} hours"]
