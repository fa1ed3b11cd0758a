"""Attention of the drafter's layers, three ways with the same results.

dense_attention     the reference: plain SDPA with the dense mask, any device
document_attention  what the CPU trains with: one SDPA per document, ten times less work where documents are short
flex_attention_of   what a GPU trains with: FlexAttention over tables in closed form, no host sync, can be captured

Shapes: T context tokens, A anchors, B block slots, Q = A*B block rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from configs.drafter_shape import DrafterShape
from consumer.anchors import Anchors
from consumer.block_mask import Intervals, closed_form_tables, dense_mask, intervals
from consumer.drafter import Attend

FlexRows = Callable[[Tensor, Tensor, Tensor, BlockMask], Tensor]


def dense_attention(anchors: Anchors, doc_start_T: Tensor, shape: DrafterShape) -> Attend:
    """Return the attention of one step; each layer type's mask [Q, T + Q] is built once."""
    masks = {kind: dense_mask(anchors, doc_start_T, shape, kind) for kind in sorted(set(shape.layer_types))}

    def attend(q: Tensor, k: Tensor, v: Tensor, layer_type: str) -> Tensor:
        q, k, v = (rows.transpose(0, 1)[None] for rows in (q, k, v))
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=masks[layer_type], enable_gqa=True)
        return _as_rows(out[0])

    return attend


def _as_rows(by_head: Tensor) -> Tensor:
    """Turn [heads, Q, D] into [Q, heads*D]."""
    return by_head.transpose(0, 1).flatten(1)


class _Part(NamedTuple):
    """One document's share: its tokens and how many anchors start in it."""

    start: int
    tokens: int
    anchors: int


def document_attention(anchors: Anchors, doc_start_T: Tensor, shape: DrafterShape) -> Attend:
    """Return the attention of one step, worked out document by document. Reads sizes on the host: not for capture.

    Anchors are sorted, so the blocks of a document are neighbours and see its tokens only. Unused blocks (the last
    ones) see nothing but themselves.
    """
    parts = _parts(anchors, doc_start_T)
    size, tokens = shape.block_size, doc_start_T.shape[0]
    masks = {kind: _part_masks(parts, anchors, doc_start_T, shape, kind) for kind in sorted(set(shape.layer_types))}
    context_sizes = [part.tokens for part in parts]
    block_sizes = [part.anchors * size for part in parts]

    def attend(q: Tensor, k: Tensor, v: Tensor, layer_type: str) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        wide_k, wide_v = (rows.transpose(0, 1).repeat_interleave(groups, 0) for rows in (k, v))
        # split's gradient is one concatenation; slices would each make a gradient of full size
        k_parts = _split(wide_k, tokens, context_sizes, block_sizes)
        v_parts = _split(wide_v, tokens, context_sizes, block_sizes)
        q_parts = q.transpose(0, 1).split(block_sizes, 1)
        outs = []
        for q_part, k_part, v_part, mask in zip(q_parts, k_parts, v_parts, masks[layer_type], strict=True):
            if q_part.shape[1]:
                outs.append(functional.scaled_dot_product_attention(q_part[None], k_part[None], v_part[None], mask)[0])
        return _as_rows(torch.cat(outs, 1))

    return attend


def _parts(anchors: Anchors, doc_start_T: Tensor) -> list[_Part]:
    """Cut the pack into documents (padding included), then one part without tokens for the unused anchors."""
    starts, sizes = torch.unique_consecutive(doc_start_T, return_counts=True)
    owner = doc_start_T[anchors.position[anchors.keep]]
    parts, at = [], 0
    for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
        count = 0 if start < 0 else int((owner == start).sum())
        parts.append(_Part(at, size, count))
        at += size
    parts.append(_Part(at, 0, int((~anchors.keep).sum())))
    return parts


def _part_masks(
    parts: list[_Part], anchors: Anchors, doc_start_T: Tensor, shape: DrafterShape, layer_type: str
) -> list[Tensor]:
    masks, first = [], 0
    for part in parts:
        own = Anchors(*(values[first : first + part.anchors] for values in anchors))
        local = Anchors(own.position - part.start, own.keep)
        starts = torch.zeros(part.tokens, dtype=doc_start_T.dtype)
        if part.tokens == 0:
            local = Anchors(torch.zeros_like(own.position), own.keep)
        masks.append(dense_mask(local, starts, shape, layer_type))
        first += part.anchors
    return masks


def _split(values: Tensor, tokens: int, context_sizes: list[int], block_sizes: list[int]) -> list[Tensor]:
    context, block = values.split([tokens, values.shape[1] - tokens], 1)
    pairs = zip(context.split(context_sizes, 1), block.split(block_sizes, 1), strict=True)
    return [torch.cat(pair, 1) for pair in pairs]


def flex_attention_of(
    anchors: Anchors, doc_start_T: Tensor, shape: DrafterShape, flex: FlexRows | None = None
) -> Attend:
    """Return the attention of one step through FlexAttention. `flex`: torch.compile of flex_rows, on a GPU."""
    kinds, run = sorted(set(shape.layer_types)), flex or flex_rows
    num_keys = doc_start_T.shape[0] + anchors.position.shape[0] * shape.block_size
    masks = {kind: block_mask_of(intervals(anchors, doc_start_T, shape, kind), num_keys) for kind in kinds}

    def attend(q: Tensor, k: Tensor, v: Tensor, layer_type: str) -> Tensor:
        return run(q, k, v, masks[layer_type])

    return attend


def flex_rows(
    q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask, kernel_options: dict[str, int] | None = None
) -> Tensor:
    """FlexAttention from rows to rows: [Q, heads, D], [T + Q, kv heads, D] -> [Q, heads*D].

    The transpositions are in here so that nothing but row-major tensors crosses into compiled code; gradients that
    cross in another layout are copied (2.5 ms of a step at hidden 5120).
    """
    by_head = [rows.transpose(0, 1)[None] for rows in (q, k, v)]
    options: Any = kernel_options
    out: Any = flex_attention(
        by_head[0], by_head[1], by_head[2], block_mask=block_mask, enable_gqa=True, kernel_options=options
    )
    return _as_rows(out[0])


def block_mask_of(seen: Intervals, num_keys: int, tile: int = 128) -> BlockMask:
    """Wrap the closed-form tables in torch's BlockMask, with the rule for tiles that are visible in part."""
    low, high, own_low, own_high = seen

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
        context = (key >= low[query]) & (key < high[query])
        return context | ((key >= own_low[query]) & (key < own_high[query]))

    tables = closed_form_tables(seen, num_keys, tile)
    return BlockMask(
        seq_lengths=(low.shape[0], num_keys),
        kv_num_blocks=tables.kv_num_blocks,
        kv_indices=tables.kv_indices,
        full_kv_num_blocks=tables.full_kv_num_blocks,
        full_kv_indices=tables.full_kv_indices,
        q_num_blocks=tables.q_num_blocks,
        q_indices=tables.q_indices,
        full_q_num_blocks=tables.full_q_num_blocks,
        full_q_indices=tables.full_q_indices,
        BLOCK_SIZE=(tile, tile),
        mask_mod=visible,
    )
