"""A model that paged attention cannot run exactly is refused at load, with a message that names the kind."""

import pytest
import torch
import transformers
from transformers import AutoModel, AutoModelForCausalLM

from specsplit.engine import loading
from specsplit.engine.errors import ModelLoadError, UnsupportedModel
from specsplit.engine.model import load_model

SMALL = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2}
HEADS = {
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
EXPERTS = {
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 2,
    "num_experts_per_tok": 1,
}
LINEAR = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
REFUSED = {
    "mamba": ("MambaConfig", {"state_size": 4}, "recurrent|linear_attention"),
    "linear-attention": ("Qwen3NextConfig", {**HEADS, **EXPERTS, **LINEAR}, "linear_attention"),
    "encoder-decoder": (
        "T5Config",
        {"d_model": 32, "d_ff": 32, "num_heads": 2, "d_kv": 16},
        "encoder-decoder",
    ),
    "sinks": (
        "GptOssConfig",
        {**HEADS, "num_local_experts": 2, "layer_types": ["full_attention"] * 2},
        "s_aux",
    ),
    "alibi": ("BloomConfig", {"n_head": 2, "n_layer": 2}, "ALiBi"),
    "conv": (
        "Lfm2Config",
        {**HEADS, "layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
        "kind conv",
    ),
    "encoder": ("BertConfig", {"num_attention_heads": 2, "intermediate_size": 32}, "not causal"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_with_the_reason(kind, tmp_path):
    name, changes, reason = REFUSED[kind]
    config = getattr(transformers, name)(**{**SMALL, **changes})
    torch.manual_seed(1)
    auto = AutoModel if kind == "encoder-decoder" else AutoModelForCausalLM
    auto.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=reason) as refused:
        load_model(str(tmp_path), dtype="float32", device="cpu", num_threads=1)
    assert refused.value.code == "unsupported_model"


def test_rope_that_depends_on_the_batch_is_served_where_it_is_constant():
    rope = {
        "rope_type": "dynamic",
        "factor": 4.0,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 32,
    }
    config = transformers.LlamaConfig(
        **{**SMALL, **HEADS, "max_position_embeddings": 128, "rope_parameters": rope}
    )
    assert loading.context_length(config) == 32


def test_attention_outside_of_the_interface():
    config = transformers.GPTNeoConfig(
        hidden_size=32, num_layers=2, num_heads=2, attention_types=[[["global"], 2]]
    )
    with pytest.raises(UnsupportedModel, match="attention interface"):
        loading.refuse_unsupported(config)


def test_missing_weights_are_not_made_up(tmp_path):
    config = transformers.LlamaConfig(**SMALL, **HEADS, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(config)
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    model.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight"):
        load_model(str(tmp_path), dtype="float32", device="cpu", num_threads=1)
