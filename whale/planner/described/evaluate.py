"""What a spread costs: memory of every stage, and the step's time, by simulating its schedule.

The search asks for `stage_cost` of many stages and for few whole evaluations. For spreads of equal stages the result
is that of `cost_model.described.predict`, which a test compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from cost_model.described.memory import BASE_BYTES, CHANNEL_BYTES, WORKSPACE_BYTES, Footprint, state_bytes
from cost_model.formulas.collectives import Group, all_gather_s, all_reduce_s, all_to_all_s, reduce_scatter_s
from cost_model.formulas.compute import rates_of
from cost_model.formulas.simulate import Tasks, Timeline, one_f_one_b_ends_s, pipeline_tasks, simulate
from whale.ir.schedule import Schedule, live_micro_batches, schedule
from whale.planner.described.model import Layers, Model
from whale.planner.described.pools import Machines, Pool
from whale.planner.described.spread import Offload, Part, Recompute, Spread, Stage

# Parameters that Adam updates on a host's processors in a second: Ren et al., "ZeRO-Offload", ATC 2021, table 5 (10
# billion in 2.57 s).
HOST_UPDATES_PER_S = 3.9e9


@dataclass(frozen=True, slots=True)
class StageCost:
    """What one stage takes: seconds of its passes (per chunk, sends included), of the end of the step, and memory.

    Attributes:
        busy_s: of one micro-batch, all chunks, without sends.
        limiting: number of the part whose passes are the longest.
        memory: of each part; lacking_bytes: by how much the worst part does not fit (negative: what is left).
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    send_s: float
    reduce_s: float
    update_s: float
    limiting: int
    memory: tuple[Footprint, ...]
    lacking_bytes: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A spread's predicted step.

    Attributes:
        step_s: all of it; compute_s, send_s, bubble_s: of the busiest stage; reduce_s, update_s: after the last pass.
        lacking_bytes: by how much the worst rank's memory is too small; not positive: it fits.
        passes_s: until the last pass of all stages ends.
    """

    step_s: float
    compute_s: float
    send_s: float
    bubble_s: float
    reduce_s: float
    update_s: float
    lacking_bytes: float
    stages: tuple[StageCost, ...]
    busiest: int
    passes_s: float

    @property
    def fits(self) -> bool:
        return self.lacking_bytes <= 0


def layers_of(
    model: Model, spread: Spread, part: Part, ranks: int, replicas: int, recompute: Recompute | None = None
) -> Layers:
    """The costs of layers on a part's ranks; `replicas` and `recompute` are the stage's (None: as the spread says)."""
    how = recompute or spread.recompute, spread.sequence_parallel, ranks
    return model.layers(part.pool, part.tensor, part.rows, *how, replicas if model.experts else 1)


def reduction_s(model: Model, machines: Machines, parts: tuple[Part, ...], parameters: list[float], zero: int) -> float:
    """Seconds to sum the gradients of a stage over its replicas; of the part that takes longest."""
    if sum(part.replicas for part in parts) == 1:
        return 0.0
    stack = model.stack
    group = machines.data_group(tuple((part.pool, part.tensor, part.replicas) for part in parts))
    found = 0.0
    for part, own in zip(parts, parameters):
        entry = machines.pools[part.pool].entry
        gradient_bytes = stack.gradient_bytes * own
        if zero >= 3:
            continue  # gathered and reduced in every pass
        if zero == 2:
            seconds = all_gather_s(group, 2.0 * own)
        elif zero == 1:
            seconds = reduce_scatter_s(group, gradient_bytes) + all_gather_s(group, 2.0 * own)
        else:
            seconds = all_reduce_s(group, gradient_bytes)
        per_byte_s = 1.0 / rates_of(entry.device, stack.dtype, entry.share).memory_bytes_per_s
        found = max(found, seconds + stack.gradient_copy_bytes * own * per_byte_s)
    return found


def part_memory(
    layers: Layers,
    ranges: tuple[tuple[int, int], ...],
    part: Part,
    replicas: int,
    live: int,
    zero: int,
    stages: int,
    offload: Offload = "none",
) -> Footprint:
    """The bytes of one rank of a part; `live` chunks of micro-batches are held at the schedule's peak."""
    held, gradients, optimizer = states(layers, ranges, replicas, zero)
    beside = 0.0
    count = max(1, sum(high - low for low, high in ranges))
    if zero >= 3 and replicas > 1:  # the layer in progress and the next one, whole
        beside = 2 * 2.0 * layers.parameters_of(ranges) / count
    if offload != "none":
        optimizer = 0.0
    if offload == "all":  # of two layers, what was fetched and what goes back
        beside = max(beside, 2 * (held + gradients) / count)
        held = gradients = 0.0
    each = sum(layers.held_bytes[high] - layers.held_bytes[low] for low, high in ranges) / len(ranges)
    activations = live * each + layers.working_bytes
    if ranges[-1][1] == len(layers.parameters) - 1:
        activations += layers.last_bytes
    groups = (part.tensor > 1) + (replicas > 1) + (stages > 1)
    channels = groups * CHANNEL_BYTES + beside
    return Footprint(held, gradients, optimizer, activations, WORKSPACE_BYTES, channels, BASE_BYTES)


def states(layers: Layers, ranges: tuple[tuple[int, int], ...], replicas: int, zero: int) -> tuple[float, float, float]:
    """Bytes of parameters, gradients and optimizer's state of one rank, wherever they lie."""
    dense = state_bytes(layers.parameters_of(ranges), zero, replicas)
    experts = state_bytes(layers.experts_of(ranges), zero, layers.expert_copies)
    scale = layers.state_bytes / 12.0
    return dense[0] + experts[0], dense[1] + experts[1], (dense[2] + experts[2]) * scale


def offloaded_bytes(
    layers: Layers, ranges: tuple[tuple[int, int], ...], replicas: int, zero: int, offload: Offload
) -> float:
    """What one rank has in its host's memory; with the state only, gradients pass through there as well."""
    held, gradients, optimizer = states(layers, ranges, replicas, zero)
    return {"none": 0.0, "state": gradients + optimizer, "all": held + gradients + optimizer}[offload]


def _passes_s(
    model: Model,
    machines: Machines,
    spread: Spread,
    stage: Stage,
    part: Part,
    one: Layers,
    low: int,
    high: int,
    group: Group | None,
) -> tuple[float, float]:
    """Seconds of both passes of layers low..high-1 with what is sent and fetched for them.

    Tokens go to experts and back between kernels. Weights of ZeRO 3 and offloaded ones come while the layer before
    computes, gradients go while the next one does: what takes longer counts, and one layer of the other.
    """
    forward_s, backward_s = one.forward(low, high), one.backward(low, high)
    count, ranges = high - low, ((low, high),)
    if one.experts and group is not None:
        exchange_s = 2 * count * all_to_all_s(group, one.routed_bytes)
        forward_s += exchange_s
        backward_s += exchange_s * (2 if spread.recompute_of(stage) == "full" else 1)
    ahead_s = back_s = 0.0
    dense = one.parameters_of(ranges)
    if group is not None and spread.zero >= 2:
        back_s += reduce_scatter_s(group, model.stack.gradient_bytes * dense)
    if group is not None and spread.zero >= 3:
        gather_s = all_gather_s(group, 2.0 * dense)
        ahead_s, back_s = gather_s, back_s + gather_s
    if spread.offload == "all":
        held, gradients, _ = states(one, ranges, stage.replicas, spread.zero)
        rate = machines.pools[part.pool].host_bytes_per_s
        ahead_s, back_s = max(ahead_s, held / rate), max(back_s, (held + gradients) / rate)
    return _beside(forward_s, ahead_s, count), _beside(backward_s, back_s, count)


def _beside(compute_s: float, moved_s: float, count: int) -> float:
    """Seconds of two things that run beside each other, layer by layer."""
    return max(compute_s, moved_s) + min(compute_s, moved_s) / count if moved_s else compute_s


def stage_cost(model: Model, machines: Machines, spread: Spread, index: int, live: int, ranks: int) -> StageCost:
    """The cost of stage `index`, whose schedule holds `live` chunks of micro-batches at its peak."""
    stages = spread.stages
    stage = stages[index]
    last = len(stages) * spread.chunks - 1
    costs = [layers_of(model, spread, part, ranks, stage.replicas, stage.recompute) for part in stage.parts]
    plain = spread.zero < 2 and spread.offload == "none" and not model.experts
    group = None
    if stage.replicas > 1 and not plain:
        group = machines.data_group(tuple((p.pool, p.tensor, p.replicas) for p in stage.parts))
    sends = [0.0, 0.0]  # to the next stage, to the one before
    for way, other in enumerate((index + 1, index - 1)):
        if len(stages) == 1:
            break
        neighbour = stages[other % len(stages)].parts
        cut = min(model.count - 1, max(1, stage.layers[0][1 - way]))
        for part in stage.parts:
            path = min(machines.send_path(part.pool, peer.pool, stage.ranks) for peer in neighbour)
            sends[way] = max(sends[way], model.send_s(cut, part.tensor, part.rows, spread.sequence_parallel, path))
    forwards, backwards, limiting = [], [], 0
    longest = -1.0
    for chunk, (low, high) in enumerate(stage.layers):
        at = chunk * len(stages) + index
        if plain:
            ahead = [one.forward(low, high) for one in costs]
            back = [one.backward(low, high) for one in costs]
        else:
            pairs = zip(stage.parts, costs)
            passes = [_passes_s(model, machines, spread, stage, p, c, low, high, group) for p, c in pairs]
            ahead, back = [p[0] for p in passes], [p[1] for p in passes]
        forwards.append(max(ahead) + (sends[0] if at < last else 0.0))
        backwards.append(max(back) + (sends[1] if at > 0 else 0.0))
        if (most := max(a + b for a, b in zip(ahead, back))) > longest:
            longest, limiting = most, [a + b for a, b in zip(ahead, back)].index(most)
    parameters = [one.parameters_of(stage.layers) for one in costs]
    experts = [one.experts_of(stage.layers) for one in costs]
    reduced = [own + e * (one.expert_copies > 1) for own, e, one in zip(parameters, experts, costs)]
    reduce_s = reduction_s(model, machines, stage.parts, reduced, spread.zero)
    stack = model.stack
    if stack.hides_data_parallel:
        shortest = min(backwards) - sends[1]
        reduce_s = max(reduce_s / max(1, stage.count), reduce_s - shortest)
    update_s = 0.0
    for part, one, own, of_experts in zip(stage.parts, costs, parameters, experts):
        entry = machines.pools[part.pool].entry
        if one.update_s is not None:
            update_s = max(update_s, sum(one.update_s[high] - one.update_s[low] for low, high in stage.layers))
            continue
        own /= stage.replicas if spread.zero >= 1 else 1
        own += of_experts / (one.expert_copies if spread.zero >= 1 else 1)
        if spread.offload != "none":
            update_s = max(update_s, _on_host_s(machines.pools[part.pool], own, spread.offload))
            continue
        rate = rates_of(entry.device, stack.dtype, entry.share).memory_bytes_per_s
        host_s = (one.tensors * stage.count + 4) * stack.update_kernels * stack.host_us * 1e-6
        update_s = max(update_s, stack.optimizer_bytes * own / rate, host_s)
    memory = tuple(
        part_memory(one, stage.layers, part, stage.replicas, live, spread.zero, len(stages), spread.offload)
        for part, one in zip(stage.parts, costs)
    )
    lacking = max(f.total_bytes - machines.pools[p.pool].memory_bytes for f, p in zip(memory, stage.parts))
    if spread.offload != "none":
        for part, one in zip(stage.parts, costs):
            used = offloaded_bytes(one, stage.layers, stage.replicas, spread.zero, spread.offload)
            lacking = max(lacking, used - machines.pools[part.pool].host_bytes)
    return StageCost(
        tuple(forwards), tuple(backwards), sends[0] + sends[1], reduce_s, update_s, limiting, memory, lacking
    )


def _on_host_s(pool: Pool, parameters: float, offload: Offload) -> float:
    """The update in the host's memory: gradients come and weights go, unless they lie there anyway."""
    moved_s = 4.0 * parameters / pool.host_bytes_per_s if offload == "state" else 0.0
    return moved_s + parameters * pool.on_host / HOST_UPDATES_PER_S


def evaluate(model: Model, machines: Machines, spread: Spread) -> Evaluation:
    """Simulates one step."""
    stages, chunks, count = len(spread.stages), spread.chunks, spread.micro_batches
    if spread.schedule == "1f1b" and chunks == 1:
        lives = [min(count, stages - i) for i in range(stages)]
        costs = [stage_cost(model, machines, spread, i, lives[i], spread.ranks) for i in range(stages)]
        ends = one_f_one_b_ends_s([c.forward_s[0] for c in costs], [c.backward_s[0] for c in costs], count)
    else:
        orders = schedule(spread.schedule, stages, chunks, count)
        lives = [live_micro_batches(order) for order in orders]
        costs = [stage_cost(model, machines, spread, i, lives[i], spread.ranks) for i in range(stages)]
        timeline = simulate(_tasks(orders, costs, lives))
        ends = [timeline.end_s[length - 1] for length in accumulate(len(order) for order in orders)]
    ready_s = max(end + one.reduce_s for end, one in zip(ends, costs))
    if stages > 1 and model.tied_parameters:
        ready_s += _tied_s(model, machines, spread)
    update_s = max(one.update_s for one in costs)
    step_s = ready_s + update_s + model.stack.step_ms * 1e-3
    busy = [count * (sum(one.forward_s) + sum(one.backward_s)) for one in costs]
    busiest = max(range(stages), key=lambda s: busy[s])
    sent = count * _sent(costs[busiest], spread, busiest)
    return Evaluation(
        step_s=step_s,
        compute_s=busy[busiest] - sent,
        send_s=sent,
        bubble_s=max(ends) - busy[busiest],
        reduce_s=ready_s - max(ends),
        update_s=step_s - ready_s,
        lacking_bytes=max(one.lacking_bytes for one in costs),
        stages=tuple(costs),
        busiest=busiest,
        passes_s=max(ends),
    )


def played(spread: Spread, found: Evaluation) -> tuple[Tasks, Timeline]:
    """Every pass of a spread's step, and when it runs; for drawing."""
    orders = schedule(spread.schedule, len(spread.stages), spread.chunks, spread.micro_batches)
    tasks = _tasks(orders, found.stages, [live_micro_batches(order) for order in orders])
    return tasks, simulate(tasks)


def _sent(cost: StageCost, spread: Spread, index: int) -> float:
    """Seconds of sends of one micro-batch."""
    return 0.0 if len(spread.stages) == 1 else cost.send_s * spread.chunks


def _tied_s(model: Model, machines: Machines, spread: Spread) -> float:
    """The sum of the gradients of what the first and the last stage share."""
    first, last = spread.stages[0].parts[0], spread.stages[-1].parts[0]
    pool = machines.pools[first.pool]
    apart = first.pool != last.pool or spread.stages[0].ranks * (len(spread.stages) - 1) >= pool.on_host
    pair = machines.pair(first.pool, last.pool, first.tensor, apart)
    tensor = min(first.tensor, last.tensor)
    return all_reduce_s(pair, model.stack.gradient_bytes * model.tied_parameters / tensor)


def _tasks(orders: Schedule, costs: Sequence[StageCost], lives: Sequence[int]) -> Tasks:
    """One task per pass on its stage's stream, in the order of the schedule."""
    held = []
    for live, cost in zip(lives, costs):
        one = cost.memory[cost.limiting].activations_bytes / max(1, live)
        held.append([one] * len(cost.forward_s))
    return pipeline_tasks(orders, [c.forward_s for c in costs], [c.backward_s for c in costs], held)


def check(model: Model, machines: Machines, spread: Spread, batch: int) -> list[str]:
    """What is wrong with a spread, independently of the search: layers, devices, rows. Empty: nothing."""
    wrong = []
    known = {kind for kind, _ in model.recomputes()}
    for index, kind in enumerate(spread.recomputes):
        if kind not in known:
            wrong.append(f"stage {index}: {kind} recompute; of the model is known: {', '.join(sorted(known))}")
    if wrong:
        return wrong
    ranges = [spread.stages[s].layers[c] for c in range(spread.chunks) for s in range(len(spread.stages))]
    if [low for low, _ in ranges] + [model.count] != [0] + [high for _, high in ranges]:
        wrong.append(f"the stages' layers {ranges} do not make up the model's {model.count}")
    if any(high <= low for low, high in ranges):
        wrong.append("a stage has no layer")
    for index, stage in enumerate(spread.stages):
        if stage.rows * spread.micro_batches != batch:
            wrong.append(f"stage {index} has {stage.rows} x {spread.micro_batches} rows of a batch of {batch}")
        if any(part.rows < 1 or part.replicas < 1 for part in stage.parts):
            wrong.append(f"stage {index} has an empty part")
    for pool in machines.pools:
        used = [part for stage in spread.stages for part in stage.parts if part.pool == pool.number]
        if sum(part.ranks for part in used) > pool.devices:
            wrong.append(f"{sum(p.ranks for p in used)} devices of {pool.name}, which has {pool.devices}")
        free = [pool.per_host] * pool.hosts if pool.hosts <= 64 else None
        for part in sorted(used, key=lambda p: -p.tensor):
            if part.tensor > pool.per_host:
                wrong.append(f"a tensor-parallel group of {part.tensor} on hosts of {pool.per_host}: {pool.name}")
            elif free is not None and not _take(free, part):
                wrong.append(f"no room for {part.replicas} groups of {part.tensor} on {pool.name}")
    return wrong


def _take(free: list[int], part: Part) -> bool:
    left = part.replicas
    for host, room in enumerate(free):
        taken = min(left, room // part.tensor)
        free[host] -= taken * part.tensor
        left -= taken
    return left == 0
