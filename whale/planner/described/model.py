"""A model as the planner sees it: a chain of layers with their seconds and bytes on a device, for so many rows."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Protocol

from cost_model.described import describe
from cost_model.described.describe import Parallel, Transformer
from cost_model.described.kernel_costs import Cost, cost, rank
from cost_model.described.memory import head_bytes, layer_activation_bytes, working_bytes
from cost_model.described.stacks import Stack
from cost_model.formulas.collectives import all_gather_s, point_to_point_s
from whale.planner.described.pools import Machines
from whale.planner.described.spread import Recompute


@dataclass(frozen=True, slots=True)
class Layers:
    """All layers of a model on one kind of rank; lists hold sums over the layers before (one entry more than layers).

    Attributes:
        forward_s, backward_s: kernels and communication that nothing hides.
        forward_host_s, backward_host_s: what the host needs to launch them; a pass takes the longer of the two.
        begin_s, begin_host_s: once per pass of a stage that waits for others, and of any.
        held_bytes: kept of one micro-batch for the backward pass.
        parameters: of one rank.
        twice: parameters that the first and the last layer share, counted once where both are on one rank.
        update_s: measured seconds of the optimizer; None: by formula.
        working_bytes: once per rank; last_bytes: once where the last layer is.
        tensors: parameter tensors per layer, of which each costs the host a launch at the end of a step.
        experts: parameters of experts of one rank (of `parameters` they are no part); 0 entries: none.
        expert_copies: replicas that have the same experts.
        routed_bytes: of the tokens that a layer sends to experts, once there and once back.
        state_bytes: of the optimizer per parameter.
    """

    forward_s: array[float]
    backward_s: array[float]
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
    tensors: int = 12
    experts: array[float] = field(default_factory=lambda: array("d"))
    expert_copies: int = 1
    routed_bytes: float = 0.0
    state_bytes: float = 12.0

    def experts_of(self, ranges: tuple[tuple[int, int], ...]) -> float:
        """Parameters of experts of one rank."""
        return sum(self.experts[high] - self.experts[low] for low, high in ranges) if self.experts else 0.0

    def forward(self, low: int, high: int) -> float:
        """Seconds of the forward pass of layers low..high-1."""
        begin_s = self.begin_s if low or high < len(self.forward_s) - 1 else 0.0  # nothing to wait for
        device_s = begin_s + self.forward_s[high] - self.forward_s[low]
        return max(device_s, self.begin_host_s + self.forward_host_s[high] - self.forward_host_s[low])

    def backward(self, low: int, high: int) -> float:
        begin_s = self.begin_s if low or high < len(self.backward_s) - 1 else 0.0
        device_s = begin_s + self.backward_s[high] - self.backward_s[low]
        return max(device_s, self.begin_host_s + self.backward_host_s[high] - self.backward_host_s[low])

    def parameters_of(self, ranges: tuple[tuple[int, int], ...]) -> float:
        own = sum(self.parameters[high] - self.parameters[low] for low, high in ranges)
        whole = ranges[0][0] == 0 and ranges[-1][1] == len(self.parameters) - 1
        return own - self.twice if whole else own


class Model(Protocol):
    """What the planner asks of a model."""

    name: str
    count: int
    stack: Stack
    experts: int  # of each layer, divided over a stage's replicas
    tied_parameters: float  # that the first and the last stage each have a copy of, and sum the gradients of

    def layers(
        self, pool: int, tensor: int, rows: int, recompute: str, sequence_parallel: bool, ranks: int, replicas: int = 1
    ) -> Layers:
        """The costs on ranks of a pool; `replicas` of a stage matter to models with experts only."""
        ...

    def tensor_degrees(self, pool: int) -> list[int]: ...

    def row_choices(self, pool: int, tensor: int) -> list[int] | None:
        """Sizes of a rank's micro-batch that are known; None: all."""
        ...

    def recomputes(self) -> list[tuple[Recompute, bool]]:
        """(recompute, sequence parallel) to choose from; what computes least again comes first."""
        ...

    def send_s(self, cut: int, tensor: int, rows: int, sequence_parallel: bool, path: tuple[float, float]) -> float:
        """Seconds to hand a micro-batch to the stage that begins at layer `cut`."""
        ...


class TransformerModel:
    """A transformer from its description, by the formulas of `cost_model`."""

    def __init__(self, transformer: Transformer, stack: Stack, machines: Machines, name: str = "") -> None:
        self.transformer, self.stack, self.machines = transformer, stack, machines
        self.name = name or f"transformer of {transformer.parameters / 1e9:.3g} billion parameters"
        self.count = transformer.layers
        self.experts = transformer.experts
        self.tied_parameters = float(transformer.embedding_parameters)
        self.layers = lru_cache(maxsize=None)(self._layers)

    def _layers(
        self, pool: int, tensor: int, rows: int, recompute: str, sequence_parallel: bool, ranks: int, replicas: int = 1
    ) -> Layers:
        t, stack, L = self.transformer, self.stack, self.count
        ways = math.gcd(t.experts, replicas) if t.experts else 1
        p = Parallel(
            tensor=tensor,
            micro_batch=rows,
            global_batch=rows,
            recompute=recompute,  # type: ignore[arg-type]
            sequence_parallel=sequence_parallel,
            experts=ways,
        )
        entry = self.machines.pools[pool].entry
        on = rank(entry.device, entry.share, self.machines.tensor_group(pool, tensor), stack, ranks)
        forward, backward = (
            cost(describe.layer_forward(t, p, stack), on),
            cost(describe.layer_backward(t, p, stack), on, True),
        )
        ahead = [cost(describe.edges_forward(t, p, stack, *edge), on) for edge in ((True, False), (False, True))]
        back = [cost(describe.edges_backward(t, p, stack, *edge), on, True) for edge in ((True, False), (False, True))]
        parameters = [t.dense_parameters / tensor] * L
        parameters[0] += t.embedding_parameters / tensor + t.sequence * t.hidden
        parameters[-1] += t.embedding_parameters / tensor
        begin_s = stack.pass_host_us * 1e-6
        return Layers(
            forward_s=_sums(forward, ahead, L, False),
            backward_s=_sums(backward, back, L, False),
            forward_host_s=_sums(forward, ahead, L, True),
            backward_host_s=_sums(backward, back, L, True),
            begin_s=0.0 if stack.hides_point_to_point else begin_s,
            begin_host_s=begin_s,
            held_bytes=array("d", (i * layer_activation_bytes(t, p, stack) for i in range(L + 1))),
            parameters=sums(parameters),
            twice=t.embedding_parameters / tensor,
            update_s=None,
            working_bytes=working_bytes(t, p, stack),
            last_bytes=head_bytes(t, p, stack),
            experts=sums([t.expert_parameters / tensor / ways] * L) if t.experts else array("d"),
            expert_copies=replicas // ways,
            routed_bytes=2.0 * rows * t.sequence * t.hidden * t.top if t.experts else 0.0,
            state_bytes=t.state_bytes,
        )

    def tensor_degrees(self, pool: int) -> list[int]:
        t = self.transformer
        most = self.machines.pools[pool].per_host
        return [d for d in (1, 2, 4, 8, 16) if d <= most and not (t.heads % d or t.hidden % d)]

    def row_choices(self, pool: int, tensor: int) -> list[int] | None:
        return None

    def recomputes(self) -> list[tuple[Recompute, bool]]:
        kinds: tuple[Recompute, ...] = ("none", "selective", "full")
        if self.stack.fused_attention:
            kinds = ("none", "full")
        # Along the sequence wherever tensors are divided: as many bytes in the forward pass, less computed and held.
        return [(kind, True) for kind in kinds]

    def send_s(self, cut: int, tensor: int, rows: int, sequence_parallel: bool, path: tuple[float, float]) -> float:
        whole = 2.0 * rows * self.transformer.sequence * self.transformer.hidden
        if tensor == 1 or sequence_parallel:
            return point_to_point_s(whole / (tensor if sequence_parallel else 1), *path)
        if self.stack.scatter_gather:
            # The receiving ranks gather the parts; the link inside hosts is that of any pool with this degree.
            inside = min(
                all_gather_s(self.machines.tensor_group(pool.number, tensor), whole)
                for pool in self.machines.pools
                if pool.per_host >= tensor
            )
            return point_to_point_s(whole / tensor, *path) + inside
        return point_to_point_s(whole, *path)


def sums(values: Iterable[float]) -> array[float]:
    """0, and the sums of the first, the first two, ... values."""
    return array("d", accumulate(values, initial=0.0))


def _sums(layer: Cost, edges: list[Cost], count: int, host: bool) -> array[float]:
    def of(one: Cost) -> float:
        return one.host_s if host else one.device_s + one.exposed_s

    each = [of(layer)] * count
    each[0] += of(edges[0])
    each[-1] += of(edges[1])
    return sums(each)
