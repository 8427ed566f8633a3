"""One step of fully sharded data parallelism (ZeRO-2 and -3 as in PyTorch FSDP).

Whole layers are gathered and reduced on a network stream beside the kernels.

Every micro-batch gathers each layer's parameters before its forward pass and, with ZeRO-3, again before its backward
pass, and scatters the sum of its gradients (Zhao et al., "PyTorch FSDP", 2023, sections 3.2 and 3.3). At most two
gathered layers wait for the kernels (the same, section 3.4, rate limiter).
"""

from __future__ import annotations

from dataclasses import dataclass

from cost_model.described import describe
from cost_model.described.describe import Op, Parallel, Transformer
from cost_model.described.kernel_costs import CHANNELS, Cost, cost, rank
from cost_model.described.stacks import Stack
from cost_model.formulas.collectives import all_gather_s, reduce_scatter_s
from cost_model.formulas.compute import rates_of, streaming_s
from cost_model.formulas.simulate import Tasks, Timeline, simulate
from cost_model.machines.rank_locations import Place
from whale.errors import PlanError

COMPUTE, NETWORK = 0, 1
AHEAD = 2  # layers that are gathered before they are used


@dataclass(frozen=True, slots=True)
class Sharded:
    """Seconds of one step, and the timeline of its first micro-batches."""

    step_s: float
    compute_s: float
    update_s: float
    tasks: Tasks
    timeline: Timeline


@dataclass(frozen=True, slots=True)
class _Unit:
    """A layer, or everything outside the layers: its passes and its communication."""

    forward: Cost
    backward: Cost
    gather_s: float
    reduce_s: float


def step(t: Transformer, p: Parallel, stack: Stack, place: Place) -> Sharded:
    """Simulates up to three micro-batches; further ones take as long as the third."""
    if p.tensor > 1 or p.pipeline > 1:
        raise PlanError(
            "fully sharded data parallelism is predicted alone",
            given=f"{p.tensor} tensor-parallel ranks, {p.pipeline} stages",
            expected="tensor = pipeline = 1 with zero >= 2",
        )
    layer = _unit(
        t,
        p,
        stack,
        place,
        describe.layer_forward(t, p, stack),
        describe.layer_backward(t, p, stack),
        t.layer_parameters,
    )
    root_forward = describe.embedding_forward(t, p, stack) + describe.head_forward(t, p, stack)
    root_backward = describe.head_backward(t, p, stack) + describe.embedding_backward(t, p, stack)
    root = _unit(t, p, stack, place, root_forward, root_backward, t.embedding_parameters + t.sequence * t.hidden)
    count = min(3, p.micro_batches)
    ends = []
    for length in range(max(1, count - 1), count + 1):
        tasks = _tasks(t.layers, length, layer, root, p.zero >= 3)
        timeline = simulate(tasks)
        ends.append(timeline.total_s)
    each_s = ends[-1] - ends[0] if len(ends) > 1 else 0.0
    passes_s = ends[-1] + (p.micro_batches - count) * each_s
    device = place.parts[0].entry
    rates = rates_of(device.device, stack.dtype, device.share)
    update_s = streaming_s(rates, stack.optimizer_bytes * t.parameters / p.data)
    update_s = max(update_s, stack.update_kernels * (t.layers + 1) * stack.host_us * 1e-6)
    compute_s = p.micro_batches * sum(
        unit_s * times
        for unit_s, times in (
            (layer.forward.device_s + layer.backward.device_s, t.layers),
            (root.forward.device_s + root.backward.device_s, 1),
        )
    )
    return Sharded(passes_s + update_s + stack.step_ms * 1e-3, compute_s, update_s, tasks, timeline)


def _unit(
    t: Transformer, p: Parallel, stack: Stack, place: Place, forward: list[Op], backward: list[Op], parameters: float
) -> _Unit:
    entry = place.parts[0].entry
    on = rank(entry.device, entry.share, place.tensor, stack, p.ranks)
    copy_s = streaming_s(on.rates, stack.gradient_copy_bytes * parameters)
    ahead, back = cost(forward, on), cost(backward, on, backward=True)
    back = Cost(back.device_s + copy_s, back.exposed_s, back.host_s)
    gather_s = all_gather_s(place.data, 2.0 * parameters)
    reduce_s = reduce_scatter_s(place.data, stack.gradient_bytes * parameters)
    lost = CHANNELS / on.rates.units
    # Kernels lose the multiprocessors that the collectives beside them take.
    ahead = Cost(ahead.device_s + lost * min(gather_s, ahead.device_s), ahead.exposed_s, ahead.host_s)
    beside_s = reduce_s + (gather_s if p.zero >= 3 else 0.0)
    back = Cost(back.device_s + lost * min(beside_s, back.device_s), back.exposed_s, back.host_s)
    return _Unit(ahead, back, gather_s, reduce_s)


def _tasks(layers: int, micro_batches: int, layer: _Unit, root: _Unit, again: bool) -> Tasks:
    """Passes on the compute stream, gathers and reductions on the network stream, each in the order they are issued."""
    tasks = Tasks()
    used: list[int] = []  # passes of layers, in order, which free a gathered layer

    def gather(unit: _Unit) -> tuple[int, ...]:
        freed = (used[-AHEAD],) if len(used) >= AHEAD else ()
        return (tasks.add(NETWORK, unit.gather_s, freed),)

    for _ in range(micro_batches):
        tasks.add(COMPUTE, root.forward.seconds, (tasks.add(NETWORK, root.gather_s),))
        for _ in range(layers):
            used.append(tasks.add(COMPUTE, layer.forward.seconds, gather(layer)))
        last = tasks.add(COMPUTE, root.backward.seconds)
        for _ in range(layers):
            last = tasks.add(COMPUTE, layer.backward.seconds, gather(layer) if again else ())
            used.append(last)
            tasks.add(NETWORK, layer.reduce_s, (last,))
        tasks.add(NETWORK, root.reduce_s, (last,))
    return tasks
