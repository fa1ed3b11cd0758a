"""pack_id -> documents, as a pure function of (data digest, seed, epoch, pack size).

Any producer can make any pack again, in any process, on any host: this is what makes resume, elastic numbers of
processes and re-extraction after a crash simple. Pack ids run through all epochs without a gap.

Mixture: a source of n documents and weight w gives w * n of them each epoch, taken in turn from its endless row of
shuffles (each shuffle holds every document once). So over any number of epochs two documents of one source differ by
at most one in how often they are trained on, and with weight 1 each is trained on once an epoch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from configs.schema import Config
from producer.corpus.documents import Documents
from producer.corpus.packing import pack_documents


class Mixture(NamedTuple):
    """Source of each document, [D], and the weight of each source."""

    sources: NDArray[np.uint16]
    weights: tuple[float, ...]


class _Epoch(NamedTuple):
    """Packs of one epoch: documents end to end, and the bounds of each pack."""

    documents: NDArray[np.int32]
    bounds: NDArray[np.int64]


class Schedule:
    """The packs of all epochs. An epoch is packed when first asked for, and kept: 12 bytes a document."""

    def __init__(
        self,
        lengths: Sequence[int],
        digest: str,
        seed: int,
        epochs: int,
        pack_tokens: int,
        mixture: Mixture | None = None,
        packs_per_epoch: Sequence[int] | None = None,
    ) -> None:
        """packs_per_epoch: as an earlier Schedule of the same arguments found them; saves packing every epoch now."""
        self._lengths = lengths
        self._key = f"{digest}:{seed}:{pack_tokens}"
        self._pack_tokens = pack_tokens
        self._mixture = mixture or Mixture(np.zeros(len(lengths), dtype=np.uint16), (1.0,))
        self._epochs: dict[int, _Epoch] = {}
        counts = packs_per_epoch or [len(self._epoch(epoch).bounds) - 1 for epoch in range(epochs)]
        self._ends = np.cumsum(counts)

    @property
    def num_packs(self) -> int:
        """Packs of all epochs together."""
        return int(self._ends[-1])

    @property
    def packs_per_epoch(self) -> list[int]:
        """Packs of each epoch."""
        return np.diff(self._ends, prepend=0).tolist()  # type: ignore[no-any-return]

    def epoch_of(self, pack_id: int) -> int:
        """The epoch a pack belongs to."""
        return int(np.searchsorted(self._ends, pack_id, side="right"))

    def documents(self, pack_id: int) -> tuple[int, ...]:
        """The documents of a pack, in the order they stand in it. Raises IndexError outside 0..num_packs-1."""
        if not 0 <= pack_id < self.num_packs:
            raise IndexError(f"pack {pack_id}: expected 0..{self.num_packs - 1}")
        number = self.epoch_of(pack_id)
        epoch = self._epoch(number)
        place = pack_id - (int(self._ends[number - 1]) if number else 0)
        return tuple(epoch.documents[epoch.bounds[place] : epoch.bounds[place + 1]].tolist())

    def epoch_documents(self, epoch: int) -> NDArray[np.int32]:
        """Every document of an epoch, once for each time it is trained on, in the order of the packs."""
        return self._epoch(epoch).documents

    def fill(self) -> float:
        """Share of the packs' tokens that are documents, over all epochs."""
        lengths = np.asarray(self._lengths)
        tokens = sum(int(lengths[self.epoch_documents(epoch)].sum()) for epoch in range(len(self._ends)))
        return tokens / (self.num_packs * self._pack_tokens)

    def _epoch(self, epoch: int) -> _Epoch:
        if epoch not in self._epochs:
            generator = self._generator(str(epoch))
            chosen = [self._taken(source, weight, epoch) for source, weight in enumerate(self._mixture.weights)]
            order = generator.permutation(np.concatenate(chosen))
            packs = pack_documents(self._lengths, order.tolist(), self._pack_tokens)
            documents = np.fromiter((document for pack in packs for document in pack), dtype=np.int32)
            bounds = np.cumsum([0, *map(len, packs)])
            self._epochs[epoch] = _Epoch(documents, bounds)
        return self._epochs[epoch]

    def _taken(self, source: int, weight: float, epoch: int) -> NDArray[np.int64]:
        """The documents of one source in one epoch: the next `weight` shares of its row of shuffles."""
        own = np.flatnonzero(self._mixture.sources == source)
        if not len(own):
            return own
        first, stop = int(weight * len(own) * epoch + 1e-6), int(weight * len(own) * (epoch + 1) + 1e-6)
        parts = []
        for lap in range(first // len(own), -(-stop // len(own))):
            shuffled = self._generator(f"source {source} lap {lap}").permutation(own)
            parts.append(shuffled[max(0, first - lap * len(own)) : stop - lap * len(own)])
        return np.concatenate(parts) if parts else own[:0]

    def _generator(self, purpose: str) -> np.random.Generator:
        digest = hashlib.sha256(f"{self._key}:{purpose}".encode()).digest()
        return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))


def schedule_of(
    documents: Documents, digest: str, config: Config, packs_per_epoch: Sequence[int] | None = None
) -> Schedule:
    """The schedule of a run: the same in preparation and in every producer. packs_per_epoch: see Schedule."""
    weights = tuple(source.weight for source in config.data.sources)
    mixture = Mixture(documents.sources(), weights)
    return Schedule(
        documents.lengths, digest, config.run.seed, config.training.epochs, config.pack.tokens, mixture, packs_per_epoch
    )
