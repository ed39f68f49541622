"""Causal attention of a ragged batch over paged KV; does not know models, or who owns a block.

Three forms of one definition: the plain reference in float64, batched torch operations for any device and
dtype, and numba for fp32 on CPUs. None lets a slot that no query may see into a result: it may be NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from specsplit.kernels import paged_attention_cpu
from specsplit.kernels.kv_write import BLOCK_SIZE

Int64s = npt.NDArray[np.int64]


class PagedRows:
    """Where each row's tokens lie: built once per forward, read by every layer.

    Row r computes the tokens at positions starts[r] .. starts[r] + num_tokens[r] - 1; all of its earlier
    positions are in the pool. Arrays are int64: slots and offsets of a large pool do not fit 32 bits.
    """

    def __init__(
        self, starts: Sequence[int], num_tokens: Sequence[int], block_tables: Sequence[Sequence[int]]
    ) -> None:
        num_rows = len(starts)
        self.starts: Int64s = np.asarray(starts, np.int64)
        self.num_tokens: Int64s = np.asarray(num_tokens, np.int64)
        self.offsets: Int64s = np.zeros(
            num_rows + 1, np.int64
        )  # row r's tokens are offsets[r] : offsets[r + 1]
        np.cumsum(self.num_tokens, out=self.offsets[1:])
        self.ends: Int64s = self.starts + self.num_tokens  # context lengths after this forward
        num_blocks = -(-self.ends // BLOCK_SIZE)
        self.tables: Int64s = np.zeros((num_rows, int(num_blocks.max(initial=0))), np.int64)
        for row, (table, count) in enumerate(zip(block_tables, num_blocks, strict=True)):
            self.tables[row, :count] = table[:count]
        row_of_token = np.repeat(np.arange(num_rows), self.num_tokens)
        self.positions: Int64s = (
            np.arange(self.offsets[-1]) - self.offsets[row_of_token] + self.starts[row_of_token]
        )
        self.slots: Int64s = (
            self.tables[row_of_token, self.positions // BLOCK_SIZE] * BLOCK_SIZE + self.positions % BLOCK_SIZE
        )
        self._tiles: dict[int, Int64s] = {}
        self._gathers: dict[tuple[torch.device, int | None], list[_Gather]] = {}

    def tiles(self, tokens_per_tile: int) -> Int64s:
        """[num_tiles, 3]: row, first token within the row, number of tokens."""
        if tokens_per_tile not in self._tiles:
            self._tiles[tokens_per_tile] = np.array(
                [
                    (row, first, min(tokens_per_tile, count - first))
                    for row, count in enumerate(self.num_tokens.tolist())
                    for first in range(0, count, tokens_per_tile)
                ],
                np.int64,
            ).reshape(-1, 3)
        return self._tiles[tokens_per_tile]

    @cached_property
    def buckets(self) -> list[Int64s]:
        """Row indices by the power of two of their token count, so that padding at most doubles a group."""
        sizes = np.ceil(np.log2(np.maximum(self.num_tokens, 1))).astype(np.int64)
        return [np.flatnonzero((sizes == size) & (self.num_tokens > 0)) for size in np.unique(sizes)]

    def gathers(self, device: torch.device, window: int | None) -> list[_Gather]:
        key = (device, window)
        if key not in self._gathers:
            self._gathers[key] = [_Gather(self, rows, device, window) for rows in self.buckets if rows.size]
        return self._gathers[key]


class _Gather:
    """Index tensors of one bucket of rows for the torch path."""

    def __init__(self, batch: PagedRows, rows: Int64s, device: torch.device, window: int | None) -> None:
        counts, ends, starts = batch.num_tokens[rows], batch.ends[rows], batch.starts[rows]
        # A row shorter than its bucket repeats its last token; what comes out for the copies is dropped.
        step = np.minimum(np.arange(counts.max()), counts[:, None] - 1)  # [rows, tokens]
        positions = starts[:, None] + step
        slots = np.arange(-(-int(ends.max()) // BLOCK_SIZE) * BLOCK_SIZE)  # [context]
        visible = slots <= positions[:, :, None]  # [rows, tokens, context]
        lowest = np.zeros_like(starts)
        if window is not None:
            visible &= slots > positions[:, :, None] - window
            lowest = np.maximum(lowest, starts + 1 - window)
        unread = (slots >= ends[:, None]) | (slots < lowest[:, None])
        kept = np.arange(counts.max()) < counts[:, None]

        def put(array: npt.NDArray[np.generic]) -> Tensor:
            return torch.from_numpy(array).to(device)

        self.tables = put(batch.tables[rows, : slots.size // BLOCK_SIZE])  # [rows, blocks]
        self.tokens = put(batch.offsets[rows][:, None] + step)  # [rows, tokens], indices into the flat batch
        self.visible = put(visible)
        self.unread = put(unread)  # [rows, context]
        self.kept = put(kept)  # [rows, tokens]


def paged_attention(
    query: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    rows: PagedRows,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """[tokens, heads, key_dim] -> [tokens, heads, value_dim]; a query sees the last `window` positions."""
    is_cpu_fp32 = query.device.type == "cpu" and query.dtype == torch.float32
    if not is_cpu_fp32 or v_pool.shape[3] % paged_attention_cpu.LANES:
        return paged_attention_torch(query, k_pool, v_pool, rows, scale=scale, window=window, softcap=softcap)
    num_kv_heads = k_pool.shape[1]
    out = torch.empty(query.shape[0], query.shape[1], v_pool.shape[3])
    tokens_per_tile = max(1, paged_attention_cpu.TILE_QUERIES * num_kv_heads // query.shape[1])
    paged_attention_cpu.attend(
        query.contiguous().numpy(),  # one memory order, so that numba compiles once
        k_pool.numpy(),
        v_pool.numpy(),
        rows.tables,
        rows.starts,
        rows.offsets,
        rows.tiles(tokens_per_tile),
        np.float32(scale),
        np.int64(window or 0),
        np.float32(softcap or 0.0),
        out.numpy(),
    )
    return out


def paged_attention_torch(
    query: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    rows: PagedRows,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Gathers each bucket's KV for one dense attention, query heads folded into their KV head's tokens."""
    num_kv_heads, key_dim = k_pool.shape[1], k_pool.shape[2]
    value_dim = v_pool.shape[3]
    group = query.shape[1] // num_kv_heads
    out = query.new_empty(query.shape[0], query.shape[1], value_dim)
    for part in rows.gathers(query.device, window):
        num_rows, num_tokens = part.tokens.shape
        unread = part.unread[:, None]  # [rows, 1, context]
        k = k_pool[part.tables].permute(0, 2, 3, 1, 4).flatten(3)  # [rows, kv_heads, key_dim, context]
        k = k.masked_fill(unread[:, :, None], 0)
        v = v_pool[part.tables].transpose(1, 2).flatten(2, 3)  # [rows, kv_heads, context, value_dim]
        v = v.masked_fill(unread[..., None], 0)
        q = query[part.tokens].view(
            num_rows, num_tokens, num_kv_heads, group, key_dim
        )  # [rows, tokens, kv_heads, group, key_dim]
        q = q.permute(0, 2, 1, 3, 4).reshape(num_rows, num_kv_heads, num_tokens * group, key_dim)
        mask = part.visible.repeat_interleave(group, dim=1)[:, None]  # [rows, 1, tokens * group, context]
        if softcap is None:
            mixed = F.scaled_dot_product_attention(q, k.transpose(2, 3), v, attn_mask=mask, scale=scale)
        else:
            scores = softcap * torch.tanh((q @ k).float() * (scale / softcap))
            weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
            mixed = weights.to(v.dtype) @ v
        mixed = mixed.reshape(num_rows, num_kv_heads, num_tokens, group, value_dim)
        mixed = mixed.permute(0, 2, 1, 3, 4).reshape(num_rows, num_tokens, -1, value_dim)
        out[part.tokens[part.kept]] = mixed[part.kept]
    return out


def paged_attention_reference(
    query: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    rows: PagedRows,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """softmax(cap(scale * q . k)) v in float64, one query head at a time: the truth for tests."""
    group = query.shape[1] // k_pool.shape[1]
    out = torch.empty(query.shape[0], query.shape[1], v_pool.shape[3], dtype=torch.float64)
    row_of_token = np.repeat(np.arange(rows.starts.size), rows.num_tokens)
    for token, (row, position) in enumerate(zip(row_of_token, rows.positions.tolist(), strict=True)):
        first = 0 if window is None else max(0, position + 1 - window)
        span = np.arange(first, position + 1)
        blocks, offsets = rows.tables[row, span // BLOCK_SIZE], span % BLOCK_SIZE
        for head in range(query.shape[1]):
            k = k_pool[blocks, head // group, :, offsets].double().cpu()
            v = v_pool[blocks, head // group, offsets].double().cpu()
            scores = scale * (k @ query[token, head].double().cpu())
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            out[token, head] = scores.softmax(0) @ v
    return out
