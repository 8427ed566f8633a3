"""Implements `layer_costs.Model` for a transformer given by hyper-parameters, by formulas or with measured layers."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from cost_model.analytic import transformer_kernels as kernels
from cost_model.analytic.kernel_costs import Cost, Rank, cost, rank_on
from cost_model.analytic.layer_costs import Edge, LayerCosts, first_alike, sums
from cost_model.analytic.layer_profile import MeasuredLayer, Profile
from cost_model.analytic.memory import gradient_bytes, head_bytes, kept_and_repeated, layer_activation_bytes
from cost_model.analytic.stacks import Stack
from cost_model.analytic.transformer import LayerShare, Transformer
from cost_model.cluster.cluster_file import DeviceEntry
from cost_model.cluster.pools import Machines
from cost_model.kernels.collectives import RoutedTokens, all_gather_s, point_to_point_s
from whale.ir.strategy import Recompute, count_expert_ranks

TENSOR_DEGREES = (1, 2, 4, 8, 16)  # from which a planner chooses


class TransformerModel:
    """Computes the costs of a transformer's layers under a software stack on a cluster's pools (a `layer_costs.Model`).

    Args:
        name: name of the model in reports; "": named by its number of parameters.
        profile: measured layers to use instead of formulas; a plan that needs a missing measurement is refused.
    """

    def __init__(
        self,
        transformer: Transformer,
        stack: Stack,
        machines: Machines,
        name: str = "",
        profile: Profile | None = None,
    ) -> None:
        self.transformer, self.stack, self.machines = transformer, stack_of(stack, transformer), machines
        self.name = name or f"transformer of {transformer.parameters / 1e9:.3g} billion parameters"
        self.count = transformer.layers
        self.experts = transformer.experts
        self.tied_parameters = 0.0 if transformer.untied else float(transformer.embedding_parameters)
        self.profile = profile
        self.sequence = 0 if profile else transformer.sequence
        self.alike = first_alike([index < transformer.dense_layers for index in range(self.count)])
        self.layer_costs = lru_cache(maxsize=None)(self._layer_costs)
        self._rank_costs = lru_cache(maxsize=None)(self._make_rank_costs)

    def on(self, machines: Machines) -> TransformerModel:
        """Returns the same model, costed for other machines."""
        return TransformerModel(self.transformer, self.stack, machines, self.name, self.profile)

    def of(self, transformer: Transformer) -> TransformerModel:
        """Returns another model, costed for the same machines and software."""
        return TransformerModel(transformer, self.stack, self.machines)

    def _layer_costs(
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
        t, stack, L = self.transformer, self.stack, self.count
        ways = experts or count_expert_ranks(t.experts, replicas)
        p = LayerShare(
            tensor=tensor,
            rows=rows,
            recompute=recompute,  # type: ignore[arg-type]
            sequence_parallel=sequence_parallel,
            experts=ways,
            context=context,
        )
        entry = self.machines.pools[pool].entry
        on, forward, (first, last) = self._rank_costs(pool, ranks, msgspec.structs.replace(p, recompute="none"))
        begin_s = stack.pass_host_us * 1e-6
        held_bytes, repeated_bytes = kept_and_repeated(t, p, stack)
        update_s = None
        if self.profile is None:
            backward = cost(kernels.layer_backward(t, p, stack), on, True)
        else:
            measured = self.profile.layer(entry.device.name, tensor, rows)
            forward, backward = (Cost(s / entry.share) for s in (measured.forward_s, measured.backward_s))
            held_bytes = _scale_measured_bytes(measured, held_bytes)
            update_s = None if measured.update_s is None else sums([measured.update_s] * L)
        experts_each = t.expert_parameters / tensor / ways if t.experts else 0.0
        layer = _Layer(forward, backward, held_bytes, t.dense_parameters / tensor, experts_each)
        each = [(layer, L)]
        if t.dense_layers:
            each = [(self._dense_layer(p, on), t.dense_layers), (layer, L - t.dense_layers)]
        ahead = [(one.forward, count) for one, count in each]
        back = [(one.backward, count) for one, count in each]
        # Ranks that divide the sequence each send their tokens.
        sent = p.tokens(t) / (tensor if sequence_parallel else 1)
        copies = sent * t.hidden * t.top * (1 - t.dense_layers / L)
        there_bytes = stack.element_bytes if stack.dispatch_bytes is None else stack.dispatch_bytes
        routed = RoutedTokens(
            there_bytes=there_bytes * copies,
            back_bytes=stack.element_bytes * copies,
            top=t.top,
            experts=t.experts,
            groups=t.expert_groups,
            top_groups=t.top_groups,
            once=stack.dispatches_once,
        )
        return LayerCosts(
            forward_s=_along(
                [(c.device_s + c.exposed_s, n) for c, n in ahead], _whole(first.forward), _whole(last.forward)
            ),
            backward_s=_along(
                [(c.device_s + c.exposed_s, n) for c, n in back], _whole(first.backward), _whole(last.backward)
            ),
            forward_exposed_s=_along(
                [(c.exposed_s, n) for c, n in ahead], first.forward.exposed_s, last.forward.exposed_s
            ),
            backward_exposed_s=_along(
                [(c.exposed_s, n) for c, n in back], first.backward.exposed_s, last.backward.exposed_s
            ),
            forward_host_s=_along([(c.host_s, n) for c, n in ahead], first.forward.host_s, last.forward.host_s),
            backward_host_s=_along([(c.host_s, n) for c, n in back], first.backward.host_s, last.backward.host_s),
            # After a send that it waits for, a stage's device idles until the host has begun the next pass.
            begin_s=0.0 if stack.hides_point_to_point else begin_s,
            begin_host_s=begin_s,
            held_bytes=_along([(one.held_bytes, n) for one, n in each]),
            parameters=_along([(one.parameters, n) for one, n in each], first.parameters, last.parameters),
            twice=0.0 if t.untied else t.embedding_parameters / tensor,
            update_s=update_s,
            working_bytes=repeated_bytes + gradient_bytes(t, p, stack),
            last_bytes=head_bytes(t, p, stack),
            experts=_along([(one.experts, n) for one, n in each]) if t.experts else array("d"),
            expert_copies=replicas // ways,
            routed=routed if t.experts else None,
            state_bytes=t.state_bytes_of(stack.element_bytes),
            element_bytes=stack.element_bytes,
            gradient_bytes=stack.gradient_element_bytes,
            shards_stages=stack.shards_stages,
            edges=(first, last),
            base_bytes=1e9 * max(entry.device.context_gb, stack.base_gb),
        )

    def _make_rank_costs(self, pool: int, ranks: int, p: LayerShare) -> tuple[Rank, Cost, tuple[Edge, Edge]]:
        """Returns (rates of a rank of a pool, cost of a layer's forward pass (0 if measured), embedding and head).

        None of these depends on what the backward pass recomputes, so that all kinds of recompute share them.

        Args:
            ranks: ranks of the whole plan.
            p: the rank's share of a layer, with `recompute="none"`.
        """
        entry, group = self.machines.pools[pool].entry, self.machines.tensor_group(pool, p.tensor)
        along = self.machines.data_group(((pool, p.tensor, p.context),)) if p.context > 1 else None
        on = rank_on(entry.device, entry.share, group, self.stack, ranks, along)
        forward = Cost()
        if self.profile is None:
            forward = cost(kernels.layer_forward(self.transformer, p, self.stack), on)
        return on, forward, self._edges(p, on, entry)

    def _dense_layer(self, p: LayerShare, on: Rank) -> _Layer:
        """Returns the costs of a layer with one dense network, for the first layers of a model with experts."""
        t, stack = self.transformer.dense, self.stack
        share = msgspec.structs.replace(p, experts=1)
        return _Layer(
            cost(kernels.layer_forward(t, share, stack), on),
            cost(kernels.layer_backward(t, share, stack), on, True),
            layer_activation_bytes(t, share, stack),
            t.dense_parameters / p.tensor,
            0.0,
        )

    def _edges(self, p: LayerShare, on: Rank, entry: DeviceEntry) -> tuple[Edge, Edge]:
        """Returns the costs of the embedding with positions, and of the head, each with its copy of the embedding's
        weights.
        """
        t, stack = self.transformer, self.stack
        table = t.embedding_parameters / p.tensor
        found = []
        for part, edge, parameters in (
            ("embedding", (True, False), table + t.position_parameters),
            ("head", (False, True), table),
        ):
            one = self.profile.find(part, entry.device.name, p.tensor, p.rows) if self.profile else None
            if one is not None:
                passes = Cost(one.forward_s / entry.share), Cost(one.backward_s / entry.share)
            else:
                ahead = cost(kernels.edges_forward(t, p, stack, *edge), on)
                passes = ahead, cost(kernels.edges_backward(t, p, stack, *edge), on, True)
            found.append(Edge(*passes, parameters))
        return found[0], found[1]

    def tensor_degrees(self, pool: int) -> list[int]:
        """Returns the tensor-parallel degrees possible on a pool: powers of two up to 16 that divide the heads and fit
        on a host.
        """
        t = self.transformer
        most = self.machines.pools[pool].per_host
        return [d for d in TENSOR_DEGREES if d <= most and not (t.heads % d or t.hidden % d)]

    def row_choices(self, pool: int, tensor: int) -> list[int] | None:
        """Returns None: the formulas apply to micro-batches of any size."""
        return None

    def recomputes(self) -> list[tuple[Recompute, bool]]:
        """Returns the (recompute, sequence parallel) pairs that a planner may choose from.

        `selective` is left out if the stack has nothing to recompute selectively.
        """
        kinds: tuple[Recompute, ...] = ("none", "selective", "full")
        if not self.stack.repeats_selectively:
            kinds = ("none", "full")
        # Always with sequence parallelism: it sends as many bytes in the forward pass, and computes and keeps less.
        return [(kind, True) for kind in kinds]

    def send_s(self, cut: int, tensor: int, rows: float, sequence_parallel: bool, path: tuple[float, float]) -> float:
        """Returns the seconds to send the activations of `rows` rows, or their gradient, to a neighbouring stage.

        Args:
            cut: first layer of the receiving stage; all layers have activations of one size, so it is not used.
            path: (bytes/s, microseconds per step) of the link.
        """
        whole = float(self.stack.element_bytes) * rows * self.transformer.sequence * self.transformer.hidden
        if tensor == 1 or sequence_parallel:
            return point_to_point_s(whole / (tensor if sequence_parallel else 1), *path)
        if self.stack.scatter_gather:
            # The receiving ranks gather the parts; the link inside hosts is that of any pool with this degree.
            pools = self.machines.pools
            able = [pool for pool in pools if pool.per_host >= tensor] or pools
            inside = min(all_gather_s(self.machines.tensor_group(pool.number, tensor), whole) for pool in able)
            return point_to_point_s(whole / tensor, *path) + inside
        return point_to_point_s(whole, *path)


def stack_of(stack: Stack, transformer: Transformer) -> Stack:
    """Returns a stack adapted to a model.

    Dropout is turned on if the model is trained with it. If the model has experts and the stack was compared only with
    measurements of models without, `compared` is emptied, so that predictions get a wide interval.
    """
    if transformer.dropout and not stack.dropout:
        stack = msgspec.structs.replace(stack, dropout=True)
    if transformer.experts and stack.compared and not stack.compared_experts:
        stack = msgspec.structs.replace(stack, compared={})
    return stack


def _scale_measured_bytes(measured: MeasuredLayer, formula_bytes: float) -> float:
    return formula_bytes if measured.memory_gb is None else measured.memory_gb * 1e9


@dataclass(frozen=True, slots=True)
class _Layer:
    """Holds the costs of one layer on one rank: both passes, activations it keeps, parameters without and within
    experts.
    """

    forward: Cost
    backward: Cost
    held_bytes: float
    parameters: float
    experts: float


def _along(each: list[tuple[float, int]], first: float = 0.0, last: float = 0.0) -> array[float]:
    """Returns the cumulative sums over layers of a value, as `LayerCosts` holds them.

    Args:
        each: (a layer's value, number of consecutive layers that have it).
        first, last: added to the first and to the last layer (embedding and head).
    """
    values: list[float] = []
    for value, count in each:
        values += [value] * count
    values[0] += first
    values[-1] += last
    return sums(values)


def _whole(one: Cost) -> float:
    return one.device_s + one.exposed_s
