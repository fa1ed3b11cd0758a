"""Lay documents end to end into packs. Integers only, no tokens.

Packing is best fit over a few open packs, in shuffled order: near full packs, each a random mixture of lengths.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

OPEN_PACKS = 24  # more open packs fill better but delay the pack of a short document; 24 gave 98 % or more


def pack_documents(lengths: Sequence[int], order: Iterable[int], pack_tokens: int) -> list[tuple[int, ...]]:
    """Assign the documents of `order` (indices into `lengths`) to packs of at most `pack_tokens` tokens.

    Every entry of `order` lands in exactly one pack. A pack begins with its longest document and ends with its
    shortest: attention on a GPU takes long ones apart and the rest in one piece (producer/packed_cuda.py). Raises
    ValueError for a document longer than a pack.
    """
    closed: list[tuple[int, ...]] = []
    open_packs: list[tuple[int, int]] = []  # (free tokens, number of the pack), ascending
    documents: dict[int, list[int]] = {}
    number = 0
    for document in order:
        need = lengths[document]
        if need > pack_tokens:
            raise ValueError(f"document {document} has {need} tokens, more than a pack ({pack_tokens})")
        best = bisect_left(open_packs, (need, -1))
        if best < len(open_packs):
            free, pack = open_packs.pop(best)
            documents[pack].append(document)
            insort(open_packs, (free - need, pack))
            continue
        if len(open_packs) == OPEN_PACKS:
            closed.append(_longest_first(documents.pop(open_packs.pop(0)[1]), lengths))
        documents[number] = [document]
        insort(open_packs, (pack_tokens - need, number))
        number += 1
    return closed + [_longest_first(documents[pack], lengths) for _, pack in open_packs]


def _longest_first(documents: list[int], lengths: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(documents, key=lambda document: -lengths[document]))
