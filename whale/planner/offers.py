"""Ranks offers of devices, and combinations of them, for one job by time and cost.

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
MOST_TOGETHER = 6  # offers that may be taken together, of which all combinations are planned
SECONDS_PER_HOUR = 3600
NAME = 28  # characters of an offer's name, or of several

Amount = Annotated[float, Meta(ge=0)]


class Offer(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """An offer of devices: a cluster file (or the cluster itself) and its price.

    Attributes:
        price_per_hour: while the devices are held; 0: free of charge.
        startup_hours, startup_price: until the first step, and once besides.
        interruptions_per_hour: how often the devices are taken away on average (spot prices).
        hours_per_interruption: what each costs: the wait for other devices, the restart, and half of the time between
            two checkpoints, whose steps are done again.
        together: offers with the same word here may be taken together, as one cluster; networks of one name are one.
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
    """The limits of a job's cost.

    Attributes:
        rows: to train on, all together; None: not known, so that only speeds and prices are compared.
        deadline_hours: the job's end; None: as soon as can be.
        money: for the whole job; None: any.
    """

    rows: float | None = None
    deadline_hours: float | None = None
    money: float | None = None

    def __post_init__(self) -> None:
        if self.rows is None and (self.deadline_hours is not None or self.money is not None):
            raise PlanError("a deadline or a budget is for a whole job", action="add --rows, all that it trains on")


@dataclass(frozen=True)
class Answer:
    """Offers that are taken together, mostly one, with their best plan, or the reason why there is none."""

    offers: tuple[Offer, ...]
    plan: PlanFile | None
    why: str = ""

    @property
    def name(self) -> str:
        """Returns the names of the offers."""
        return " + ".join(offer.name for offer in self.offers)

    @property
    def price_per_hour(self) -> float:
        """Returns what all of them cost in an hour."""
        return sum(offer.price_per_hour for offer in self.offers)

    @property
    def useful_part(self) -> float:
        """Returns the part of the time that is not lost by interruptions, of any of the offers; 0: all is lost.

        While steps take t hours, t + n h pass for n interruptions of h hours each, which come all of the time: n is
        their rate times t + n h (Young, "A first order approximation to the optimum checkpoint interval", 1974).
        """
        lost = sum(offer.interruptions_per_hour * offer.hours_per_interruption for offer in self.offers)
        return max(0.0, 1.0 - lost)

    @property
    def rows_per_s(self) -> float:
        """Returns the rows that are trained on in a second on average, interruptions included."""
        return 0.0 if self.plan is None else self.useful_part * self.plan.batch / self.plan.step_s

    @property
    def cost_per_million_rows(self) -> float:
        """Returns the cost of a million rows in the currency of the offers' prices."""
        if not self.rows_per_s:
            return math.inf
        return self.price_per_hour / SECONDS_PER_HOUR / self.rows_per_s * 1e6

    def hours(self, rows: float) -> float:
        """Returns the hours until so many rows are trained on, start included; infinite: never."""
        if not self.rows_per_s:
            return math.inf
        return max(offer.startup_hours for offer in self.offers) + rows / self.rows_per_s / SECONDS_PER_HOUR

    def cost(self, rows: float) -> float:
        """Returns the money for so many rows; devices cost from their start on."""
        if not self.rows_per_s:
            return math.inf
        return sum(offer.startup_price for offer in self.offers) + self.price_per_hour * self.hours(rows)


def read_offers(path: str) -> list[tuple[tuple[Offer, ...], Cluster]]:
    """Reads the offers of a file, and what can be taken together of them, each with its cluster.

    Raises:
        PlanError: the file cannot be read, or does not list offers.
        ClusterError: a cluster cannot be read, or two do not fit together.
    """
    offers = decode(path, _Offers, EXAMPLE).offers
    if not offers:
        raise PlanError("a file of offers lists no offers", given=path, expected=EXAMPLE)
    if len({offer.name for offer in offers}) < len(offers):
        raise PlanError("offers need names of their own", given=path)
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
                given=f"{path}: {len(own)} of {word}",
                expected=f"at most {MOST_TOGETHER}, of which all combinations are planned",
            )
        for count in range(2, len(own) + 1):
            yield from itertools.combinations(own, count)


def join_clusters(parts: Sequence[tuple[str, Cluster]]) -> Cluster:
    """Returns one cluster of several, by their offers' names, which are put before the names of their hosts.

    Raises:
        ClusterError: a network of one name is another one in another cluster, or hosts share no network.
    """
    hosts: list[HostEntry] = []
    networks: dict[str, NetworkEntry] = {}
    for name, one in parts:
        for network, entry in one.networks.items():
            if networks.setdefault(network, entry) != entry:
                raise ClusterError(
                    "offers that are taken together have unlike networks of one name",
                    given=f"{network} of {name}",
                    action="give one of them another name",
                )
        hosts += [msgspec.structs.replace(host, name=f"{name}-{host.name}") for host in one.hosts]
    joined = Cluster(" + ".join(name for name, _ in parts), hosts, networks)
    for first, second in itertools.combinations(hosts, 2):
        joined.find_path(first, second)
    return joined


def decode(path: str, kind: Any, expected: str) -> Any:
    """Reads a YAML file as a type; raises PlanError if it cannot be."""
    try:
        return yaml_files.YamlFile(yaml_files.read_text(path, "file"), path, "file").decode(kind)
    except ClusterError as error:
        raise PlanError("a file cannot be read", given=path, reason=str(error), expected=expected) from error


def rank(
    offers: Sequence[tuple[tuple[Offer, ...], Cluster]],
    batch: int,
    transformer: Transformer | None,
    table: LayerProfile | None,
    software: str,
    limits: Constraints,
) -> list[Answer]:
    """Plans all offers and returns them fastest first; those on which no strategy fits come last."""
    found = []
    for several, cluster in offers:
        try:
            found.append(Answer(several, ask.plan(cluster, batch, transformer, table, software, limits)))
        except PlanError as error:
            found.append(Answer(several, None, error.message))
    return sorted(found, key=lambda a: -a.rows_per_s)


def choose(answers: Sequence[Answer], wanted: Wanted) -> Answer | None:
    """Returns the answer to take; None: none is as was wanted.

    The cheapest that ends by the deadline; without one, what ends soonest for the money, or at all.
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
    """Formats a row for each answer, the fastest and the cheapest marked, and a line that says what to take."""
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
            why = answer.why or "it is interrupted sooner than it goes on"
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
    words = " ".join(limits) or "as soon as can be"
    if chosen is not None:
        hours, cost = chosen.hours(rows), chosen.cost(rows)
        return f"Take {chosen.name}: {words}, it ends after {hours:.2f} hours and costs {cost:.2f}."
    if not fitting:
        return f"None of the offers trains the model: nothing ends {words}."
    soonest = min(fitting, key=lambda a: a.hours(rows))
    cheapest = min(fitting, key=lambda a: a.cost(rows))
    return (
        f"None ends {words}: {soonest.name} ends soonest, after {soonest.hours(rows):.2f} hours, and {cheapest.name} "
        f"costs least, {cheapest.cost(rows):.2f}."
    )
