"""Attention over two intervals of keys per query, as Triton kernels: work follows the intervals, not a grid of tiles.

A query row sees context [low, high) and its own block [own_low, own_high). Anchors are sorted, so the rows of a query
tile see nearly the same context: the tile walks over the union of its rows' intervals, without a mask where all rows
agree. Seen from a tile of keys, the rows that see it are one range too. FlexAttention instead walks tiles of 128 keys
that start at multiples of 128, about a fifth more at blocks of 16 and contexts of 1000 tokens.

Softmax is kept in base 2. Reference: attention.dense_attention.
Shapes: Q block rows, N = T + Q keys (context first), D head size (a power of two, at least 16).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from consumer.anchors import Anchors
from consumer.block_mask import Intervals, intervals
from consumer.drafter import Attend, DrafterShape

FORWARD = {"ROWS": 64, "KEYS": 64, "num_warps": 4, "num_stages": 3}
BACKWARD_Q = {"ROWS": 64, "KEYS": 64, "num_warps": 4, "num_stages": 2}
BACKWARD_KV = {"ROWS": 64, "KEYS": 64, "num_warps": 4, "num_stages": 2}
_NOTHING = tl.constexpr(-1.0e30)


class Ranges(NamedTuple):
    """Which query rows see a tile of keys, int32: [tiles] for context keys, [tiles] for block keys."""

    context_first: Tensor
    context_end: Tensor
    own_first: Tensor
    own_end: Tensor


def ranges(seen: Intervals, num_context: int, block_size: int, tile: int) -> Ranges:
    """Work out the row ranges of all key tiles; no host sync. Intervals ascend from block to block."""
    device, rows = seen.low.device, seen.low.shape[0]
    high_A, low_A = seen.high[::block_size].contiguous(), seen.low[::block_size].contiguous()
    begin = torch.arange(-(-num_context // tile), device=device, dtype=torch.int32) * tile
    first = torch.searchsorted(high_A, begin, right=True, out_int32=True) * block_size
    end = torch.searchsorted(low_A, begin + tile, out_int32=True) * block_size
    own = torch.arange(-(-rows // tile), device=device, dtype=torch.int32) * tile
    own_end = ((own + tile + block_size - 1) // block_size * block_size).clamp(max=rows)
    return Ranges(first, end, own // block_size * block_size, own_end)


@triton.jit  # type: ignore[untyped-decorator]
def _tile(pointer, index, limit, stride, HEAD: tl.constexpr):  # type: ignore[no-untyped-def]
    lane = tl.arange(0, HEAD)
    at = index.to(tl.int64)[:, None] * stride + lane[None, :]
    return tl.load(pointer + at, mask=(index < limit)[:, None], other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _forward_walk(  # type: ignore[no-untyped-def]
    total, top, mixed, q, k, v, low, high, begin, end, num_keys, stride, scale,
    MASKED: tl.constexpr, KEYS: tl.constexpr, HEAD: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    for start in range(begin, end, KEYS):
        key = start + tl.arange(0, KEYS)
        k_tile = _tile(k, key, num_keys, stride, HEAD)
        score = tl.dot(q, tl.trans(k_tile), input_precision=EXACT) * scale
        if MASKED:
            score = tl.where((key[None, :] >= low[:, None]) & (key[None, :] < high[:, None]), score, _NOTHING)
        higher = tl.maximum(top, tl.max(score, 1))
        shrink = tl.exp2(top - higher)
        share = tl.exp2(score - higher[:, None])
        total = total * shrink + tl.sum(share, 1)
        v_tile = _tile(v, key, num_keys, stride, HEAD)
        mixed = mixed * shrink[:, None] + tl.dot(share.to(v_tile.dtype), v_tile, input_precision=EXACT)
        top = higher
    return total, top, mixed


@triton.jit  # type: ignore[untyped-decorator]
def _forward_kernel(  # type: ignore[no-untyped-def]
    q, k, v, out, norm, low, high, own_low, own_high, rows, num_keys, q_stride, k_stride, scale,
    GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, HEAD: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    q_tile = _tile(q + head * HEAD, row, rows, q_stride, HEAD)
    k += head // GROUP * HEAD
    v += head // GROUP * HEAD
    total = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], _NOTHING, tl.float32)
    mixed = tl.zeros([ROWS, HEAD], tl.float32)
    lo, hi = tl.load(low + row, mask=inside, other=2147483647), tl.load(high + row, mask=inside, other=0)
    some_lo, all_lo = tl.min(lo, 0), tl.max(tl.where(inside, lo, 0), 0)
    some_hi, all_hi = tl.max(hi, 0), tl.min(tl.where(inside, hi, 2147483647), 0)
    # up to `clear` and from `clear_end` on, rows differ in what they see
    clear = some_lo + (tl.maximum(all_lo - some_lo, 0) + KEYS - 1) // KEYS * KEYS
    clear_end = clear + tl.maximum(all_hi - clear, 0) // KEYS * KEYS
    total, top, mixed = _forward_walk(
        total, top, mixed, q_tile, k, v, lo, hi, some_lo, tl.minimum(clear, some_hi), num_keys, k_stride, scale,
        True, KEYS, HEAD, EXACT,
    )  # fmt: skip
    total, top, mixed = _forward_walk(
        total, top, mixed, q_tile, k, v, lo, hi, clear, clear_end, num_keys, k_stride, scale,
        False, KEYS, HEAD, EXACT,
    )  # fmt: skip
    total, top, mixed = _forward_walk(
        total, top, mixed, q_tile, k, v, lo, hi, clear_end, some_hi, num_keys, k_stride, scale,
        True, KEYS, HEAD, EXACT,
    )  # fmt: skip
    # Its own block comes last: every row sees itself, which wipes out what a row without context gathered above.
    lo, hi = tl.load(own_low + row, mask=inside, other=2147483647), tl.load(own_high + row, mask=inside, other=0)
    total, top, mixed = _forward_walk(
        total, top, mixed, q_tile, k, v, lo, hi, tl.min(lo, 0), tl.max(hi, 0), num_keys, k_stride, scale,
        True, KEYS, HEAD, EXACT,
    )  # fmt: skip
    lane = tl.arange(0, HEAD)
    at = row.to(tl.int64)[:, None] * q_stride + head * HEAD + lane[None, :]
    tl.store(out + at, (mixed / total[:, None]).to(out.dtype.element_ty), mask=inside[:, None])
    tl.store(norm + head * rows + row, top + tl.log2(total), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _q_walk(  # type: ignore[no-untyped-def]
    d_q, q, d_out, norm, delta, k, v, low, high, begin, end, num_keys, stride, scale,
    MASKED: tl.constexpr, KEYS: tl.constexpr, HEAD: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    for start in range(begin, end, KEYS):
        key = start + tl.arange(0, KEYS)
        k_tile = _tile(k, key, num_keys, stride, HEAD)
        v_tile = _tile(v, key, num_keys, stride, HEAD)
        share = tl.exp2(tl.dot(q, tl.trans(k_tile), input_precision=EXACT) * scale - norm[:, None])
        if MASKED:
            share = tl.where((key[None, :] >= low[:, None]) & (key[None, :] < high[:, None]), share, 0.0)
        d_share = tl.dot(d_out, tl.trans(v_tile), input_precision=EXACT)
        d_score = share * (d_share - delta[:, None])
        d_q += tl.dot(d_score.to(k_tile.dtype), k_tile, input_precision=EXACT)
    return d_q


@triton.jit  # type: ignore[untyped-decorator]
def _backward_q_kernel(  # type: ignore[no-untyped-def]
    q, k, v, out, d_out, norm, delta, d_q, low, high, own_low, own_high, rows, num_keys, q_stride, k_stride,
    scale, plain_scale,
    GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, HEAD: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    q_tile = _tile(q + head * HEAD, row, rows, q_stride, HEAD)
    d_out_tile = _tile(d_out + head * HEAD, row, rows, q_stride, HEAD)
    out_tile = _tile(out + head * HEAD, row, rows, q_stride, HEAD)
    row_delta = tl.sum(d_out_tile.to(tl.float32) * out_tile.to(tl.float32), 1)
    tl.store(delta + head * rows + row, row_delta, mask=inside)
    row_norm = tl.load(norm + head * rows + row, mask=inside, other=0.0)
    k += head // GROUP * HEAD
    v += head // GROUP * HEAD
    total = tl.zeros([ROWS, HEAD], tl.float32)
    lo, hi = tl.load(low + row, mask=inside, other=2147483647), tl.load(high + row, mask=inside, other=0)
    some_lo, all_lo = tl.min(lo, 0), tl.max(tl.where(inside, lo, 0), 0)
    some_hi, all_hi = tl.max(hi, 0), tl.min(tl.where(inside, hi, 2147483647), 0)
    clear = some_lo + (tl.maximum(all_lo - some_lo, 0) + KEYS - 1) // KEYS * KEYS
    clear_end = clear + tl.maximum(all_hi - clear, 0) // KEYS * KEYS
    total = _q_walk(
        total, q_tile, d_out_tile, row_norm, row_delta, k, v, lo, hi, some_lo, tl.minimum(clear, some_hi),
        num_keys, k_stride, scale, True, KEYS, HEAD, EXACT,
    )  # fmt: skip
    total = _q_walk(
        total, q_tile, d_out_tile, row_norm, row_delta, k, v, lo, hi, clear, clear_end,
        num_keys, k_stride, scale, False, KEYS, HEAD, EXACT,
    )  # fmt: skip
    total = _q_walk(
        total, q_tile, d_out_tile, row_norm, row_delta, k, v, lo, hi, clear_end, some_hi,
        num_keys, k_stride, scale, True, KEYS, HEAD, EXACT,
    )  # fmt: skip
    lo, hi = tl.load(own_low + row, mask=inside, other=2147483647), tl.load(own_high + row, mask=inside, other=0)
    total = _q_walk(
        total, q_tile, d_out_tile, row_norm, row_delta, k, v, lo, hi, tl.min(lo, 0), tl.max(hi, 0),
        num_keys, k_stride, scale, True, KEYS, HEAD, EXACT,
    )  # fmt: skip
    lane = tl.arange(0, HEAD)
    at = row.to(tl.int64)[:, None] * q_stride + head * HEAD + lane[None, :]
    tl.store(d_q + at, (total * plain_scale).to(d_q.dtype.element_ty), mask=inside[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _backward_kv_kernel(  # type: ignore[no-untyped-def]
    q, k, v, d_out, norm, delta, d_k, d_v, low, high, first_row, end_row, first_key, end_key, rows, q_stride, k_stride,
    scale, plain_scale,
    GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, HEAD: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(1)
    key = first_key + tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    k_tile = _tile(k + kv_head * HEAD, key, end_key, k_stride, HEAD)
    v_tile = _tile(v + kv_head * HEAD, key, end_key, k_stride, HEAD)
    k_total = tl.zeros([KEYS, HEAD], tl.float32)
    v_total = tl.zeros([KEYS, HEAD], tl.float32)
    begin, end = tl.load(first_row + tl.program_id(0)), tl.load(end_row + tl.program_id(0))
    for member in range(GROUP):
        head = kv_head * GROUP + member
        for start in range(begin, end, ROWS):
            row = start + tl.arange(0, ROWS)
            inside = row < rows
            q_tile = _tile(q + head * HEAD, row, rows, q_stride, HEAD)
            d_out_tile = _tile(d_out + head * HEAD, row, rows, q_stride, HEAD)
            lo, hi = tl.load(low + row, mask=inside, other=2147483647), tl.load(high + row, mask=inside, other=0)
            row_norm = tl.load(norm + head * rows + row, mask=inside, other=0.0)
            row_delta = tl.load(delta + head * rows + row, mask=inside, other=0.0)
            score = tl.dot(k_tile, tl.trans(q_tile), input_precision=EXACT) * scale
            visible = (key[:, None] >= lo[None, :]) & (key[:, None] < hi[None, :])
            share = tl.where(visible, tl.exp2(score - row_norm[None, :]), 0.0)
            v_total += tl.dot(share.to(d_out_tile.dtype), d_out_tile, input_precision=EXACT)
            d_share = tl.dot(v_tile, tl.trans(d_out_tile), input_precision=EXACT)
            d_score = share * (d_share - row_delta[None, :])
            k_total += tl.dot(d_score.to(q_tile.dtype), q_tile, input_precision=EXACT)
    lane = tl.arange(0, HEAD)
    at = key.to(tl.int64)[:, None] * k_stride + kv_head * HEAD + lane[None, :]
    stored = (key < end_key)[:, None]
    tl.store(d_k + at, (k_total * plain_scale).to(d_k.dtype.element_ty), mask=stored)
    tl.store(d_v + at, v_total.to(d_v.dtype.element_ty), mask=stored)


class _IntervalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, seen: Intervals, rows_of: Ranges) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        rows, heads, size = q.shape
        out, norm = torch.empty_like(q), torch.empty(heads, rows, dtype=torch.float32, device=q.device)
        ctx.fixed = {"GROUP": heads // k.shape[1], "HEAD": size, "EXACT": _precision(q)}
        plain_scale = size**-0.5
        ctx.numbers = (rows, k.shape[0], heads * size, k.shape[1] * size, plain_scale / math.log(2), plain_scale)
        _forward_kernel[(triton.cdiv(rows, FORWARD["ROWS"]), heads)](
            q, k, v, out, norm, *seen, *ctx.numbers[:5], **ctx.fixed, **FORWARD
        )
        ctx.save_for_backward(q, k, v, out, norm)
        ctx.seen, ctx.rows_of = seen, rows_of
        return out.flatten(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, norm = ctx.saved_tensors
        d_out, seen, rows_of = grads[0].contiguous(), ctx.seen, ctx.rows_of
        rows, num_keys, q_stride, k_stride, scale, plain_scale = ctx.numbers
        delta, d_q = torch.empty_like(norm), torch.empty_like(q)
        d_k, d_v = torch.empty_like(k), torch.empty_like(v)
        _backward_q_kernel[(triton.cdiv(rows, BACKWARD_Q["ROWS"]), q.shape[1])](
            q, k, v, out, d_out, norm, delta, d_q, *seen, *ctx.numbers, **ctx.fixed, **BACKWARD_Q
        )
        num_context = num_keys - rows
        for low, high, first, end, begin, limit in (
            (seen.low, seen.high, rows_of.context_first, rows_of.context_end, 0, num_context),
            (seen.own_low, seen.own_high, rows_of.own_first, rows_of.own_end, num_context, num_keys),
        ):
            _backward_kv_kernel[(first.shape[0], k.shape[1])](
                q, k, v, d_out, norm, delta, d_k, d_v, low, high, first, end, begin, limit, rows, q_stride, k_stride,
                scale, plain_scale, **ctx.fixed, **BACKWARD_KV,
            )  # fmt: skip
        return d_q, d_k, d_v, None, None


def _precision(q: Tensor) -> str:
    return "ieee" if q.dtype == torch.float32 else "tf32"


def interval_attention(anchors: Anchors, doc_start_T: Tensor, shape: DrafterShape) -> Attend:
    """Return the attention of one step through these kernels; no host sync."""
    num_context = doc_start_T.shape[0]
    seen = {kind: intervals(anchors, doc_start_T, shape, kind) for kind in sorted(set(shape.layer_types))}
    rows_of = {kind: ranges(both, num_context, shape.block_size, BACKWARD_KV["KEYS"]) for kind, both in seen.items()}

    def attend(q: Tensor, k: Tensor, v: Tensor, layer_type: str) -> Tensor:
        out: Tensor = _IntervalAttention.apply(  # type: ignore[no-untyped-call]
            q, k, v, seen[layer_type], rows_of[layer_type]
        )
        return out

    return attend
