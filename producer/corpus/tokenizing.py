"""Tokenise chunks of rows, in one process or in several: rows in, arrays of tokens out, in the order of the sources.

Only a few chunks are under way at a time, so memory does not grow with the corpus. A corpus of a few thousand rows is
done by the calling process; beyond that each further process loads the tokenizer once.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs.cores import usable_cores
from configs.schema import DataConfig
from ops.control import die_with_parent
from producer.corpus.chat import ChatTokenizer, Document, tokenize_text
from producer.corpus.conversation import BadRow, conversation_of, unknown_fields
from producer.corpus.sources import Chunk, Row

CHUNKS_BEFORE_HELP = 8  # a process that helps takes seconds to start
CHUNKS_UNDER_WAY = 3  # per process
DIGEST_BYTES = 16
MIN_SUPERVISED = 2  # an anchor and a token to predict: fewer can never be trained on


class TokenizingFailed(Exception):
    """A process that tokenises has died. Exit code 5."""

    exit_code = 5


@dataclass
class Batch:
    """What became of one chunk. Documents stand end to end; those of one row (a split one) are neighbours."""

    source: int
    rows: int = 0
    ids: list[NDArray[np.int32]] = field(default_factory=list)
    mask: list[NDArray[np.uint8]] = field(default_factory=list)
    row_sizes: list[int] = field(default_factory=list)
    """Documents of each usable row."""
    row_digests: list[bytes] = field(default_factory=list)
    """Identity of each usable row: a digest of all its tokens, before any cut."""
    skipped: list[tuple[str, str, str]] = field(default_factory=list)
    """Reason, place and detail of each row that cannot be used."""
    counts: Counter[str] = field(default_factory=Counter)
    """truncated, split, supervised_read, supervised_cut."""
    notes: Counter[str] = field(default_factory=Counter)


class RowTokenizer:
    """Tokenises rows by the rules of a configuration."""

    def __init__(self, config: DataConfig, tokenizer: Any, limit: int) -> None:
        """limit: tokens of the longest document."""
        self._config, self._tokenizer, self._limit = config, tokenizer, limit
        self._chat = ChatTokenizer(tokenizer, config.chat_template_kwargs, config.end_of_turn, config.empty_reasoning)

    def batch(self, chunk: Chunk) -> Batch:
        """Tokenise one chunk; rows that cannot be used are listed, never raised."""
        batch = Batch(chunk.source)
        self._chat.notes = batch.notes
        for row in chunk.rows():
            batch.rows += 1
            try:
                self._add(batch, row, self._config.sources[chunk.source].kind)
            except BadRow as bad:
                batch.skipped.append((bad.reason, row.place, str(bad)))
        return batch

    def _add(self, batch: Batch, row: Row, kind: str) -> None:
        document = self._tokenize(row, kind)
        parts = self._fit(document, batch)
        batch.ids += [part.ids for part in parts]
        batch.mask += [part.loss_mask for part in parts]
        batch.row_sizes.append(len(parts))
        batch.row_digests.append(sha256(document.ids.tobytes()).digest()[:DIGEST_BYTES])
        supervised = int(document.loss_mask.sum())
        batch.counts["supervised_read"] += supervised
        batch.counts["supervised_cut"] += supervised - sum(int(part.loss_mask.sum()) for part in parts)

    def _tokenize(self, row: Row, kind: str) -> Document:
        if row.content is None:
            raise BadRow(row.fault)
        if isinstance(row.content, dict) and row.content.keys() == {"skipped", "place"}:  # by regeneration
            raise BadRow(str(row.content["skipped"]), str(row.content["place"]))
        if kind != "text" and not isinstance(row.content, str):
            conversation = conversation_of(row.content)
            if conversation is not None:
                return self._chat.tokenize(conversation)
        text = row.content.get("text") if isinstance(row.content, dict) else row.content
        if kind == "chat" or not isinstance(text, str):
            raise BadRow("no_known_fields", unknown_fields(row.content, kind))
        if not text.strip():
            raise BadRow("empty")
        return tokenize_text(self._tokenizer, text)

    def _fit(self, document: Document, batch: Batch) -> list[Document]:
        """Cut a long document by the policy; drop parts that cannot be trained on."""
        limit, policy, parts = self._limit, self._config.long_documents, [document]
        is_long = len(document.ids) > limit
        if is_long:
            if policy == "skip":
                raise BadRow("too_long")
            cuts = range(0, len(document.ids), limit) if policy == "split" else range(1)
            parts = [Document(document.ids[cut : cut + limit], document.loss_mask[cut : cut + limit]) for cut in cuts]
        parts = [part for part in parts if int(part.loss_mask.sum()) >= MIN_SUPERVISED]
        if not parts:
            raise BadRow("no_supervised_tokens")
        batch.counts["split" if policy == "split" else "truncated"] += is_long
        return parts


def tokenize(
    chunks: Iterable[Chunk], rows: RowTokenizer, folder: str, config: DataConfig, limit: int
) -> Iterator[Batch]:
    """Yield the batch of each chunk, in order; processes that help load the tokenizer from `folder`.

    Raises TokenizingFailed.
    """
    chunks = iter(chunks)
    for _, chunk in zip(range(CHUNKS_BEFORE_HELP), chunks, strict=False):
        yield rows.batch(chunk)
    workers = config.workers or usable_cores()
    first = next(chunks, None)
    if first is None:
        return
    yield rows.batch(first)
    if workers == 1:
        yield from map(rows.batch, chunks)
        return
    yield from _in_processes(chunks, workers, (config, folder, limit))


def _in_processes(chunks: Iterator[Chunk], workers: int, rules: tuple[DataConfig, str, int]) -> Iterator[Batch]:
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_helper, initargs=rules)
    under_way: deque[Future[Batch]] = deque()
    try:
        for chunk in chunks:
            under_way.append(pool.submit(_help, chunk))
            if len(under_way) >= CHUNKS_UNDER_WAY * workers:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    except BrokenProcessPool:
        raise TokenizingFailed(
            "data: a process that tokenises has died (killed for memory?); lower data.workers and start again"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_helper: RowTokenizer | None = None


def _start_helper(config: DataConfig, folder: str, limit: int) -> None:
    global _helper
    die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import transformers

    _helper = RowTokenizer(config, transformers.AutoTokenizer.from_pretrained(folder), limit)


def _help(chunk: Chunk) -> Batch:
    assert _helper is not None
    return _helper.batch(chunk)
