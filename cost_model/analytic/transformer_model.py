"""Presents a described transformer as a chain of layers, by formulas or with measured layers."""

from __future__ import annotations

from array import array
from functools import lru_cache

from cost_model.analytic import transformer_kernels as kernels
from cost_model.analytic.kernel_costs import Cost, Rank, cost, rank_on
from cost_model.analytic.layer_costs import Edge, LayerCosts, sums
from cost_model.analytic.layer_profile import MeasuredLayer, Profile
from cost_model.analytic.memory import head_bytes, layer_activation_bytes, working_bytes
from cost_model.analytic.stacks import Stack
from cost_model.analytic.transformer import LayerShare, Transformer
from cost_model.cluster.pools import Machines
from cost_model.kernels.collectives import all_gather_s, point_to_point_s
from whale.ir.strategy import Recompute, count_expert_ranks

TENSOR_DEGREES = (1, 2, 4, 8, 16)  # that are looked at


class TransformerModel:
    """A transformer under a software stack on a cluster's pools (a `layer_costs.Model`).

    Args:
        profile: measurements of its layers, which take the place of formulas where the plan needs a layer's costs.
        expert_ranks: replicas that divide a layer's experts; None: as many of a stage's as divide them evenly.
    """

    def __init__(
        self,
        transformer: Transformer,
        stack: Stack,
        machines: Machines,
        name: str = "",
        profile: Profile | None = None,
        expert_ranks: int | None = None,
    ) -> None:
        self.transformer, self.stack, self.machines = transformer, stack, machines
        self.name = name or f"transformer of {transformer.parameters / 1e9:.3g} billion parameters"
        self.count = transformer.layers
        self.experts = transformer.experts
        self.tied_parameters = 0.0 if transformer.untied else float(transformer.embedding_parameters)
        self.profile, self.expert_ranks = profile, expert_ranks
        self.layer_costs = lru_cache(maxsize=None)(self._layer_costs)

    def on(self, machines: Machines) -> TransformerModel:
        """Returns the same model on other machines."""
        return TransformerModel(self.transformer, self.stack, machines, self.name, self.profile, self.expert_ranks)

    def of(self, transformer: Transformer) -> TransformerModel:
        """Returns another model on the same machines, under the same software."""
        return TransformerModel(transformer, self.stack, self.machines, expert_ranks=self.expert_ranks)

    def _layer_costs(
        self, pool: int, tensor: int, rows: int, recompute: str, sequence_parallel: bool, ranks: int, replicas: int = 1
    ) -> LayerCosts:
        t, stack, L = self.transformer, self.stack, self.count
        ways = self.expert_ranks or count_expert_ranks(t.experts, replicas)
        p = LayerShare(
            tensor=tensor,
            rows=rows,
            recompute=recompute,  # type: ignore[arg-type]
            sequence_parallel=sequence_parallel,
            experts=ways,
        )
        entry = self.machines.pools[pool].entry
        on = rank_on(entry.device, entry.share, self.machines.tensor_group(pool, tensor), stack, ranks)
        begin_s = stack.pass_host_us * 1e-6
        first, last = self._edges(p, on)
        held_bytes, update_s = layer_activation_bytes(t, p, stack), None
        if self.profile is None:
            forward = cost(kernels.layer_forward(t, p, stack), on)
            backward = cost(kernels.layer_backward(t, p, stack), on, True)
        else:
            measured = self.profile.layer(entry.device.name, tensor, rows)
            forward, backward = (Cost(s / entry.share) for s in (measured.forward_s, measured.backward_s))
            held_bytes = _measured_bytes(measured, held_bytes)
            update_s = None if measured.update_s is None else sums([measured.update_s] * L)
        edges_forward, edges_backward = (first.forward, last.forward), (first.backward, last.backward)
        parameters = [t.dense_parameters / tensor] * L
        parameters[0] += first.parameters
        parameters[-1] += last.parameters
        return LayerCosts(
            forward_s=sums(_each([c.device_s + c.exposed_s for c in (forward, *edges_forward)], L)),
            backward_s=sums(_each([c.device_s + c.exposed_s for c in (backward, *edges_backward)], L)),
            forward_exposed_s=sums(_each([c.exposed_s for c in (forward, *edges_forward)], L)),
            backward_exposed_s=sums(_each([c.exposed_s for c in (backward, *edges_backward)], L)),
            forward_host_s=sums(_each([c.host_s for c in (forward, *edges_forward)], L)),
            backward_host_s=sums(_each([c.host_s for c in (backward, *edges_backward)], L)),
            # After a send that it waits for, a stage's device idles until the host has begun the next pass.
            begin_s=0.0 if stack.hides_point_to_point else begin_s,
            begin_host_s=begin_s,
            held_bytes=array("d", (i * held_bytes for i in range(L + 1))),
            parameters=sums(parameters),
            twice=0.0 if t.untied else t.embedding_parameters / tensor,
            update_s=update_s,
            working_bytes=working_bytes(t, p, stack),
            last_bytes=head_bytes(t, p, stack),
            experts=sums([t.expert_parameters / tensor / ways] * L) if t.experts else array("d"),
            expert_copies=replicas // ways,
            routed_bytes=float(stack.element_bytes) * rows * t.sequence * t.hidden * t.top if t.experts else 0.0,
            state_bytes=t.state_bytes_of(stack.element_bytes),
            element_bytes=stack.element_bytes,
            edges=(first, last),
        )

    def _edges(self, p: LayerShare, on: Rank) -> tuple[Edge, Edge]:
        """Returns the costs of the embedding with positions, and of the head, which has a copy of the embedding's
        weights.
        """
        t, stack = self.transformer, self.stack
        table = t.embedding_parameters / p.tensor
        first, last = (
            Edge(
                cost(kernels.edges_forward(t, p, stack, *edge), on),
                cost(kernels.edges_backward(t, p, stack, *edge), on, True),
                parameters,
            )
            for edge, parameters in (((True, False), table + t.sequence * t.hidden), ((False, True), table))
        )
        return first, last

    def tensor_degrees(self, pool: int) -> list[int]:
        """Returns the powers of two that a host of the pool has devices for and that divide the heads, at most 16."""
        t = self.transformer
        most = self.machines.pools[pool].per_host
        return [d for d in TENSOR_DEGREES if d <= most and not (t.heads % d or t.hidden % d)]

    def row_choices(self, pool: int, tensor: int) -> list[int] | None:
        """Returns None: by formulas, all sizes of a micro-batch are known."""
        return None

    def recomputes(self) -> list[tuple[Recompute, bool]]:
        """Returns the choices of recompute, without the selective one where it would have nothing to leave out."""
        kinds: tuple[Recompute, ...] = ("none", "selective", "full")
        if self.stack.fused_attention and not self.stack.selective_part:
            kinds = ("none", "full")
        # Along the sequence wherever tensors are divided: as many bytes in the forward pass, less computed and held.
        return [(kind, True) for kind in kinds]

    def send_s(self, cut: int, tensor: int, rows: int, sequence_parallel: bool, path: tuple[float, float]) -> float:
        """Returns the seconds to send the activations of `rows` rows, or their gradient; `path`: (bytes/s, step in
        us).
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


def _measured_bytes(measured: MeasuredLayer, formula_bytes: float) -> float:
    return formula_bytes if measured.memory_gb is None else measured.memory_gb * 1e9


def _each(values: list[float], count: int) -> list[float]:
    """Returns a value for each of `count` layers from (a layer's, the first one's addition, the last one's
    addition).
    """
    layer, first, last = values
    each = [layer] * count
    each[0] += first
    each[-1] += last
    return each
