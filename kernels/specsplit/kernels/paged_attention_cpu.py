"""Paged attention for fp32 on CPUs, in numba: knows vectors, caches and threads, not models or batching.

Work is split into (row, KV head, tile of query tokens). A tile's queries are the G query heads that share the
KV head times some tokens; each walks the row's KV blocks in place, in chunks that fit the L1 cache, with an
online softmax between chunks. The two inner products are written as vector IR because LLVM's loop vectoriser
does not keep several queries' accumulators in registers: that halves the time of plain loops.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import prange
from numba.core import cgutils, types
from numba.extending import intrinsic

from specsplit.kernels.jit import jit

LANES = 16  # one KV block of fp32 K columns: two AVX2 registers, one AVX-512 register
# Queries per micro-kernel call: 8 AVX2 accumulators, which leaves registers for K/V and the broadcast.
QUERIES = 4
CHUNK_BLOCKS = 16  # 256 scores per query and chunk
TILE_QUERIES = 16  # scores of a tile: 16 * 256 * 4 bytes = 16 KiB

_F32 = ir.FloatType()
_VEC = ir.VectorType(_F32, LANES)
_I64 = ir.IntType(64)
_I32 = ir.IntType(32)


def _splat(builder: Any, pointer: Any) -> Any:
    undefined = ir.Constant(_VEC, ir.Undefined)
    one = builder.insert_element(undefined, builder.load(pointer), _I32(0))
    return builder.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES))


def _multiply_add(builder: Any, a: Any, b: Any, accumulator: Any) -> None:
    product = builder.fmul(a, b, flags=("contract",))
    builder.store(builder.fadd(product, builder.load(accumulator), flags=("contract",)), accumulator)


def _at(builder: Any, base: Any, index: Any) -> Any:
    return builder.gep(base, [index])


def _make_score_block(num_queries: int) -> Any:
    """scores[j, 0:16] = q[j, :] . k[:, 0:16] for `num_queries` queries and one KV block."""

    @intrinsic
    def score_block(_context, q, q_stride, k, head_dim, scores, scores_stride):  # type: ignore[no-untyped-def]
        def generate(context, builder, _signature, args):  # type: ignore[no-untyped-def]
            q, q_stride, k, head_dim, scores, scores_stride = args
            float_p, vec_p = _F32.as_pointer(), _VEC.as_pointer()
            q, k, scores = (builder.inttoptr(address, float_p) for address in (q, k, scores))
            rows = [_at(builder, q, builder.mul(q_stride, _I64(j))) for j in range(num_queries)]
            zero = ir.Constant(_VEC, [0.0] * LANES)
            sums = [cgutils.alloca_once_value(builder, zero) for _ in rows]
            with cgutils.for_range(builder, head_dim) as loop:
                column = _at(builder, k, builder.mul(loop.index, _I64(LANES)))
                keys = builder.load(builder.bitcast(column, vec_p), align=4)
                for row, total in zip(rows, sums, strict=True):
                    _multiply_add(builder, _splat(builder, _at(builder, row, loop.index)), keys, total)
            for j, total in enumerate(sums):
                target = _at(builder, scores, builder.mul(scores_stride, _I64(j)))
                builder.store(builder.load(total), builder.bitcast(target, vec_p), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), generate

    return score_block


def _make_mix_block(num_queries: int) -> Any:
    """out[j, :] += sum over slots s in [0, num_slots) of weights[j, s] * v[s, :]; head_dim % 16 == 0."""

    @intrinsic
    def mix_block(_context, weights, weights_stride, v, head_dim, num_slots, out):  # type: ignore[no-untyped-def]
        def generate(context, builder, _signature, args):  # type: ignore[no-untyped-def]
            weights, weights_stride, v, head_dim, num_slots, out = args
            float_p, vec_p = _F32.as_pointer(), _VEC.as_pointer()
            weights, v, out = (builder.inttoptr(address, float_p) for address in (weights, v, out))
            rows = [_at(builder, weights, builder.mul(weights_stride, _I64(j))) for j in range(num_queries)]
            sums = [cgutils.alloca_once(builder, _VEC) for _ in rows]
            with cgutils.for_range(builder, builder.sdiv(head_dim, _I64(LANES))) as part:
                column = builder.mul(part.index, _I64(LANES))
                targets = [
                    builder.bitcast(
                        _at(builder, out, builder.add(builder.mul(head_dim, _I64(j)), column)), vec_p
                    )
                    for j in range(num_queries)
                ]
                for total, target in zip(sums, targets, strict=True):
                    builder.store(builder.load(target, align=4), total)
                with cgutils.for_range(builder, num_slots) as slot:
                    source = _at(builder, v, builder.add(builder.mul(slot.index, head_dim), column))
                    values = builder.load(builder.bitcast(source, vec_p), align=4)
                    for row, total in zip(rows, sums, strict=True):
                        _multiply_add(builder, _splat(builder, _at(builder, row, slot.index)), values, total)
                for total, target in zip(sums, targets, strict=True):
                    builder.store(builder.load(total), target, align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), generate

    return mix_block


_score_1, _score_2, _score_3, _score_4 = (_make_score_block(n) for n in range(1, QUERIES + 1))
_mix_1, _mix_2, _mix_3, _mix_4 = (_make_mix_block(n) for n in range(1, QUERIES + 1))


@intrinsic
def _float_of_bits(_context, bits):  # type: ignore[no-untyped-def]
    def generate(_context, builder, _signature, args):  # type: ignore[no-untyped-def]
        return builder.bitcast(args[0], _F32)

    return types.float32(types.int32), generate


@jit(fastmath={"contract", "reassoc", "nsz"}, inline="never")
def _exp_sum(x, shift, count):  # type: ignore[no-untyped-def]
    """x[i] = exp(x[i] - shift) for i < count, and their sum. Vectorised: math.exp would be a call per score.

    exp(z) = 2^n * exp(t), n = round(z / ln 2), |t| <= ln(2) / 2, with ln 2 split in two parts so that t
    keeps its bits; exp(t) by its Taylor series to t^7 / 7!, relative error under 2e-7.
    """
    total = np.float32(0)
    for i in range(count):
        z = max(x[i] - shift, np.float32(-87.0))
        n = np.floor(z * np.float32(1.4426950408889634) + np.float32(0.5))
        t = z - n * np.float32(0.693359375) + n * np.float32(2.1219444005469057e-4)
        p = np.float32(1 / 5040) * t + np.float32(1 / 720)
        p = p * t + np.float32(1 / 120)
        p = p * t + np.float32(1 / 24)
        p = p * t + np.float32(1 / 6)
        p = p * t + np.float32(0.5)
        p = p * t * t + t + np.float32(1)
        e = p * _float_of_bits(np.int32((np.int32(n) + np.int32(127)) << np.int32(23)))
        x[i] = e
        total += e
    return total


@jit(fastmath={"contract", "reassoc", "nsz", "nnan"}, inline="never")
def _max(x, count):  # type: ignore[no-untyped-def]
    top = x[0]
    for i in range(1, count):
        top = max(top, x[i])
    return top


@jit()
def _score_queries(q, num_queries, k, head_dim, scores, stride):  # type: ignore[no-untyped-def]
    j = np.int64(0)
    while num_queries - j >= 4:
        _score_4(q + j * head_dim * 4, head_dim, k, head_dim, scores + j * stride * 4, stride)
        j += 4
    left = num_queries - j
    q += j * head_dim * 4
    scores += j * stride * 4
    if left == 3:
        _score_3(q, head_dim, k, head_dim, scores, stride)
    elif left == 2:
        _score_2(q, head_dim, k, head_dim, scores, stride)
    elif left == 1:
        _score_1(q, head_dim, k, head_dim, scores, stride)


@jit()
def _mix_queries(weights, stride, num_queries, v, head_dim, num_slots, out):  # type: ignore[no-untyped-def]
    j = np.int64(0)
    while num_queries - j >= 4:
        _mix_4(weights + j * stride * 4, stride, v, head_dim, num_slots, out + j * head_dim * 4)
        j += 4
    left = num_queries - j
    weights += j * stride * 4
    out += j * head_dim * 4
    if left == 3:
        _mix_3(weights, stride, v, head_dim, num_slots, out)
    elif left == 2:
        _mix_2(weights, stride, v, head_dim, num_slots, out)
    elif left == 1:
        _mix_1(weights, stride, v, head_dim, num_slots, out)


@jit()
def _attend_tile(q, k, v, table, first_position, num_tokens, kv_head, scale, window, softcap, out):  # type: ignore[no-untyped-def]
    """One tile: tokens at first_position.. of one row, the query heads of one KV head.

    q, out: [num_tokens, heads, dim] views; table: the row's block ids. A query at position p reads the slots
    max(0, p + 1 - window) .. p and no other; slots outside of a query's range but inside the tile's carry
    weight 0 and belong to another query of the tile, so they are written.
    """
    group = q.shape[1] // k.shape[1]
    key_dim, value_dim = k.shape[2], v.shape[3]
    num_queries = num_tokens * group
    queries = np.empty((num_queries, key_dim), np.float32)
    for i in range(num_queries):
        queries[i] = q[i // group, kv_head * group + i % group]
    mixed = np.zeros((num_queries, value_dim), np.float32)
    top = np.full(num_queries, -np.inf, np.float32)
    total = np.zeros(num_queries, np.float32)
    stride = np.int64(CHUNK_BLOCKS * LANES)
    scores = np.empty((num_queries, CHUNK_BLOCKS * LANES), np.float32)
    lowest = np.int64(0) if window <= 0 else max(np.int64(0), first_position + 1 - window)
    end = first_position + num_tokens  # one past the last readable slot
    block = lowest // LANES
    last_block = (end + LANES - 1) // LANES
    while block < last_block:
        num_blocks = min(np.int64(CHUNK_BLOCKS), last_block - block)
        base = block * LANES
        for b in range(num_blocks):
            address = k[table[block + b], kv_head].ctypes.data
            _score_queries(
                queries.ctypes.data, num_queries, address, key_dim, scores.ctypes.data + b * LANES * 4, stride
            )
        for i in range(num_queries):
            position = first_position + i // group
            high = min(position + 1 - base, num_blocks * LANES)
            low = np.int64(0) if window <= 0 else max(np.int64(0), position + 1 - window - base)
            row = scores[i]
            if low >= high:  # nothing of this chunk is in this query's range
                row[:] = 0
                continue
            if softcap > 0:
                for s in range(low, high):
                    row[s] = softcap * np.tanh(row[s] * scale / softcap)
            else:
                for s in range(low, high):
                    row[s] *= scale
            new_top = max(top[i], _max(row[low:high], high - low))
            if new_top > top[i]:
                shrink = np.exp(top[i] - new_top)
                total[i] *= shrink
                for d in range(value_dim):
                    mixed[i, d] *= shrink
                top[i] = new_top
            total[i] += _exp_sum(row[low:high], new_top, high - low)
            row[:low] = 0
            row[high:] = 0
        for b in range(num_blocks):
            # Blocks may begin before the lowest slot that this tile reads, and end after the last one.
            skip = max(np.int64(0), lowest - base - b * LANES)
            num_slots = min(np.int64(LANES), end - base - b * LANES) - skip
            address = v[table[block + b], kv_head].ctypes.data + skip * value_dim * 4
            _mix_queries(
                scores.ctypes.data + (b * LANES + skip) * 4,
                stride,
                num_queries,
                address,
                value_dim,
                num_slots,
                mixed.ctypes.data,
            )
        block += num_blocks
    for i in range(num_queries):
        inverse = np.float32(1) / total[i]
        for d in range(value_dim):
            out[i // group, kv_head * group + i % group, d] = mixed[i, d] * inverse


@jit(parallel=True)
def attend(q, k, v, tables, starts, query_offsets, tiles, scale, window, softcap, out):  # type: ignore[no-untyped-def]
    """All rows. tiles: [num_tiles, 3] row, first token, number of tokens; window, softcap: 0 is none."""
    num_kv_heads = k.shape[1]
    for task in prange(tiles.shape[0] * num_kv_heads):
        tile, kv_head = task // num_kv_heads, task % num_kv_heads
        row, first = tiles[tile, 0], tiles[tile, 1]
        begin = query_offsets[row] + first
        num_tokens = tiles[tile, 2]
        _attend_tile(
            q[begin : begin + num_tokens],
            k,
            v,
            tables[row],
            starts[row] + first,
            num_tokens,
            kv_head,
            scale,
            window,
            softcap,
            out[begin : begin + num_tokens],
        )
