"""What a model asks of attention, and the check at start that paged logits equal its own forward's."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from specsplit.engine import attention
from specsplit.engine.attention import LayerProbe, LayerSpec, PagedBatch, PagedKV
from specsplit.engine.batch import BLOCK_SIZE
from specsplit.engine.errors import UnsupportedModel
from specsplit.engine.flat import run_flat
from specsplit.kernels.paged_attention import PagedRows

NUM_TOKENS = 40
MAX_WINDOW = 256  # a window up to this size is exceeded by the check; a larger one would cost too much
# Largest difference over the largest absolute logit. A wrong mask, window or scale is off by a tenth or more.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}


def probe_layers(model: Any) -> list[LayerSpec]:
    """Each layer's attention, in order; refuses layers that use none. Leaves paged attention set."""
    probe = LayerProbe()
    model.set_attn_implementation(attention.NAME)
    run_flat(model, [0], torch.zeros(1, dtype=torch.int64), [0], probe)
    text = model.config.get_text_config()
    layers = range(text.num_hidden_layers)
    if silent := sorted(set(layers) - probe.specs.keys()):
        raise UnsupportedModel(
            f"{text.model_type} cannot be served: layers {silent} do not use the attention interface",
            field="model",
        )
    assert len(probe.specs) == len(layers), (
        f"more attention layers than the configuration says: {probe.specs}"
    )
    for layer, kind in zip(layers, getattr(text, "layer_types", None) or [], strict=False):
        if kind == "sliding_attention" and probe.specs[layer].window is None:
            raise UnsupportedModel(
                f"{text.model_type} cannot be served: layer {layer} hides its sliding window in a mask",
                field="model",
            )
    return [probe.specs[layer] for layer in layers]


def canary(model: Any, specs: list[LayerSpec], max_length: int) -> tuple[list[int], Tensor]:
    """Random tokens and the logits of transformers' own attention without a cache: [tokens, vocab]."""
    windows = [spec.window for spec in specs if spec.window is not None and spec.window <= MAX_WINDOW]
    length = min(max([NUM_TOKENS, *(window + BLOCK_SIZE for window in windows)]), max_length)
    generator = torch.Generator().manual_seed(0)
    vocab_size = model.config.get_text_config().vocab_size
    tokens = torch.randint(vocab_size, (1, length), generator=generator)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        logits = model(input_ids=tokens.to(model.device), use_cache=False).logits[0].float()
    model.set_attn_implementation(attention.NAME)
    return tokens[0].tolist(), logits


def check_paged(model: Any, specs: list[LayerSpec], tokens: list[int], expected: Tensor) -> None:
    """Runs the tokens in uneven chunks through scattered, poisoned blocks; refuses a model that differs."""
    num_blocks = -(-len(tokens) // BLOCK_SIZE)
    kv = PagedKV(specs, num_blocks, dtype=model.dtype, device=model.device, is_poisoned=True)
    table = list(reversed(range(num_blocks)))
    cuts = [0, 1, 2, 2 + len(tokens) // 2, len(tokens)]
    got = []
    for start, end in pairwise(cuts):
        rows = PagedRows([start], [end - start], [table])
        positions = torch.from_numpy(rows.positions)
        got.append(run_flat(model, tokens[start:end], positions, range(end - start), PagedBatch(kv, rows)))
    error = float((torch.cat(got) - expected).abs().max() / expected.abs().max())
    if not error <= TOLERANCE[model.dtype]:  # NaN fails too
        raise UnsupportedModel(
            f"{model.config.model_type} cannot be served: its paged logits differ from its own"
            f" by {error:.1e} of the largest (allowed: {TOLERANCE[model.dtype]:.0e})",
            field="model",
        )
