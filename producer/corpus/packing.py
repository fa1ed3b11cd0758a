"""Lay documents end to end into packs, and packs' documents into rows for the target. Integers only, no tokens.

Packing is best fit over a few open packs, in shuffled order: near full packs, each a random mixture of lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

OPEN_PACKS = 24  # more open packs fill better but delay the pack of a short document; 24 gave 98 % or more


def pack_documents(lengths: Sequence[int], order: Sequence[int], pack_tokens: int) -> list[tuple[int, ...]]:
    """Assign the documents of `order` (indices into `lengths`) to packs of at most `pack_tokens` tokens.

    Every document lands in exactly one pack; documents stand in a pack in the order they came. Raises ValueError for
    a document longer than a pack.
    """
    closed: list[tuple[int, ...]] = []
    open_packs: list[tuple[int, list[int]]] = []  # (free tokens, documents)
    for document in order:
        need = lengths[document]
        if need > pack_tokens:
            raise ValueError(f"document {document} has {need} tokens, more than a pack ({pack_tokens})")
        fitting = [place for place, (free, _) in enumerate(open_packs) if free >= need]
        if fitting:
            best = min(fitting, key=lambda place: open_packs[place][0])
            free, documents = open_packs[best]
            documents.append(document)
            open_packs[best] = (free - need, documents)
            continue
        if len(open_packs) == OPEN_PACKS:
            fullest = min(range(OPEN_PACKS), key=lambda place: open_packs[place][0])
            closed.append(tuple(open_packs.pop(fullest)[1]))
        open_packs.append((pack_tokens - need, [document]))
    return closed + [tuple(documents) for _, documents in sorted(open_packs, key=lambda pack: pack[0])]


class RowBatch(NamedTuple):
    """Rows of one forward: documents, and the padded length of each row in tokens."""

    documents: tuple[int, ...]
    row_tokens: int


def row_batches(
    documents: Sequence[int], lengths: Sequence[int], max_tokens: int, buckets: Sequence[int]
) -> list[RowBatch]:
    """Group documents into right-padded rows of near-equal length, `max_tokens` per forward, padding included.

    Documents are sorted by length; each batch is padded to the smallest bucket that holds its longest document.
    A document longer than the largest bucket makes a batch of its own length.
    """
    ordered = sorted(documents, key=lambda document: (-lengths[document], document))
    batches: list[RowBatch] = []
    start = 0
    while start < len(ordered):
        row_tokens = bucket_of(lengths[ordered[start]], buckets)
        rows = max(1, max_tokens // row_tokens)
        batches.append(RowBatch(tuple(ordered[start : start + rows]), row_tokens))
        start += rows
    return batches


def bucket_of(length: int, buckets: Sequence[int]) -> int:
    """Return the smallest bucket that holds `length`; the length itself above the largest."""
    return next((bucket for bucket in buckets if bucket >= length), length)


def choose_buckets(lengths: Sequence[int], num_buckets: int) -> tuple[int, ...]:
    """Choose row lengths at equal shares of the data's tokens, rounded up to multiples of 16 (64 above 1024)."""
    ordered = np.sort(np.asarray(lengths, dtype=np.int64))
    share = np.cumsum(ordered) / ordered.sum()
    cuts = [ordered[np.searchsorted(share, (number + 1) / num_buckets - 1e-12)] for number in range(num_buckets)]
    return tuple(sorted({_round_up(int(cut)) for cut in cuts}))


def _round_up(length: int) -> int:
    unit = 64 if length > 1024 else 16
    return -(-length // unit) * unit
