"""Every path of paged attention against the float64 reference, over pools whose unwritten slots are NaN."""

import numpy as np
import pytest
import torch

from specsplit.kernels.kv_write import BLOCK_SIZE, kv_pools, kv_write, kv_write_torch
from specsplit.kernels.paged_attention import (
    PagedRows,
    paged_attention,
    paged_attention_reference,
    paged_attention_torch,
)

NUM_BLOCKS = 96
# (start, tokens): a first token, block edges, decode, drafts, chunks, contexts past one CPU chunk.
SHAPES = {
    "one": [(0, 1)],
    "edges": [(15, 1), (16, 1), (14, 4), (0, 16), (0, 17)],
    "decode": [(255, 1), (256, 1), (300, 1), (7, 1)],
    "drafts": [(100, 5), (33, 3), (270, 9), (0, 2)],
    "mixed": [(0, 70), (500, 1), (250, 37), (5, 1)],
}


def scattered_batch(
    shape: list[tuple[int, int]], heads: int, kv_heads: int, key_dim: int, value_dim: int, seed: int
):
    """Pools that hold only what the rows need, written by kv_write through a shuffled block table."""
    generator = torch.Generator().manual_seed(seed)
    free = torch.randperm(NUM_BLOCKS, generator=generator).tolist()
    tables = []
    for start, count in shape:
        need = -(-(start + count) // BLOCK_SIZE)
        tables.append(free[:need])
        free = free[need:]
    k_pool, v_pool = kv_pools(
        NUM_BLOCKS, kv_heads, key_dim, value_dim, dtype=torch.float32, device=torch.device("cpu")
    )
    k_pool.fill_(float("nan"))
    v_pool.fill_(float("nan"))
    whole = PagedRows([0] * len(shape), [start + count for start, count in shape], tables)
    total = int(whole.offsets[-1])
    kv_write(
        torch.randn(total, kv_heads, key_dim, generator=generator),
        torch.randn(total, kv_heads, value_dim, generator=generator),
        whole.slots,
        k_pool,
        v_pool,
    )
    rows = PagedRows([start for start, _ in shape], [count for _, count in shape], tables)
    query = torch.randn(int(rows.offsets[-1]), heads, key_dim, generator=generator)
    return query, k_pool, v_pool, rows


@pytest.mark.parametrize("attend", [paged_attention, paged_attention_torch])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "key_dim", "value_dim"),
    [(9, 3, 64, 64), (8, 1, 16, 16), (4, 4, 24, 32), (4, 2, 8, 8)],
)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (21, None), (300, 20.0), (1, None)])
def test_equals_the_reference(attend, shape, heads, kv_heads, key_dim, value_dim, window, softcap):
    query, k_pool, v_pool, rows = scattered_batch(
        SHAPES[shape], heads, kv_heads, key_dim, value_dim, seed=len(shape)
    )
    options = {"scale": 0.3, "window": window, "softcap": softcap}
    got = attend(query, k_pool, v_pool, rows, **options)
    want = paged_attention_reference(query, k_pool, v_pool, rows, **options)
    assert (got.double() - want).abs().max() < 1e-5 * want.abs().max()


def test_large_scores_do_not_overflow():
    query, k_pool, v_pool, rows = scattered_batch(SHAPES["drafts"], 4, 2, 32, 32, seed=5)
    got = paged_attention(query * 200, k_pool, v_pool, rows, scale=1.0)
    want = paged_attention_reference(query * 200, k_pool, v_pool, rows, scale=1.0)
    # Scores near 5000 carry an fp32 error near 1e-3, which the exponential passes on.
    assert (got.double() - want).abs().max() < 5e-3


def test_a_window_never_reads_what_has_left_it():
    query, k_pool, v_pool, rows = scattered_batch([(200, 3)], 4, 2, 16, 16, seed=6)
    want = paged_attention_reference(query, k_pool, v_pool, rows, scale=0.25, window=40)
    for block in rows.tables[0, : (201 - 40) // BLOCK_SIZE]:
        k_pool[block] = float("nan")
        v_pool[block] = float("nan")
    for attend in (paged_attention, paged_attention_torch):
        got = attend(query, k_pool, v_pool, rows, scale=0.25, window=40)
        assert (got.double() - want).abs().max() < 1e-5


def test_a_nan_stays_in_its_row():
    query, k_pool, v_pool, rows = scattered_batch(SHAPES["decode"], 9, 3, 64, 64, seed=7)
    want = paged_attention_reference(query, k_pool, v_pool, rows, scale=0.125)
    last = rows.slots[1]
    v_pool[last // BLOCK_SIZE, :, last % BLOCK_SIZE] = float("nan")
    for attend in (paged_attention, paged_attention_torch):
        got = attend(query, k_pool, v_pool, rows, scale=0.125)
        assert got[1].isnan().all()
        others = [0, 2, 3]
        assert (got[others].double() - want[others]).abs().max() < 1e-5


def test_kv_write_equals_the_reference():
    generator = torch.Generator().manual_seed(1)
    key = torch.randn(3, 40, 24, generator=generator).transpose(0, 1)  # strided, as a model hands it over
    value = torch.randn(40, 3, 32, generator=generator)
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE, generator=generator)[:40]
    pools = [
        [
            pool.zero_()
            for pool in kv_pools(NUM_BLOCKS, 3, 24, 32, dtype=torch.float32, device=torch.device("cpu"))
        ]
        for _ in range(2)
    ]
    kv_write(key, value, slots.numpy().astype(np.int64), *pools[0])
    kv_write_torch(key, value, slots, *pools[1])
    assert torch.equal(pools[0][0], pools[1][0])
    assert torch.equal(pools[0][1], pools[1][1])
    assert torch.equal(pools[0][0][slots[7] // BLOCK_SIZE, 1, :, slots[7] % BLOCK_SIZE], key[7, 1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_reference_on_cuda(dtype, tolerance, shape):
    query, k_pool, v_pool, rows = scattered_batch(SHAPES[shape], 8, 2, 64, 64, seed=3)
    query, k_pool, v_pool = (tensor.to("cuda", dtype) for tensor in (query, k_pool, v_pool))
    for options in ({"window": 21}, {"softcap": 20.0}, {}):
        got = paged_attention(query, k_pool, v_pool, rows, scale=0.125, **options)
        want = paged_attention_reference(query, k_pool, v_pool, rows, scale=0.125, **options)
        assert (got.double().cpu() - want).abs().max() < tolerance * want.abs().max()
