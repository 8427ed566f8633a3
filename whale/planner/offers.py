"""Ranks priced clusters ("offers"), and combinations of them, for one training job by time and cost.

offers:
  - {name: old, cluster: v100.yaml, price_per_hour: 24.0}    # a path from this file's folder, or a cluster itself
  - {name: new, cluster: h100.yaml, price_per_hour: 98.0, startup_hours: 0.5, startup_price: 20.0, together: zone-a}
  - {name: spot, cluster: more.yaml, price_per_hour: 40.0, interruptions_per_hour: 0.05, together: zone-a}
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from cost_model.analytic.transformer import Transformer
from cost_model.cluster import cluster_file as clusters
from cost_model.cluster import yaml_files
from cost_model.cluster.cluster_file import Cluster, HostEntry, NetworkEntry
from whale.errors import ClusterError, PlanError
from whale.ir.plan_text import format_seconds
from whale.planner import ask
from whale.planner.analytic_search.candidates import Constraints
from whale.planner.analytic_search.layer_profiles import LayerProfile
from whale.planner.report.planfile import PlanFile

EXAMPLE = "offers: [{name: ..., cluster: FILE, price_per_hour: ...}]"
MOST_TOGETHER = 6  # most offers with one word in `together`: all their combinations are planned
SECONDS_PER_HOUR = 3600
NAME = 28  # width of the column with names of offers

Amount = Annotated[float, Meta(ge=0)]


class Offer(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Represents one entry of an offers file: a cluster with its price.

    Attributes:
        cluster: path of a cluster file, relative to the offers file, or the content of one.
        price_per_hour: price while the devices are held, in any one currency; 0: free of charge.
        startup_hours: hours from the beginning of the rent to the first step.
        startup_price: price that is paid once, in addition.
        interruptions_per_hour: how often the devices are taken away on average (spot prices).
        hours_per_interruption: hours lost each time: the wait for other devices, the restart, and half of the time
            between two checkpoints, whose steps are repeated.
        together: offers with the same word here may be taken together as one cluster, in which networks of equal name
            are one network.
    """

    name: str
    cluster: str | dict[str, Any]
    price_per_hour: Amount = 0.0
    startup_hours: Amount = 0.0
    startup_price: Amount = 0.0
    interruptions_per_hour: Amount = 0.0
    hours_per_interruption: Amount = 0.5
    together: str = ""


class _Offers(msgspec.Struct, forbid_unknown_fields=True):
    offers: list[Offer]


@dataclass(frozen=True)
class Wanted:
    """Holds what the user wants of a job: rows to train, a deadline, a budget.

    Attributes:
        rows: rows to train on in all; None: unknown, so that only speeds and prices are compared.
        deadline_hours: latest end; None: as soon as possible.
        money: most that the whole job may cost; None: no limit.
    """

    rows: float | None = None
    deadline_hours: float | None = None
    money: float | None = None

    def __post_init__(self) -> None:
        if self.rows is None and (self.deadline_hours is not None or self.money is not None):
            raise PlanError(
                "--deadline and --spend need the length of the job",
                expected="--rows N, the number of rows that the whole job trains on",
                action="add --rows N",
            )


@dataclass(frozen=True)
class Answer:
    """Holds the best plan for an offer, or for several offers taken together.

    Attributes:
        offers: the offers, mostly one.
        plan: the best plan; None: no strategy fits.
        why: the reason why there is no plan.
    """

    offers: tuple[Offer, ...]
    plan: PlanFile | None
    why: str = ""

    @property
    def name(self) -> str:
        """Returns the names of the offers, joined by +."""
        return " + ".join(offer.name for offer in self.offers)

    @property
    def price_per_hour(self) -> float:
        """Returns the price per hour of all offers together."""
        return sum(offer.price_per_hour for offer in self.offers)

    @property
    def useful_part(self) -> float:
        """Returns the part of the time in which steps run, that is, not lost to interruptions; 0: all is lost.

        While steps take t hours, t + n h pass for n interruptions of h hours each. Interruptions come all of the time,
        so that n is their rate times t + n h (Young, "A first order approximation to the optimum checkpoint interval",
        1974).
        """
        lost = sum(offer.interruptions_per_hour * offer.hours_per_interruption for offer in self.offers)
        return max(0.0, 1.0 - lost)

    @property
    def rows_per_s(self) -> float:
        """Returns the rows trained per second on average, interruptions included; 0: no plan."""
        return 0.0 if self.plan is None else self.useful_part * self.plan.batch / self.plan.step_s

    @property
    def cost_per_million_rows(self) -> float:
        """Returns the price of a million rows, in the currency of the offers; infinite: no plan."""
        if not self.rows_per_s:
            return math.inf
        return self.price_per_hour / SECONDS_PER_HOUR / self.rows_per_s * 1e6

    def hours(self, rows: float) -> float:
        """Returns the hours from the beginning of the rent until `rows` rows are trained; infinite: never."""
        if not self.rows_per_s:
            return math.inf
        return max(offer.startup_hours for offer in self.offers) + rows / self.rows_per_s / SECONDS_PER_HOUR

    def cost(self, rows: float) -> float:
        """Returns the price to train `rows` rows; the price per hour is due during startup too."""
        if not self.rows_per_s:
            return math.inf
        return sum(offer.startup_price for offer in self.offers) + self.price_per_hour * self.hours(rows)


def read_offers(path: str) -> list[tuple[tuple[Offer, ...], Cluster]]:
    """Reads an offers file; returns (offers, cluster) for each offer and for each combination that may be taken
    together.

    Raises:
        PlanError: the file cannot be read, or does not list offers.
        ClusterError: a cluster cannot be read, or the clusters of a combination cannot be joined.
    """
    offers = decode(path, _Offers, EXAMPLE).offers
    if not offers:
        raise PlanError("an offers file lists no offers", given=path, expected=EXAMPLE, action="add an offer")
    if len({offer.name for offer in offers}) < len(offers):
        raise PlanError(
            "two offers have the same name",
            given=f"{path}: {', '.join(offer.name for offer in offers)}",
            expected="a name of its own for each offer",
            action="give one of them another `name`",
        )
    where: dict[str, Cluster] = {}
    for offer in offers:
        if isinstance(offer.cluster, str):
            where[offer.name] = clusters.read(Path(path).parent / offer.cluster)
        else:
            where[offer.name] = clusters.parse(msgspec.yaml.encode(offer.cluster).decode(), offer.name)
    found: list[tuple[tuple[Offer, ...], Cluster]] = [((offer,), where[offer.name]) for offer in offers]
    for several in _combinations(offers, path):
        found.append((several, join_clusters([(offer.name, where[offer.name]) for offer in several])))
    return found


def _combinations(offers: Sequence[Offer], path: str) -> Iterator[tuple[Offer, ...]]:
    for word in dict.fromkeys(offer.together for offer in offers if offer.together):
        own = [offer for offer in offers if offer.together == word]
        if len(own) > MOST_TOGETHER:
            raise PlanError(
                "too many offers may be taken together",
                given=f"{path}: {len(own)} offers with together: {word}",
                expected=f"at most {MOST_TOGETHER}, as all their combinations are planned",
                action="give some of them another word in `together`, or none",
            )
        for count in range(2, len(own) + 1):
            yield from itertools.combinations(own, count)


def join_clusters(parts: Sequence[tuple[str, Cluster]]) -> Cluster:
    """Returns one cluster that consists of several; names of hosts are prefixed by the name of their offer.

    Args:
        parts: (name of the offer, cluster).

    Raises:
        ClusterError: two clusters have different networks of the same name, or hosts share no network.
    """
    hosts: list[HostEntry] = []
    networks: dict[str, NetworkEntry] = {}
    for name, one in parts:
        for network, entry in one.networks.items():
            if networks.setdefault(network, entry) != entry:
                raise ClusterError(
                    "offers that are taken together have unlike networks of one name",
                    given=f"network {network} of offer {name}",
                    expected="the same type and figures for networks with the same name",
                    action="give one of the networks another name",
                )
        hosts += [msgspec.structs.replace(host, name=f"{name}-{host.name}") for host in one.hosts]
    joined = Cluster(" + ".join(name for name, _ in parts), hosts, networks)
    for first, second in itertools.combinations(hosts, 2):
        joined.find_path(first, second)
    return joined


def decode(path: str, kind: Any, expected: str) -> Any:
    """Reads a YAML file into the type `kind`; raises PlanError if the file cannot be read or does not have that
    form.
    """
    try:
        return yaml_files.YamlFile(yaml_files.read_text(path, "file"), path, "file").decode(kind)
    except ClusterError as error:
        raise PlanError(
            "a file cannot be read",
            given=path,
            reason=str(error),
            expected=expected,
            action="correct the path, or the line of the file that the reason names",
        ) from error


def rank(
    offers: Sequence[tuple[tuple[Offer, ...], Cluster]],
    batch: int,
    transformer: Transformer | None,
    table: LayerProfile | None,
    software: str,
    limits: Constraints,
) -> list[Answer]:
    """Plans the model on every offer and combination; returns the answers, fastest first, those without a plan last.

    Args:
        offers: (offers, cluster), as `read_offers` returns them.
        batch: global batch in rows.
        limits: the user's constraints and the budget of each search.
    """
    found = []
    for several, cluster in offers:
        try:
            found.append(Answer(several, ask.plan(cluster, batch, transformer, table, software, limits)))
        except PlanError as error:
            found.append(Answer(several, None, error.message))
    return sorted(found, key=lambda a: -a.rows_per_s)


def choose(answers: Sequence[Answer], wanted: Wanted) -> Answer | None:
    """Returns the answer to take; None: none meets the deadline or the budget.

    With a deadline this is the cheapest answer that ends in time; without one, the answer that ends first within the
    budget.
    """
    able = [a for a in answers if a.rows_per_s]
    rows = wanted.rows
    if rows is None:
        return able[0] if able else None
    able = [
        a
        for a in able
        if (wanted.deadline_hours is None or a.hours(rows) <= wanted.deadline_hours)
        and (wanted.money is None or a.cost(rows) <= wanted.money)
    ]
    if wanted.deadline_hours is not None:
        return min(able, key=lambda a: (a.cost(rows), a.hours(rows)), default=None)
    return min(able, key=lambda a: (a.hours(rows), a.cost(rows)), default=None)


def format_ranking(answers: Sequence[Answer], wanted: Wanted) -> list[str]:
    """Formats a table with one line per answer, in which the fastest and the cheapest are marked, and a line of
    advice.
    """
    fitting = [a for a in answers if a.rows_per_s]
    rows, chosen = wanted.rows, choose(answers, wanted)
    priced = [a for a in fitting if a.price_per_hour]
    cheapest = min(priced, key=lambda a: a.cost_per_million_rows if rows is None else a.cost(rows), default=None)
    whole = f" {'hours':>9} {'cost':>10}" if rows is not None else ""
    head = f"{'offer':{NAME}} {'step':>10} {'rows/s':>12} {'per hour':>10} {'per 1M rows':>12}{whole}  plan"
    lines = [head]
    for answer in answers:
        plan, price = answer.plan, answer.price_per_hour
        start = f"{answer.name[:NAME]:{NAME}}"
        if plan is None or not answer.rows_per_s:
            why = answer.why or "interruptions take all of the time"
            empty = f" {'-':>9} {'-':>10}" if rows is not None else ""
            lines.append(f"{start} {'-':>10} {'-':>12} {price:>10.2f} {'-':>12}{empty}  {why}")
            continue
        cost = f"{answer.cost_per_million_rows:.2f}" if price else "-"
        whole = f" {answer.hours(rows):>9.2f} {answer.cost(rows):>10.2f}" if rows is not None else ""
        marks = [word for word, one in (("fastest", fitting[0]), ("cheapest", cheapest)) if one is answer]
        mark = f"({', '.join(marks)}) " if marks else ""
        lines.append(
            f"{start} {format_seconds(plan.step_s):>10} {answer.rows_per_s:>12,.1f} {price:>10.2f} {cost:>12}{whole}  "
            f"{mark}{plan.strategy.format_summary()}"
        )
    if rows is not None:
        lines.append(_advice(chosen, fitting, wanted, rows))
    return lines


def _advice(chosen: Answer | None, fitting: Sequence[Answer], wanted: Wanted, rows: float) -> str:
    limits = []
    if wanted.deadline_hours is not None:
        limits.append(f"within {wanted.deadline_hours:g} hours")
    if wanted.money is not None:
        limits.append(f"for at most {wanted.money:g}")
    words = " ".join(limits) or "as soon as possible"
    if chosen is not None:
        hours, cost = chosen.hours(rows), chosen.cost(rows)
        return f"Take {chosen.name}: {words}, it ends after {hours:.2f} hours and costs {cost:.2f}."
    if not fitting:
        return "None of the offers can train the model: it does not fit, or interruptions take all of the time."
    soonest = min(fitting, key=lambda a: a.hours(rows))
    cheapest = min(fitting, key=lambda a: a.cost(rows))
    return (
        f"No offer ends {words}: {soonest.name} ends soonest, after {soonest.hours(rows):.2f} hours, and "
        f"{cheapest.name} costs least, {cheapest.cost(rows):.2f}."
    )
