"""The data report: what was read, used and skipped, and the laws that these numbers must obey.

rows read = rows used + held out + duplicates dropped + skipped, by reason; supervised tokens read = offered + cut off +
held out + dropped. A report that breaks a law stops the run: documents would be lost in silence.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from producer.corpus.tokenizing import Batch

_BINS = (0, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


@dataclass
class SourceShare:
    """One source: rows read and usable, and its share of the tokens as read and as trained on in an epoch."""

    name: str
    weight: float
    rows: int = 0
    usable: int = 0
    documents: int = 0
    tokens: int = 0
    share_pct: float = 0.0
    weighted_share_pct: float = 0.0


@dataclass
class DataReport:
    """Everything the report says; `skipped` is by reason, with the first place and detail of each."""

    rows: int = 0
    used: int = 0
    heldout: int = 0
    duplicates_dropped: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    first_place: dict[str, str] = field(default_factory=dict)
    documents: int = 0
    truncated: int = 0
    split: int = 0
    duplicates: int = 0
    tokens: int = 0
    supervised_read: int = 0
    supervised_cut: int = 0
    supervised_heldout: int = 0
    supervised_dropped: int = 0
    supervised_tokens: int = 0
    notes: dict[str, int] = field(default_factory=dict)
    lengths: list[tuple[int, int, int]] = field(default_factory=list)
    """Histogram: from, to (exclusive; 0 for the open end), documents."""
    sources: list[SourceShare] = field(default_factory=list)
    template: dict[str, Any] = field(default_factory=dict)
    """digest of the chat template, its arguments, whether it has generation markers."""
    example: list[tuple[str, bool]] = field(default_factory=list)
    """The first trained document as runs of text, supervised or not."""
    warnings: list[str] = field(default_factory=list)

    def count(self, batch: Batch) -> None:
        """Add what became of one chunk."""
        self.rows += batch.rows
        for reason, place, detail in batch.skipped:
            self.skipped[reason] = self.skipped.get(reason, 0) + 1
            self.first_place.setdefault(reason, place if detail == reason else f"{place} ({detail[:200]})")
        for key, number in batch.counts.items():
            setattr(self, key, getattr(self, key) + number)
        self.notes = dict(Counter(self.notes) + batch.notes)
        self.sources[batch.source].rows += batch.rows
        self.sources[batch.source].usable += len(batch.row_sizes)

    def as_dict(self) -> dict[str, Any]:
        """The report as plain JSON data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> DataReport:
        """Undo as_dict."""
        return cls(**{**plain, "sources": [SourceShare(**source) for source in plain["sources"]]})

    def broken_laws(self) -> list[str]:
        """Each conservation law that the numbers break, in words; none if all is well."""
        skipped = sum(self.skipped.values())
        laws = {
            "rows: read = used + held out + duplicates dropped + skipped": (
                self.rows,
                self.used + self.heldout + self.duplicates_dropped + skipped,
            ),
            "supervised tokens: read = offered + cut off + held out + dropped": (
                self.supervised_read,
                self.supervised_tokens + self.supervised_cut + self.supervised_heldout + self.supervised_dropped,
            ),
        }
        return [f"{law}: {left} = {right}" for law, (left, right) in laws.items() if left != right]


def histogram(lengths: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """Count documents by length in powers of two; empty bins at both ends are left out."""
    counts, _ = np.histogram(lengths, bins=[*_BINS, np.inf])
    bins = [(low, high, int(count)) for low, high, count in zip(_BINS, (*_BINS[1:], 0), counts, strict=True)]
    filled = [number for number, (_, _, count) in enumerate(bins) if count]
    return bins[filled[0] : filled[-1] + 1] if filled else []
