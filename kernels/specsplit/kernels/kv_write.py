"""Writes new K and V into the paged pools, and says how a pool is laid out; does not know who owns a block.

K blocks are kept transposed, [num_blocks, kv_heads, head_dim, 16], and V blocks as they come,
[num_blocks, kv_heads, 16, head_dim]: both products of attention then run along contiguous memory (16 slots of
one K dimension, all dimensions of one V slot), and a block of one head is one contiguous piece.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specsplit.kernels.jit import jit

BLOCK_SIZE = 16


def kv_pools(
    num_blocks: int,
    num_kv_heads: int,
    key_dim: int,
    value_dim: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Uninitialised pools of one layer."""
    keys = torch.empty(num_blocks, num_kv_heads, key_dim, BLOCK_SIZE, dtype=dtype, device=device)
    values = torch.empty(num_blocks, num_kv_heads, BLOCK_SIZE, value_dim, dtype=dtype, device=device)
    return keys, values


@jit()
def _write(key, value, slots, k_pool, v_pool):  # type: ignore[no-untyped-def]
    for i in range(slots.shape[0]):
        block, offset = slots[i] // BLOCK_SIZE, slots[i] % BLOCK_SIZE
        for h in range(key.shape[1]):
            for d in range(key.shape[2]):
                k_pool[block, h, d, offset] = key[i, h, d]
            for d in range(value.shape[2]):
                v_pool[block, h, offset, d] = value[i, h, d]


def kv_write(
    key: Tensor, value: Tensor, slots: npt.NDArray[np.int64], k_pool: Tensor, v_pool: Tensor
) -> None:
    """Puts token i's key [kv_heads, key_dim] and value into slot slots[i] = block * 16 + offset, in place."""
    if key.device.type == "cpu" and key.dtype == torch.float32:
        # One memory order, so that numba compiles once.
        _write(key.contiguous().numpy(), value.contiguous().numpy(), slots, k_pool.numpy(), v_pool.numpy())
    else:
        kv_write_torch(key, value, torch.from_numpy(slots).to(key.device), k_pool, v_pool)


def kv_write_torch(key: Tensor, value: Tensor, slots: Tensor, k_pool: Tensor, v_pool: Tensor) -> None:
    """The reference, and the path for other dtypes and devices."""
    block, offset = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    k_pool[block, :, :, offset] = key
    v_pool[block, :, offset] = value
