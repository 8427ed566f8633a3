"""Models that are described by a Hugging Face configuration, with the parameters that their authors publish."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from whale.errors import PlanError
from whale.planner import ask

# The fields of the models' config.json that matter, and some that do not.
LLAMA = {
    "model_type": "llama", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rope_theta": 500000.0, "tie_word_embeddings": False,
    "attention_dropout": 0.0, "torch_dtype": "bfloat16",
}  # fmt: skip
MIXTRAL = {**LLAMA, "model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}
QWEN = {
    **LLAMA, "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_hidden_layers": 48, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128,
    "num_experts_per_tok": 8, "sliding_window": None, "use_sliding_window": False,
}  # fmt: skip
DEEPSEEK = {
    **LLAMA, "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "vocab_size": 129280, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1,
    "first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "n_group": 8, "topk_group": 4,
}  # fmt: skip
GEMMA = {
    "model_type": "gemma3", "text_config": {
        "model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2560,
        "intermediate_size": 10240, "num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 256, "vocab_size": 262208,
        "rope_theta": 1000000.0, "sliding_window": 1024,
    },
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "activation_function": "gelu_new", "n_embd": 1024, "n_layer": 24, "n_head": 16,
    "n_positions": 1024, "vocab_size": 50257, "resid_pdrop": 0.1, "attn_pdrop": 0.1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "billions", "has"),
    [
        (
            LLAMA,
            8.03,
            {"kv_heads": 8, "gated": 1, "untied": 1, "rotary": 1, "dropout": 0, "experts": 0, "sequence": 2048},
        ),
        (MIXTRAL, 46.7, {"experts": 8, "top": 2, "feed_forward": 14336}),
        (QWEN, 30.5, {"experts": 128, "head_width": 128, "window": 0, "dense_layers": 0}),
        (
            DEEPSEEK,
            671.0,
            {"latent": 512, "kv_heads": 0, "rope_width": 64, "dense_feed_forward": 18432, "dense_layers": 3},
        ),
        (GEMMA, 3.88, {"gated": 1, "untied": 0, "window": 1024, "head_width": 256}),
        (GPT2, 0.355, {"gated": 0, "untied": 0, "rotary": 0, "dropout": 1, "sequence": 1024}),
    ],
    ids=lambda value: value.get("model_type", "") if isinstance(value, dict) else "",
)
def test_a_configuration_is_the_model_that_its_authors_count(
    tmp_path: Path, config: dict[str, object], billions: float, has: dict[str, int]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    found, batch = ask.describe(f"{path},batch=64")
    assert batch == 64 and found.parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert {name: getattr(found, name) for name in has} == has
    longer, none = ask.describe(f"{path},sequence=8192,layers=6")
    assert (longer.sequence, longer.layers, none) == (8192, 6, None)


def test_families_have_what_their_models_have_in_common() -> None:
    llama, _ = ask.describe("llama:layers=32,hidden=4096,heads=32,kv_heads=8,feed_forward=14336,vocabulary=128256")
    assert llama.parameters / 1e9 == pytest.approx(8.03, rel=0.01)
    with pytest.raises(PlanError, match="experts"):
        ask.describe("mixtral:layers=32,hidden=4096,heads=32")


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("tp=8", "cannot say how the model is divided"),
        ("hidden_size=64", "write hidden=64"),
        ("gbs=8", "write batch=8"),
    ],
)
def test_what_others_call_a_field_is_named(field: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        ask.describe(f"llama:layers=2,heads=4,{field}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model_type": "t5", "d_model": 512}', "not that of a decoder-only"),
        ('{"model_type": "llama", "hidden_size": 64}', "layers (num_hidden_layers"),
        ('{"num_hidden_layers": "32", "hidden_size": 64, "num_attention_heads": 4}', "num_hidden_layers '32'"),
        ("[1]", "is no JSON object"),
        ("{", "is not valid JSON"),
    ],
)
def test_what_is_no_configuration_is_an_error(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(PlanError) as error:
        ask.describe(str(path))
    assert message in str(error.value)
