"""Which positions of a pack start a block, and what each slot of a block has to predict.

Everything is fixed-shape tensor arithmetic without a host sync, so it can be captured. Random numbers are a hash of
(seed, draw, position): the same on every device, different at each draw, and one counter is all the state there is.
Source: DFlash's training section; candidate rule and draw in docs/drafter.md.

Shapes: T tokens, A anchors, B block slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

NO_LABEL = -1
_MASK32 = 0xFFFFFFFF


class Anchors(NamedTuple):
    """Drawn anchors: positions [A] int64 ascending, keep [A] bool. Unused ones stand last, at T-1, keep False."""

    position: Tensor
    keep: Tensor


class Blocks(NamedTuple):
    """The blocks of a step, all [A, B]: input ids (anchor, then mask tokens), labels, valid (supervised), positions."""

    input_ids: Tensor
    labels: Tensor
    valid: Tensor
    positions: Tensor


def random_keys(seed: Tensor, draw: Tensor, num_tokens: int) -> Tensor:
    """Return [T] distinct non-negative int64 keys in random order, a function of seed and draw (0-dim int64) alone."""
    index = torch.arange(num_tokens, device=draw.device)
    mixed = _mixed(index + _mixed(draw * 0x9E3779B9 + _mixed(seed)))
    return mixed * num_tokens + index


def _mixed(value: Tensor) -> Tensor:
    """Mix 32 bits (the finaliser of MurmurHash3, public domain), carried in int64."""
    value = value & _MASK32
    value = ((value ^ (value >> 16)) * 0x85EBCA6B) & _MASK32
    value = ((value ^ (value >> 13)) * 0xC2B2AE35) & _MASK32
    return value ^ (value >> 16)


def candidates(loss_mask_T: Tensor, doc_start_T: Tensor, block_size: int) -> Tensor:
    """Tell where a block may start, [T] bool: supervised, with a later supervised token in block and document."""
    supervised = (loss_mask_T != 0) & (doc_start_T >= 0)
    later = _windows(supervised, block_size, False) & (_windows(doc_start_T, block_size, -2) == doc_start_T[:, None])
    return supervised & later[:, 1:].any(dim=1)


def _windows(values_T: Tensor, size: int, beyond: int | bool) -> Tensor:
    """Return [T, size]: each position's value and the following ones, `beyond` past the end."""
    return torch.nn.functional.pad(values_T, (0, size - 1), value=beyond).unfold(0, size, 1)


def select_anchors(
    loss_mask_T: Tensor,
    doc_start_T: Tensor,
    num_anchors: int,
    block_size: int,
    per_document_min: int,
    keys_T: Tensor,
) -> Anchors:
    """Draw `num_anchors` candidates without replacement, uniformly, and sort them. No host sync.

    Each document is given min(its candidates, per_document_min) first, in turns if the budget is too small for that;
    the rest is drawn from all. With a budget of at least the candidates each of them is used once.
    Shapes: loss_mask [T], doc_start [T] (-1 in padding), keys [T] from random_keys, or uniform numbers -> [A], [A].
    """
    num_tokens = loss_mask_T.shape[0]
    if keys_T.is_floating_point():
        keys_T = (keys_T.double() * 2**32).long() * num_tokens + torch.arange(num_tokens, device=keys_T.device)
    may_T = candidates(loss_mask_T, doc_start_T, block_size)
    never = torch.iinfo(torch.int64).max
    order_T = torch.where(may_T, keys_T, never)
    if per_document_min > 0:
        # Ranks below the floor go first (all documents' first pick, then their second, ...), the rest by key alone.
        rank_T = _rank_in_document(order_T, doc_start_T)
        turn_T = rank_T.clamp(max=per_document_min)
        order_T = torch.where(may_T, turn_T * (num_tokens << 32) + keys_T, never)
    num_drawn = min(num_anchors, num_tokens)
    key_A, chosen_A = torch.topk(order_T, num_drawn, largest=False, sorted=False)
    position_A = torch.where(key_A < never, chosen_A, num_tokens - 1)
    if num_drawn < num_anchors:
        position_A = torch.nn.functional.pad(position_A, (0, num_anchors - num_drawn), value=num_tokens - 1)
    position_A = torch.sort(position_A).values
    # The last token has no successor, so it is never a candidate: that position marks an unused anchor.
    return Anchors(position_A, position_A < num_tokens - 1)


def _rank_in_document(order_T: Tensor, doc_start_T: Tensor) -> Tensor:
    """Return each token's rank [T] by `order` among those of its document."""
    by_order = torch.argsort(order_T)
    by_document = by_order[torch.argsort(doc_start_T[by_order], stable=True)]
    document = doc_start_T[by_document].contiguous()
    first = torch.searchsorted(document, document)
    rank = torch.arange(order_T.shape[0], device=order_T.device) - first
    return torch.empty_like(rank).scatter_(0, by_document, rank)


def lay_out_blocks(
    anchors: Anchors,
    input_ids_T: Tensor,
    loss_mask_T: Tensor,
    doc_start_T: Tensor,
    block_size: int,
    mask_token_id: int,
) -> Blocks:
    """Lay out each block's input ids, labels and positions; slot k predicts the token at anchor + k.

    Slot 0 predicts nothing. A slot beyond the document, one whose token is not supervised, and every slot of an unused
    block has NO_LABEL; an unsupervised token silences its own slot only, later ones count again. Positions count on
    from the anchor's position in its document.
    """
    num_tokens = input_ids_T.shape[0]
    offset_B = torch.arange(block_size, device=input_ids_T.device)
    at = anchors.position[:, None] + offset_B
    inside = (at < num_tokens) & (offset_B > 0) & anchors.keep[:, None]
    at = at.clamp(max=num_tokens - 1)
    start_A = doc_start_T[anchors.position]
    valid = inside & (doc_start_T[at] == start_A[:, None]) & (loss_mask_T[at] != 0)
    token_A = input_ids_T[anchors.position].long()
    ids = torch.where(offset_B == 0, token_A[:, None], mask_token_id)
    positions = (anchors.position - start_A.clamp(min=0))[:, None] + offset_B
    return Blocks(ids, torch.where(valid, input_ids_T[at].long(), NO_LABEL), valid, positions)


def positions_in_document(doc_start_T: Tensor) -> Tensor:
    """Return the position in its document of every token, [T] int64; 0 in padding."""
    index = torch.arange(doc_start_T.shape[0], device=doc_start_T.device)
    return torch.where(doc_start_T >= 0, index - doc_start_T, 0)
