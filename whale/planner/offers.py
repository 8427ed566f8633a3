"""Ranks several offers of devices for one job by time and cost, and packs several jobs on one cluster.

offers:
  - {name: old, cluster: v100.yaml, price_per_hour: 24.0}    # a path from this file's folder, or a cluster itself
  - {name: new, cluster: h100.yaml, price_per_hour: 98.0}

jobs:
  - {name: small, describe: "gpt:layers=24,hidden=2048,heads=16,batch=512", rows: 1000000}
  - {name: large, describe: "gpt:layers=48,hidden=8192,heads=64,batch=1024", rows: 200000}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from cost_model.analytic.transformer import Transformer
from cost_model.cluster import cluster_file as clusters
from cost_model.cluster import yaml_files
from cost_model.cluster.cluster_file import Cluster
from whale.errors import ClusterError, PlanError
from whale.ir.plan_text import format_seconds
from whale.planner import ask
from whale.planner.analytic_search.candidates import Constraints
from whale.planner.analytic_search.layer_profiles import LayerProfile
from whale.planner.report.planfile import PlanFile

EXAMPLE = "offers: [{name: ..., cluster: FILE, price_per_hour: ...}]"
MOST_HOSTS = 256  # of a shared cluster
SECONDS_PER_HOUR = 3600


class Offer(msgspec.Struct, forbid_unknown_fields=True):
    """An offer of devices: a cluster file (or the cluster itself) and its price per hour; 0: free of charge."""

    name: str
    cluster: str | dict[str, Any]
    price_per_hour: float = 0.0


class Job(msgspec.Struct, forbid_unknown_fields=True):
    """A model by its description, with its batch, and the number of rows to train on."""

    name: str
    describe: str
    rows: float


class _Offers(msgspec.Struct, forbid_unknown_fields=True):
    offers: list[Offer]


class _Jobs(msgspec.Struct, forbid_unknown_fields=True):
    jobs: list[Job]


@dataclass(frozen=True)
class Answer:
    """An offer with its best plan, or the reason why there is none."""

    offer: Offer
    plan: PlanFile | None
    why: str = ""

    @property
    def cost_per_million_rows(self) -> float:
        """Returns the cost of a million rows in the currency of the offer's price."""
        assert self.plan is not None
        return self.offer.price_per_hour / SECONDS_PER_HOUR * self.plan.step_s / self.plan.batch * 1e6


def read_offers(path: str) -> list[tuple[Offer, Cluster]]:
    """Reads the offers of a file with their clusters.

    Raises:
        PlanError: the file cannot be read, or does not list offers.
        ClusterError: a cluster cannot be read.
    """
    offers = _decoded(path, _Offers, EXAMPLE).offers
    if not offers:
        raise PlanError("a file of offers lists no offers", given=path, expected=EXAMPLE)
    found = []
    for offer in offers:
        if isinstance(offer.cluster, str):
            found.append((offer, clusters.read(Path(path).parent / offer.cluster)))
        else:
            found.append((offer, clusters.parse(msgspec.yaml.encode(offer.cluster).decode(), offer.name)))
    return found


def read_jobs(path: str) -> list[Job]:
    """Reads the jobs of a file.

    Raises:
        PlanError: the file cannot be read, or does not list jobs.
    """
    jobs = _decoded(path, _Jobs, "jobs: [{name: ..., describe: gpt:layers=..., rows: ...}]").jobs
    if not jobs or len({job.name for job in jobs}) < len(jobs):
        raise PlanError("jobs need names of their own, and at least one is needed", given=path)
    return jobs


def _decoded(path: str, kind: Any, expected: str) -> Any:
    try:
        return yaml_files.YamlFile(yaml_files.read_text(path, "file"), path, "file").decode(kind)
    except ClusterError as error:
        raise PlanError("a file cannot be read", given=path, reason=str(error), expected=expected) from error


def rank(
    offers: Sequence[tuple[Offer, Cluster]],
    batch: int,
    transformer: Transformer | None,
    table: LayerProfile | None,
    software: str,
    limits: Constraints,
) -> list[Answer]:
    """Plans each offer and returns them fastest first; offers on which no strategy fits come last."""
    found = []
    for offer, cluster in offers:
        try:
            found.append(Answer(offer, ask.plan(cluster, batch, transformer, table, software, limits)))
        except PlanError as error:
            found.append(Answer(offer, None, error.message))
    return sorted(found, key=lambda a: a.plan.step_s if a.plan else float("inf"))


def ranking(answers: Sequence[Answer]) -> list[str]:
    """Formats a row for each offer, and a line with the fastest and the cheapest one."""
    fitting = [a for a in answers if a.plan is not None]
    priced = [a for a in fitting if a.offer.price_per_hour]
    cheapest = min(priced, key=lambda a: a.cost_per_million_rows, default=None)
    rows = [f"{'offer':20} {'step':>10} {'rows/s':>12} {'per hour':>10} {'per 1M rows':>12}  plan"]
    for answer in answers:
        plan, offer = answer.plan, answer.offer
        if plan is None:
            rows.append(
                f"{offer.name[:20]:20} {'-':>10} {'-':>12} {offer.price_per_hour:>10.2f} {'-':>12}  {answer.why}"
            )
            continue
        step_s = plan.step_s
        cost = f"{answer.cost_per_million_rows:.2f}" if offer.price_per_hour else "-"
        marks = [word for word, one in (("fastest", fitting[0]), ("cheapest", cheapest)) if one is answer]
        mark = f"({', '.join(marks)}) " if marks else ""
        rows.append(
            f"{offer.name[:20]:20} {format_seconds(step_s):>10} {plan.batch / step_s:>12,.1f} "
            f"{offer.price_per_hour:>10.2f} {cost:>12}  {mark}{plan.strategy.format_summary()}"
        )
    return rows


@dataclass(frozen=True)
class Packed:
    """A job with its number of hosts of each kind, and its plan on these."""

    job: Job
    hosts: tuple[int, ...]
    plan: PlanFile

    @property
    def hours(self) -> float:
        """Returns the hours of the whole job, for all its rows."""
        return self.job.rows / self.plan.batch * self.plan.step_s / SECONDS_PER_HOUR


class _Packer:
    """Assigns hosts one by one, each to the job that would end last."""

    def __init__(self, jobs: Sequence[Job], cluster: Cluster, software: str, budget_s: float) -> None:
        self.jobs, self.cluster, self.software = jobs, cluster, software
        self.limits = Constraints(budget_s=budget_s)
        self.known: dict[tuple[int, tuple[int, ...]], PlanFile | None] = {}
        self.described = []
        for job in jobs:
            transformer, batch = ask.describe(job.describe)
            if batch is None:
                raise PlanError("a job's batch is not known", given=job.describe, action="add batch=ROWS")
            self.described.append((transformer, batch))

    def plan(self, number: int, hosts: tuple[int, ...]) -> PlanFile | None:
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

    def hours(self, number: int, hosts: tuple[int, ...]) -> float:
        """Returns a job's hours on `hosts` of each kind; infinite: no strategy fits."""
        plan = self.plan(number, hosts)
        return float("inf") if plan is None else Packed(self.jobs[number], hosts, plan).hours

    def run(self) -> list[Packed]:
        """Returns the jobs with their hosts; raises PlanError if a job has none on which it fits."""
        free = [host.count for host in self.cluster.hosts]
        given = [(0,) * len(free) for _ in self.jobs]
        done: set[int] = set()  # jobs that no further host makes faster
        while any(free) and len(done) < len(self.jobs):
            number = max((n for n in range(len(self.jobs)) if n not in done), key=lambda n: self.hours(n, given[n]))
            now = self.hours(number, given[number])
            options = [
                tuple(h + (k == kind) for k, h in enumerate(given[number])) for kind, left in enumerate(free) if left
            ]
            best = min(options, key=lambda hosts: (self.hours(number, hosts), -self._memory(hosts)))
            if now < float("inf") and self.hours(number, best) >= now:
                done.add(number)
                continue
            free = [left - (a - b) for left, a, b in zip(free, best, given[number])]
            given[number] = best
        found = []
        for number, job in enumerate(self.jobs):
            plan = self.plan(number, given[number])
            if plan is None:
                raise PlanError(
                    "the jobs do not fit on the cluster together",
                    given=f"{job.name} on {sum(given[number])} hosts of {self.cluster.name}",
                    expected="enough memory for every job",
                    action="run fewer jobs at a time, or add hosts",
                )
            found.append(Packed(job, given[number], plan))
        return found

    def _memory(self, hosts: tuple[int, ...]) -> float:
        each = [sum(e.count * e.device.memory_bytes * e.share for e in host.devices) for host in self.cluster.hosts]
        return sum(n * own for n, own in zip(hosts, each))


def pack(jobs: Sequence[Job], cluster: Cluster, software: str, budget_s: float = 0.4) -> list[Packed]:
    """Gives whole hosts to jobs so that the last job ends early: each host in turn to the job that would end last.

    Args:
        budget_s: of the search for one plan.

    Raises:
        PlanError: the jobs do not fit together, or the cluster is too large for this.
    """
    if (hosts := sum(host.count for host in cluster.hosts)) > MOST_HOSTS:
        raise PlanError("the cluster is too large to pack host by host", given=hosts, expected=f"at most {MOST_HOSTS}")
    return _Packer(jobs, cluster, software, budget_s).run()


def packing(packed: Sequence[Packed], cluster: Cluster) -> list[str]:
    """Formats a row for each job: its hosts, step time and hours."""
    rows = [f"{'job':20} {'hosts':32} {'step':>10} {'hours':>10}  plan"]
    for one in packed:
        hosts = ", ".join(f"{n} {host.name}" for n, host in zip(one.hosts, cluster.hosts) if n)
        step = format_seconds(one.plan.step_s)
        rows.append(
            f"{one.job.name[:20]:20} {hosts[:32]:32} {step:>10} {one.hours:>10.2f}  "
            f"{one.plan.strategy.format_summary()}"
        )
    left = [host.count - sum(one.hosts[k] for one in packed) for k, host in enumerate(cluster.hosts)]
    free = ", ".join(f"{n} {host.name}" for n, host in zip(left, cluster.hosts) if n)
    return [*rows, f"All end within {max(one.hours for one in packed):.2f} hours" + (f"; free: {free}" if free else "")]
