"""Holds what a search evaluates plans with: the ranks' speeds, prices of operations and exchanges, and memory limits.

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

UNEQUAL = 1.25  # ranks whose speeds differ by less than this factor are taken to be equal
# Passes over memory of an exchange that does not wait: it reads what it sends, adds it up, and writes it.
PASSES_OF_AN_EXCHANGE = 3
# Predicted computation is off by less than the first factor; the other two bound the factors that are looked for.
ROUGH, LEAST_EXCHANGES, MOST_TIMES = 1.5, 1e-3, 1e9


class Slowdown(msgspec.Struct, frozen=True):
    """Holds the factors by which measured steps are slower than predicted: for computation, and for communication."""

    computing: float = 1.0
    exchanging: float = 1.0


class SlowableStep(Protocol):
    """A priced step whose time can be predicted again with slower figures: ``cost_model.graph.predict.PricedStep``."""

    exchanges_s: float

    def predict_s(self, computing: float, exchanging: float) -> float:
        """Returns the seconds of a step if computation and communication are slower by these two factors."""
        ...


def find_slowdown(step: SlowableStep, step_s: float, exchanges_s: float) -> Slowdown:
    """Returns the two factors by which predictions have to be slowed down so that a predicted step takes as long as
    measured.

    The communication factor is the measured over the predicted seconds of all exchanges; the computation factor is then
    chosen so that the step's prediction is right. There are two exceptions. Measured times of overlapping exchanges are
    too long: if they alone would make the predicted step longer than the measured one, computation is assumed to be
    faster than predicted by the largest error that predictions have (a factor of `ROUGH`), and the communication factor
    is chosen so that the step's prediction is right. And if the step is predicted to exchange nothing, the measured
    exchange is the one that every step has (ranks compare their plans), and only computation is corrected.

    Args:
        step: the predicted step.
        step_s: measured seconds of a step.
        exchanges_s: measured seconds of its exchanges, without waits, on the rank with the most.
    """
    least = min(1.0, step_s / step.predict_s(1.0, 1.0)) / ROUGH
    if step.exchanges_s <= 0:
        return Slowdown(computing=_solve(lambda times: step.predict_s(times, 1.0), step_s - exchanges_s, least))
    exchanging = max(LEAST_EXCHANGES, exchanges_s / step.exchanges_s)
    if step.predict_s(least, exchanging) < step_s:
        return Slowdown(_solve(lambda times: step.predict_s(times, exchanging), step_s, least), exchanging)
    return Slowdown(least, _solve(lambda times: step.predict_s(least, times), step_s, LEAST_EXCHANGES, exchanging))


def _solve(grows: Callable[[float], float], value: float, least: float, most: float = 0.0) -> float:
    """Returns the argument, to 1 %, at which the growing function `grows` has `value`, found by bisection.

    Args:
      least, most: interval to search; most 0: no upper bound.
    """
    if not most:
        most = 2 * least
        while grows(most) < value and most < MOST_TIMES:
            least, most = most, 2 * most
    while most > 1.01 * least:
        middle = math.sqrt(least * most)
        least, most = (middle, most) if grows(middle) < value else (least, middle)
    return math.sqrt(least * most)


class Lending(Protocol):
    """Measures a step of one rank that computes on all cores of the host while the other ranks wait."""

    @property
    def threads(self) -> int:
        """Returns the number of threads with which one rank would compute on the cores of all ranks of its host."""

    def measure_step(self, program: Program) -> float:
        """Runs one rank's program on random values with all threads; returns the seconds of a step.

        Raises:
          WhaleError: the program cannot be run without effects on the user's script.
        """


@dataclass(frozen=True)
class SearchEnvironment:
    """Holds the ranks' speeds, prices and memory by which a search evaluates plans.

    Attributes:
      rates: the speed of each rank.
      prices: a profile written by `whale profile`, or a cluster whose first devices are the ranks; it prices operations
          and exchanges. None: `rates` do.
      limits_bytes: memory that each rank has for a step.
      captured: the program as captured, with its gradients marked, which recomputation needs: the search normalises it
          again under other settings. None: its gradients are not marked, and recomputation is not tried.
      hosts_bytes: host memory that each rank may use for offloaded tables; (): none.
      topology: the hosts and the links between them; None: exchanges between any two ranks take equally long.
      lending: measures a step of one rank on the cores of all; None: each rank computes on its own cores.
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
        """Creates the environment of the first ``size`` devices of a cluster, with figures of the hardware catalogue.

        Args:
          program: the program to search for, whose largest weight decides which data type's FLOP/s count.
          captured: the program as captured, for recomputation.

        Raises:
          ClusterError: the cluster has fewer devices.
        """
        machine = cluster_machine(cluster)
        machine.check_holds(size)
        weights = [v.type for v in program.variables if len(v.type.shape or ()) >= 2]
        dtype = max(weights, key=lambda t: t.bytes).dtype if weights else "float32"
        limits_bytes = machine.memory_bytes[:size]
        hosts_bytes, topology = _list_hosts_bytes(cluster, size), cluster_topology(cluster, size)
        return cls(cluster_rates(cluster, dtype)[:size], cluster, limits_bytes, captured, hosts_bytes, topology)

    def slow_down(self, slower: Slowdown) -> SearchEnvironment:
        """Returns an environment with ranks and links that are slower by the given factors."""
        assert not isinstance(self.prices, Cluster)  # steps are measured on this machine, not on a cluster file's
        return replace(
            self,
            rates=[one.slow_down(slower.computing, slower.exchanging) for one in self.rates],
            prices=self.prices and self.prices.slow_down(slower.computing, slower.exchanging),
            topology=self.topology and self.topology.slow_down(slower.exchanging),
        )

    @property
    def origin(self) -> str:
        """Describes for the user where the figures come from, such as "host1 as `whale profile` measured it"."""
        if isinstance(self.prices, MachineProfile):
            return f"{self.prices.host} as `whale profile` measured it"
        return self.rates[0].origin

    @property
    def prices_links(self) -> bool:
        """Returns True if the price of an exchange depends on the links between the hosts of its ranks."""
        return self.prices is None and self.topology is not None

    def machine(self, program: Program) -> Machine:
        """Returns the machine model that prices the operations and exchanges of ranks that run ``program``."""
        if isinstance(self.prices, MachineProfile):
            marks = [compute_fingerprint(program)]
            return make_measured_machine(self.prices, len(self.rates), marks, topology=self.topology)
        return (
            make_rated_machine(self.rates, topology=self.topology)
            if self.prices is None
            else cluster_machine(self.prices)
        )

    def lacking_bytes(self, held: Mapping[int, int]) -> float:
        """Returns by how many bytes the fullest rank exceeds its memory; 0 or less: all ranks fit.

        Args:
          held: peak bytes by rank.
        """
        return max(size - self.limits_bytes[rank] for rank, size in held.items())

    def lacking_on_hosts(self, programs: Mapping[int, Program]) -> float:
        """Returns by how many bytes the offloaded variables of a rank exceed its share of host memory, for the worst
        rank.

        0 or less: all fit, or the hosts' memory is unknown.

        Args:
            programs: rank -> its program.
        """
        if not self.hosts_bytes:
            return 0.0
        return max(count_host_bytes(program) - self.hosts_bytes[rank] for rank, program in programs.items())

    def seconds_of_each(self, program: Program, stands_for: int) -> list[float]:
        """Returns, for each rank of the run, the seconds that its device would take for one given program, without
        waiting.

        Args:
            program: the program of rank ``stands_for``.
            stands_for: number of the rank that the program was made for, which its exchanges need.
        """
        size, kinds = len(self.rates), list(dict.fromkeys(self.rates))
        seconds = rank_seconds(program, stands_for, size, [_make_waitless_machine([one] * size) for one in kinds])
        of_kind = dict(zip(kinds, seconds))
        return [of_kind[one] for one in self.rates]


def _list_hosts_bytes(cluster: Cluster, size: int) -> Sequence[float]:
    """Returns the host memory that each of the first `size` ranks may use, in rank order; (): unknown for some, or CPU
    ranks.
    """
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
    """Returns True if the speeds of the ranks differ by more than the factor `by`, which measurement noise does not
    reach.
    """
    speeds = [min(one.flops_per_s / rates[0].flops_per_s, one.bytes_per_s / rates[0].bytes_per_s) for one in rates]
    return max(speeds) > by * min(speeds)


def _make_waitless_machine(rates: Sequence[Rates]) -> Machine:
    """Returns a machine model on which an exchange costs no waiting, only the CPU work to read, add and write the
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
