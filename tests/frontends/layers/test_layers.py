"""``wh.layers.MoE`` against its definition, on one device; over ranks: tests/runtime/layouts/test_giant.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from whale.errors import ProgramError

GROUPS, EACH, WIDTH, EXPERTS = 3, 8, 4, 4


def made(**options: Any) -> tuple[Any, np.ndarray, dict[str, np.ndarray]]:
    """A layer, inputs, and its weights by name; biases are not 0."""
    layer = wh.layers.MoE(**{"experts": EXPERTS, "hidden": 5, **options}, dtype="float64")
    layer.build((None, EACH, WIDTH))
    random = np.random.default_rng(0)
    for v in layer.trainable_variables:
        v.assign(random.normal(size=v.shape))
    names = [
        n for n in ("router", "into", "into_bias", "out", "out_bias", "shared_into", "shared_out") if hasattr(layer, n)
    ]
    return layer, random.normal(size=(GROUPS, EACH, WIDTH)), {n: np.asarray(getattr(layer, n)) for n in names}


def chances(x: np.ndarray, w: dict[str, np.ndarray]) -> np.ndarray:
    raised = np.exp(x @ w["router"])
    return raised / raised.sum(-1, keepdims=True)


def expert(x: np.ndarray, w: dict[str, np.ndarray], e: int) -> np.ndarray:
    return np.maximum(x @ w["into"][e] + w["into_bias"][e, 0], 0) @ w["out"][e] + w["out_bias"][e, 0]


@pytest.mark.parametrize("capacity_factor", [EXPERTS / 2, 0.7, None])
def test_tokens_go_to_their_best_experts_until_these_are_full(capacity_factor: float | None) -> None:
    layer, x, w = made(top_k=2, capacity_factor=capacity_factor)
    found, p = np.asarray(layer(x)), chances(x, w)
    capacity = EACH if capacity_factor is None else int(np.ceil(capacity_factor * EACH * 2 / EXPERTS))
    expected, lost, load = np.zeros_like(x), 0, np.zeros(EXPERTS)
    for g in range(GROUPS):
        best = np.argsort(-p[g], axis=1)[:, :2]
        taken = np.zeros(EXPERTS, int)
        for choice in range(2):  # first choices of all tokens come before second ones
            for t in range(EACH):
                e = best[t, choice]
                load[e] += 1
                taken[e] += 1
                if taken[e] > capacity:
                    lost += 1
                    continue
                expected[g, t] += p[g, t, e] / p[g, t, best[t]].sum() * expert(x[g, t], w, e)
    np.testing.assert_allclose(found, expected, atol=1e-12)
    assert float(np.asarray(layer.dropped)) == pytest.approx(lost / (GROUPS * EACH * 2)) and (lost > 0) == (
        capacity < EACH
    )
    np.testing.assert_allclose(np.asarray(layer.load), load / load.sum())


@pytest.mark.parametrize("capacity_factor", [EXPERTS / 2, None])
def test_a_router_beside_16_bits_chooses_in_float32(capacity_factor: float | None) -> None:
    """Of 600 tokens: in 16 bits logits nearly tie, and slots are not counted beyond 256."""
    x = tf.cast(np.random.default_rng(1).normal(size=(600, WIDTH)), tf.bfloat16)
    layers = [
        wh.layers.MoE(EXPERTS, 5, capacity_factor=capacity_factor, dtype=dtype)
        for dtype in ("mixed_bfloat16", "float32")
    ]
    for layer in layers:
        layer.build(x.shape)
        for n, v in enumerate(layer.variables):
            v.assign(np.random.default_rng(n).normal(size=v.shape))
    rounded, exact = (np.asarray(tf.cast(layer(tf.cast(x, layer.compute_dtype)), tf.float32)) for layer in layers)
    np.testing.assert_array_equal(np.asarray(layers[0].load), np.asarray(layers[1].load))
    np.testing.assert_allclose(rounded, exact, atol=0.03 * np.abs(exact).max())


def test_experts_choose_their_tokens() -> None:
    layer, x, w = made(top_k=1, choose="experts", capacity_factor=1.0)
    found, p = np.asarray(layer(x)), chances(x, w)
    expected, seen = np.zeros_like(x), np.zeros((GROUPS, EACH), bool)
    for g in range(GROUPS):
        for e in range(EXPERTS):
            for t in np.argsort(-p[g, :, e])[: EACH // EXPERTS]:
                expected[g, t] += p[g, t, e] * expert(x[g, t], w, e)
                seen[g, t] = True
    np.testing.assert_allclose(found, expected, atol=1e-12)
    assert float(np.asarray(layer.dropped)) == pytest.approx(1 - seen.mean())


@pytest.mark.parametrize("balance", ["batch", "group"])
def test_losses_of_the_router(balance: str) -> None:
    layer, x, w = made(top_k=1, balance=balance, balance_weight=0.1, z_weight=0.01)
    layer(x)
    p = chances(x, w)
    over = (0, 1) if balance == "batch" else (1,)
    share = np.eye(EXPERTS)[p.argmax(-1)].mean(over)
    even = 0.1 * EXPERTS * (share * p.mean(over)).sum(-1).mean()
    small = 0.01 * (np.log(np.exp(x @ w["router"]).sum(-1)) ** 2).mean()
    assert float(tf.add_n(layer.losses)) == pytest.approx(even + small)


def test_a_shared_expert_sees_every_token() -> None:
    layer, x, w = made(shared=6, experts=1, top_k=1)
    expected = expert(x, w, 0) + np.maximum(x @ w["shared_into"], 0) @ w["shared_out"]
    np.testing.assert_allclose(layer(x), expected, atol=1e-12)


def test_models_have_it_and_make_it_again() -> None:
    inputs = tf.keras.Input((EACH, WIDTH))
    model = tf.keras.Model(inputs, wh.layers.MoE(EXPERTS, 5, name="experts")(inputs))
    model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(GROUPS, EACH, WIDTH)).astype(np.float32)
    model.fit(x, x, batch_size=GROUPS, verbose=0)
    again = tf.keras.Model.from_config(model.get_config(), custom_objects={"MoE": wh.layers.MoE})
    again.set_weights(model.get_weights())
    np.testing.assert_allclose(again(x), model(x))


@pytest.mark.parametrize("options", [{"top_k": 5}, {"choose": "neither"}, {"balance": "none"}])
def test_what_is_no_layer_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ProgramError, match="MoE does not accept these"):
        made(**options)


def test_tokens_without_groups_are_refused_where_they_do_not_divide() -> None:
    layer = wh.layers.MoE(EXPERTS, 5, groups=3)
    with pytest.raises(ProgramError, match="MoE does not accept these"):
        layer(np.zeros((8, WIDTH), np.float32))
