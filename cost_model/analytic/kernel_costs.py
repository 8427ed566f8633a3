"""Computes how long one rank takes for a sequence of kernels and collectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from cost_model.analytic.stacks import EXPERT_STREAMS, Stack
from cost_model.analytic.transformer_kernels import Attention, Collective, Idle, Matmul, Op, Streaming
from cost_model.hardware import Device
from cost_model.kernels.collectives import COLLECTIVES, Group
from cost_model.kernels.compute import Rates, attention_s, find_rates, matmul_s, streaming_s


class Cost(msgspec.Struct, frozen=True):
    """Holds the seconds of some work on one rank: on the device, in exposed communication, and on the host.

    Attributes:
        device_s: kernels on the device's stream.
        exposed_s: communication that no kernel hides.
        host_s: launching all of that; the host runs ahead of the device, so the two overlap.
    """

    device_s: float = 0.0
    exposed_s: float = 0.0
    host_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Returns the elapsed seconds: device and exposed communication, or the host's launches if these take
        longer.
        """
        return max(self.device_s + self.exposed_s, self.host_s)

    def plus(self, other: Cost, times: float = 1) -> Cost:
        """Returns the cost of this work followed by `times` repetitions of the other."""
        return Cost(
            self.device_s + times * other.device_s,
            self.exposed_s + times * other.exposed_s,
            self.host_s + times * other.host_s,
        )


@dataclass(frozen=True, slots=True)
class Rank:
    """Holds the rates of one rank's device, and the groups that it communicates in, under a software stack.

    Attributes:
        rates: for all kernels but products with weights.
        weight_rates: for products with weights, which may have a smaller dtype (FP8).
        group: the tensor-parallel group.
        context: the context-parallel group, whose ranks divide the tokens of a row; None without context parallelism.
    """

    rates: Rates
    weight_rates: Rates
    group: Group
    stack: Stack
    context: Group | None = None


def rank_on(
    device: Device, share: float, group: Group, stack: Stack, ranks: int = 1, context: Group | None = None
) -> Rank:
    """Returns the rates and groups of the slowest of `ranks` equal ranks, for which all others wait.

    Args:
        device: the catalogue's entry of the ranks' devices.
        share: part of the device that a rank has (1: all of it).
        group: the tensor-parallel group.
        ranks: number of ranks that wait for each other; the more there are, the slower the slowest is expected to be.
        context: the context-parallel group, or None.

    Raises:
        ClusterError: the device does not support the stack's dtypes.
    """
    slower = stack.kernel_time
    rates = weight_rates = find_rates(device, stack.dtype, share, ranks, stack.attention, slower)
    if stack.weights_dtype:
        weight_rates = find_rates(device, stack.weights_dtype, share, ranks, slower=slower)
    return Rank(rates, weight_rates, group, stack, context)


def cost(ops: Sequence[Op], on: Rank, backward: bool = False) -> Cost:
    """Returns the cost of running `ops` in order on one rank.

    A collective that overlaps products (`Collective.over`) is exposed only for the time by which it is longer than they
    are.

    Args:
        backward: whether the ops are a backward pass, whose launches take the host another time
            (`Stack.backward_host_us`).
    """
    stack, rates = on.stack, on.rates
    host_us = stack.backward_host_us if backward else stack.host_us
    device_s = exposed_s = launch_us = 0.0
    beside: dict[str, float] = {}  # seconds of products and attention, by name
    hidden: list[tuple[Collective, float]] = []
    for op in ops:
        if isinstance(op, Idle):
            device_s += op.seconds
            continue
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
