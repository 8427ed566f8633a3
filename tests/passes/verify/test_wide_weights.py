"""Weights that are far larger than the rows they meet are named, with what a split would send instead."""

from __future__ import annotations

from dataclasses import replace

from tests.programs import mlp, planned
from whale.passes.verify.explain import explain_wide_weights, find_wide_weights


def test_a_wide_layer_of_few_rows_is_named() -> None:
    program = mlp(features=1024, hidden=4096)
    plan = planned(program, 4, 4)
    (one,) = find_wide_weights(program, plan)
    assert one.shape == (1024, 4096) and one.gradient_bytes == 8 * 1024 * 4096
    assert one.rows_bytes == 2 * 8 * (8 * 1024 + 8 * 4096)
    text = explain_wide_weights(program, plan)
    assert "32.0 MiB are of w1 (1024x4096), but the activations of these layers are only 640.0 KiB" in text
    assert "wh.split()" in text and "mesh.auto_parallel=True" in text


def test_nothing_is_said_where_a_split_would_not_help() -> None:
    many_rows = mlp(rows=4096, features=1024, hidden=4096)
    assert explain_wide_weights(many_rows, planned(many_rows, 2048, 2048)) == ""
    small = mlp()
    assert explain_wide_weights(small, planned(small, 4, 4)) == ""
    wide = mlp(features=1024, hidden=4096)
    assert explain_wide_weights(wide, planned(wide, 8)) == "", "one rank sends nothing"
    assert explain_wide_weights(wide, replace(planned(wide, 4, 4), reshards=())) == "", "its gradients are not summed"
