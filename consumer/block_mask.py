"""Who sees what in a step: the dense mask, which is the reference, and FlexAttention's tables in closed form.

Queries are the Q = A*B block rows; keys are the T context tokens, then the Q block rows (docs/drafter.md).
Context kv is visible to block j with anchor a, slot k, iff kv < a (strictly), same document, and in a sliding layer
(a + k) - kv < W. A block row is visible iff it is in the same block and, where the layer is causal in the block, not
later. The block of an unused anchor sees itself only, so that no softmax row is empty.

What a query sees is therefore two intervals of keys: context [low, high) and its own block. Which tiles of 128 x 128
are touched or full follows by comparing interval ends with tile ends, with static shapes and no host sync, so the
tables can be captured; torch's create_block_mask would evaluate all Q x (T + Q) pairs (8-10 ms and 1.3 GB each on an
H200 at T = Q = 8192).

Shapes: T context tokens, A anchors, B block slots, Q block rows, M tiles of queries, N tiles of keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from configs.drafter_shape import DrafterShape
from consumer.anchors import Anchors


def dense_mask(anchors: Anchors, doc_start_T: Tensor, shape: DrafterShape, layer_type: str) -> Tensor:
    """Build the mask [Q, T + Q], True where visible, straight from the rules above."""
    size, window = shape.block_size, shape.window_of(layer_type)
    num_anchors, tokens = anchors.position.shape[0], doc_start_T.shape[0]
    slot = torch.arange(size, device=doc_start_T.device)
    key = torch.arange(tokens, device=doc_start_T.device)
    anchor = anchors.position[:, None]
    visible = (key < anchor) & anchors.keep[:, None]
    if tokens:
        visible = visible & (doc_start_T == doc_start_T[anchors.position][:, None])
    visible = visible[:, None, :].expand(-1, size, -1)
    if window is not None:
        visible = visible & ((anchor + slot)[:, :, None] - key < window)
    inside = torch.ones(size, size, dtype=torch.bool, device=doc_start_T.device)
    if shape.causal_of(layer_type):
        inside = inside.tril()
    same_block = torch.eye(num_anchors, dtype=torch.bool, device=doc_start_T.device)
    own = same_block[:, None, :, None] & inside[None, :, None, :]
    rows = num_anchors * size
    return torch.cat([visible.reshape(rows, tokens), own.reshape(rows, rows)], dim=1)


class Intervals(NamedTuple):
    """Keys that each query sees, all [Q] int32: context [low, high), then own block [own_low, own_high)."""

    low: Tensor
    high: Tensor
    own_low: Tensor
    own_high: Tensor


class Tables(NamedTuple):
    """FlexAttention's tables of one layer type, int32: for each query tile the key tiles that are partly and wholly
    visible (counts [1, 1, M], indices [1, 1, M, N], visible ones first), and the same seen from the key tiles."""

    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor
    full_kv_indices: Tensor
    q_num_blocks: Tensor
    q_indices: Tensor
    full_q_num_blocks: Tensor
    full_q_indices: Tensor


def intervals(anchors: Anchors, doc_start_T: Tensor, shape: DrafterShape, layer_type: str) -> Intervals:
    """Work out both intervals of every block row; an unused block's context is empty."""
    size, window = shape.block_size, shape.window_of(layer_type)
    tokens, num_anchors = doc_start_T.shape[0], anchors.position.shape[0]
    slot = torch.arange(size, device=doc_start_T.device)
    high = anchors.position[:, None].expand(-1, size)
    low = doc_start_T[anchors.position][:, None].expand(-1, size).long()
    if window is not None:
        low = torch.maximum(low, high + slot - (window - 1))
    low = torch.minimum(torch.where(anchors.keep[:, None], low, high), high)
    first = tokens + torch.arange(num_anchors, device=doc_start_T.device)[:, None] * size
    end = first + (slot + 1 if shape.causal_of(layer_type) else size)
    parts = (low, high, first.expand(-1, size), end.expand(num_anchors, size))
    return Intervals(*(part.flatten().to(torch.int32) for part in parts))


def closed_form_tables(seen: Intervals, num_keys: int, tile: int = 128) -> Tables:
    """Make FlexAttention's tables for `num_keys` = T + Q keys; equal to create_block_mask's. No host sync.

    Queries beyond Q, which pad the last tile, see nothing, as torch has it.
    """
    num_tiles = -(-num_keys // tile)
    begin = torch.arange(num_tiles, device=seen.low.device, dtype=torch.int32) * tile
    touched, full = _tile_cover(seen.low, seen.high, begin, tile)
    own_touched, own_full = _tile_cover(seen.own_low, seen.own_high, begin, tile)
    rows = touched.shape[0]
    pad = (0, 0, 0, -rows % tile)
    by_tile = [
        torch.nn.functional.pad(values, pad).view(-1, tile, num_tiles)
        for values in (touched | own_touched, full | own_full)
    ]
    some_MN, all_MN = by_tile[0].any(1), by_tile[1].all(1)
    partly_MN = some_MN & ~all_MN
    return Tables(*_listed(partly_MN), *_listed(all_MN), *_listed(partly_MN.t()), *_listed(all_MN.t()))


def _tile_cover(low: Tensor, high: Tensor, begin_N: Tensor, tile: int) -> tuple[Tensor, Tensor]:
    """Tell for each row and tile whether its interval touches it and whether it covers it, two [Q, N] bool."""
    low, high = low[:, None], high[:, None]
    touches = (low < begin_N + tile) & (high > begin_N) & (low < high)
    return touches, (low <= begin_N) & (high >= begin_N + tile)


def _listed(present: Tensor) -> tuple[Tensor, Tensor]:
    """Turn [R, C] bool into counts [1, 1, R] and column numbers [1, 1, R, C], present ones first, each ascending."""
    present = present.contiguous()
    ahead = present.to(torch.int32).cumsum(1, dtype=torch.int32)
    count = ahead[:, -1:]
    absent_ahead = (~present).to(torch.int32).cumsum(1, dtype=torch.int32)
    place = torch.where(present, ahead - 1, count + absent_ahead - 1)
    column = torch.arange(present.shape[1], device=present.device, dtype=torch.int32).expand_as(place)
    indices = torch.empty_like(place).scatter_(1, place.long(), column)
    return count[:, 0][None, None].contiguous(), indices[None, None]
