"""The short convolution of Gated DeltaNet layers on a GPU: one kernel that reads its row once and writes it once.

Reference: the plain shifted additions of packed_recurrent.py. What torch.compile made of those took, at 8192 tokens and
10240 channels on an H200, 0.235 ms and a part of another kernel's 0.31; to read and write that row once takes 0.09.
A program takes a tile of tokens and channels; the earlier tokens that it needs are lines that it or its neighbour has
just read. Triton is there on a GPU machine only, so this file is imported where a GPU is used.

Shapes: T tokens of the row, C channels, k taps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Tile(NamedTuple):
    """What one program takes: `tokens` of `channels`, in steps of `rows` tokens, by `warps` warps.

    One warp: each of its threads keeps 8 channels, so weights come in the layout of the states; with more warps they
    would go through shared memory at each step.
    """

    tokens: int = 32
    rows: int = 8
    channels: int = 256
    warps: int = 1


TILE = Tile()


@triton.jit  # type: ignore[untyped-decorator]
def _convolution_kernel(  # type: ignore[no-untyped-def]
    x, weight, bias, positions, out, tokens, channels, row_stride,
    TAPS: tl.constexpr, BIASED: tl.constexpr, SILU: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < channels
    if BIASED:
        added = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    for start in range(0, TOKENS, ROWS):
        token = tl.program_id(1) * TOKENS + start + tl.arange(0, ROWS)
        before = tl.load(positions + token, mask=token < tokens, other=-1)
        row = x + token.to(tl.int64)[:, None] * row_stride + channel[None, :]
        total = tl.zeros([ROWS, CHANNELS], dtype=tl.float32)
        for back in tl.static_range(TAPS):
            of_document = (before >= back)[:, None] & inside[None, :]
            value = tl.load(row - back * row_stride, mask=of_document, other=0.0).to(tl.float32)
            scale = tl.load(weight + (TAPS - 1 - back) * channels + channel, mask=inside, other=0.0).to(tl.float32)
            total += value * scale[None, :]
        if BIASED:
            total += added[None, :]
        if SILU:
            total = total * tl.sigmoid(total)
        at = out + token.to(tl.int64)[:, None] * channels + channel[None, :]
        tl.store(at, total.to(out.dtype.element_ty), mask=(token < tokens)[:, None] & inside[None, :])


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor, silu: bool, tile: Tile = TILE
) -> Tensor:
    """Convolve causally inside each document: x [1, T, C] whose channels lie side by side, weight [C, k], bias [C].

    `positions` [T] int32: tokens of the same document before each. `silu`: apply SiLU to the sums, which are float32
    until then. Returns [1, T, C] in x's dtype, contiguous. Launches on x's device and waits for nothing.
    """
    _, tokens, channels = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    by_tap = weight.t().contiguous()  # a program then reads the channels of a tap side by side
    grid = (triton.cdiv(channels, tile.channels), triton.cdiv(tokens, tile.tokens))
    with torch.cuda.device_of(x):
        _convolution_kernel[grid](
            x,
            by_tap,
            by_tap if bias is None else bias,
            positions,
            out,
            tokens,
            channels,
            x.stride(1),
            TAPS=weight.shape[1],
            BIASED=bias is not None,
            SILU=silu,
            TOKENS=tile.tokens,
            ROWS=tile.rows,
            CHANNELS=tile.channels,
            num_warps=tile.warps,
        )
    return out
