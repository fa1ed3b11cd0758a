"""Casts to 8-bit floats with their scales, as Triton kernels. float8.py has the reference.

The cast itself cuts at the largest number and lets NaN through, so that a step with one is still skipped.

Shapes: R rows, I columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_WIDTH, _TILE = 4096, 64
_LARGEST, _LEAST_SCALE = tl.constexpr(448.0), tl.constexpr(1e-12)


@triton.jit  # type: ignore[untyped-decorator]
def _row_kernel(x, out, scales, columns, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    top = tl.zeros([WIDTH], tl.float32)
    for start in range(0, columns, WIDTH):
        column = start + tl.arange(0, WIDTH)
        top = tl.maximum(
            top, tl.abs(tl.load(x + row * columns + column, mask=column < columns, other=0.0).to(tl.float32))
        )
    scale = tl.maximum(tl.max(top, 0) / _LARGEST, _LEAST_SCALE)
    tl.store(scales + row, scale)
    factor = 1.0 / scale
    for start in range(0, columns, WIDTH):  # read a second time, from the cache
        column = start + tl.arange(0, WIDTH)
        value = tl.load(x + row * columns + column, mask=column < columns, other=0.0).to(tl.float32) * factor
        tl.store(out + row * columns + column, value.to(out.dtype.element_ty), mask=column < columns)


@triton.jit  # type: ignore[untyped-decorator]
def _transposed_kernel(x, out, scale, rows, columns, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    value = tl.load(x + row[:, None] * columns + column[None, :], mask=inside, other=0.0).to(tl.float32)
    value *= 1.0 / tl.load(scale)
    turned = tl.trans(value.to(out.dtype.element_ty))
    tl.store(out + column[:, None] * rows + row[None, :], turned, mask=tl.trans(inside))


def by_row(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [R, I] in 8 bits and each row's scale [R, 1] float32."""
    x = x.contiguous()
    rows, columns = x.shape
    out = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    _row_kernel[(rows,)](x, out, scales, columns, WIDTH=_WIDTH, num_warps=8)
    return out, scales


def transposed(weight: Tensor, scale: Tensor) -> Tensor:
    """Return weight [R, I] as [I, R] in 8 bits, over one scale (0-dim float32)."""
    rows, columns = weight.shape
    out = torch.empty(columns, rows, dtype=torch.float8_e4m3fn, device=weight.device)
    grid = (triton.cdiv(rows, _TILE), triton.cdiv(columns, _TILE))
    _transposed_kernel[grid](weight, out, scale, rows, columns, TILE=_TILE, num_warps=4)
    return out
