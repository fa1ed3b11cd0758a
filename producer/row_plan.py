"""Which documents the target reads together: right-padded rows of near-equal length. Integers only, no tokens.

A window of packs is kept filled. Each forward serves the oldest pack: its longest unread document, and with it the
documents of all packs in the window that are nearest in length. So rows are near-equal, each pack stays a random
mixture, and packs are finished one by one rather than all at the end of a window. On log-normal lengths (median 600,
sigma 1, up to 8192) a window of 16 packs and 8 row lengths per doubling leave 7 % padding.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from typing import NamedTuple

SMALLEST_ROW = 16
NEAR = 0.9  # a row shorter than this share of the padded length is better read with others ...
LEAST_SHARE = 0.5  # ... unless the forward would fall below this share of its tokens
LENGTHS_TRIED = 4


class RowBatch(NamedTuple):
    """Rows of one forward: (pack, document) of each, and their padded length in tokens."""

    rows: tuple[tuple[int, int], ...]
    row_tokens: int


def row_length(tokens: int, per_doubling: int) -> int:
    """Round a document's length up to one of the few lengths the target sees: `per_doubling` between 2^k and 2^(k+1).

    Multiples of 16 and at least 16, so that few shapes occur and kernels are aligned.
    """
    if tokens <= SMALLEST_ROW:
        return SMALLEST_ROW
    step = (1 << ((tokens - 1).bit_length() - 1)) // per_doubling // SMALLEST_ROW * SMALLEST_ROW or SMALLEST_ROW
    return min(-(-tokens // step) * step, 1 << (tokens - 1).bit_length())


class RowPlan:
    """The unread documents of the packs in the window, sorted by length."""

    def __init__(self, max_tokens: int, per_doubling: int) -> None:
        """Forwards of at most `max_tokens`, padding included; a longer document is read alone."""
        self._max_tokens = max_tokens
        self._per_doubling = per_doubling
        self._unread: list[tuple[int, int, int]] = []  # (tokens, pack, document), ascending
        self._left: dict[int, int] = {}  # pack -> documents not read

    def __len__(self) -> int:
        return len(self._left)

    def add(self, pack_id: int, documents: list[tuple[int, int]]) -> None:
        """Add a pack of (document, tokens). Packs are served in the order they are added."""
        for document, tokens in documents:
            insort(self._unread, (tokens, pack_id, document))
        self._left[pack_id] = len(documents)

    def next_batch(self) -> RowBatch:
        """Remove and return the rows of the next forward. Raises IndexError when nothing is left."""
        if not self._unread:
            raise IndexError("no unread document")
        oldest = next(iter(self._left))
        wanted = max(place for place, row in enumerate(self._unread) if row[1] == oldest)
        low, high = self._best_span(wanted)
        chosen = self._unread[low:high]
        del self._unread[low:high]
        for _, pack_id, _ in chosen:
            self._left[pack_id] -= 1
            if self._left[pack_id] == 0:
                del self._left[pack_id]
        return RowBatch(
            tuple((pack_id, document) for _, pack_id, document in reversed(chosen)), self._length(chosen[-1][0])
        )

    def _length(self, tokens: int) -> int:
        return row_length(tokens, self._per_doubling)

    def _best_span(self, wanted: int) -> tuple[int, int]:
        """Return the span of neighbours in length around `wanted` that wastes the smallest share on padding."""
        best_share, best = -1.0, (wanted, wanted + 1)
        limit = self._length(self._unread[wanted][0])
        for _ in range(LENGTHS_TRIED):
            high = bisect_right(self._unread, limit, key=lambda row: row[0])
            rows = max(1, self._max_tokens // limit)
            low = min(max(0, high - rows), wanted)
            low, high = self._trim(low, min(high, low + rows), wanted)
            used = sum(row[0] for row in self._unread[low:high])
            share = used / (self._length(self._unread[high - 1][0]) * (high - low))
            if share > best_share:
                best_share, best = share, (low, high)
            if high == len(self._unread):
                break
            limit = self._length(limit + 1)
        return best

    def _trim(self, low: int, high: int, wanted: int) -> tuple[int, int]:
        """Leave out rows much shorter than the longest, as long as enough tokens remain."""
        row_tokens = self._length(self._unread[high - 1][0])
        while (
            low < wanted
            and self._unread[low][0] < NEAR * row_tokens
            and (high - low - 1) * row_tokens >= LEAST_SHARE * self._max_tokens
        ):
            low += 1
        return low, high
