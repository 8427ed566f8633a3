"""A configuration of DeepSpeed's becomes keys that there are, with values that they may have; no field is forgotten."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale.config import Config
from whale.config.deepspeed import _KEYS, _NOTES, describe_field, is_deepspeed, translate
from whale.config.keys import KEYS

pytestmark = pytest.mark.core
OFF, CPU, NVME = {"device": "none"}, {"device": "cpu", "pin_memory": True}, {"device": "nvme", "nvme_path": "/disk"}


@pytest.mark.parametrize(
    "fields, keys",
    [
        ({"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8}}, {"memory.zero": 2}),
        ({"zero_optimization": {"stage": 0}}, {}),
        ({"zero_optimization": True}, {"memory.zero": 1}),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": CPU, "offload_param": OFF}},
            {"memory.zero": 1, "memory.offload": "optimizer"},
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": CPU, "offload_param": NVME}},
            {"memory.zero": 3, "memory.offload": "parameters"},
        ),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, {"memory.zero": 2, "memory.offload": "optimizer"}),
        (
            {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 1e5}},
            {"memory.zero": 3, "memory.zero_min_bytes": 400_000},
        ),
        ({"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": "auto"}}, {"memory.zero": 3}),
        ({"fp16": {"enabled": True, "loss_scale": 0}}, {"precision.compute_dtype": "float16"}),
        (
            {"fp16": {"enabled": True, "loss_scale": 128}},
            {"precision.compute_dtype": "float16", "precision.loss_scale": 128.0},
        ),
        ({"fp16": {"enabled": "auto"}, "bf16": {"enabled": True}}, {"precision.compute_dtype": "bfloat16"}),
        ({"fp16": {"enabled": False, "loss_scale": 128}}, {}),
        ({"gradient_accumulation_steps": 4, "train_batch_size": 64}, {"pipeline.micro_batches": 4}),
        ({"gradient_accumulation_steps": 1}, {}),
        ({"gradient_accumulation_steps": "auto"}, {}),
        ({"activation_checkpointing": {"partition_activations": True}}, {"memory.recompute": "auto"}),
        ({"autotuning": {"enabled": True}, "elasticity": {"enabled": False}}, {"mesh.auto_parallel": True}),
        ({"communication_data_type": "fp16"}, {"communication.wire_dtype": "float16"}),
    ],
)
def test_fields_are_keys(fields: dict[str, Any], keys: dict[str, Any]) -> None:
    found = translate(fields)
    assert is_deepspeed(fields) and found.keys == keys and found.sources.keys() == keys.keys()
    assert Config(found.keys, environment={}) is not None


def test_batch_sizes_are_rows_of_the_step() -> None:
    def said(**fields: object) -> str:
        return " ".join(translate(fields).notes.values())

    assert "64 rows: the batch of all ranks" in said(train_batch_size=64, train_micro_batch_size_per_gpu=4)
    assert "64 / 4 / the number of ranks" in said(train_batch_size=64, train_micro_batch_size_per_gpu=4)
    assert "12 rows times the number of ranks" in said(train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=3)
    assert said(train_batch_size=64, train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=8).count("rows") == 1


def test_what_stands_for_fields_is_there() -> None:
    """The keys that are named."""
    named = {word for text in (*_KEYS.values(), *_NOTES.values()) for word in re.findall(r"\b[a-z]+\.[a-z_]+\b", text)}
    known = {key.name for key in KEYS}
    assert {word for word in named if word.partition(".")[0] in {name.partition(".")[0] for name in known}} <= known
    assert describe_field("zero_optimization.stage") and not describe_field("memory.zero")


@given(
    st.dictionaries(
        st.sampled_from([*_KEYS, *_NOTES, "unheard_of"]),
        st.one_of(
            st.none(), st.booleans(), st.integers(-3, 9), st.just("auto"), st.floats(-1, 1e9),
            st.dictionaries(
                st.sampled_from(["enabled", "stage", "device", "loss_scale", "offload_optimizer", "offload_param"]),
                st.one_of(st.none(), st.booleans(), st.integers(0, 3), st.just("cpu"), st.just({"device": "cpu"})),
            ),
        ),
        min_size=1,
    )
)  # fmt: skip
def test_any_file_is_read_and_none_of_its_fields_is_forgotten(fields: dict[str, Any]) -> None:
    found = translate(fields)
    Config(found.keys, environment={})
    for name in fields.keys() & _NOTES.keys():
        switched_off = isinstance(fields[name], dict) and fields[name].get("enabled") is False
        assert switched_off or name in found.notes
    assert "unheard_of" not in fields or "unknown" in found.notes.get("unheard_of", "unknown")
