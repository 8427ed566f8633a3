"""Reads the hyper-parameters of a decoder-only transformer from a Hugging Face `config.json`.

Keys are those of github.com/huggingface/transformers, models/*/configuration_*.py, whose families call a few fields
differently.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from cost_model.cluster.yaml_files import read_text
from whale.errors import PlanError

# A field of `Transformer`, and the keys that say it, of which the first that is there counts.
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
DROPPED = ("resid_pdrop", "attn_pdrop", "attention_dropout", "hidden_dropout", "dropout")
GATES = ("silu", "swish", "swiglu", "geglu", "gelu_pytorch_tanh")  # activations of networks with a gate, where ...
UNGATED = ("gpt", "opt", "bloom", "falcon", "phi", "starcoder", "mpt", "bert", "codegen")  # the family has none
ENCODERS = ("t5", "bart", "bert", "vit", "clip", "whisper")


def read_config(path: str | Path) -> dict[str, int]:
    """Returns the fields of `Transformer` that a model's `config.json` says, by name.

    The sequence is not among them, but where the model takes no longer one than that: how long rows are, training says.

    Raises:
        ClusterError: the file cannot be read; PlanError: it is no configuration of a decoder-only transformer.
    """
    try:
        given = json.loads(read_text(path, "model's configuration"))
    except ValueError as error:
        raise PlanError("the model's configuration is no JSON", given=f"{path}: {error}") from error
    if isinstance(given, dict) and isinstance(given.get("text_config"), dict):  # of a model that also takes images
        given = {**given, **given["text_config"]}
    if not isinstance(given, dict):
        raise PlanError("the model's configuration is no mapping", given=str(path), expected="a config.json")
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
        raise PlanError("the model's configuration is incomplete", given=str(path), expected=", ".join(missing))
    _settle(found, given, family)
    return found


def _find(given: Mapping[str, object], keys: tuple[str, ...], path: str | Path) -> int | None:
    for key in keys:
        value = given.get(key)
        if value is None or value is False:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise PlanError(
                "a model's configuration has a size that is none", given=f"{path}: {key} {value!r}", expected="a number"
            )
        return value
    return None


def _settle(found: dict[str, int], given: Mapping[str, object], family: str) -> None:
    """Turns what families say in their own ways into what fields mean."""
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
        own = _find(given, ("moe_intermediate_size",), "config.json")
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
        for name in ("expert_groups", "top_groups"):  # a token's experts are in any
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
