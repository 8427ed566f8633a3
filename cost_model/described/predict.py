"""A prediction: a transformer, how it is spread, the software and the cluster -> step time and memory.

Ranks that do the same at the same time (tensor- and data-parallel ones) are simulated once, so a plan costs as much as
its stages and micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from cost_model.described import describe, sharded
from cost_model.described.describe import Parallel, Transformer
from cost_model.described.kernel_costs import Cost, cost, rank
from cost_model.described.layer_profile import Profile
from cost_model.described.memory import Footprint, footprint, layer_activation_bytes
from cost_model.described.stacks import Stack
from cost_model.formulas.collectives import all_gather_s, all_reduce_s, point_to_point_s, reduce_scatter_s
from cost_model.formulas.compute import rates_of
from cost_model.formulas.simulate import Tasks, Timeline, memory_curve, pipeline_tasks, simulate
from cost_model.machines.cluster import Cluster
from cost_model.machines.rank_locations import Place, places
from whale.errors import PlanError
from whale.ir.schedule import Schedule, live_micro_batches, schedule


@dataclass(frozen=True, slots=True)
class Prediction:
    """What one step takes.

    Attributes:
        step_s: the whole step.
        compute_s: the busiest stage's kernels.
        exposed_communication_s: communication of that stage that no kernel hides, point-to-point included.
        bubble_s: time in which that stage waits.
        update_s: gradient reduction and optimizer after the last backward pass.
        stages: memory of each stage's ranks.
        timeline: start and end of every phase; `tasks` has their resources (the stage).
    """

    step_s: float
    compute_s: float
    exposed_communication_s: float
    bubble_s: float
    update_s: float
    stages: tuple[Footprint, ...]
    tasks: Tasks
    timeline: Timeline

    @property
    def peak_bytes(self) -> float:
        return max(stage.total_bytes for stage in self.stages)

    def memory_curve(self, stage: int) -> list[tuple[float, float]]:
        """(second, bytes of activations) of a stage over the step."""
        return memory_curve(self.tasks, self.timeline, [stage])


def chunk_layers(layers: int, pipeline: int, chunks: int) -> list[int]:
    """Layers of each chunk, in the model's order; earlier ones take what does not divide."""
    count = pipeline * chunks
    if layers < count:
        raise PlanError("there are more stages than layers", given=f"{count} chunks, {layers} layers")
    each, more = divmod(layers, count)
    return [each + (i < more) for i in range(count)]


def predict(t: Transformer, p: Parallel, stack: Stack, cluster: Cluster, profile: Profile | None = None) -> Prediction:
    """Simulates one step; measurements of a profile take the place of the formulas for layers.

    Raises:
        PlanError: the plan does not fit the model (layers, heads, batch).
        ClusterError: the cluster has too few devices, or one without the stack's dtype.
    """
    if t.heads % p.tensor or t.hidden % p.tensor:
        raise PlanError("tensor-parallel ranks do not divide the heads", given=f"{p.tensor} ranks, {t.heads} heads")
    if t.experts:
        raise PlanError(
            "layers with experts are predicted by the planner only",
            given=f"{t.experts} experts",
            action="use `whale plan --describe moe:...`",
        )
    at = places(cluster, p)
    if p.zero >= 2:
        if profile:
            raise PlanError("fully sharded data parallelism is predicted by formulas only", given="a profile")
        return _sharded(t, p, stack, at[0])
    layers = chunk_layers(t.layers, p.pipeline, p.chunks)
    orders = schedule(p.schedule, p.pipeline, p.chunks, p.micro_batches)
    costs: dict[tuple[int, int, bool], Cost] = {}
    known: dict[tuple[int, int, bool, bool, bool], Cost] = {}
    for stage in range(p.pipeline):
        for chunk in range(p.chunks):
            index = chunk * p.pipeline + stage
            first, last = index == 0, index == len(layers) - 1
            for backward in (False, True):
                key = (id(at[stage]), layers[index], first, last, backward)
                if key not in known:
                    known[key] = _phase_cost(t, p, stack, at[stage], profile, layers[index], first, last, backward)
                costs[stage, chunk, backward] = known[key]
    kept = [_kept_bytes(t, p, stack, place, profile) for place in at]
    tasks = _tasks(t, p, stack, orders, costs, at, layers, kept)
    return _summarise(t, p, stack, at, layers, kept, profile, orders, costs, tasks, simulate(tasks))


def _sharded(t: Transformer, p: Parallel, stack: Stack, place: Place) -> Prediction:
    found = sharded.step(t, p, stack, place)
    held = footprint(t, p, stack, t.parameters, t.layers * layer_activation_bytes(t, p, stack), True, sharded.AHEAD)
    waited_s = found.step_s - found.compute_s - found.update_s - stack.step_ms * 1e-3
    return Prediction(
        step_s=found.step_s,
        compute_s=found.compute_s,
        exposed_communication_s=waited_s,
        bubble_s=0.0,
        update_s=found.update_s,
        stages=(held,),
        tasks=found.tasks,
        timeline=found.timeline,
    )


def _phase_cost(
    t: Transformer,
    p: Parallel,
    stack: Stack,
    place: Place,
    profile: Profile | None,
    layers: int,
    first: bool,
    last: bool,
    backward: bool,
) -> Cost:
    """The cost of a chunk's pass on the slowest of the stage's devices."""
    begin_s = stack.pass_host_us * 1e-6
    # After a send that it waits for, a stage's device idles until the host has begun the next pass.
    waits = p.pipeline > 1 and not stack.hides_point_to_point
    begin = Cost(exposed_s=begin_s, host_s=begin_s) if waits else Cost(host_s=begin_s)
    of = describe.edges_backward if backward else describe.edges_forward
    layer_of = describe.layer_backward if backward else describe.layer_forward
    each = []
    for part in place.parts:
        device = part.entry.device
        on = rank(device, part.entry.share, place.tensor, stack, p.ranks)
        if profile:
            measured = profile.layer(device.name, p.tensor, p.micro_batch)
            layer = Cost(device_s=(measured.backward_s if backward else measured.forward_s) / part.entry.share)
        else:
            layer = cost(layer_of(t, p, stack), on, backward)
        each.append(begin.plus(layer, layers).plus(cost(of(t, p, stack, first, last), on, backward)))
    return max(each, key=lambda one: one.seconds)


def _kept_bytes(t: Transformer, p: Parallel, stack: Stack, place: Place, profile: Profile | None) -> float:
    """What a layer keeps of a micro-batch on the stage's devices."""
    formula = layer_activation_bytes(t, p, stack)
    if profile is None:
        return formula
    measured = [profile.layer(part.entry.device.name, p.tensor, p.micro_batch).memory_gb for part in place.parts]
    return max(formula if one is None else one * 1e9 for one in measured)


def send_s(t: Transformer, p: Parallel, stack: Stack, place: Place) -> float:
    """Seconds to hand one micro-batch's activations (or their gradient) to the neighbouring stage."""
    whole = 2.0 * p.micro_batch * t.sequence * t.hidden
    if p.tensor == 1 or p.sequence_parallel:
        sent = whole / (p.tensor if p.sequence_parallel else 1)
        return point_to_point_s(sent, place.forward_bytes_per_s, place.forward_step_us)
    if stack.scatter_gather:
        part_s = point_to_point_s(whole / p.tensor, place.forward_bytes_per_s, place.forward_step_us)
        return part_s + all_gather_s(place.tensor, whole)
    return point_to_point_s(whole, place.forward_bytes_per_s, place.forward_step_us)


def _tasks(
    t: Transformer,
    p: Parallel,
    stack: Stack,
    orders: Schedule,
    costs: dict[tuple[int, int, bool], Cost],
    at: list[Place],
    layers: list[int],
    kept: list[float],
) -> Tasks:
    """One task per phase on its stage's stream; a send that the stage waits for is a part of its phase."""
    stages, chunks = range(p.pipeline), range(p.chunks)
    send = [send_s(t, p, stack, place) if p.pipeline > 1 else 0.0 for place in at]
    last = p.pipeline * p.chunks - 1

    def seconds(stage: int, chunk: int, backward: bool) -> float:
        end = 0 if backward else last
        return costs[stage, chunk, backward].seconds + (send[stage] if chunk * p.pipeline + stage != end else 0.0)

    ahead, back = ([[seconds(s, c, b) for c in chunks] for s in stages] for b in (False, True))
    return pipeline_tasks(orders, ahead, back, [[n * kept[s] for n in layers[s :: p.pipeline]] for s in stages])


def stage_parameters(t: Transformer, p: Parallel, layers: list[int], stage: int) -> float:
    """Parameters on one rank of a stage; of several stages the last one has a copy of the embedding."""
    own = sum(layers[stage :: p.pipeline]) * t.layer_parameters / p.tensor
    if stage == 0:
        own += t.embedding_parameters / p.tensor + t.sequence * t.hidden
    elif stage == p.pipeline - 1:
        own += t.embedding_parameters / p.tensor
    return own


def update_s(
    t: Transformer, p: Parallel, stack: Stack, place: Place, parameters: float, layers: int
) -> tuple[float, float]:
    """Seconds of (gradient reduction, optimizer) of one rank after its last backward pass."""
    rates = [rates_of(part.entry.device, stack.dtype, part.entry.share) for part in place.parts]
    per_byte_s = 1.0 / min(one.memory_bytes_per_s for one in rates)
    gradient_bytes = stack.gradient_bytes * parameters
    own = parameters / (p.data if p.zero >= 1 else 1)
    reduce = 0.0
    if p.data > 1:
        if p.zero >= 1:
            reduce = reduce_scatter_s(place.data, gradient_bytes) + all_gather_s(place.data, 2.0 * parameters)
        else:
            reduce = all_reduce_s(place.data, gradient_bytes)
        reduce += stack.gradient_copy_bytes * parameters * per_byte_s
    tensors = 12 * layers + 4
    host_s = tensors * stack.update_kernels * stack.host_us * 1e-6
    return reduce, max(stack.optimizer_bytes * own * per_byte_s, host_s)


def _summarise(
    t: Transformer,
    p: Parallel,
    stack: Stack,
    at: list[Place],
    layers: list[int],
    kept: list[float],
    profile: Profile | None,
    orders: Schedule,
    costs: dict[tuple[int, int, bool], Cost],
    tasks: Tasks,
    timeline: Timeline,
) -> Prediction:
    stages = p.pipeline
    lengths = accumulate(len(order) for order in orders)
    end_s = [timeline.end_s[length - 1] for length in lengths]  # a stage's tasks stand together, the last one last
    reduced_s, optimizer_s, footprints = [], [], []
    for stage in range(stages):
        parameters = stage_parameters(t, p, layers, stage)
        own = layers[stage::stages]
        reduce, optimizer = update_s(t, p, stack, at[stage], parameters, sum(own))
        if profile:
            measured = [profile.layer(part.entry.device.name, p.tensor, p.micro_batch) for part in at[stage].parts]
            optimizer = max(optimizer if one.update_s is None else one.update_s * sum(own) for one in measured)
        if stack.hides_data_parallel:
            shortest = min(costs[stage, chunk, True].seconds for chunk in range(p.chunks))
            reduce = max(reduce / max(1, sum(own)), reduce - shortest)
        reduced_s.append(end_s[stage] + reduce)
        optimizer_s.append(optimizer)
        live = live_micro_batches(orders[stage])
        footprints.append(
            footprint(t, p, stack, parameters, live * sum(own) / p.chunks * kept[stage], stage == stages - 1)
        )
    ready_s = max(reduced_s)
    if stages > 1:
        ready_s += all_reduce_s(at[0].embedding, stack.gradient_bytes * t.embedding_parameters / p.tensor)
    step_s = ready_s + max(optimizer_s) + stack.step_ms * 1e-3
    busy = max(range(stages), key=lambda s: timeline.busy_s[s])
    m = p.micro_batches
    mine = [costs[busy, chunk, backward] for chunk in range(p.chunks) for backward in (False, True)]
    compute_s = m * sum(max(c.device_s, c.seconds - c.exposed_s) for c in mine)
    return Prediction(
        step_s=step_s,
        compute_s=compute_s,
        exposed_communication_s=timeline.busy_s[busy] - compute_s,
        bubble_s=timeline.total_s - timeline.busy_s[busy],
        update_s=step_s - timeline.total_s,
        stages=tuple(footprints),
        tasks=tasks,
        timeline=timeline,
    )
