"""Computes the cost of a sequence of kernels and collectives for one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cost_model.analytic.stacks import EXPERT_STREAMS, Stack
from cost_model.analytic.transformer_kernels import Attention, Collective, Matmul, Op, Streaming
from cost_model.hardware import Device
from cost_model.kernels.collectives import COLLECTIVES, Group
from cost_model.kernels.compute import Rates, attention_s, find_rates, matmul_s, streaming_s


@dataclass(frozen=True, slots=True)
class Cost:
    """The seconds on the device's stream, the seconds of exposed communication, and the seconds on the host."""

    device_s: float = 0.0
    exposed_s: float = 0.0
    host_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Returns the seconds of device and exposed communication, or the host's where it launches more slowly."""
        return max(self.device_s + self.exposed_s, self.host_s)

    def plus(self, other: Cost, times: float = 1) -> Cost:
        """Returns this cost plus `times` the other one, one after the other."""
        return Cost(
            self.device_s + times * other.device_s,
            self.exposed_s + times * other.exposed_s,
            self.host_s + times * other.host_s,
        )


@dataclass(frozen=True, slots=True)
class Rank:
    """The rates of one rank, and the groups that it communicates in, under a software stack.

    Attributes:
        group: of the ranks that divide tensors; context: of those that divide a row's tokens (None: nobody does).
    """

    rates: Rates
    weight_rates: Rates
    group: Group
    stack: Stack
    context: Group | None = None


def rank_on(
    device: Device, share: float, group: Group, stack: Stack, ranks: int = 1, context: Group | None = None
) -> Rank:
    """Returns the slowest of `ranks` with a share of a device each; ClusterError if it lacks the stack's dtypes."""
    slower = stack.kernel_time
    rates = weight_rates = find_rates(device, stack.dtype, share, ranks, stack.attention, slower)
    if stack.weights_dtype:
        weight_rates = find_rates(device, stack.weights_dtype, share, ranks, slower=slower)
    return Rank(rates, weight_rates, group, stack, context)


def cost(ops: Sequence[Op], on: Rank, backward: bool = False) -> Cost:
    """Returns the cost of ops in order; a collective that overlaps products is exposed for the time by which it is
    longer.
    """
    stack, rates = on.stack, on.rates
    host_us = stack.backward_host_us if backward else stack.host_us
    device_s = exposed_s = launch_us = 0.0
    beside: dict[str, float] = {}  # seconds of products and attention, by name
    hidden: list[tuple[Collective, float]] = []
    for op in ops:
        launch_us += host_us
        if isinstance(op, Matmul):
            seconds = matmul_s(on.weight_rates if op.weights else rates, op.m, op.n, op.k, op.batch)
            if op.weights and stack.launches_each_expert:  # and casts of operands before them
                seconds += (op.batch - 1) * rates.kernel_s / EXPERT_STREAMS
                cast = bool(stack.quantise_bytes) and not op.cast_before
                launch_us += (op.batch - 1) * host_us * (2 if cast else 1)
            beside[op.name] = seconds
            device_s += seconds
            if op.weights and stack.quantise_bytes and not op.cast_before:
                device_s += streaming_s(rates, stack.quantise_bytes * op.batch * op.m * op.k)
        elif isinstance(op, Streaming):
            device_s += streaming_s(rates, op.moved_bytes) + (op.kernels - 1) * rates.kernel_s
            launch_us += (op.kernels - 1) * host_us
        elif isinstance(op, Attention):
            beside[op.name] = seconds = attention_s(rates, op.flops, op.sequence)
            device_s += seconds
        else:
            group = on.context if op.along == "context" else on.group
            seconds = 0.0 if group is None else COLLECTIVES[op.kind](group, op.tensor_bytes)
            launch_us += stack.collective_host_us - host_us
            if op.over:
                hidden.append((op, seconds))
            else:
                exposed_s += seconds
    for op, seconds in hidden:
        beside_s = min(seconds * (1 - op.exposed), sum(beside[name] for name in op.over))
        device_s += beside_s * rates.lost_units
        exposed_s += seconds - beside_s
    return Cost(device_s, exposed_s, launch_us * 1e-6)
