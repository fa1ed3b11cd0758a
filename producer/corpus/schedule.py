"""pack_id -> documents, as a pure function of (data digest, seed, epochs, pack size).

Any producer can make any pack again, in any process, on any host: this is what makes resume, elastic numbers of
processes and re-extraction after a crash simple. Pack ids run through all epochs without a gap.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from producer.corpus.packing import pack_documents


class Schedule:
    """The packs of all epochs. Epochs are packed when first asked for and kept."""

    def __init__(self, lengths: Sequence[int], digest: str, seed: int, epochs: int, pack_tokens: int) -> None:
        self._lengths = lengths
        self._key = f"{digest}:{seed}:{pack_tokens}"
        self._pack_tokens = pack_tokens
        self._epochs = [self._pack_epoch(epoch) for epoch in range(epochs)]
        self._ends = np.cumsum([len(packs) for packs in self._epochs])

    @property
    def num_packs(self) -> int:
        """Packs of all epochs together."""
        return int(self._ends[-1])

    @property
    def packs_per_epoch(self) -> list[int]:
        """Packs of each epoch."""
        return [len(packs) for packs in self._epochs]

    def epoch_of(self, pack_id: int) -> int:
        """The epoch a pack belongs to."""
        return int(np.searchsorted(self._ends, pack_id, side="right"))

    def documents(self, pack_id: int) -> tuple[int, ...]:
        """The documents of a pack, in the order they stand in it. Raises IndexError outside 0..num_packs-1."""
        if not 0 <= pack_id < self.num_packs:
            raise IndexError(f"pack {pack_id}: expected 0..{self.num_packs - 1}")
        epoch = self.epoch_of(pack_id)
        return self._epochs[epoch][pack_id - int(self._ends[epoch])]  # negative index: counted from the epoch's end

    def fill(self) -> float:
        """Share of the packs' tokens that are documents, over all epochs."""
        tokens = sum(int(np.sum(np.asarray(self._lengths)[list(pack)])) for packs in self._epochs for pack in packs)
        return tokens / (self.num_packs * self._pack_tokens)

    def _pack_epoch(self, epoch: int) -> list[tuple[int, ...]]:
        digest = hashlib.sha256(f"{self._key}:{epoch}".encode()).digest()
        generator = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))
        order = generator.permutation(len(self._lengths))
        return pack_documents(self._lengths, [int(document) for document in order], self._pack_tokens)
