"""The evaluation of a strategy: equal to schedules played pass by pass, unequal ranks, experts, fully sharded steps."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest

from cost_model.analytic import job, sharded
from cost_model.analytic.evaluate import evaluate, kernels_s, simulate_passes
from cost_model.analytic.predict import even_strategy, predict
from cost_model.analytic.sharded import ShardedUnit
from cost_model.analytic.stacks import stack
from cost_model.analytic.stage_costs import stage_cost
from cost_model.analytic.transformer import Transformer
from cost_model.analytic.transformer_model import TransformerModel
from cost_model.cluster import cluster_file
from cost_model.cluster.cluster_file import Cluster
from cost_model.cluster.pools import Machines
from cost_model.kernels.compute import find_rates
from cost_model.simulator import simulate
from whale.errors import PlanError
from whale.ir.pipeline_schedule import count_live_micro_batches, make_schedule
from whale.ir.strategy import Degrees, DeviceGroup, ParallelStrategy, Stage, count_live_chunks, divide_chunks

GPT = Transformer(layers=24, hidden=2048, heads=16, sequence=1024, vocabulary=51200)
MOE = Transformer(layers=12, hidden=1024, heads=16, sequence=512, vocabulary=30720, experts=16, top=2)
SOFTWARE = stack("megatron-2022")


def hosts(*kinds: str, count: int = 2, name: str = "lab") -> Cluster:
    """A cluster with an entry of `count` hosts for each text of devices."""
    entries = "".join(
        f"- {{name: h{i}, count: {count}, devices: [{devices}], networks: {{f: {{nics: 4}}}}}}\n"
        for i, devices in enumerate(kinds)
    )
    return cluster_file.parse(f"name: {name}\nnetworks: {{f: {{type: infiniband-hdr-200}}}}\nhosts:\n{entries}")


LAB = hosts("{type: a100, count: 8}")
MIXED_HOSTS = hosts("{type: a100, count: 4}, {type: v100, count: 4}")


def model_on(machines: Machines, transformer: Transformer = GPT) -> TransformerModel:
    return TransformerModel(transformer, SOFTWARE, machines)


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_what_a_stage_holds_at_most_is_what_its_schedule_says(name: str) -> None:
    for stages, chunks, times in itertools.product(range(1, 6), (1, 2, 3) if name == "1f1b" else (1,), range(1, 5)):
        count = stages * times if chunks > 1 else times
        found = [count_live_micro_batches(order) for order in make_schedule(name, stages, chunks, count)]
        assert found == [count_live_chunks(name, stages, chunks, count, stage) for stage in range(stages)]


def test_chunks_are_as_equal_as_they_can_be() -> None:
    assert divide_chunks(7, 2, 1) == [((0, 4),), ((4, 7),)]
    assert divide_chunks(5, 2, 2) == [((0, 2), (3, 4)), ((2, 3), (4, 5))]
    with pytest.raises(PlanError, match="more stages than layers"):
        divide_chunks(3, 2, 2)


@pytest.mark.parametrize("again", [False, True])
def test_a_fully_sharded_step_is_played_as_its_tasks_are_simulated(again: bool) -> None:
    root = ShardedUnit(0.3, 0.5, 0.8, 0.2, 0.7)
    layers = [ShardedUnit(0.1 * i, 0.3 - 0.02 * i, 0.4, 0.15 + 0.03 * i, 0.1 * (i % 3)) for i in range(1, 7)]
    ends_s = sharded.simulate_ends_s(root, layers, 4, again)
    for count, end_s in enumerate(ends_s, 1):
        assert simulate(sharded.tasks(root, layers, count, again)).total_s == pytest.approx(end_s)


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("replicas", [8, 16])
@pytest.mark.parametrize("rows", [1, 4])
def test_the_quick_cost_of_a_fully_sharded_stage_is_near_what_is_played(zero: int, replicas: int, rows: int) -> None:
    machines = Machines(LAB)
    strategy = ParallelStrategy((Stage(((0, 24),), (DeviceGroup(0, 1, replicas, rows),)),), 4, zero=zero)
    quick = stage_cost(model_on(machines), machines, strategy, 0, 1, replicas)
    quick_s = 4 * (quick.forward_s[0] + quick.backward_s[0])
    assert evaluate(model_on(machines), machines, strategy).passes_s == pytest.approx(quick_s, rel=0.05)


def test_a_fully_sharded_step_runs_at_the_pace_of_its_slower_ranks() -> None:
    a100, v100 = "{type: a100, count: 8}", "{type: v100, count: 8}"
    plan = Degrees(data=16, micro_batch=2, batch=64, zero=3)
    clusters = hosts(a100), hosts(v100), hosts(a100, v100, count=1)
    fast, slow, mixed = (predict(GPT, plan, SOFTWARE, where) for where in clusters)
    assert fast.step_s < slow.step_s == pytest.approx(mixed.step_s, rel=0.05)
    assert [part.pool for part in mixed.strategy.stages[0].parts] == [0, 1]
    assert mixed.update_s + mixed.compute_s + mixed.exposed_communication_s == pytest.approx(mixed.step_s)


def test_ranks_lie_where_the_clusters_file_says() -> None:
    both = Machines(hosts("{type: a100, count: 8}", "{type: v100, count: 8}"))
    strategy = even_strategy(24, Degrees(tensor=4, stages=2, data=3, batch=3), both, "float16")
    assert [stage.parts for stage in strategy.stages] == [
        (DeviceGroup(0, 4, 3, 1),),
        (DeviceGroup(0, 4, 1, 1), DeviceGroup(1, 4, 2, 1)),
    ]
    # A tensor-parallel group over two kinds of device is as slow as the slower one.
    machines = Machines(MIXED_HOSTS)
    assert even_strategy(24, Degrees(tensor=8, data=2, batch=2), machines, "float16").stages[0].parts == (
        DeviceGroup(1, 8, 2, 1),
    )
    assert even_strategy(24, Degrees(tensor=4, data=4, batch=4), machines, "float16").stages[0].parts == (
        DeviceGroup(0, 4, 2, 1),
        DeviceGroup(1, 4, 2, 1),
    )


def test_groups_know_who_shares_a_host() -> None:
    machines = Machines(MIXED_HOSTS)
    # Four of each pool fit on a host: eight of one pool need two hosts, four of either share one.
    assert machines.data_group(((0, 1, 8),)).per_host == 4
    assert machines.data_group(((0, 1, 4), (1, 1, 4))).per_host == 8
    assert machines.data_group(((0, 1, 3), (0, 1, 1))).hosts == 1


def test_the_first_stage_sends_nothing_back_and_the_last_one_nothing_on() -> None:
    machines = Machines(LAB)
    stages = tuple(Stage(ranges, (DeviceGroup(0, 1, 4, 2),)) for ranges in divide_chunks(24, 4, 1))
    strategy = ParallelStrategy(stages, 8)
    found = evaluate(model_on(machines), machines, strategy)
    first, second, _, last = found.stages
    assert first.send_s + last.send_s == pytest.approx(second.send_s) and first.send_s > 0
    tasks, times = simulate_passes(strategy, found)
    assert times.total_s == pytest.approx(found.passes_s)
    parts = found.compute_s + found.send_s + found.bubble_s + found.reduce_s + found.update_s
    assert parts == pytest.approx(found.step_s)
    assert 0 < kernels_s(model_on(machines), machines, strategy, found) <= found.compute_s
    assert len(tasks.seconds) == 4 * 8 * 2


def test_schedules_that_take_backward_passes_apart_are_refused() -> None:
    with pytest.raises(PlanError, match="schedule that splits backward passes"):
        predict(GPT, Degrees(stages=2, batch=4, schedule="zb-h1"), SOFTWARE, LAB)


JOB = """\
model: {layers: 12, hidden: 1024, heads: 16, sequence: 512, vocabulary: 30720, experts: 16, top: 2, state_bytes: 4}
plan: {data: 16, micro_batch: 2, batch: 128, experts: EXPERTS}
"""


def test_a_job_may_have_experts(tmp_path: Path) -> None:
    def predicted(experts: int):
        (tmp_path / "job.yaml").write_text(JOB.replace("EXPERTS", str(experts)))
        return job.read(tmp_path / "job.yaml").predict(LAB)

    whole, half, divided = predicted(1), predicted(2), predicted(16)
    assert whole.peak_bytes > half.peak_bytes > divided.peak_bytes
    # Each rank has as many of them less, and sums the gradients of fewer; tokens are sent where they are divided.
    assert whole.stages[0].parameters_bytes - divided.stages[0].parameters_bytes == pytest.approx(
        2 * 12 * MOE.expert_parameters * 15 / 16
    )
    assert whole.evaluation.reduce_s > half.evaluation.reduce_s > divided.evaluation.reduce_s
    assert whole.exposed_communication_s == pytest.approx(0, abs=1e-9)
    assert divided.exposed_communication_s > half.exposed_communication_s > 0
    # The planner divides experts over all replicas that it can: the same figures.
    machines = Machines(LAB)
    model = model_on(machines, msgspec.structs.replace(MOE, state_bytes=4))
    found = evaluate(model, machines, divided.strategy)
    assert found.step_s == divided.step_s and found.stages == divided.evaluation.stages
    for experts in (3, 32):
        with pytest.raises(PlanError, match="does not divide the experts"):
            predicted(experts)
    with pytest.raises(PlanError, match="does not divide the experts"):
        predict(GPT, Degrees(data=2, batch=2, experts=2), SOFTWARE, LAB)


@pytest.mark.parametrize("chunks", [1, 2, 4, 12])
@pytest.mark.parametrize("slow", [0.5, 4.0, 30.0])
def test_sums_of_gradients_run_behind_the_passes_of_other_chunks(chunks: int, slow: float) -> None:
    """As if each chunk's sum began when its last backward pass has ended, one after the other."""
    machines = Machines(hosts("{type: a100, count: 8}", count=8))
    software = msgspec.structs.replace(SOFTWARE, hides_data_parallel=True, gradient_bytes=slow)
    model = TransformerModel(GPT, software, machines)
    stages = tuple(Stage(ranges, (DeviceGroup(0, 8, 4, 2),)) for ranges in divide_chunks(GPT.layers, 2, chunks))
    strategy = ParallelStrategy(stages, 16)
    found = evaluate(model, machines, strategy)
    unhidden = TransformerModel(GPT, msgspec.structs.replace(software, hides_data_parallel=False), machines)
    whole = evaluate(unhidden, machines, strategy)
    _, timeline = simulate_passes(strategy, found)
    passes = itertools.chain(*make_schedule("1f1b", 2, chunks, 16))
    stage_ends: list[dict[int, float]] = [{}, {}]
    for number, (chunk, _, backward) in enumerate(passes):
        if backward:  # the last one of a chunk comes last
            stage_ends[number // (2 * chunks * 16)][chunk] = timeline.end_s[number]
    ready = []
    for stage, ends in enumerate(stage_ends):
        each_s, free = whole.stages[stage].reduce_s / chunks, 0.0
        for chunk in reversed(range(1, chunks)):
            free = max(free, ends[chunk]) + each_s
        of_last_layer = ends[0] + each_s * chunks / (GPT.layers // 2)
        ready.append(max(of_last_layer, each_s + max(free, ends[0] - found.stages[stage].backward_s[0])))
    beside_s = find_rates(machines.pools[0].device, "float16").lost_units * whole.reduce_s
    assert -0.2 * whole.reduce_s <= found.passes_s + found.reduce_s - max(ready) <= 0.2 * whole.reduce_s + beside_s
    assert found.reduce_s < whole.reduce_s
