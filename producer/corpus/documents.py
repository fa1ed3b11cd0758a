"""The documents that a run trains on: memory-mapped, numbered from 0, and where each came from."""

from __future__ import annotations

import hashlib
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs.schema import DataConfig
from producer.corpus.chat import Document
from producer.corpus.store import read_view


class DataError(Exception):
    """The data cannot be trained on. Exit code 3."""

    exit_code = 3


class Documents:
    """A run's documents, read-only. Held-out ones and dropped duplicates are not among them."""

    def __init__(self, folder: Path) -> None:
        """Open the data folder of a run. Raises DataError if the tokenised data are gone."""
        try:
            self._corpus, self._kept = read_view(folder)
        except FileNotFoundError as error:
            raise DataError(str(error)) from None

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each document."""
        return self.length_array.tolist()  # type: ignore[no-any-return]

    @property
    def length_array(self) -> NDArray[np.int64]:
        """Tokens of each document, [D]."""
        return np.diff(self._corpus.offsets)[self._kept]

    def __getitem__(self, number: int) -> Document:
        place = self._corpus.place(int(self._kept[number]))
        return Document(np.asarray(self._corpus.ids[place]), np.asarray(self._corpus.mask[place]))

    def sources(self) -> NDArray[np.uint16]:
        """Source of each document, [D]."""
        per_row = self._corpus.sources()
        return np.repeat(per_row, np.diff(self._corpus.rows()))[self._kept]

    def token_counts(self, vocab_size: int) -> NDArray[np.int64]:
        """How often each token id is supervised, [vocab_size]; documents that are not trained on do not count."""
        corpus = self._corpus
        counts = np.zeros(vocab_size, dtype=np.int64)
        supervised = corpus.counts()[1]
        counts[: len(supervised)] = supervised
        left_out = np.setdiff1d(np.arange(len(corpus.offsets) - 1), self._kept, assume_unique=True)
        for document in left_out.tolist():
            place = corpus.place(document)
            counts -= np.bincount(corpus.ids[place][corpus.mask[place] == 1], minlength=vocab_size)
        return counts

    def used_ids(self) -> NDArray[np.int64]:
        """Token ids that occur anywhere in the corpus, ascending; held-out documents included."""
        return np.flatnonzero(self._corpus.counts()[0])


def data_digest(content: str, kept: NDArray[np.int64], config: DataConfig) -> str:
    """Identity of what is trained on: the tokens and masks, which documents, and how often each source's."""
    weights = [source.weight for source in config.sources]
    digest = hashlib.sha256(content.encode())
    digest.update(np.ascontiguousarray(kept, dtype="<i8").data)
    digest.update(json.dumps(weights).encode())
    return digest.hexdigest()


def describe(document: Document, tokenizer: Any, limit: int = 300) -> list[tuple[str, bool]]:
    """A document's first `limit` tokens as runs of text, each supervised or not."""
    ids, mask = document.ids[:limit], document.loss_mask[:limit]
    edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)]
    return [
        (str(tokenizer.decode(ids[a:z], clean_up_tokenization_spaces=False)), bool(mask[a]))
        for a, z in pairwise(edges)
        if z > a
    ]
