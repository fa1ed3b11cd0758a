"""Make packs: documents -> target -> taps gathered into each pack, on the target's device. Waits for nothing there.

A target that can is read packed, one pack per forward (producer/packed.py). Any other is read in right-padded rows of
near-equal length, which come from a window of packs (producer/row_plan.py); a pack is handed on when its last row has
been gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from configs.schema import Config
from gpu.device import to_device
from producer.row_plan import RowBatch, RowPlan
from producer.trunk import Target

if TYPE_CHECKING:
    from producer.corpus.documents import Documents
    from producer.corpus.schedule import Schedule


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

    @property
    def lengths(self) -> list[int]:
        """Tokens of each document, in the order they stand."""
        return [end - start for start, end in self.spans.values()]

    @property
    def spans(self) -> dict[int, tuple[int, int]]:
        """First and end token of each document."""
        ends = [*list(self.starts.values())[1:], self.num_tokens]
        return {number: (start, end) for (number, start), end in zip(self.starts.items(), ends, strict=True)}

    def gather(self, span: tuple[int, int], taps: Sequence[Tensor], last: Tensor, keep_final: bool) -> None:
        """Copy the states [n, H] of the tokens in `span` to their place; padding stays zero."""
        tokens, hidden = len(self.input_ids), taps[0].shape[-1]
        if self.features is None:
            self.features = torch.empty(
                tokens, len(taps) * hidden, dtype=last.dtype, device=last.device if keep_final else taps[0].device
            )
            self.features[self.num_tokens :].zero_()
            if keep_final:
                self.final_hidden = last.new_empty(tokens, hidden)
                self.final_hidden[self.num_tokens :].zero_()
        start, end = span
        for place, tap in enumerate(taps):
            self.features[start:end, place * hidden : (place + 1) * hidden] = tap
        if self.final_hidden is not None:
            self.final_hidden[start:end] = last


class PackMaker:
    """Runs packs through the target, in the order they are added."""

    def __init__(self, corpus: Documents, schedule: Schedule, target: Target, config: Config) -> None:
        """Read as `target.is_packed` says; the window is `pack.window_packs` for rows, one pack when packed."""
        self._corpus = corpus
        self._schedule = schedule
        self._target = target
        self._pack_tokens = config.pack.tokens
        self._final_hidden = config.target.final_hidden
        self._plan = RowPlan(config.pack.max_row_tokens or config.pack.tokens, config.pack.row_buckets)
        self._packs: dict[int, Pack] = {}
        self.window = 1 if target.is_packed else config.pack.window_packs
        """Packs that are worth having under way at the same time."""
        self.read_tokens = self.row_tokens = 0

    def __len__(self) -> int:
        return len(self._packs)

    @property
    def pack_ids(self) -> set[int]:
        """Packs added and not yet handed on."""
        return set(self._packs)

    @property
    def room(self) -> int:
        """How many packs the window still takes."""
        return self.window - len(self._packs)

    @property
    def padding(self) -> float:
        """Share of the tokens read so far that were padding."""
        return 1 - self.read_tokens / self.row_tokens if self.row_tokens else 0.0

    def add(self, pack_ids: Iterable[int]) -> None:
        """Put packs into the window."""
        for pack_id in pack_ids:
            epoch, documents = self._schedule.epoch_of(pack_id), self._schedule.documents(pack_id)
            pack = Pack(pack_id, epoch, documents, self._corpus, self._pack_tokens)
            self._packs[pack_id] = pack
            if not self._target.is_packed:
                self._plan.add(pack_id, list(zip(pack.documents, pack.lengths, strict=True)))

    def advance(self) -> Iterator[Pack]:
        """Run one forward and yield the packs that it completed; nothing to do without packs in the window."""
        if not self._packs:
            return
        if self._target.is_packed:
            yield self._read_packed(self._packs.pop(next(iter(self._packs))))
            return
        batch = self._plan.next_batch()
        self._read_rows(batch)
        for pack_id in dict.fromkeys(pack_id for pack_id, _ in batch.rows):
            if self._packs[pack_id].missing == 0:
                yield self._packs.pop(pack_id)

    def _read_packed(self, pack: Pack) -> Pack:
        """Read a whole pack at once; its unused end is one more document, whose states are thrown away."""
        unused = self._pack_tokens - pack.num_tokens
        ids = to_device(torch.from_numpy(pack.input_ids), self._target.device).long()
        taps, last = self._target.forward_packed(ids, pack.lengths + ([unused] if unused else []))
        used = slice(0, pack.num_tokens)
        pack.gather((0, pack.num_tokens), [tap[0, used] for tap in taps], last[0, used], self._final_hidden)
        pack.missing = 0
        self._count(pack.num_tokens, self._pack_tokens)
        return pack

    def _read_rows(self, batch: RowBatch) -> None:
        """Run one forward over rows and gather each row's valid tokens into its pack."""
        rows = torch.zeros(len(batch.rows), batch.row_tokens, dtype=torch.int32)
        spans = [self._packs[pack_id].spans[number] for pack_id, number in batch.rows]
        for row, (number, (start, end)) in enumerate(zip((number for _, number in batch.rows), spans, strict=True)):
            rows[row, : end - start] = torch.from_numpy(np.array(self._corpus[number].ids, dtype=np.int32))
        taps, last = self._target.forward(to_device(rows, self._target.device).long())
        for row, ((pack_id, _), span) in enumerate(zip(batch.rows, spans, strict=True)):
            used = slice(0, span[1] - span[0])
            pack = self._packs[pack_id]
            pack.gather(span, [tap[row, used] for tap in taps], last[row, used], self._final_hidden)
            pack.missing -= 1
        self._count(sum(end - start for start, end in spans), rows.numel())

    def _count(self, read_tokens: int, row_tokens: int) -> None:
        self.read_tokens += read_tokens
        self.row_tokens += row_tokens
