"""The entry in transformers' attention interface: each layer writes its KV, then attends over its pools.

Knows which arguments of the interface are implemented; refuses all others by name. Does not know models.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from specsplit.engine.errors import UnsupportedModel
from specsplit.kernels.kv_write import kv_pools, kv_write
from specsplit.kernels.paged_attention import PagedRows, paged_attention

NAME = "specsplit_paged"

# Arguments that models pass along and that change nothing here: positions are in the batch, dropout is off.
_WITHOUT_EFFECT = frozenset({"dropout", "position_ids"})


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The attention of one layer, as its module asks for it."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int | None
    softcap: float | None


class AttentionBackend(Protocol):
    """What a forward hands to its layers: runs one layer's attention. [tokens, heads, dim] in and out."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: LayerSpec) -> Tensor: ...


@dataclass(slots=True)
class LayerProbe:
    """Learns what each layer asks for, and answers with zeros."""

    specs: dict[int, LayerSpec] = field(default_factory=dict)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: LayerSpec) -> Tensor:
        if layer in self.specs:
            raise UnsupportedModel(f"layer {layer} calls attention more than once in a forward")
        self.specs[layer] = spec
        return query.new_zeros(query.shape[0], query.shape[1], spec.value_dim)


class PagedKV:
    """The KV pools of all layers."""

    def __init__(
        self,
        specs: list[LayerSpec],
        num_blocks: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        is_poisoned: bool,
    ) -> None:
        self.specs = specs
        self.num_blocks = num_blocks
        self.pools = [
            kv_pools(num_blocks, spec.num_kv_heads, spec.key_dim, spec.value_dim, dtype=dtype, device=device)
            for spec in specs
        ]
        if is_poisoned:  # a read of a slot that nobody wrote then shows as NaN
            for keys, values in self.pools:
                keys.fill_(float("nan"))
                values.fill_(float("nan"))


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """One forward's rows over the pools."""

    kv: PagedKV
    rows: PagedRows

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: LayerSpec) -> Tensor:
        k_pool, v_pool = self.kv.pools[layer]
        assert spec == self.kv.specs[layer], f"layer {layer} changed its attention: {spec}"
        kv_write(key, value, self.rows.slots, k_pool, v_pool)
        return paged_attention(
            query, k_pool, v_pool, self.rows, scale=spec.scale, window=spec.window, softcap=spec.softcap
        )


def _paged_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    paged_batch: AttentionBackend | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, tokens, key_dim], key and value alike -> [1, tokens, heads, value_dim]."""
    if paged_batch is None:
        raise UnsupportedModel(
            f"{type(module).__name__} does not pass the forward's arguments on to attention"
        )
    for name, argument in others.items():
        if argument is not None and argument is not False and name not in _WITHOUT_EFFECT:
            raise UnsupportedModel(
                f"{type(module).__name__} uses attention with {name}, which is not implemented"
            )
    if attention_mask is not None:
        raise UnsupportedModel(f"{type(module).__name__} uses attention with a mask of its own")
    if is_causal is False or not getattr(module, "is_causal", True):
        raise UnsupportedModel(f"{type(module).__name__} uses attention that is not causal")
    if not isinstance(getattr(module, "layer_idx", None), int):
        raise UnsupportedModel(f"{type(module).__name__} does not number its layers")
    spec = LayerSpec(
        num_kv_heads=key.shape[1],
        key_dim=key.shape[3],
        value_dim=value.shape[3],
        scale=query.shape[3] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window,
        softcap=softcap,
    )
    query, key, value = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    return paged_batch.attend(module.layer_idx, query, key, value, spec)[None], None  # type: ignore[arg-type]


# No mask function goes with it: transformers then builds no mask at all.
AttentionInterface.register(NAME, _paged_attention_forward)
