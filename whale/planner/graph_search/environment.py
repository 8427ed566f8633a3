"""Holds the inputs by which a search evaluates plans: each rank's speed, prices of operations and exchanges, memory
limits.

Decision: 0106.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from cost_model.cluster.cluster_file import Cluster
from cost_model.cluster.pools import Machines
from cost_model.graph.executor_graph import count_host_bytes
from cost_model.graph.machine import (
    Machine,
    Rates,
    cluster_machine,
    cluster_rates,
    cluster_topology,
    make_measured_machine,
    make_rated_machine,
)
from cost_model.graph.machine_profile import MachineProfile
from cost_model.graph.predict import rank_seconds
from whale.ir.fingerprint import compute_fingerprint
from whale.ir.program import Program
from whale.ir.topology import Topology

UNEQUAL = 1.25  # ranks whose speeds differ by less are taken to be equal
# An exchange reads what it sends, adds it up and writes it: so many passes over memory, where nobody is waited for.
PASSES_OF_AN_EXCHANGE = 3
# Computing is predicted better than by this factor. Figures are no further off than by the others.
ROUGH, LEAST_EXCHANGES, MOST_TIMES = 1.5, 1e-3, 1e9


class Slowdown(msgspec.Struct, frozen=True):
    """Says how many times as long as predicted the ranks take for what they compute, and for exchanges."""

    computing: float = 1.0
    exchanging: float = 1.0


class SlowableStep(Protocol):
    """A step of which is predicted what it takes with slower figures: ``cost_model.graph.predict.PricedStep``."""

    exchanges_s: float

    def predict_s(self, computing: float, exchanging: float) -> float:
        """Returns the seconds of a step where computing, and exchanges, take so many times as long."""
        ...


def find_slowdown(step: SlowableStep, step_s: float, exchanges_s: float) -> Slowdown:
    """Returns by what figures a step is predicted to take what it took.

    Exchanges are as much slower as all of them together were, and computing as much as explains the rest. What was
    measured of exchanges that overlap each other is too much: if they alone would make the step longer than it was,
    they are as slow as explains it, and computing as fast as predictions may be wrong by, a factor of `ROUGH`. Where a
    step was to exchange nothing, what it exchanged is what every plan does: the comparison of the ranks' plans.

    Args:
      step_s: measured seconds of a step.
      exchanges_s: of its exchanges, without waits, on the rank with most.
    """
    least = min(1.0, step_s / step.predict_s(1.0, 1.0)) / ROUGH
    if step.exchanges_s <= 0:
        return Slowdown(computing=_solve(lambda times: step.predict_s(times, 1.0), step_s - exchanges_s, least))
    exchanging = max(LEAST_EXCHANGES, exchanges_s / step.exchanges_s)
    if step.predict_s(least, exchanging) < step_s:
        return Slowdown(_solve(lambda times: step.predict_s(times, exchanging), step_s, least), exchanging)
    return Slowdown(least, _solve(lambda times: step.predict_s(least, times), step_s, LEAST_EXCHANGES, exchanging))


def _solve(grows: Callable[[float], float], value: float, least: float, most: float = 0.0) -> float:
    """Returns where a growing function has a value, to a hundredth, between two positions (0: no upper bound)."""
    if not most:
        most = 2 * least
        while grows(most) < value and most < MOST_TIMES:
            least, most = most, 2 * most
    while most > 1.01 * least:
        middle = math.sqrt(least * most)
        least, most = (middle, most) if grows(middle) < value else (least, middle)
    return math.sqrt(least * most)


class Lending(Protocol):
    """The cores of a host that one rank may compute on while the others wait, as far as they can be measured."""

    @property
    def threads(self) -> int:
        """Returns the threads of one rank on the cores of all."""

    def measure_step(self, program: Program) -> float:
        """Returns the seconds of a step of one rank's program, on random values, with all threads.

        Raises:
          WhaleError: it cannot be run without effects on the script.
        """


@dataclass(frozen=True)
class SearchEnvironment:
    """The inputs by which a search evaluates plans, which it partitions itself (`whale.partition`).

    Attributes:
      rates: of each rank.
      prices: a profile written by `whale profile`, or a cluster whose first devices these are, which prices operations
        and exchanges instead of the rates; None: the rates do.
      limits_bytes: memory that each rank has for a step.
      captured: the program as captured, with its gradients marked, which recomputation needs: the search normalises it
        again under other settings. It exists before the search begins, as the searched program was made of it. None:
        its gradients are not marked.
      hosts_bytes: memory of its host that each rank may use for tables that are offloaded; (): none may be.
      topology: the hosts, and the links between them; None: exchanges between any ranks take as long.
      lending: the cores of the host, if ranks may lend theirs; None: each rank computes with its own.
    """

    rates: Sequence[Rates]
    prices: MachineProfile | Cluster | None
    limits_bytes: Sequence[float]
    captured: Program | None = None
    hosts_bytes: Sequence[float] = ()
    topology: Topology | None = None
    lending: Lending | None = None

    @classmethod
    def read_cluster(
        cls, cluster: Cluster, program: Program, size: int, captured: Program | None = None
    ) -> SearchEnvironment:
        """Reads the first ``size`` devices of a cluster from the catalogue.

        Raises:
          ClusterError: it has fewer.
        """
        machine = cluster_machine(cluster)
        machine.check_holds(size)
        weights = [v.type for v in program.variables if len(v.type.shape or ()) >= 2]
        dtype = max(weights, key=lambda t: t.bytes).dtype if weights else "float32"
        limits_bytes = machine.memory_bytes[:size]
        hosts_bytes, topology = _list_hosts_bytes(cluster, size), cluster_topology(cluster, size)
        return cls(cluster_rates(cluster, dtype)[:size], cluster, limits_bytes, captured, hosts_bytes, topology)

    def slow_down(self, slower: Slowdown) -> SearchEnvironment:
        """Returns what it is where ranks, and links between them, are so many times as slow."""
        assert not isinstance(self.prices, Cluster)  # nothing runs on it
        return replace(
            self,
            rates=[one.slow_down(slower.computing, slower.exchanging) for one in self.rates],
            prices=self.prices and self.prices.slow_down(slower.computing, slower.exchanging),
            topology=self.topology and self.topology.slow_down(slower.exchanging),
        )

    @property
    def origin(self) -> str:
        """Describes where the figures come from."""
        if isinstance(self.prices, MachineProfile):
            return f"{self.prices.host} as `whale profile` measured it"
        return self.rates[0].origin

    @property
    def prices_links(self) -> bool:
        """Tells whether exchanges are priced by the links between the hosts of their ranks."""
        return self.prices is None and self.topology is not None

    def machine(self, program: Program) -> Machine:
        """Returns the machine model that prices the operations of ranks that run ``program``."""
        if isinstance(self.prices, MachineProfile):
            marks = [compute_fingerprint(program)]
            return make_measured_machine(self.prices, len(self.rates), marks, topology=self.topology)
        return (
            make_rated_machine(self.rates, topology=self.topology)
            if self.prices is None
            else cluster_machine(self.prices)
        )

    def lacking_bytes(self, held: Mapping[int, int]) -> float:
        """Returns the largest memory deficit of a rank if ranks need ``held`` bytes; below 0: all fit."""
        return max(size - self.limits_bytes[rank] for rank, size in held.items())

    def lacking_on_hosts(self, programs: Mapping[int, Program]) -> float:
        """Returns the largest deficit of the hosts' memory, where it is known, for what ranks' programs hold there.

        Below 0: all fits.
        """
        if not self.hosts_bytes:
            return 0.0
        return max(count_host_bytes(program) - self.hosts_bytes[rank] for rank, program in programs.items())

    def seconds_of_each(self, program: Program, stands_for: int) -> list[float]:
        """Returns the seconds of each rank, without waiting, if it ran the program of rank ``stands_for``."""
        size, kinds = len(self.rates), list(dict.fromkeys(self.rates))
        seconds = rank_seconds(program, stands_for, size, [_make_waitless_machine([one] * size) for one in kinds])
        of_kind = dict(zip(kinds, seconds))
        return [of_kind[one] for one in self.rates]


def _list_hosts_bytes(cluster: Cluster, size: int) -> Sequence[float]:
    """Returns the host memory that each of the first ranks may use beside a device's; (): that is not known of all."""
    if "cpu" in cluster.kinds:
        return ()
    found = [
        pool.host_bytes
        for host in cluster.hosts
        for _ in range(host.count)
        for pool in Machines(msgspec.structs.replace(cluster, hosts=[host])).pools
        for _ in range(pool.per_host)
    ][:size]
    return found if all(found) else ()


def unequal(rates: Sequence[Rates], by: float = UNEQUAL) -> bool:
    """Tells whether the ranks' rates differ by more than measurement noise."""
    speeds = [min(one.flops_per_s / rates[0].flops_per_s, one.bytes_per_s / rates[0].bytes_per_s) for one in rates]
    return max(speeds) > by * min(speeds)


def _make_waitless_machine(rates: Sequence[Rates]) -> Machine:
    """Returns a machine whose exchanges only cost CPU work on the sending rank: reading, adding and writing the
    data.
    """
    return make_rated_machine([
        replace(
            one,
            exchange_s=0.0,
            exchanged_bytes_per_s=max(one.exchanged_bytes_per_s, one.bytes_per_s / PASSES_OF_AN_EXCHANGE),
            devices=None,
        )
        for one in rates
    ])  # fmt: skip
