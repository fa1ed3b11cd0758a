"""Make packs: documents of a window of packs -> rows -> target -> taps gathered into each pack, on the device.

Rows of one forward may belong to several packs of the window, so rows are near-equal in length while each pack stays
a random mixture. A pack is handed on when its last row has been gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from configs.schema import Config
from producer.corpus.documents import Documents
from producer.corpus.packing import RowBatch, row_batches
from producer.corpus.schedule import Schedule
from producer.target import Target


class BadStates(Exception):
    """The target produced states that cannot be trained on; the message names document and tap. Exit code 3."""

    exit_code = 3


class Pack:
    """One pack under construction: token fields on the host, features (and final_hidden) on the target's device."""

    def __init__(self, pack_id: int, epoch: int, documents: Sequence[int], corpus: Documents, tokens: int) -> None:
        self.pack_id = pack_id
        self.epoch = epoch
        self.documents = tuple(documents)
        self.input_ids: NDArray[np.int32] = np.zeros(tokens, dtype=np.int32)
        self.loss_mask: NDArray[np.uint8] = np.zeros(tokens, dtype=np.uint8)
        self.doc_start: NDArray[np.int32] = np.full(tokens, -1, dtype=np.int32)
        self.starts: dict[int, int] = {}
        self.features: Tensor | None = None
        self.final_hidden: Tensor | None = None
        self.missing = len(self.documents)
        place = 0
        for number in self.documents:
            document = corpus[number]
            end = place + len(document.ids)
            self.input_ids[place:end] = document.ids
            self.loss_mask[place:end] = document.loss_mask
            self.doc_start[place:end] = place
            self.starts[number] = place
            place = end
        self.num_tokens = place


class PackMaker:
    """Runs windows of packs through the target; `buckets` are the row lengths it may see."""

    def __init__(
        self,
        corpus: Documents,
        schedule: Schedule,
        target: Target,
        device: torch.device,
        config: Config,
        buckets: Sequence[int],
    ) -> None:
        self._corpus = corpus
        self._schedule = schedule
        self._target = target
        self._device = device
        self._pack_tokens = config.pack.tokens
        self._max_row_tokens = config.pack.max_row_tokens or config.pack.tokens
        self._buckets = tuple(buckets)
        self._final_hidden = config.target.final_hidden

    def window(self, pack_ids: Sequence[int], stop: Callable[[], bool]) -> Iterator[Pack]:
        """Yield the packs of `pack_ids`, each as soon as its last document has been gathered. Raises BadStates.

        `stop` is asked before each forward; packs that are not complete by then are given up.
        """
        packs = {pack_id: self._new_pack(pack_id) for pack_id in pack_ids}
        owner = {(pack_id, number): pack for pack_id, pack in packs.items() for number in pack.documents}
        keys = list(owner)
        lengths = [len(self._corpus[number].ids) for _, number in keys]
        for batch in row_batches(range(len(keys)), lengths, self._max_row_tokens, self._buckets):
            if stop():
                return
            self._extract(batch, keys, owner)
            for key in {keys[row][0] for row in batch.documents}:
                if packs[key].missing == 0:
                    yield packs.pop(key)

    def _new_pack(self, pack_id: int) -> Pack:
        documents = self._schedule.documents(pack_id)
        return Pack(pack_id, self._schedule.epoch_of(pack_id), documents, self._corpus, self._pack_tokens)

    def _extract(self, batch: RowBatch, keys: list[tuple[int, int]], owner: dict[tuple[int, int], Pack]) -> None:
        """Run one forward and gather each row's valid tokens into its pack."""
        rows = torch.zeros(len(batch.documents), batch.row_tokens, dtype=torch.int64)
        row_keys = [keys[row] for row in batch.documents]
        for row, (_, number) in enumerate(row_keys):
            ids = self._corpus[number].ids
            rows[row, : len(ids)] = torch.from_numpy(np.array(ids, dtype=np.int64))
        taps, last = self._target.forward(rows.to(self._device))
        for row, key in enumerate(row_keys):
            pack, start = owner[key], owner[key].starts[key[1]]
            end = start + len(self._corpus[key[1]].ids)
            self._allocate(pack, taps)
            assert pack.features is not None
            hidden = taps[0].shape[-1]
            for place, tap in enumerate(taps):
                states = tap[row, : end - start]
                check_states(states, document=key[1], tap=place)
                pack.features[start:end, place * hidden : (place + 1) * hidden] = states
            if pack.final_hidden is not None:
                pack.final_hidden[start:end] = last[row, : end - start]
            pack.missing -= 1

    def _allocate(self, pack: Pack, taps: list[Tensor]) -> None:
        if pack.features is None:
            hidden = taps[0].shape[-1]
            pack.features = taps[0].new_zeros(self._pack_tokens, len(taps) * hidden)
            if self._final_hidden:
                pack.final_hidden = taps[0].new_zeros(self._pack_tokens, hidden)


def check_states(states: Tensor, document: int, tap: int) -> None:
    """Raise BadStates for a non-finite value or an all-zero row in one document's tap [n, H].

    One reduction and one small host copy per document and tap: fine on a CPU; a GPU path must batch it.
    """
    largest = states.abs().amax(dim=-1)
    if bool(torch.isfinite(largest).all()) and bool((largest > 0).all()):
        return
    bad = int((~torch.isfinite(largest)).sum())
    zero = int((largest == 0).sum())
    raise BadStates(
        f"target states of document {document}, tap {tap}: expected finite, non-zero rows, got {bad} rows with "
        f"NaN or Inf and {zero} all-zero rows of {len(states)}; the target or its attention backend is broken"
    )
