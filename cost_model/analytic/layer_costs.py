"""Defines the interface of a model to the evaluation: seconds and bytes of any range of its layers on one kind of rank.

A model is any object that implements `Model`: a transformer costed by formulas (`transformer_model`), or the planner's
measured tables.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

from cost_model.analytic.kernel_costs import Cost
from cost_model.analytic.stacks import Stack, When
from cost_model.analytic.transformer import OPTIMIZER_BYTES
from cost_model.cluster.pools import Machines
from cost_model.hardware import CONTEXT_GB
from cost_model.kernels.collectives import RoutedTokens
from cost_model.kernels.compute import round_ranks
from whale.ir.strategy import DeviceGroup, ParallelStrategy, Recompute

# Parameter tensors of a transformer's layer: weight and bias of two normalisations, of the products for queries, keys
# and values, of the projection, and of the two products of the feed-forward network.
TENSORS_PER_LAYER = 12
MATRICES_PER_LAYER = 4  # of them; the others are vectors
# And outside its layers: the embedding, positions, weight and bias of the last normalisation.
TENSORS_OUTSIDE = 4
MATRICES_OUTSIDE = 2


@dataclass(frozen=True, slots=True)
class Edge:
    """Holds what the embedding adds to the first layer, or the head to the last: the cost of both passes, and the
    number of parameters on one rank.
    """

    forward: Cost = field(default_factory=Cost)
    backward: Cost = field(default_factory=Cost)
    parameters: float = 0.0

    def plus(self, other: Edge) -> tuple[Cost, Cost]:
        """Returns (forward, backward) cost of both edges together."""
        return self.forward.plus(other.forward), self.backward.plus(other.backward)


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """Holds the costs of all layers of a model on one kind of rank.

    Arrays are cumulative sums with one entry more than there are layers: layers low..high-1 cost `a[high] - a[low]`.

    Attributes:
        forward_s, backward_s: seconds of kernels and exposed communication (which no kernel hides).
        forward_exposed_s, backward_exposed_s: seconds of the exposed communication alone.
        forward_host_s, backward_host_s: seconds in which the host launches them; a pass takes the longer of the two.
        begin_s: seconds at the start of each pass of a stage that waits for other stages.
        begin_host_s: seconds of the host at the start of every pass.
        held_bytes: activations of one micro-batch that are kept for the backward pass.
        parameters: number of parameters on one rank, experts excluded.
        twice: number of parameters that the first and the last layer share, counted once if one rank has both.
        update_s: measured seconds of the optimizer; None: computed by formula.
        working_bytes: memory of one rank for the layer in progress.
        last_bytes: memory in addition on the rank with the last layer (logits and loss).
        tensors: parameter tensors per layer; the host launches kernels for each of them at the end of a step.
        experts: number of parameters of experts on one rank; empty: the model has no experts.
        expert_copies: number of replicas that have the same experts.
        routed: the tokens that a layer sends to experts and gets back; None: the model has no experts.
        state_bytes: optimizer state per parameter.
        element_bytes: bytes of a parameter.
        gradient_bytes: bytes of a parameter's gradient.
        shards_stages: `Stack.shards_stages`.
        edges: the part of the first and of the last layer's costs that is embedding and head.
        base_bytes: memory of the framework itself on every rank.
    """

    forward_s: array[float]
    backward_s: array[float]
    forward_exposed_s: array[float]
    backward_exposed_s: array[float]
    forward_host_s: array[float]
    backward_host_s: array[float]
    begin_s: float
    begin_host_s: float
    held_bytes: array[float]
    parameters: array[float]
    twice: float
    update_s: array[float] | None
    working_bytes: float
    last_bytes: float
    tensors: int = TENSORS_PER_LAYER
    experts: array[float] = field(default_factory=lambda: array("d"))
    expert_copies: int = 1
    routed: RoutedTokens | None = None
    state_bytes: float = OPTIMIZER_BYTES
    element_bytes: int = 2
    gradient_bytes: float = 2.0
    shards_stages: When = "pass"
    edges: tuple[Edge, Edge] = (Edge(), Edge())
    base_bytes: float = 1e9 * CONTEXT_GB

    @property
    def count(self) -> int:
        """Returns the number of the model's layers."""
        return len(self.forward_s) - 1

    def experts_of(self, ranges: tuple[tuple[int, int], ...]) -> float:
        """Returns the number of expert parameters on one rank that holds the layers of these [low, high) ranges."""
        return sum([self.experts[high] - self.experts[low] for low, high in ranges]) if self.experts else 0.0

    def forward(self, low: int, high: int) -> float:
        """Returns the seconds of the forward pass of layers low..high-1."""
        begin_s = self.begin_s if low or high < len(self.forward_s) - 1 else 0.0  # nothing to wait for
        device_s = begin_s + self.forward_s[high] - self.forward_s[low]
        host_s = self.begin_host_s + self.forward_host_s[high] - self.forward_host_s[low]
        return device_s if device_s > host_s else host_s

    def backward(self, low: int, high: int) -> float:
        """Returns the seconds of the backward pass of layers low..high-1, recomputation included."""
        begin_s = self.begin_s if low or high < len(self.backward_s) - 1 else 0.0
        device_s = begin_s + self.backward_s[high] - self.backward_s[low]
        host_s = self.begin_host_s + self.backward_host_s[high] - self.backward_host_s[low]
        return device_s if device_s > host_s else host_s

    def kernels(self, low: int, high: int) -> tuple[float, float]:
        """Returns the seconds of (forward, backward) of layers low..high-1 without exposed communication and pass
        starts.
        """
        begin_s = self.begin_s if low or high < self.count else 0.0
        found = []
        for whole_s, seconds, exposed in (
            (self.forward(low, high), self.forward_s, self.forward_exposed_s),
            (self.backward(low, high), self.backward_s, self.backward_exposed_s),
        ):
            exposed_s = exposed[high] - exposed[low]
            found.append(max(seconds[high] - seconds[low] - exposed_s, whole_s - exposed_s - begin_s))
        return found[0], found[1]

    def layer(self, index: int) -> tuple[Cost, Cost]:
        """Returns the cost of (forward, backward) of one layer, without pass starts, embedding and head."""
        found = []
        for sums_s, exposed, host, way in (
            (self.forward_s, self.forward_exposed_s, self.forward_host_s, "forward"),
            (self.backward_s, self.backward_exposed_s, self.backward_host_s, "backward"),
        ):
            exposed_s = exposed[index + 1] - exposed[index]
            one = Cost(sums_s[index + 1] - sums_s[index] - exposed_s, exposed_s, host[index + 1] - host[index])
            for at, edge in zip((0, self.count - 1), self.edges):
                one = one.plus(getattr(edge, way), -1) if index == at else one
            found.append(one)
        return found[0], found[1]

    def parameters_of(self, ranges: tuple[tuple[int, int], ...]) -> float:
        """Returns the number of parameters on one rank that holds the layers of these [low, high) ranges, experts
        excluded.
        """
        own = sum([self.parameters[high] - self.parameters[low] for low, high in ranges])
        whole = ranges[0][0] == 0 and ranges[-1][1] == len(self.parameters) - 1
        return own - self.twice if whole else own

    def layer_parameters_of(self, ranges: tuple[tuple[int, int], ...]) -> float:
        """Returns the mean number of parameters of one layer of these [low, high) ranges, without embedding, head and
        experts.
        """
        own = sum(self.parameters[high] - self.parameters[low] for low, high in ranges)
        if ranges[0][0] == 0:
            own -= self.edges[0].parameters
        if ranges[-1][1] == self.count:
            own -= self.edges[1].parameters
        return own / max(1, sum(high - low for low, high in ranges))


class Model(Protocol):
    """Defines what the evaluation and the planner need of a model."""

    name: str
    count: int
    stack: Stack
    experts: int  # of each layer, divided over a stage's replicas
    tied_parameters: float  # that the first and the last stage each have a copy of, and sum the gradients of
    sequence: int  # tokens of a row, which ranks may divide; 0: rows are whole
    alike: list[int]  # for each layer, the first one in its run of layers that cost the same (see `first_alike`)

    def layer_costs(
        self,
        pool: int,
        tensor: int,
        rows: int,
        recompute: str,
        sequence_parallel: bool,
        ranks: int,
        replicas: int = 1,
        context: int = 1,
        experts: int = 0,
    ) -> LayerCosts:
        """Returns the costs of all layers on ranks of one pool of devices.

        Args:
            pool: number of the pool in the cluster (`Machines.pools`).
            tensor: tensor-parallel degree.
            rows: rows of a micro-batch on one replica.
            recompute: kind of recompute (`whale.ir.strategy.Recompute`).
            sequence_parallel: whether Megatron's sequence parallelism is used.
            ranks: ranks of the whole plan, of which the slowest sets the pace.
            replicas: data-parallel replicas of a stage; matters only to models with experts.
            context: ranks that divide the tokens of a row.
            experts: ranks that divide a layer's experts; 0: as many as divide them evenly.
        """
        ...

    def on(self, machines: Machines) -> Model:
        """Returns the same model, costed for other machines."""
        ...

    def tensor_degrees(self, pool: int) -> list[int]:
        """Returns the tensor-parallel degrees that are possible on a pool, in ascending order."""
        ...

    def row_choices(self, pool: int, tensor: int) -> list[int] | None:
        """Returns the micro-batch sizes of a rank for which costs are known (measured); None: any size."""
        ...

    def recomputes(self) -> list[tuple[Recompute, bool]]:
        """Returns the (recompute, sequence parallel) pairs that a planner may choose from, least recomputation
        first.
        """
        ...

    def send_s(self, cut: int, tensor: int, rows: float, sequence_parallel: bool, path: tuple[float, float]) -> float:
        """Returns the seconds to send one micro-batch's activations to the stage whose first layer is `cut`.

        Args:
            tensor: tensor-parallel degree of the sender.
            rows: rows of the micro-batch on one rank; a fraction with context parallelism.
            path: (bytes/s, microseconds per step) of the link.
        """
        ...


def costs_of(
    model: Model,
    strategy: ParallelStrategy,
    part: DeviceGroup,
    ranks: int,
    replicas: int,
    recompute: Recompute | None = None,
) -> LayerCosts:
    """Returns the costs of a model's layers on one device group of a stage.

    Args:
        part: the device group.
        ranks: ranks of the whole plan.
        replicas: data-parallel replicas of the stage.
        recompute: the stage's kind of recompute; None: the strategy's.
    """
    how = recompute or strategy.recompute, strategy.sequence_parallel, round_ranks(ranks)
    own: tuple[int, ...] = (replicas if model.experts else 1,)
    if strategy.context > 1 or strategy.expert_ranks:
        own += (strategy.context, strategy.expert_ranks)
    return model.layer_costs(part.pool, part.tensor, part.rows, *how, *own)


def slowest_passes_s(costs: Sequence[LayerCosts], low: int, high: int) -> float:
    """Returns the seconds of forward plus backward pass of layers low..high-1, each on the slowest of several kinds of
    rank.
    """
    if len(costs) == 1:
        return costs[0].forward(low, high) + costs[0].backward(low, high)
    return max(one.forward(low, high) for one in costs) + max(one.backward(low, high) for one in costs)


def first_alike(kinds: Sequence[object]) -> list[int]:
    """Returns, for each layer, the index of the first layer in its run of consecutive layers of equal kind.

    The first and the last layer count as kinds of their own, as they contain embedding and head. E.g. kinds `[a, a, a,
    a, b]` give `[0, 1, 1, 1, 4]`: the run of layers 1 to 3 begins at 1.
    """
    found: list[int] = []
    for index, kind in enumerate(kinds):
        alone = index in (0, 1, len(kinds) - 1)
        found.append(index if alone or kind != kinds[index - 1] else found[-1])
    return found


def move_to_alike(alike: Sequence[int], low: int, high: int) -> tuple[int, int]:
    """Returns the first range of layers in the model that costs the same as layers low..high-1, to share cache entries.

    Args:
        alike: what `first_alike` returns.
    """
    first = alike[low]
    if low == first or alike[high - 1] != first:
        return low, high
    return first + 1, first + 1 + high - low


def sums(values: Iterable[float]) -> array[float]:
    """Returns the cumulative sums of values, beginning with 0."""
    return array("d", accumulate(values, initial=0.0))
