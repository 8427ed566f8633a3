"""Reads the hyper-parameters of a decoder-only transformer from a Hugging Face `config.json`.

The keys are those of github.com/huggingface/transformers, models/*/configuration_*.py. Model families name a few fields
differently, so that `KEYS` lists several keys for a field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from cost_model.cluster.yaml_files import read_text
from whale.errors import PlanError

# Field of `Transformer` -> keys that may hold its value; the first one found in the file counts.
KEYS = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "vocabulary": ("vocab_size",),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "feed_forward": ("intermediate_size", "n_inner", "ffn_dim"),
    "experts": ("n_routed_experts", "num_local_experts", "num_experts"),
    "top": ("num_experts_per_tok", "num_experts_per_token"),
    "shared_experts": ("n_shared_experts",),
    "dense_layers": ("first_k_dense_replace",),
    "expert_groups": ("n_group",),
    "top_groups": ("topk_group",),
    "head_width": ("head_dim", "qk_nope_head_dim"),
    "value_width": ("v_head_dim",),
    "latent": ("kv_lora_rank",),
    "query_latent": ("q_lora_rank",),
    "rope_width": ("qk_rope_head_dim",),
    "window": ("sliding_window",),
}
CONTEXT = ("max_position_embeddings", "n_positions")  # the longest sequence that a model takes
DROPPED = ("resid_pdrop", "attn_pdrop", "attention_dropout", "hidden_dropout", "dropout")  # dropout probabilities
GATES = ("silu", "swish", "swiglu", "geglu", "gelu_pytorch_tanh")  # activations of gated networks, except in ...
UNGATED = ("gpt", "opt", "bloom", "falcon", "phi", "starcoder", "mpt", "bert", "codegen")  # ... these families
ENCODERS = ("t5", "bart", "bert", "vit", "clip", "whisper")


def read_config(path: str | Path) -> dict[str, int]:
    """Returns the fields of `Transformer` that a model's `config.json` gives, by name.

    The sequence length is among them only if the model takes no sequence longer than 2047 tokens; otherwise the user
    has to say how long rows are in training.

    Raises:
        ClusterError: the file cannot be read.
        PlanError: the file is no configuration of a decoder-only transformer.
    """
    try:
        given = json.loads(read_text(path, "model's configuration"))
    except ValueError as error:
        raise PlanError(
            "the model's configuration is not valid JSON",
            given=f"{path}: {error}",
            expected="a config.json of Hugging Face transformers",
            action="correct the file, or download it again",
        ) from error
    if isinstance(given, dict) and isinstance(given.get("text_config"), dict):  # of a model that also takes images
        given = {**given, **given["text_config"]}
    if not isinstance(given, dict):
        raise PlanError(
            "the model's configuration is no JSON object",
            given=str(path),
            expected='a config.json of Hugging Face transformers: {"hidden_size": ..., ...}',
            action="give the model's config.json",
        )
    family = str(given.get("model_type", "")).lower()
    if given.get("is_encoder_decoder") or family.startswith(ENCODERS):
        raise PlanError(
            "the configuration is not that of a decoder-only transformer",
            given=f"{path}: model_type {family}",
            action="describe it as a program: bert:..., t5:..., vit:... (`whale plan --describe`)",
        )
    found = {name: value for name, keys in KEYS.items() if (value := _find(given, keys, path)) is not None}
    if missing := [
        f"{name} ({' or '.join(KEYS[name])})" for name in ("layers", "hidden", "heads") if name not in found
    ]:
        raise PlanError(
            "the model's configuration is incomplete",
            given=str(path),
            expected=", ".join(missing),
            action="add the keys to the file, or describe the model as gpt:layers=...,hidden=...,heads=...",
        )
    _settle(found, given, family, path)
    return found


def _find(given: Mapping[str, object], keys: tuple[str, ...], path: str | Path) -> int | None:
    for key in keys:
        value = given.get(key)
        if value is None or value is False:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise PlanError(
                "a size in the model's configuration is no whole number",
                given=f"{path}: {key} {value!r}",
                expected="a whole number, 0 or more",
                action=f"correct {key} in the file",
            )
        return value
    return None


def _settle(found: dict[str, int], given: Mapping[str, object], family: str, path: str | Path) -> None:
    """Corrects `found` in place for families that use a key in another meaning, and adds flags such as `gated`.

    Args:
        found: fields of `Transformer` found so far.
        given: the content of the configuration file.
        family: its `model_type`, in lower case.
        path: the file, for messages.
    """
    if found.get("kv_heads") == found["heads"] or "latent" in found:
        found.pop("kv_heads", None)
    if found.get("head_width", 0) * found["heads"] == found["hidden"] and "latent" not in found:
        found.pop("head_width", None)
    if "latent" not in found:
        for name in ("query_latent", "rope_width", "value_width"):
            found.pop(name, None)
    if given.get("use_sliding_window") is False:
        found.pop("window", None)
    if found.get("experts", 0) > 1:
        own = _find(given, ("moe_intermediate_size",), path)
        if own is not None:
            dense = found.get("feed_forward", 0)
            found["feed_forward"] = own
            if found.get("dense_layers"):
                found["dense_feed_forward"] = dense
        if not found.get("dense_layers") or "dense_feed_forward" not in found:
            found.pop("dense_layers", None)
    else:
        for name in ("experts", "top", "shared_experts", "dense_layers"):
            found.pop(name, None)
    if "experts" not in found or not 1 < found.get("expert_groups", 1) > found.get("top_groups", 0) > 0:
        for name in ("expert_groups", "top_groups"):  # a token may choose experts of all groups
            found.pop(name, None)
    act = str(given.get("hidden_act") or given.get("hidden_activation") or given.get("activation_function") or "")
    gated = act in GATES and not (act == "gelu_pytorch_tanh" and not family.startswith("gemma"))
    if gated and not family.startswith(UNGATED):
        found["gated"] = 1
    if act == "relu":
        found["relu"] = 1
    if given.get("tie_word_embeddings") is False:
        found["untied"] = 1
    if any(str(key).startswith(("rope_", "rotary_")) for key in given):
        found["rotary"] = 1
    if any(isinstance(p := given.get(name), float) and p > 0 for name in DROPPED):
        found["dropout"] = 1
    context = next((value for key in CONTEXT if isinstance(value := given.get(key), int)), None)
    if context is not None and context < 2048:
        found["sequence"] = context
