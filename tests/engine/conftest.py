"""Tiny random models in folders, and the poison that makes reads of unwritten KV show."""

from __future__ import annotations

import specsplit.engine.threads  # noqa: F401  before torch

import pytest  # isort: skip
import torch
import transformers
from transformers import AutoModelForCausalLM

SIZES = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # Attention of a model with the usual small weights is uniform, and hides mistakes.
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CONFIGS = {
    "llama": ("LlamaConfig", {}),
    "llama-mha-bias": ("LlamaConfig", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    "llama-odd-head": ("LlamaConfig", {"head_dim": 24}),  # no multiple of the CPU kernel's lanes
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "mistral": ("MistralConfig", {"sliding_window": 21}),
    "gemma2": (
        "Gemma2Config",
        {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "sliding_window": 19,
            "query_pre_attn_scalar": 40,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {"num_hidden_layers": 6, "head_dim": 16, "sliding_window": 17, "query_pre_attn_scalar": 25},
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek-mla": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "first_k_dense_replace": 1,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 32,
        },
    ),
}


@pytest.fixture(autouse=True)
def _poison(monkeypatch):
    monkeypatch.setenv("SPECSPLIT_POISON", "1")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """Folder of a tiny model by kind, made once."""
    made = {}

    def make(kind):
        if kind not in made:
            name, changes = CONFIGS[kind]
            config = getattr(transformers, name)(**{**SIZES, **changes})
            torch.manual_seed(11)
            model = AutoModelForCausalLM.from_config(config)
            made[kind] = str(tmp_path_factory.mktemp(kind))
            model.save_pretrained(made[kind])
        return made[kind]

    return make


@pytest.fixture(scope="session")
def own_logits():
    """[tokens, vocab] of transformers' own forward, without a cache."""
    models = {}

    def compute(folder, token_ids):
        if folder not in models:
            models[folder] = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager"
            ).eval()
        with torch.inference_mode():
            return models[folder](input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]

    return compute
