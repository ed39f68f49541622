"""One call of a model's own forward over a flat [1, tokens] batch; does not know where the KV lies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specsplit.engine.attention import AttentionBackend


@torch.inference_mode()
def run_flat(
    model: Any, token_ids: Sequence[int], positions: Tensor, wanted: Sequence[int], backend: AttentionBackend
) -> Tensor:
    """Logits [len(wanted), vocab], float32, of the tokens at the flat indices `wanted`."""
    output = model(
        input_ids=torch.tensor([token_ids], device=model.device),
        position_ids=positions[None].to(model.device),
        use_cache=False,
        logits_to_keep=torch.tensor(wanted, dtype=torch.int64, device=model.device),
        paged_batch=backend,
    )
    return output.logits[0].float()  # type: ignore[no-any-return]
