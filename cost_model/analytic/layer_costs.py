"""Defines a chain of layers for the evaluation: seconds and bytes of any range of layers on one kind of rank.

A model is any object that provides these: a described transformer by formulas (`transformer_model`), or the planner's
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
    """The additional passes, and parameters on one rank, of the first or the last layer of a chain."""

    forward: Cost = field(default_factory=Cost)
    backward: Cost = field(default_factory=Cost)
    parameters: float = 0.0

    def plus(self, other: Edge) -> tuple[Cost, Cost]:
        """Returns both passes of this and of the other one."""
        return self.forward.plus(other.forward), self.backward.plus(other.backward)


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """All layers of a model on one kind of rank; arrays hold sums over the layers before (one entry more than layers).

    Attributes:
        forward_s, backward_s: kernels and communication that nothing hides.
        forward_exposed_s, backward_exposed_s: that communication.
        forward_host_s, backward_host_s: what the host needs to launch them; a pass takes the longer of the two.
        begin_s, begin_host_s: once per pass of a stage that waits for others, and of any.
        held_bytes: kept of one micro-batch for the backward pass.
        parameters: of one rank, those of experts not counted.
        twice: parameters that the first and the last layer share, counted once where both are on one rank.
        update_s: measured seconds of the optimizer; None: by formula.
        working_bytes: once per rank; last_bytes: once where the last layer is.
        tensors: parameter tensors per layer, of which each costs the host a launch at the end of a step.
        experts: parameters of experts of one rank; 0 entries: none.
        expert_copies: replicas that have the same experts.
        routed: the tokens that a layer sends to experts and gets back; None: it has none.
        state_bytes: of the optimizer per parameter; element_bytes: of a parameter; gradient_bytes: of its gradient.
        shards_stages: as the stack says.
        edges: what the arrays have in the first and in the last layer besides: embedding and head.
        base_bytes: of the framework's own, on every rank.
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
        """Returns the parameters of experts of one rank that holds these layers."""
        return sum(self.experts[high] - self.experts[low] for low, high in ranges) if self.experts else 0.0

    def forward(self, low: int, high: int) -> float:
        """Returns the seconds of the forward pass of layers low..high-1."""
        begin_s = self.begin_s if low or high < len(self.forward_s) - 1 else 0.0  # nothing to wait for
        device_s = begin_s + self.forward_s[high] - self.forward_s[low]
        return max(device_s, self.begin_host_s + self.forward_host_s[high] - self.forward_host_s[low])

    def backward(self, low: int, high: int) -> float:
        """Returns the seconds of the backward pass of layers low..high-1, recomputation included."""
        begin_s = self.begin_s if low or high < len(self.backward_s) - 1 else 0.0
        device_s = begin_s + self.backward_s[high] - self.backward_s[low]
        return max(device_s, self.begin_host_s + self.backward_host_s[high] - self.backward_host_s[low])

    def kernels(self, low: int, high: int) -> tuple[float, float]:
        """Returns the seconds of `forward` and `backward` without exposed communication and waits for a start."""
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
        """Returns both passes of one layer, without pass start and the additional parts of the first and the last
        layer.
        """
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
        """Returns the parameters of one rank with these layers, without experts."""
        own = sum(self.parameters[high] - self.parameters[low] for low, high in ranges)
        whole = ranges[0][0] == 0 and ranges[-1][1] == len(self.parameters) - 1
        return own - self.twice if whole else own

    def layer_parameters_of(self, ranges: tuple[tuple[int, int], ...]) -> float:
        """Returns the mean parameters of these layers, without the additional ones of the first and the last layer."""
        own = sum(self.parameters[high] - self.parameters[low] for low, high in ranges)
        if ranges[0][0] == 0:
            own -= self.edges[0].parameters
        if ranges[-1][1] == self.count:
            own -= self.edges[1].parameters
        return own / max(1, sum(high - low for low, high in ranges))


class Model(Protocol):
    """The interface of a model that the evaluation and the planner use."""

    name: str
    count: int
    stack: Stack
    experts: int  # of each layer, divided over a stage's replicas
    tied_parameters: float  # that the first and the last stage each have a copy of, and sum the gradients of
    sequence: int  # tokens of a row, which ranks may divide; 0: rows are whole
    alike: list[int]  # of each layer, the first of the layers around it that cost as much (see `first_alike`)

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
        """Returns the costs on a pool's ranks.

        `ranks`: of the plan; `replicas` of a stage matter to experts only, of which `experts` ranks divide a layer's
        (0: as many as divide them evenly); `context`: ranks that divide the tokens of a row.
        """
        ...

    def on(self, machines: Machines) -> Model:
        """Returns the same model on other machines."""
        ...

    def tensor_degrees(self, pool: int) -> list[int]:
        """Returns the tensor-parallel degrees possible on a pool, in growing order."""
        ...

    def row_choices(self, pool: int, tensor: int) -> list[int] | None:
        """Returns the sizes of a rank's micro-batch that are known; None: all."""
        ...

    def recomputes(self) -> list[tuple[Recompute, bool]]:
        """Returns the pairs (recompute, sequence parallel) to choose from, the least recomputation first."""
        ...

    def send_s(self, cut: int, tensor: int, rows: float, sequence_parallel: bool, path: tuple[float, float]) -> float:
        """Returns the seconds to send a micro-batch to the stage that begins with layer `cut`; `path`: (bytes/s, step
        in us).
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
    """Returns the costs of layers on a part; `replicas`, `recompute`: the stage's (None: as the strategy has it)."""
    how = recompute or strategy.recompute, strategy.sequence_parallel, round_ranks(ranks)
    own: tuple[int, ...] = (replicas if model.experts else 1,)
    if strategy.context > 1 or strategy.expert_ranks:
        own += (strategy.context, strategy.expert_ranks)
    return model.layer_costs(part.pool, part.tensor, part.rows, *how, *own)


def slowest_passes_s(costs: Sequence[LayerCosts], low: int, high: int) -> float:
    """Returns the seconds of both passes of layers low..high-1, each on the slowest of several kinds of rank."""
    if len(costs) == 1:
        return costs[0].forward(low, high) + costs[0].backward(low, high)
    return max(one.forward(low, high) for one in costs) + max(one.backward(low, high) for one in costs)


def first_alike(kinds: Sequence[object]) -> list[int]:
    """Returns, for each layer, the first of the layers of its kind that follow each other.

    The first and the last layer are alone: embedding and head, and what only whole models hold, count there.
    """
    found: list[int] = []
    for index, kind in enumerate(kinds):
        alone = index in (0, 1, len(kinds) - 1)
        found.append(index if alone or kind != kinds[index - 1] else found[-1])
    return found


def move_to_alike(alike: Sequence[int], low: int, high: int) -> tuple[int, int]:
    """Returns the first range of layers that costs what layers low..high-1 do, and follows on a layer of that kind if
    these do.
    """
    first = alike[low]
    if low == first or alike[high - 1] != first:
        return low, high
    return first + 1, first + 1 + high - low


def sums(values: Iterable[float]) -> array[float]:
    """Returns 0, and the sums of the first, the first two, ... values."""
    return array("d", accumulate(values, initial=0.0))
