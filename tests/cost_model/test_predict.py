"""Predictions: invariants that hold whatever the constants are."""

from __future__ import annotations

import msgspec
import pytest

from cost_model.analytic import predict
from cost_model.analytic.layer_costs import LayerCosts
from cost_model.analytic.memory import held_tensors, layer_activation_bytes, states, working_bytes
from cost_model.analytic.stacks import Stack, stack
from cost_model.analytic.stage_costs import sharding_groups
from cost_model.analytic.transformer import LayerShare, Transformer
from cost_model.analytic.transformer_kernels import Collective, Matmul, layer_backward, layer_forward
from cost_model.analytic.transformer_model import TransformerModel
from cost_model.cluster import cluster_file
from cost_model.cluster.pools import Machines
from cost_model.hardware import catalogue
from whale.errors import ClusterError, PlanError
from whale.ir.strategy import Degrees

GPT = Transformer(layers=24, hidden=2048, heads=16, sequence=1024, vocabulary=51200)
MEGATRON = stack("megatron-2021")
LAB = cluster_file.parse(
    "name: lab\nnetworks: {f: {type: infiniband-hdr-200}}\n"
    "hosts: [{name: a, count: 16, devices: [{type: a100, count: 8}], networks: {f: {nics: 8}}}]"
)
PLANS = [
    Degrees(micro_batch=2, batch=64),
    Degrees(data=16, micro_batch=2, batch=64),
    Degrees(tensor=8, micro_batch=2, batch=64, recompute="full"),
    Degrees(tensor=2, data=4, micro_batch=2, batch=64, sequence_parallel=True, recompute="selective"),
    Degrees(tensor=4, stages=4, data=2, micro_batch=2, batch=64),
    Degrees(tensor=2, stages=4, chunks=3, data=2, micro_batch=2, batch=64),
    Degrees(data=16, micro_batch=2, batch=64, zero=3),
    Degrees(data=16, micro_batch=2, batch=64, zero=1),
]


def on(plan: Degrees, where=LAB, model=GPT, software=MEGATRON) -> predict.JobPrediction:
    return predict.predict(model, plan, software, where)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_parts_make_the_step(plan: Degrees) -> None:
    found = on(plan)
    parts = found.compute_s + found.exposed_communication_s + found.bubble_s + found.update_s
    assert found.step_s == pytest.approx(parts, rel=0.01, abs=0.012)
    assert min(found.compute_s, found.exposed_communication_s, found.bubble_s, found.update_s) >= 0
    assert found.compute_s >= GPT.step_flops(plan.batch) / plan.ranks / 312e12


def test_one_device_has_no_communication() -> None:
    found = on(PLANS[0])
    assert found.bubble_s == 0
    assert found.exposed_communication_s == pytest.approx(0, abs=1e-9)
    assert not any(
        isinstance(op, Collective) for op in layer_forward(GPT, LayerShare(rows=PLANS[0].micro_batch), MEGATRON)
    )


def test_rings_without_a_common_adapter_leave_hosts_from_far_devices() -> None:
    """Two of eight devices are beside an adapter: all eight in a ring, or neighbours, or one of a host, are near."""
    text = "name: lab\nnetworks: {f: {type: infiniband-hdr-200}}\nhosts:\n"
    text += "- {name: a, count: 16, devices: [{type: a100, count: 8}], networks: {f: {nics: 4, far_gb_per_s: 6.1}}}"
    machines, adapter = Machines(cluster_file.parse(text)), catalogue.find_network("infiniband-hdr-200").bytes_per_s

    def shared_by_groups(plan: Degrees, groups: int) -> float:
        return machines.data_group(((0, plan.tensor, plan.data),)).host_bytes_per_s * groups / 4

    for tensor, rate in ((1, adapter), (2, 6.1e9), (4, 6.1e9), (8, adapter)):
        assert shared_by_groups(Degrees(tensor=tensor, data=16, batch=16), tensor) == pytest.approx(rate)
    # A tensor-parallel group that spans hosts has neighbours; several stages do not change where its ranks are.
    assert machines.tensor_group(0, 16).host_bytes_per_s == pytest.approx(4 * adapter)
    assert shared_by_groups(Degrees(tensor=4, stages=2, data=4, batch=4), 4) == pytest.approx(6.1e9)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_twice_the_bandwidth_is_never_slower(plan: Degrees, monkeypatch: pytest.MonkeyPatch) -> None:
    before = on(plan).step_s
    fast = {
        name: msgspec.structs.replace(link, gb_per_s=2 * link.gb_per_s) for name, link in catalogue.load_links().items()
    }
    wide = {
        name: msgspec.structs.replace(net, gb_per_s=2 * net.gb_per_s) for name, net in catalogue.load_networks().items()
    }
    monkeypatch.setattr(catalogue, "load_links", lambda: fast)
    with_links = on(plan).step_s
    monkeypatch.setattr(catalogue, "load_networks", lambda: wide)
    assert on(plan).step_s <= with_links <= before
    if plan.ranks > 1:
        assert on(plan).step_s < before


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_memory_grows_with_the_micro_batch_and_shrinks_with_sharding(plan: Degrees) -> None:
    peaks = [on(msgspec.structs.replace(plan, micro_batch=m, batch=plan.data * 12 * m)).peak_bytes for m in (1, 2, 4)]
    assert peaks == sorted(set(peaks))
    if plan.data > 1:
        sharded = [
            on(msgspec.structs.replace(plan, tensor=1, stages=1, chunks=1, sequence_parallel=False, zero=z))
            for z in range(4)
        ]
        totals = [
            one.stages[0].parameters_bytes + one.stages[0].gradients_bytes + one.stages[0].optimizer_bytes
            for one in sharded
        ]
        assert totals == sorted(totals, reverse=True) and len(set(totals)) == 4


def test_recompute_trades_time_for_memory() -> None:
    plans = [msgspec.structs.replace(PLANS[4], recompute=r) for r in ("none", "selective", "full")]
    found = [on(plan) for plan in plans]
    assert [f.step_s for f in found] == sorted(f.step_s for f in found)
    activations = [f.stages[0].activations_bytes for f in found]
    assert activations == sorted(activations, reverse=True)


def test_activations_are_those_of_the_published_formula() -> None:
    # Korthikanti et al., 2022, table 2, for one layer of 22B: s b h (34 + 5 a s / h) without tensor parallelism.
    model = Transformer(48, 6144, 64, 2048, 51200)
    sbh = 2048 * 4 * 6144
    plan = LayerShare(rows=4)
    assert layer_activation_bytes(model, plan, MEGATRON) == pytest.approx(sbh * (34 + 5 * 64 * 2048 / 6144))
    split = LayerShare(tensor=8, rows=4, sequence_parallel=True, recompute="selective")
    assert layer_activation_bytes(model, split, MEGATRON) == pytest.approx(sbh * 34 / 8)


@pytest.mark.parametrize(("heads", "hidden", "saved"), [(96, 12288, 0.70), (128, 20480, 0.65)])
def test_selective_recomputation_saves_what_was_published(heads: int, hidden: int, saved: float) -> None:
    # Korthikanti et al., 2022, section 5: 70 % of the activations of GPT-3, 65 % of those of MT-NLG 530B.
    model = Transformer(96, hidden, heads, 2048, 51200)
    shares = [LayerShare(tensor=8, sequence_parallel=True, recompute=how) for how in ("none", "selective")]
    none, selective = (layer_activation_bytes(model, share, MEGATRON) for share in shares)
    assert 1 - selective / none == pytest.approx(saved, abs=0.005)


def test_what_is_kept_follows_from_the_activation_and_the_dropout() -> None:
    share = LayerShare(rows=4)
    sbh = 2048 * 4 * 6144
    model = Transformer(48, 6144, 64, 2048, 51200)
    held = held_tensors(model, share, MEGATRON)
    assert held["network"] == held["activation"] == 2 * 4 * sbh
    assert held_tensors(msgspec.structs.replace(model, relu=1), share, MEGATRON)["network"] == 0
    scores = 4 * 64 * 2048 * 2048
    assert held["core"] == 5 * scores  # before and after the dropout, and its mask
    without = msgspec.structs.replace(MEGATRON, dropout=False)
    assert held_tensors(model, share, without)["core"] == 2 * scores


def test_a_stage_that_waits_for_what_it_receives_does_so_both_ways() -> None:
    plan = Degrees(stages=4, batch=16)
    waits = msgspec.structs.replace(MEGATRON, receives_block=True)
    before, after = (on(plan, software=one).evaluation.stages for one in (MEGATRON, waits))
    assert [b.send_s / a.send_s for a, b in zip(before, after)] == pytest.approx([2.0] * 4)


def test_the_feed_forward_width_counts_in_memory_and_flops() -> None:
    narrow, wide = (Transformer(48, 6144, 64, 2048, 51200, feed_forward=f) for f in (8192, 32768))
    share = LayerShare(rows=2, tensor=4)
    more = layer_activation_bytes(wide, share, MEGATRON) - layer_activation_bytes(narrow, share, MEGATRON)
    assert more == 2 * 2 * 2 * 2048 * (32768 - 8192) / 4  # two tensors of two bytes
    assert wide.step_flops(8) - narrow.step_flops(8) == 3 * 4.0 * 8 * 2048 * 48 * 6144 * (32768 - 8192)
    same = Transformer(48, 6144, 64, 2048, 51200, feed_forward=4 * 6144)
    published = 72 * 8 * 2048 * 48 * 6144**2 * (1 + 2048 / (6 * 6144) + 51200 / (12 * 48 * 6144))
    assert same.step_flops(8) == pytest.approx(published)  # SC 2021, appendix, without recompute


def test_grouped_queries_gates_and_untied_embeddings_are_those_of_published_models() -> None:
    # Llama 3.1: 8B, 70B and 405B have 8 heads of keys and values, gated networks, an embedding and a head of their own.
    share = LayerShare(tensor=8, rows=1, sequence_parallel=True)
    for layers, hidden, heads, inner, billions in (
        (32, 4096, 32, 14336, 8.03),
        (80, 8192, 64, 28672, 70.6),
        (126, 16384, 128, 53248, 405.9),
    ):
        llama = Transformer(layers, hidden, heads, 8192, 128256, inner, kv_heads=8, gated=1, untied=1, rotary=1)
        assert llama.parameters / 1e9 == pytest.approx(billions, rel=0.002)
        products = [op for op in layer_forward(llama, share, MEGATRON) if isinstance(op, Matmul) and op.weights]
        assert sum(op.n * op.k * 8 for op in products) == llama.attention_elements + llama.network_elements
        backward = [op for op in layer_backward(llama, share, MEGATRON) if isinstance(op, Matmul) and op.weights]
        assert sum(op.m * op.n * op.k for op in backward) == 2 * sum(op.m * op.n * op.k for op in products)
        model = TransformerModel(llama, MEGATRON, Machines(LAB))
        assert model.tied_parameters == 0
        costs = model.layer_costs(0, 8, 1, "none", True, 8)
        assert 8 * costs.parameters_of(((0, layers),)) == pytest.approx(llama.parameters, rel=1e-3)
        learned = msgspec.structs.replace(llama, rotary=0)
        assert learned.parameters - llama.parameters == 8192 * hidden
    # Folding the same products into a plain network's width costs as many FLOPs.
    folded = Transformer(80, 8192, 64, 8192, 128256, 35840)
    llama = Transformer(80, 8192, 64, 8192, 128256, 28672, kv_heads=8, gated=1)
    assert llama.step_flops(4) == folded.step_flops(4)
    with pytest.raises(PlanError, match="not a multiple of kv_heads"):
        Transformer(2, 64, 8, 8, 128, kv_heads=3)


def test_shared_experts_are_computed_for_all_tokens_and_held_by_all_ranks() -> None:
    # DeepSeek-like: 64 narrow experts, of which a token goes through 6, and 2 that all go through.
    plain = Transformer(28, 2048, 16, 4096, 102400, 1408, experts=64, top=6, gated=1)
    shared = msgspec.structs.replace(plain, shared_experts=2)
    assert shared.expert_parameters == plain.expert_parameters
    assert shared.dense_parameters - plain.dense_parameters == 2 * (3 * 2048 * 1408 + 2048 + 2 * 1408)
    assert shared.step_flops(1) - plain.step_flops(1) == 3 * 4096 * 28 * 2 * 2 * 3 * 2048 * 1408
    share = LayerShare(rows=1, experts=8)
    more = layer_activation_bytes(shared, share, MEGATRON) - layer_activation_bytes(plain, share, MEGATRON)
    assert more == 3 * 2 * 4096 * 2 * 1408
    with pytest.raises(PlanError, match="only for a model with experts"):
        Transformer(2, 64, 8, 8, 128, shared_experts=1)


@pytest.mark.parametrize("experts", [0, 16])
@pytest.mark.parametrize(
    "software", ["megatron-2022", "composer-bf16", "tensorflow-fp32", "torchtitan-bf16", "maxtext-fp8"]
)
def test_recomputing_more_never_takes_more_memory(software: str, experts: int) -> None:
    model = Transformer(24, 2048, 16, 1024, 51200, experts=experts, top=2 if experts else 1)
    for tensor, parallel, layers, live in ((1, False, 1, 1), (8, True, 1, 1), (8, False, 2, 3), (4, True, 24, 1)):
        held = []
        for how in ("full", "selective", "none"):
            share = LayerShare(tensor=tensor, rows=2, recompute=how, sequence_parallel=parallel)
            kept = live * layers * layer_activation_bytes(model, share, stack(software))
            held.append(kept + working_bytes(model, share, stack(software)))
        assert held == sorted(held)


DEEPSEEK = Transformer(
    61, 7168, 128, 4096, 129280, 2048, 256, 8, gated=1, untied=1, rotary=1, shared_experts=1, head_width=128,
    value_width=128, latent=512, query_latent=1536, rope_width=64, dense_layers=3, dense_feed_forward=18432,
)  # fmt: skip


def test_latent_attention_and_first_dense_layers_are_those_of_deepseek() -> None:
    # DeepSeek-V3 technical report, 2024, section 4.2: 671 billion parameters, 37 of them active for a token.
    assert DEEPSEEK.parameters / 1e9 == pytest.approx(671, rel=0.005)
    active = DEEPSEEK.step_flops(1) / 6 / 4096
    attention = 3 * 4.0 * DEEPSEEK.attended * 128 * (192 + 128) * 61 / 6 / 4096
    assert (active - attention + DEEPSEEK.embedding_parameters) / 1e9 == pytest.approx(37.5, rel=0.02)
    share = LayerShare(tensor=8, experts=32)
    products = [op for op in layer_forward(DEEPSEEK, share, MEGATRON) if isinstance(op, Matmul)]
    own = {op.name: op.n * op.k for op in products}
    assert own["latents"] == DEEPSEEK.latent_elements == 7168 * (1536 + 512 + 64)  # which every rank has
    once = DEEPSEEK.attention_elements - DEEPSEEK.latent_elements
    assert 8 * (own["queries"] + own["keys and values"] + own["projection"]) == once
    backward = [op for op in layer_backward(DEEPSEEK, share, MEGATRON) if isinstance(op, Matmul)]
    work = [sum(op.m * op.n * op.k * op.batch for op in ops if op.weights) for ops in (products, backward)]
    routers = sum(op.m * op.n * op.k for op in backward if op.name == "router")
    assert work[1] == pytest.approx(2 * work[0]) and routers > 0
    # Latent attention keeps little more of a token than its own heads' keys: the latents.
    model = TransformerModel(DEEPSEEK, stack("megatron-core-bf16"), Machines(LAB))
    costs = model.layer_costs(0, 8, 1, "none", True, 64, 64, 1, 32)
    assert costs.forward_s[1] != pytest.approx(costs.forward_s[4] - costs.forward_s[3], rel=0.01)
    assert costs.experts[3] == 0 < costs.experts[4] == pytest.approx(DEEPSEEK.expert_parameters / 8 / 32)
    for wrong in ({"latent": 8, "kv_heads": 2}, {"rope_width": 8}, {"dense_layers": 1}, {"window_period": 2}):
        with pytest.raises(PlanError):
            Transformer(4, 64, 4, 64, 128, **wrong)
    with pytest.raises(PlanError, match="give head_width"):
        Transformer(4, 60, 8, 64, 128)
    assert Transformer(4, 60, 8, 64, 128, head_width=16).attention_elements == 4 * 60 * 128


def test_a_window_leaves_out_pairs_of_tokens() -> None:
    whole = Transformer(24, 2048, 16, 8192, 51200)
    window = msgspec.structs.replace(whole, window=1024)
    mixed = msgspec.structs.replace(window, window_period=6)  # every sixth layer sees all, as in Gemma 3
    assert whole.attended == 8192**2 / 2 and window.attended == 1024 * (8192 - 512)
    assert mixed.attended == (4 * whole.attended + 20 * window.attended) / 24
    assert msgspec.structs.replace(whole, window=10**6).attended == whole.attended
    core = stack("megatron-core-bf16")
    times = [on(Degrees(batch=1), model=one, software=core).step_s for one in (window, mixed, whole)]
    assert times == sorted(set(times))
    lost = whole.step_flops(1) - window.step_flops(1)
    assert lost == 3 * 24 * 4 * 2048 * 2 * (whole.attended - window.attended)


def test_context_parallel_ranks_divide_the_tokens_of_a_row() -> None:
    model = msgspec.structs.replace(GPT, sequence=16384)
    core = stack("megatron-core-bf16")
    alone, four = (on(Degrees(context=c, batch=4, data=1), model=model, software=core) for c in (1, 4))
    assert four.strategy.ranks == 4 and four.strategy.batch == 4
    # A fourth of the activations and of the work; what goes round is not all hidden.
    assert four.stages[0].activations_bytes == pytest.approx(alone.stages[0].activations_bytes / 4, rel=0.01)
    assert alone.step_s / 4 < four.step_s < alone.step_s / 2
    assert "4 context" in four.strategy.format_summary()
    shares = [LayerShare(context=c, tensor=2, sequence_parallel=True) for c in (1, 4)]
    work = [
        sum(op.m * op.n * op.k * op.batch for op in layer_forward(model, p, MEGATRON) if isinstance(op, Matmul))
        for p in shares
    ]
    assert work[0] == 4 * work[1]
    round_ = [op for op in layer_forward(model, shares[1], core) if getattr(op, "along", "") == "context"]
    assert [op.tensor_bytes for op in round_] == [2 * 2 * 16384 * 2048 / 2] and round_[0].over == ("attention",)
    # Its ranks hold the same parameters: their gradients are summed, and ZeRO divides states over them.
    sharded = on(Degrees(context=4, data=2, batch=4, zero=1), model=model, software=core)
    same = on(Degrees(data=8, batch=8, zero=1), model=model, software=core)
    assert sharded.stages[0].optimizer_bytes == same.stages[0].optimizer_bytes
    # Stages send as much less.
    sent = [on(Degrees(stages=2, context=c, batch=4), model=model).evaluation.stages[0].send_s for c in (1, 4)]
    assert 3 < sent[0] / sent[1] < 4
    with pytest.raises(PlanError, match="does not divide the length of the sequence"):
        on(Degrees(context=3, batch=1), model=model)


def test_fully_sharded_steps_may_divide_tensors_and_have_stages() -> None:
    plain = on(Degrees(tensor=2, data=8, batch=32))
    for plan in (
        Degrees(tensor=2, data=8, batch=32, zero=3),
        Degrees(tensor=2, data=4, stages=2, batch=32, zero=3),
        Degrees(tensor=2, data=8, batch=32, zero=2),
    ):
        found = on(plan)
        parts = found.compute_s + found.exposed_communication_s + found.bubble_s + found.update_s
        assert found.step_s == pytest.approx(parts, rel=0.02, abs=0.012)
        assert found.stages[0].gradients_bytes < plain.stages[0].gradients_bytes / 4 < found.step_s * 1e12


def test_hybrid_sharding_divides_states_over_some_ranks_and_sums_gradients_over_the_others() -> None:
    core = stack("torchtitan-bf16")
    whole, hybrid, alone = (
        on(Degrees(data=64, micro_batch=2, batch=128, zero=3, shard=s), software=core) for s in (0, 8, 64)
    )
    assert whole.step_s == alone.step_s
    assert hybrid.stages[0].optimizer_bytes == pytest.approx(8 * whole.stages[0].optimizer_bytes)
    machines = Machines(LAB)
    inside, copies = sharding_groups(machines, hybrid.strategy.stages[0].parts, 8)
    assert (inside.size, inside.hosts, copies.size, copies.hosts) == (8, 1, 8, 8)
    assert sharding_groups(machines, whole.strategy.stages[0].parts, 64)[1] is None
    slow = cluster_file.parse(
        "name: lab\nnetworks: {f: {type: ethernet-10g}}\n"
        "hosts: [{name: a, count: 16, devices: [{type: a100, count: 8}], networks: {f: {nics: 1}}}]"
    )
    ways = [Degrees(data=64, micro_batch=2, batch=128, zero=3, shard=s) for s in (0, 8)]
    far, near = (on(plan, slow, software=core).step_s for plan in ways)
    assert near < far  # parameters are gathered inside hosts
    assert "ZeRO 3 over 8 each" in hybrid.strategy.format_summary()
    with pytest.raises(PlanError, match="do not divide into groups"):
        Degrees(data=6, batch=6, shard=4)


def test_a_job_may_say_the_layers_of_each_stage() -> None:
    even, uneven = (on(Degrees(stages=4, batch=8, stage_layers=own)) for own in ((), (3, 7, 7, 7)))
    assert [stage.count for stage in uneven.strategy.stages] == [3, 7, 7, 7]
    assert uneven.step_s > even.step_s
    assert uneven.stages[0].parameters_bytes < even.stages[0].parameters_bytes
    chunks = on(Degrees(stages=2, chunks=2, batch=8, stage_layers=(5, 7, 7, 5)))
    assert [stage.layers for stage in chunks.strategy.stages] == [((0, 5), (12, 19)), ((5, 12), (19, 24))]
    with pytest.raises(PlanError, match="expected: 24"):
        on(Degrees(stages=2, batch=8, stage_layers=(5, 5)))
    with pytest.raises(PlanError, match="stage_layers does not fit"):
        Degrees(stages=2, batch=8, stage_layers=(24,))


def test_experts_have_a_degree_of_their_own_that_the_strategy_says() -> None:
    model = Transformer(24, 2048, 16, 1024, 51200, 1024, experts=16, top=2)
    found = [on(Degrees(data=16, batch=64, experts=e), model=model) for e in (1, 4, 16)]
    assert [one.strategy.expert_ranks for one in found] == [1, 4, 16]
    held = [one.stages[0].parameters_bytes for one in found]
    assert held == sorted(held, reverse=True)
    assert "experts over 4" in found[1].strategy.format_summary()
    two = on(Degrees(data=8, context=2, batch=64, experts=16), model=model)  # over context-parallel ranks as well
    assert two.stages[0].parameters_bytes == found[2].stages[0].parameters_bytes


def test_matrix_products_are_the_published_flops() -> None:
    # 24 B s h^2 (1 + s / 6h) forward, twice that backward, divided over tensor-parallel ranks (SC 2021, appendix).
    plan = LayerShare(tensor=4, rows=2)
    forward = 24 * 2 * 1024 * 2048**2 * (1 + 1024 / (6 * 2048)) / 4

    def flops(ops) -> float:
        return sum(2.0 * op.m * op.n * op.k * op.batch for op in ops if isinstance(op, Matmul))

    assert flops(layer_forward(GPT, plan, MEGATRON)) == pytest.approx(forward)
    assert flops(layer_backward(GPT, plan, MEGATRON)) == pytest.approx(2 * forward)
    again = msgspec.structs.replace(plan, recompute="full")
    assert flops(layer_backward(GPT, again, MEGATRON)) == pytest.approx(3 * forward)


def test_a_pipeline_runs_at_the_pace_of_its_slower_devices() -> None:
    text = "name: mixed\nnetworks: {{f: {{type: infiniband-hdr-200}}}}\nhosts:\n" + "".join(
        f"- {{{{name: {name}, devices: [{{{{type: {kind}, count: 8}}}}], networks: {{{{f: {{{{nics: 8}}}}}}}}}}}}\n"
        for name, kind in (("a", "h100"), ("b", "{second}"))
    )
    times = [
        on(Degrees(tensor=8, stages=2, batch=16), cluster_file.parse(text.format(second=second))).step_s
        for second in ("h100", "a100", "v100")
    ]
    assert times == sorted(set(times))


def test_plans_that_cannot_be() -> None:
    with pytest.raises(ClusterError, match="needs 256 devices and the cluster lab has 128"):
        on(Degrees(data=256, batch=256))
    with pytest.raises(PlanError, match="does not divide the number of attention heads"):
        on(Degrees(tensor=3, batch=1))
    with pytest.raises(PlanError, match="more stages than layers"):
        on(Degrees(stages=32, batch=32))
    with pytest.raises(PlanError, match="not a multiple"):
        Degrees(data=3, batch=4)
    with pytest.raises(PlanError, match="hidden must be positive"):
        Transformer(2, 0, 2, 8, 8)
    v100 = cluster_file.parse("name: old\nhosts: [{name: a, devices: [{type: v100}]}]")
    with pytest.raises(ClusterError, match="does not compute in bfloat16"):
        on(Degrees(batch=1), v100, software=stack("composer-bf16"))
    with pytest.raises(ClusterError, match="expected: megatron-202"):
        stack("megatron-2020")


def test_single_precision_doubles_what_is_held_and_needs_no_copy_of_weights() -> None:
    """V100 and P100 as in the first Whale paper: all but dropout's masks is twice as large, no copy of weights."""
    fp32 = stack("tensorflow-fp32")
    half = msgspec.structs.replace(fp32, dtype="float16")
    model = Transformer(24, 1024, 16, 128, 30720)
    masks = 4 * 128 * 1024 * (2 + 16 * 128 / 1024)
    whole, halved = (layer_activation_bytes(model, LayerShare(rows=4), one) - masks for one in (fp32, half))
    assert whole == pytest.approx(2 * halved)
    devices = "{type: v100-sxm2-32gb}, {type: p100-pcie-16gb}"
    machines = Machines(cluster_file.parse(f"name: w\nhosts: [{{name: h, devices: [{devices}]}}]\n"))

    def costs(one: Stack, pool: int = 0) -> LayerCosts:
        return TransformerModel(model, one, machines).layer_costs(pool, 1, 4, "none", False, 1)

    held, held_of_half = (states(costs(one), ((0, 24),), 1, 0) for one in (fp32, half))
    assert held[0] == 2 * held_of_half[0] and held[2] * 12 == held_of_half[2] * 8
    assert costs(fp32, 1).forward(0, 24) > 1.2 * costs(fp32).forward(0, 24)  # 9.3 and 15.7 TFLOP/s
    with pytest.raises(ClusterError, match="does not compute in tf32"):
        costs(stack("tensorflow-tf32"))
