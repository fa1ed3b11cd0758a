"""The functions between the matrix products as Triton kernels with their own gradients: each reads and writes once.

Reference: the plain functions of the same name in drafter.py. What torch.compile makes of those took 11 ms of a 230 ms
step on an H200 (hidden 5120), about twice what the bytes need. Gradients of norm weights are summed in a fixed order
(each program keeps a partial sum over its rows), so that a step can be repeated to the bit.

Shapes: R rows, H hidden, I intermediate, T context rows, Q block rows, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_NORM_PROGRAMS = {True: 264, False: 528}  # wide rows, narrow rows
HEAD_ROWS = 32
_HEAD_PROGRAMS = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _norm_kernel(  # type: ignore[no-untyped-def]
    x, update, weight, total, normed, inverse, hidden, eps, WIDTH: tl.constexpr, ADD: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < hidden
    at = row * hidden + column
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(update + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(total + at, value.to(total.dtype.element_ty), mask=inside)
        value = value.to(total.dtype.element_ty).to(tl.float32)  # the norm reads what the residual stream holds
    rstd = tl.rsqrt(tl.sum(value * value, 0) / hidden + eps)
    tl.store(inverse + row, rstd)
    scaled = value * rstd * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + at, scaled.to(normed.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _norm_backward_kernel(  # type: ignore[no-untyped-def]
    d_total, d_normed, total, inverse, weight, d_x, d_weight, rows, hidden, WIDTH: tl.constexpr, ADD: tl.constexpr
):
    program = tl.program_id(0)
    column = tl.arange(0, WIDTH)
    inside = column < hidden
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    summed = tl.zeros([WIDTH], dtype=tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        at = (row + tl.zeros([WIDTH], dtype=tl.int64)) * hidden + column
        rstd = tl.load(inverse + row)
        unit = tl.load(total + at, mask=inside, other=0.0).to(tl.float32) * rstd
        grad = tl.load(d_normed + at, mask=inside, other=0.0).to(tl.float32)
        summed += grad * unit
        grad *= scale
        grad = (grad - unit * (tl.sum(grad * unit, 0) / hidden)) * rstd
        if ADD:
            grad += tl.load(d_total + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(d_x + at, grad.to(d_x.dtype.element_ty), mask=inside)
    tl.store(d_weight + program * hidden + column, summed, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _sum_kernel(partial, out, rows, columns, ROWS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        total += tl.load(partial + row[:, None] * columns + column[None, :], mask=inside, other=0.0)
    tl.store(out + column, tl.sum(total, 0).to(out.dtype.element_ty), mask=column < columns)


@triton.jit  # type: ignore[untyped-decorator]
def _gated_kernel(gate_up, out, width, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < width
    at = row * 2 * width + column
    gate = tl.load(gate_up + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + at + width, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _gated_backward_kernel(gate_up, d_out, d_gate_up, width, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < width
    at = row * 2 * width + column
    gate = tl.load(gate_up + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + at + width, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(d_out + row * width + column, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    d_up = grad * gate * share
    d_gate = grad * up * share * (1.0 + gate * (1.0 - share))
    tl.store(d_gate_up + at, d_gate.to(d_gate_up.dtype.element_ty), mask=inside)
    tl.store(d_gate_up + at + width, d_up.to(d_gate_up.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _place(tile, qkv, kv, num_block, num_context, heads, kv_heads, ROWS: tl.constexpr, HEAD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Find the head rows of a tile. Tiles lie in five parts: q; k of context, of blocks; v of context, of blocks.

    Returns where the source is, the part, head rows before it in its result, and which row and place inside it.
    """
    block_tiles, context_tiles = tl.cdiv(num_block * kv_heads, ROWS), tl.cdiv(num_context * kv_heads, ROWS)
    q_tiles = tl.cdiv(num_block * heads, ROWS)
    part, source, width, count = 0, qkv, heads, num_block
    stride, column, before = (heads + 2 * kv_heads) * HEAD, 0, 0
    if tile >= q_tiles:
        tile -= q_tiles
        part, width, column = 1, kv_heads, heads * HEAD
        if tile >= context_tiles + block_tiles:
            tile -= context_tiles + block_tiles
            part, column = 2, (heads + kv_heads) * HEAD
        before = num_context
        if tile < context_tiles:
            source, count, before = kv, num_context, 0
            stride, column = 2 * kv_heads * HEAD, (part - 1) * kv_heads * HEAD
        else:
            tile -= context_tiles
    index = tile * ROWS + tl.arange(0, ROWS)
    row = index // width
    at = row * stride + column + (index % width) * HEAD
    return source, part, before, width, row, index, at, row < count


@triton.jit  # type: ignore[untyped-decorator]
def _heads_kernel(  # type: ignore[no-untyped-def]
    qkv, kv, q_weight, k_weight, cos, sin, q, k, v, num_block, num_context, heads, kv_heads, eps,
    ROWS: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    source, part, before, width, row, index, at, inside = _place(
        tl.program_id(0), qkv, kv, num_block, num_context, heads, kv_heads, ROWS, HEAD
    )
    kind = q.dtype.element_ty
    half = tl.arange(0, HEAD // 2)
    inside = inside[:, None]
    low_at = at[:, None] + half[None, :]
    low = tl.load(source + low_at, mask=inside, other=0.0)
    high = tl.load(source + low_at + HEAD // 2, mask=inside, other=0.0)
    out_at = (before * width + index)[:, None] * HEAD + half[None, :]
    if part == 2:
        tl.store(v + out_at, low, mask=inside)
        tl.store(v + out_at + HEAD // 2, high, mask=inside)
    else:
        weight, out, turn = k_weight, k, before + row
        if part == 0:
            weight, out, turn = q_weight, q, num_context + row
        x, y = low.to(tl.float32), high.to(tl.float32)
        rstd = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / HEAD + eps)[:, None]
        x = (x * rstd * tl.load(weight + half).to(tl.float32)[None, :]).to(kind).to(tl.float32)
        y = (y * rstd * tl.load(weight + HEAD // 2 + half).to(tl.float32)[None, :]).to(kind).to(tl.float32)
        angle = turn[:, None] * HEAD + half[None, :]
        c, s = tl.load(cos + angle, mask=inside, other=0.0), tl.load(sin + angle, mask=inside, other=0.0)
        tl.store(out + out_at, (x * c - y * s).to(kind), mask=inside)
        tl.store(out + out_at + HEAD // 2, (y * c + x * s).to(kind), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _heads_backward_kernel(  # type: ignore[no-untyped-def]
    qkv, kv, q_weight, k_weight, cos, sin, d_q, d_k, d_v, d_qkv, d_kv, partial, num_block, num_context, heads, kv_heads,
    eps, q_programs, k_programs, per_program, ROWS: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    kind = d_qkv.dtype.element_ty
    program = tl.program_id(0)
    half = tl.arange(0, HEAD // 2)
    first = program * per_program
    q_tiles = tl.cdiv(num_block * heads, ROWS)
    k_tiles = tl.cdiv(num_block * kv_heads, ROWS) + tl.cdiv(num_context * kv_heads, ROWS)
    stop = q_tiles  # a program stays in its part, so that its partial sum belongs to one weight
    if program >= q_programs:
        first, stop = q_tiles + (program - q_programs) * per_program, q_tiles + k_tiles
    if program >= q_programs + k_programs:
        first, stop = q_tiles + k_tiles + (program - q_programs - k_programs) * per_program, q_tiles + 2 * k_tiles
    low_sum = tl.zeros([HEAD // 2], tl.float32)
    high_sum = tl.zeros([HEAD // 2], tl.float32)
    for tile in range(first, tl.minimum(first + per_program, stop)):
        source, part, before, width, row, index, at, inside = _place(
            tile, qkv, kv, num_block, num_context, heads, kv_heads, ROWS, HEAD
        )
        inside = inside[:, None]
        low_at = at[:, None] + half[None, :]
        grad_at = (before * width + index)[:, None] * HEAD + half[None, :]
        grad, out, weight, turn = d_q, d_qkv, q_weight, num_context + row
        if part > 0:
            grad, weight, turn = d_k, k_weight, before + row
            if before == 0:
                out = d_kv
        if part == 2:
            grad = d_v
        low_grad = tl.load(grad + grad_at, mask=inside, other=0.0)
        high_grad = tl.load(grad + grad_at + HEAD // 2, mask=inside, other=0.0)
        if part < 2:
            low = tl.load(source + low_at, mask=inside, other=0.0).to(tl.float32)
            high = tl.load(source + low_at + HEAD // 2, mask=inside, other=0.0).to(tl.float32)
            rstd = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / HEAD + eps)[:, None]
            angle = turn[:, None] * HEAD + half[None, :]
            c, s = tl.load(cos + angle, mask=inside, other=0.0), tl.load(sin + angle, mask=inside, other=0.0)
            g_low, g_high = low_grad.to(tl.float32), high_grad.to(tl.float32)
            n_low, n_high = g_low * c + g_high * s, g_high * c - g_low * s
            low, high = low * rstd, high * rstd
            low_sum += tl.sum(n_low * low, 0)
            high_sum += tl.sum(n_high * high, 0)
            n_low *= tl.load(weight + half).to(tl.float32)[None, :]
            n_high *= tl.load(weight + HEAD // 2 + half).to(tl.float32)[None, :]
            mean = ((tl.sum(n_low * low, 1) + tl.sum(n_high * high, 1)) / HEAD)[:, None]
            low_grad = ((n_low - low * mean) * rstd).to(kind)
            high_grad = ((n_high - high * mean) * rstd).to(kind)
        tl.store(out + low_at, low_grad, mask=inside)
        tl.store(out + low_at + HEAD // 2, high_grad, mask=inside)
    tl.store(partial + program * HEAD + half, low_sum)
    tl.store(partial + program * HEAD + HEAD // 2 + half, high_sum)


@triton.jit  # type: ignore[untyped-decorator]
def _spread_kernel(rows, out, last, columns, size, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    source = tl.where(row % size == 0, row // size, last)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    value = tl.load(rows + source.to(tl.int64) * columns + column, mask=column < columns)
    tl.store(out + row.to(tl.int64) * columns + column, value, mask=column < columns)


@triton.jit  # type: ignore[untyped-decorator]
def _drop_kernel(rows, kept, columns, size, BACK: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    slot = row % size
    place = (row // size * (size - 1) + slot - 1).to(tl.int64) * columns
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = (column < columns) & (slot > 0)
    at = rows + row.to(tl.int64) * columns + column
    if BACK:
        tl.store(at, tl.load(kept + place + column, mask=inside, other=0.0), mask=column < columns)
    else:
        tl.store(kept + place + column, tl.load(at, mask=inside), mask=inside)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, block_size: int) -> Tensor:
        ctx.block_size, (count, columns) = block_size, rows.shape
        out = rows.new_empty((count - 1) * block_size, columns)
        grid = (out.shape[0], triton.cdiv(columns, 2048))
        _spread_kernel[grid](rows, out, count - 1, columns, block_size, WIDTH=2048, num_warps=4)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        d_out = grads[0].unflatten(0, (-1, ctx.block_size))
        d_rows = d_out.new_empty(d_out.shape[0] + 1, d_out.shape[2])
        d_rows[:-1] = d_out[:, 0]
        torch.sum(d_out[:, 1:], (0, 1), out=d_rows[-1])
        return d_rows, None


class _WithoutAnchors(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, block_size: int) -> Tensor:
        ctx.block_size, (count, columns) = block_size, rows.shape
        kept = rows.new_empty(count // block_size * (block_size - 1), columns)
        _drop_kernel[count, triton.cdiv(columns, 2048)](
            rows, kept, columns, block_size, BACK=False, WIDTH=2048, num_warps=4
        )
        return kept

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        d_kept, size = grads[0].contiguous(), ctx.block_size
        count, columns = d_kept.shape[0] // (size - 1) * size, d_kept.shape[1]
        d_rows = d_kept.new_empty(count, columns)
        _drop_kernel[count, triton.cdiv(columns, 2048)](
            d_rows, d_kept, columns, size, BACK=True, WIDTH=2048, num_warps=4
        )
        return d_rows, None


class _Norm(torch.autograd.Function):
    """RMS norm of x, or of the sum of x and an update, which is returned too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, ...]:
        rows, hidden = x.shape
        total, normed = torch.empty_like(x) if update is not None else x, torch.empty_like(x)
        inverse = torch.empty(rows, dtype=torch.float32, device=x.device)
        ctx.width, ctx.add = triton.next_power_of_2(hidden), update is not None
        _norm_kernel[(rows,)](
            x, update, weight, total, normed, inverse, hidden, eps,
            WIDTH=ctx.width, ADD=ctx.add, num_warps=_warps(ctx.width),
        )  # fmt: skip
        ctx.save_for_backward(total, inverse, weight)
        return (total, normed) if ctx.add else (normed,)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        total, inverse, weight = ctx.saved_tensors
        d_total, d_normed = grads[0].contiguous(), grads[-1].contiguous()
        rows, hidden = total.shape
        wide = ctx.width > 2048
        programs = min(_NORM_PROGRAMS[wide], rows)
        d_x = torch.empty_like(total)
        partial = torch.empty(programs, hidden, dtype=torch.float32, device=total.device)
        _norm_backward_kernel[(programs,)](
            d_total, d_normed, total, inverse, weight, d_x, partial, rows, hidden,
            WIDTH=ctx.width, ADD=ctx.add, num_warps=_warps(ctx.width), maxnreg=64 if wide else None,
        )  # fmt: skip
        return d_x, d_x if ctx.add else None, _summed(partial, weight), None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, width)
        _gated_kernel[(rows, triton.cdiv(width, 1024))](gate_up, out, width, WIDTH=1024, num_warps=4)
        ctx.save_for_backward(gate_up)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        d_gate_up = torch.empty_like(gate_up)
        _gated_backward_kernel[(rows, triton.cdiv(width, 1024))](
            gate_up, grads[0].contiguous(), d_gate_up, width, WIDTH=1024, num_warps=4
        )
        return d_gate_up


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, kv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        head, (num_context, kv_width) = q_weight.shape[0], kv.shape
        num_block, kv_heads = qkv.shape[0], kv_width // head // 2
        heads = qkv.shape[1] // head - 2 * kv_heads
        q = qkv.new_empty(num_block, heads, head)
        k, v = (qkv.new_empty(num_context + num_block, kv_heads, head) for _ in range(2))
        ctx.sizes, ctx.eps = (num_block, num_context, heads, kv_heads), eps
        q_tiles, k_tiles = _head_tiles(*ctx.sizes)
        _heads_kernel[(q_tiles + 2 * k_tiles,)](
            qkv, kv, q_weight, k_weight, cos, sin, q, k, v, *ctx.sizes, eps, ROWS=HEAD_ROWS, HEAD=head, num_warps=4
        )
        ctx.save_for_backward(qkv, kv, q_weight, k_weight, cos, sin)
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv, kv, q_weight, k_weight, cos, sin = ctx.saved_tensors
        d_q, d_k, d_v = (grad.contiguous() for grad in grads)
        head = q_weight.shape[0]
        q_tiles, k_tiles = _head_tiles(*ctx.sizes)
        per_program = triton.cdiv(q_tiles + 2 * k_tiles, _HEAD_PROGRAMS)
        q_programs, k_programs = triton.cdiv(q_tiles, per_program), triton.cdiv(k_tiles, per_program)
        d_qkv, d_kv = torch.empty_like(qkv), torch.empty_like(kv)
        partial = torch.empty(q_programs + 2 * k_programs, head, dtype=torch.float32, device=qkv.device)
        _heads_backward_kernel[(partial.shape[0],)](
            qkv, kv, q_weight, k_weight, cos, sin, d_q, d_k, d_v, d_qkv, d_kv, partial, *ctx.sizes, ctx.eps,
            q_programs, k_programs, per_program, ROWS=HEAD_ROWS, HEAD=head, num_warps=4,
        )  # fmt: skip
        d_q_weight = _summed(partial[:q_programs], q_weight)
        d_k_weight = _summed(partial[q_programs : q_programs + k_programs], k_weight)
        return d_qkv, d_kv, d_q_weight, d_k_weight, None, None, None


def _head_tiles(num_block: int, num_context: int, heads: int, kv_heads: int) -> tuple[int, int]:
    """Tiles of q, and of k (or of v)."""
    context, block = (triton.cdiv(rows * kv_heads, HEAD_ROWS) for rows in (num_context, num_block))
    return triton.cdiv(num_block * heads, HEAD_ROWS), context + block


def _summed(partial: Tensor, weight: Tensor) -> Tensor:
    """Add up the programs' partial sums [P, N], in order, into a gradient of `weight` [N]."""
    rows, columns = partial.shape
    out = torch.empty_like(weight)
    width = 32 if columns <= 1024 else 64
    _sum_kernel[(triton.cdiv(columns, width),)](partial, out, rows, columns, ROWS=64, WIDTH=width, num_warps=8)
    return out


def _warps(width: int) -> int:
    return max(1, min(16, width // 512))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide by the root mean square over the last dimension and scale. [R, H]."""
    normed: tuple[Tensor] = _Norm.apply(x.contiguous(), None, weight, eps)  # type: ignore[no-untyped-call]
    return normed[0]


def add_norm(x: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add `update` to the residual stream and norm the sum; returns both. [R, H] contiguous."""
    out: tuple[Tensor, Tensor] = _Norm.apply(x.contiguous(), update.contiguous(), weight, eps)  # type: ignore[no-untyped-call]
    return out


def gated(gate_up: Tensor) -> Tensor:
    """SwiGLU of [R, 2*I], gate first: silu(gate) * up."""
    out: Tensor = _Gated.apply(gate_up)  # type: ignore[no-untyped-call]
    return out


def spread(rows: Tensor, block_size: int) -> Tensor:
    """Turn [A + 1, O], the anchors' rows and the one that all other slots share, into [A*B, O]."""
    out: Tensor = _Spread.apply(rows.contiguous(), block_size)  # type: ignore[no-untyped-call]
    return out


def without_anchors(rows_Q: Tensor, block_size: int) -> Tensor:
    """Drop slot 0 of each block: [A*B, O] to [A*(B-1), O]."""
    out: Tensor = _WithoutAnchors.apply(rows_Q.contiguous(), block_size)  # type: ignore[no-untyped-call]
    return out


def heads(
    qkv: Tensor, kv_context: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm, rotate and lay out the heads; shapes as in drafter.heads. D is a power of two."""
    out: tuple[Tensor, Tensor, Tensor] = _Heads.apply(  # type: ignore[no-untyped-call]
        qkv.contiguous(), kv_context.contiguous(), q_weight, k_weight, cos, sin, eps
    )
    return out
