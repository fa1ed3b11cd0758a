"""Attention over two intervals of keys per query, as Triton kernels: work follows the intervals, not a grid of tiles.

A query row sees context [low, high) and its own block [own_low, own_high). All heads that share a key head (GROUP of
them) and all slots of a block see nearly the same keys, so they lie side by side in one tile of queries: packed row
f = (block * GROUP + member) * BLOCK + slot. A tile of 64 packed rows spans two or three blocks, so almost all of what
it walks over is seen by every row and needs no mask. Seen from a tile of keys, the rows that see it are one range too,
since anchors are sorted. Tiles with the most work start first. FlexAttention's tiles of 128 x 128 hold one head and
eight blocks, about a quarter more work at blocks of 16 and contexts of 1000 tokens.

Softmax is kept in base 2. Reference: attention.dense_attention.
Shapes: A blocks, Q block rows, P = Q * GROUP packed rows, N = T + Q keys (context first), D head size (a power of two).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from configs.drafter_shape import DrafterShape
from consumer.anchors import Anchors
from consumer.block_mask import Intervals, intervals
from consumer.drafter import Attend

_NOTHING = tl.constexpr(-1.0e30)
_FAR = tl.constexpr(2147483647)


class Tiles(NamedTuple):
    """Tile sizes of one kernel: packed rows, keys, and how it is compiled."""

    ROWS: int
    KEYS: int
    num_warps: int
    num_stages: int


class Kernels(NamedTuple):
    """Tile sizes of all kernels; forward and backward_q have the same ROWS, `own` makes the gradients of block keys."""

    forward: Tiles
    backward_q: Tiles
    backward_kv: Tiles
    own: Tiles


HALF = Kernels(Tiles(64, 32, 4, 3), Tiles(64, 32, 4, 3), Tiles(64, 128, 8, 3), Tiles(32, 32, 4, 3))
WIDE = Kernels(*[Tiles(32, 32, 4, 1)] * 4)
FULL = Kernels(*[Tiles(16, 16, 4, 1)] * 4)


def tiles_of(dtype: torch.dtype, head_dim: int) -> Kernels:
    """Choose tile sizes: measured ones (H200, heads of 128) for two bytes and heads up to 128, else small ones.

    float32 is for checks, not for speed; larger tiles of it do not fit in registers.
    """
    if dtype.itemsize > 2:
        return FULL
    return HALF if head_dim <= 128 else WIDE


class Plan(NamedTuple):
    """Where each tile's work lies, int32. For a tile of keys: blocks first..end see it at least in part, full_first..
    full_end wholly. `order`: tiles by falling work."""

    rows_order: Tensor
    first: Tensor
    full_first: Tensor
    full_end: Tensor
    end: Tensor
    order: Tensor
    own_first: Tensor
    own_end: Tensor
    own_order: Tensor


def plan(seen: Intervals, num_context: int, block_size: int, group: int, tiles: Kernels) -> Plan:
    """Work out the ranges of all tiles; no host sync. Intervals ascend from block to block."""
    device, rows = seen.low.device, seen.low.shape[0]
    high, low, last_low = (
        values.contiguous()
        for values in (seen.high[::block_size], seen.low[::block_size], seen.low[block_size - 1 :: block_size])
    )
    blocks, per_block = high.shape[0], group * block_size
    tile = torch.arange(-(-rows * group // tiles.forward.ROWS), device=device) * tiles.forward.ROWS
    last_block = ((tile + (tiles.forward.ROWS - 1)) // per_block).clamp(max=blocks - 1)
    rows_order = _falling(high[last_block] - low[tile // per_block])
    keys = tiles.backward_kv.KEYS
    begin = torch.arange(-(-num_context // keys), device=device, dtype=torch.int32) * keys
    first = torch.searchsorted(high, begin, right=True, out_int32=True)
    full_first = torch.searchsorted(high, begin + keys, out_int32=True)
    end = torch.searchsorted(low, begin + keys, out_int32=True)
    full_end = torch.searchsorted(last_low, begin, right=True, out_int32=True)
    keys = tiles.own.KEYS
    own = torch.arange(-(-rows // keys), device=device, dtype=torch.int32)
    own_end = ((own * keys + (keys + block_size - 1)) // block_size).clamp(max=blocks)
    return Plan(
        rows_order, first, full_first, full_end, end, _falling(end - first), own * keys // block_size, own_end, own
    )


def _falling(work: Tensor) -> Tensor:
    return torch.argsort(work, descending=True).to(torch.int32)


@triton.jit  # type: ignore[untyped-decorator]
def _unpacked(packed, GROUP: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the block row and the member of the group of packed rows."""
    rest = packed % (GROUP * BLOCK)
    return packed // (GROUP * BLOCK) * BLOCK + rest % BLOCK, rest // BLOCK


@triton.jit  # type: ignore[untyped-decorator]
def _tile(pointer, row, column, inside, stride, HEAD: tl.constexpr, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = pointer + (row * stride + column)[:, None] + tl.arange(0, HEAD)[None, :]
    if WHOLE:
        return tl.load(at)
    return tl.load(at, mask=inside[:, None], other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _keys(source, start, limit, stride, KEYS: tl.constexpr, HEAD: tl.constexpr, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    lane = tl.arange(0, KEYS)
    return _tile(source + start * stride, lane, 0, start + lane < limit, stride, HEAD, WHOLE)


@triton.jit  # type: ignore[untyped-decorator]
def _reach(lo, hi, inside, KEYS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Cut the union of the rows' intervals: masked up to `clear`, free up to `clear_end`, masked up to `some_hi`."""
    filled = inside & (lo < hi)
    some_hi = tl.max(tl.where(filled, hi, 0), 0)
    some_lo = tl.minimum(tl.min(tl.where(filled, lo, _FAR), 0), some_hi)
    all_lo = tl.max(tl.where(inside, lo, 0), 0)
    all_hi = tl.min(tl.where(inside, hi, _FAR), 0)
    clear = some_lo + (tl.maximum(all_lo - some_lo, 0) + KEYS - 1) // KEYS * KEYS
    clear_end = clear + tl.maximum(all_hi - clear, 0) // KEYS * KEYS
    return some_lo, clear, clear_end, some_hi


@triton.jit  # type: ignore[untyped-decorator]
def _forward_kernel(  # type: ignore[no-untyped-def]
    q, k, v, out, norm, low, high, own_low, own_high, order, packed, num_keys, q_stride, k_stride, scale,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, HEAD: tl.constexpr, EXACT: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    at = tl.load(order + tl.program_id(1)) * ROWS + tl.arange(0, ROWS)
    inside = at < packed
    row, member = _unpacked(at, GROUP, BLOCK)
    column = (kv_head * GROUP + member) * HEAD
    q_tile = _tile(q, row, column, inside, q_stride, HEAD, False)
    k += kv_head * HEAD
    v += kv_head * HEAD
    lo, hi = tl.load(low + row, mask=inside, other=_FAR), tl.load(high + row, mask=inside, other=0)
    some_lo, clear, clear_end, some_hi = _reach(lo, hi, inside, KEYS)
    total = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], _NOTHING, tl.float32)
    mixed = tl.zeros([ROWS, HEAD], tl.float32)
    for start in range(clear, clear_end, KEYS):
        k_tile = _keys(k, start, num_keys, k_stride, KEYS, HEAD, True)
        score = tl.dot(q_tile, tl.trans(k_tile), input_precision=EXACT)
        higher = tl.maximum(top, tl.max(score, 1) * scale)
        shrink = tl.exp2(top - higher)
        share = tl.exp2(score * scale - higher[:, None])
        total = total * shrink + tl.sum(share, 1)
        v_tile = _keys(v, start, num_keys, k_stride, KEYS, HEAD, True)
        mixed = tl.dot(share.to(v_tile.dtype), v_tile, mixed * shrink[:, None], input_precision=EXACT)
        top = higher
    # What rows do not share, then their own blocks: every row sees itself there, which wipes out what a row without
    # context has gathered.
    own_lo, own_hi = tl.load(own_low + row, mask=inside, other=_FAR), tl.load(own_high + row, mask=inside, other=0)
    begin_own, end_own = tl.min(own_lo, 0), tl.max(own_hi, 0)
    left = tl.cdiv(tl.minimum(clear, some_hi) - some_lo, KEYS)
    right = left + tl.cdiv(tl.maximum(some_hi - clear_end, 0), KEYS)
    for index in range(right + tl.cdiv(end_own - begin_own, KEYS)):
        start = tl.where(index < left, some_lo + index * KEYS, clear_end + (index - left) * KEYS)
        start = tl.where(index < right, start, begin_own + (index - right) * KEYS)
        k_tile = _keys(k, start, num_keys, k_stride, KEYS, HEAD, False)
        score = tl.dot(q_tile, tl.trans(k_tile), input_precision=EXACT) * scale
        key = start + tl.arange(0, KEYS)
        least, most = tl.where(index < right, lo, own_lo), tl.where(index < right, hi, own_hi)
        score = tl.where((key[None, :] >= least[:, None]) & (key[None, :] < most[:, None]), score, _NOTHING)
        higher = tl.maximum(top, tl.max(score, 1))
        shrink = tl.exp2(top - higher)
        share = tl.exp2(score - higher[:, None])
        total = total * shrink + tl.sum(share, 1)
        v_tile = _keys(v, start, num_keys, k_stride, KEYS, HEAD, False)
        mixed = tl.dot(share.to(v_tile.dtype), v_tile, mixed * shrink[:, None], input_precision=EXACT)
        top = higher
    place = (row * q_stride + column)[:, None] + tl.arange(0, HEAD)[None, :]
    tl.store(out + place, (mixed / total[:, None]).to(out.dtype.element_ty), mask=inside[:, None])
    tl.store(norm + kv_head * packed + at, top + tl.log2(total), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _backward_q_kernel(  # type: ignore[no-untyped-def]
    q, k, v, out, d_out, norm, delta, d_q, low, high, own_low, own_high, order, packed, num_keys, q_stride, k_stride,
    scale, plain_scale,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, HEAD: tl.constexpr, EXACT: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    at = tl.load(order + tl.program_id(1)) * ROWS + tl.arange(0, ROWS)
    inside = at < packed
    row, member = _unpacked(at, GROUP, BLOCK)
    column = (kv_head * GROUP + member) * HEAD
    q_tile = _tile(q, row, column, inside, q_stride, HEAD, False)
    d_out_tile = _tile(d_out, row, column, inside, q_stride, HEAD, False)
    out_tile = _tile(out, row, column, inside, q_stride, HEAD, False)
    k += kv_head * HEAD
    v += kv_head * HEAD
    row_delta = tl.sum(d_out_tile.to(tl.float32) * out_tile.to(tl.float32), 1)
    tl.store(delta + kv_head * packed + at, row_delta, mask=inside)
    row_norm = tl.load(norm + kv_head * packed + at, mask=inside, other=0.0)
    lo, hi = tl.load(low + row, mask=inside, other=_FAR), tl.load(high + row, mask=inside, other=0)
    some_lo, clear, clear_end, some_hi = _reach(lo, hi, inside, KEYS)
    total = tl.zeros([ROWS, HEAD], tl.float32)
    for start in range(clear, clear_end, KEYS):
        k_tile = _keys(k, start, num_keys, k_stride, KEYS, HEAD, True)
        v_tile = _keys(v, start, num_keys, k_stride, KEYS, HEAD, True)
        score = tl.dot(q_tile, tl.trans(k_tile), input_precision=EXACT)
        d_share = tl.dot(d_out_tile, tl.trans(v_tile), input_precision=EXACT)
        d_score = tl.exp2(score * scale - row_norm[:, None]) * (d_share - row_delta[:, None])
        total = tl.dot(d_score.to(k_tile.dtype), k_tile, total, input_precision=EXACT)
    own_lo, own_hi = tl.load(own_low + row, mask=inside, other=_FAR), tl.load(own_high + row, mask=inside, other=0)
    begin_own, end_own = tl.min(own_lo, 0), tl.max(own_hi, 0)
    left = tl.cdiv(tl.minimum(clear, some_hi) - some_lo, KEYS)
    right = left + tl.cdiv(tl.maximum(some_hi - clear_end, 0), KEYS)
    for index in range(right + tl.cdiv(end_own - begin_own, KEYS)):
        start = tl.where(index < left, some_lo + index * KEYS, clear_end + (index - left) * KEYS)
        start = tl.where(index < right, start, begin_own + (index - right) * KEYS)
        k_tile = _keys(k, start, num_keys, k_stride, KEYS, HEAD, False)
        v_tile = _keys(v, start, num_keys, k_stride, KEYS, HEAD, False)
        score = tl.dot(q_tile, tl.trans(k_tile), input_precision=EXACT)
        d_share = tl.dot(d_out_tile, tl.trans(v_tile), input_precision=EXACT)
        key = start + tl.arange(0, KEYS)
        least, most = tl.where(index < right, lo, own_lo), tl.where(index < right, hi, own_hi)
        visible = (key[None, :] >= least[:, None]) & (key[None, :] < most[:, None])
        share = tl.where(visible, tl.exp2(score * scale - row_norm[:, None]), 0.0)
        total = tl.dot((share * (d_share - row_delta[:, None])).to(k_tile.dtype), k_tile, total, input_precision=EXACT)
    place = (row * q_stride + column)[:, None] + tl.arange(0, HEAD)[None, :]
    tl.store(d_q + place, (total * plain_scale).to(d_q.dtype.element_ty), mask=inside[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _kv_part(  # type: ignore[no-untyped-def]
    k_total, v_total, k_tile, v_tile, key, q, d_out, norm, delta, low, high, start, kv_head, packed, q_stride, scale,
    MASKED: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, HEAD: tl.constexpr, EXACT: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    at = start + tl.arange(0, ROWS)
    inside = at < packed
    row, member = _unpacked(at, GROUP, BLOCK)
    column = (kv_head * GROUP + member) * HEAD
    q_tile = _tile(q, row, column, inside, q_stride, HEAD, not MASKED)
    d_out_tile = _tile(d_out, row, column, inside, q_stride, HEAD, not MASKED)
    row_norm = tl.load(norm + kv_head * packed + at, mask=inside, other=0.0)
    row_delta = tl.load(delta + kv_head * packed + at, mask=inside, other=0.0)
    score = tl.dot(k_tile, tl.trans(q_tile), input_precision=EXACT)
    share = tl.exp2(score * scale - row_norm[None, :])
    if MASKED:
        lo, hi = tl.load(low + row, mask=inside, other=_FAR), tl.load(high + row, mask=inside, other=0)
        share = tl.where((key[:, None] >= lo[None, :]) & (key[:, None] < hi[None, :]), share, 0.0)
    d_share = tl.dot(v_tile, tl.trans(d_out_tile), input_precision=EXACT)
    v_total = tl.dot(share.to(d_out_tile.dtype), d_out_tile, v_total, input_precision=EXACT)
    d_score = share * (d_share - row_delta[None, :])
    k_total = tl.dot(d_score.to(q_tile.dtype), q_tile, k_total, input_precision=EXACT)
    return k_total, v_total


@triton.jit  # type: ignore[untyped-decorator]
def _backward_kv_kernel(  # type: ignore[no-untyped-def]
    q, k, v, d_out, norm, delta, d_k, d_v, low, high, first, full_first, full_end, end, order,
    first_key, end_key, packed, q_stride, k_stride, scale, plain_scale,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, HEAD: tl.constexpr, EXACT: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    kv_head, tile = tl.program_id(0), tl.load(order + tl.program_id(1))
    key = first_key + tile * KEYS + tl.arange(0, KEYS)
    k_tile = _tile(k, key, kv_head * HEAD, key < end_key, k_stride, HEAD, False)
    v_tile = _tile(v, key, kv_head * HEAD, key < end_key, k_stride, HEAD, False)
    k_total = tl.zeros([KEYS, HEAD], tl.float32)
    v_total = tl.zeros([KEYS, HEAD], tl.float32)
    begin, stop = tl.load(first + tile) * (GROUP * BLOCK), tl.load(end + tile) * (GROUP * BLOCK)
    full = tl.load(full_first + tile) * (GROUP * BLOCK)
    clear = begin + tl.cdiv(tl.maximum(full - begin, 0), ROWS) * ROWS
    clear_end = clear + tl.maximum(tl.load(full_end + tile) * (GROUP * BLOCK) - clear, 0) // ROWS * ROWS
    for start in range(clear, clear_end, ROWS):
        k_total, v_total = _kv_part(
            k_total, v_total, k_tile, v_tile, key, q, d_out, norm, delta, low, high, start, kv_head, packed, q_stride,
            scale, False, GROUP, BLOCK, HEAD, EXACT, ROWS,
        )  # fmt: skip
    left = tl.cdiv(tl.minimum(clear, stop) - begin, ROWS)
    for index in range(left + tl.cdiv(tl.maximum(stop - clear_end, 0), ROWS)):
        start = tl.where(index < left, begin + index * ROWS, clear_end + (index - left) * ROWS)
        k_total, v_total = _kv_part(
            k_total, v_total, k_tile, v_tile, key, q, d_out, norm, delta, low, high, start, kv_head, packed, q_stride,
            scale, True, GROUP, BLOCK, HEAD, EXACT, ROWS,
        )  # fmt: skip
    at = (key * k_stride + kv_head * HEAD)[:, None] + tl.arange(0, HEAD)[None, :]
    stored = (key < end_key)[:, None]
    tl.store(d_k + at, (k_total * plain_scale).to(d_k.dtype.element_ty), mask=stored)
    tl.store(d_v + at, v_total.to(d_v.dtype.element_ty), mask=stored)


class _Fixed(NamedTuple):
    """What the kernels of one step and layer type share."""

    seen: Intervals
    plan: Plan
    tiles: Kernels
    block_size: int


class _IntervalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, fixed: _Fixed) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        rows, heads, size = q.shape
        kv_heads, tiles = k.shape[1], fixed.tiles.forward
        ctx.group = {"GROUP": heads // kv_heads, "BLOCK": fixed.block_size, "HEAD": size, "EXACT": _precision(q)}
        packed, plain_scale = rows * heads // kv_heads, size**-0.5
        out, norm = torch.empty_like(q), torch.empty(kv_heads, packed, dtype=torch.float32, device=q.device)
        ctx.numbers = (packed, k.shape[0], heads * size, kv_heads * size, plain_scale / math.log(2))
        ctx.plain_scale = plain_scale
        _forward_kernel[kv_heads, triton.cdiv(packed, tiles.ROWS)](
            q, k, v, out, norm, *fixed.seen, fixed.plan.rows_order, *ctx.numbers, **ctx.group,
            **tiles._asdict(),
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, out, norm)
        ctx.fixed = fixed
        return out.flatten(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, norm = ctx.saved_tensors
        d_out, (seen, work, tiles, _) = grads[0].contiguous(), ctx.fixed
        packed, num_keys, q_stride, k_stride, scale = ctx.numbers
        delta, d_q = torch.empty_like(norm), torch.empty_like(q)
        d_k, d_v = torch.empty_like(k), torch.empty_like(v)
        _backward_q_kernel[k.shape[1], triton.cdiv(packed, tiles.backward_q.ROWS)](
            q, k, v, out, d_out, norm, delta, d_q, *seen, work.rows_order, *ctx.numbers, ctx.plain_scale, **ctx.group,
            **tiles.backward_q._asdict(),
        )  # fmt: skip
        num_context = num_keys - q.shape[0]
        context = (seen.low, seen.high, work.first, work.full_first, work.full_end, work.end, work.order)
        own = (seen.own_low, seen.own_high, work.own_first, work.own_end, work.own_first, work.own_end, work.own_order)
        for part, begin, limit, how in (
            (context, 0, num_context, tiles.backward_kv),
            (own, num_context, num_keys, tiles.own),
        ):
            if part[-1].shape[0]:
                _backward_kv_kernel[k.shape[1], part[-1].shape[0]](
                    q, k, v, d_out, norm, delta, d_k, d_v, *part, begin, limit, packed, q_stride, k_stride, scale,
                    ctx.plain_scale, **ctx.group, **how._asdict(),
                )  # fmt: skip
        return d_q, d_k, d_v, None


def _precision(q: Tensor) -> str:
    return "ieee" if q.dtype == torch.float32 else "tf32"


def interval_attention(anchors: Anchors, doc_start_T: Tensor, shape: DrafterShape, tiles: Kernels = HALF) -> Attend:
    """Return the attention of one step through these kernels; no host sync. `tiles`: see tiles_of."""
    group = shape.num_heads // shape.num_kv_heads
    kinds: dict[str, _Fixed] = {}
    for kind in sorted(set(shape.layer_types)):
        seen = intervals(anchors, doc_start_T, shape, kind)
        work = plan(seen, doc_start_T.shape[0], shape.block_size, group, tiles)
        kinds[kind] = _Fixed(seen, work, tiles, shape.block_size)

    def attend(q: Tensor, k: Tensor, v: Tensor, layer_type: str) -> Tensor:
        out: Tensor = _IntervalAttention.apply(q, k, v, kinds[layer_type])  # type: ignore[no-untyped-call]
        return out

    return attend
