"""The tokenised corpus on disk: three memory-mapped arrays, and the report of how it came about.

    ids.npy      int32 [sum n]    all documents end to end
    mask.npy     uint8 [sum n]    1 = supervised
    offsets.npy  int64 [D + 1]    document d is [offsets[d], offsets[d + 1])
    heldout.jsonl                 prompts of documents that are never trained on

Knows the policies for bad and long rows. Conservation: rows read = used + held out + skipped, by reason.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs.schema import DataConfig
from producer.corpus.chat import BadRow, Document, messages_of, tokenize_chat, tokenize_text
from producer.corpus.sources import Row, read_rows


class DataError(Exception):
    """The data cannot be trained on. Exit code 3."""

    exit_code = 3


@dataclass
class DataReport:
    """Counts of what was read, used and skipped; `skipped` is by reason, with the first place of each."""

    rows: int = 0
    used: int = 0
    heldout: int = 0
    documents: int = 0
    truncated: int = 0
    split: int = 0
    duplicates: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    first_place: dict[str, str] = field(default_factory=dict)

    def skip(self, reason: str, place: str) -> None:
        """Count one skipped row."""
        self.skipped[reason] += 1
        self.first_place.setdefault(reason, place)

    def as_dict(self) -> dict[str, Any]:
        """The report as plain JSON data."""
        plain = {key: value for key, value in self.__dict__.items() if isinstance(value, int)}
        return {**plain, "skipped": dict(self.skipped), "first_place": self.first_place}


class Documents:
    """The tokenised corpus, memory-mapped read-only."""

    def __init__(self, folder: Path) -> None:
        self._ids = np.load(folder / "ids.npy", mmap_mode="r")
        self._mask = np.load(folder / "mask.npy", mmap_mode="r")
        self._offsets = np.load(folder / "offsets.npy")

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @property
    def lengths(self) -> list[int]:
        """Tokens of each document."""
        return [int(length) for length in np.diff(self._offsets)]

    def __getitem__(self, number: int) -> Document:
        place = slice(int(self._offsets[number]), int(self._offsets[number + 1]))
        return Document(np.asarray(self._ids[place]), np.asarray(self._mask[place]))

    @property
    def digest(self) -> str:
        """SHA-256 over ids, masks and document bounds: the identity of the data."""
        digest = hashlib.sha256()
        for array in (self._ids, self._mask, self._offsets):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def token_counts(self, vocab_size: int) -> NDArray[np.int64]:
        """How often each token id is supervised, [vocab_size]."""
        supervised = self._ids[np.asarray(self._mask) == 1]
        return np.bincount(supervised, minlength=vocab_size)


def build_documents(config: DataConfig, tokenizer: Any, pack_tokens: int, folder: Path) -> DataReport:
    """Read, tokenise, split and write the corpus into `folder`. Raises DataError if nothing usable is left."""
    folder.mkdir(parents=True, exist_ok=True)
    report = DataReport()
    limit = min(config.max_document_tokens or pack_tokens, pack_tokens)
    rows = list(_usable(config, tokenizer, limit, report))
    heldout = _choose_heldout([document for document, _ in rows], config.heldout_documents)
    kept: list[Document] = []
    for number, (_, parts) in enumerate(rows):
        if number not in heldout:
            kept.extend(parts)
            report.used += 1
    report.heldout = len(heldout)
    if not kept:
        reasons = ", ".join(f"{reason} {count}" for reason, count in report.skipped.items()) or "the sources are empty"
        raise DataError(f"data: no usable document left of {report.rows} rows ({reasons})")
    report.documents = len(kept)
    report.tokens = sum(len(document.ids) for document in kept)
    report.supervised_tokens = sum(int(document.loss_mask.sum()) for document in kept)
    report.duplicates = len(kept) - len({document.ids.tobytes() for document in kept})
    _write(folder, kept)
    _write_heldout(folder, [rows[number][0] for number in sorted(heldout)], tokenizer)
    return report


def _usable(
    config: DataConfig, tokenizer: Any, limit: int, report: DataReport
) -> Iterator[tuple[Document, list[Document]]]:
    """Yield each usable row as the whole document and the parts that fit a pack; count the rest."""
    for row in read_rows(config.sources):
        if config.max_documents is not None and report.rows >= config.max_documents:
            return
        report.rows += 1
        try:
            document = _tokenize(row, config, tokenizer)
            parts = _fit(document, config.long_documents, limit, report)
        except BadRow as bad:
            if config.bad_rows == "fail":
                raise DataError(f"{row.place}: {bad.reason}; mend the row, or set data.bad_rows: skip") from None
            report.skip(bad.reason, row.place)
            continue
        yield document, parts


def _tokenize(row: Row, config: DataConfig, tokenizer: Any) -> Document:
    kind = config.sources[row.source].kind
    if row.content is None:
        raise BadRow("not_json")
    messages = messages_of(row.content) if isinstance(row.content, dict) and kind != "text" else None
    if messages is not None:
        return tokenize_chat(tokenizer, messages, config.chat_template_kwargs)
    text = row.content if isinstance(row.content, str) else row.content.get("text")
    if kind == "chat" or not isinstance(text, str):
        raise BadRow("no_known_fields")
    if not text.strip():
        raise BadRow("empty")
    return tokenize_text(tokenizer, text)


def _fit(document: Document, policy: str, limit: int, report: DataReport) -> list[Document]:
    """Cut a long document by the policy; drop parts without two supervised tokens in a row's reach."""
    parts = [document]
    if len(document.ids) > limit:
        if policy == "skip":
            raise BadRow("too_long")
        cuts = range(0, len(document.ids), limit) if policy == "split" else range(1)
        parts = [Document(document.ids[cut : cut + limit], document.loss_mask[cut : cut + limit]) for cut in cuts]
        report.split += policy == "split"
        report.truncated += policy == "truncate"
    parts = [part for part in parts if int(part.loss_mask.sum()) >= 2]
    if not parts:
        raise BadRow("no_supervised_tokens")
    return parts


def _choose_heldout(documents: list[Document], wanted: int) -> set[int]:
    """Choose held-out rows by the digest of their tokens, so that the choice does not depend on the order."""
    digests = [hashlib.sha256(document.ids.tobytes()).digest() for document in documents]
    by_digest = sorted(range(len(documents)), key=lambda number: digests[number])
    chosen = {digests[number] for number in by_digest[:wanted]}
    return {number for number in range(len(documents)) if digests[number] in chosen}


def _write(folder: Path, documents: list[Document]) -> None:
    np.save(folder / "ids.npy", np.concatenate([document.ids for document in documents]))
    np.save(folder / "mask.npy", np.concatenate([document.loss_mask for document in documents]))
    offsets = np.concatenate([[0], np.cumsum([len(document.ids) for document in documents])])
    np.save(folder / "offsets.npy", offsets.astype(np.int64))


def _write_heldout(folder: Path, documents: list[Document], tokenizer: Any) -> None:
    """Write the prompt (everything before the first supervised token) of each held-out document."""
    with (folder / "heldout.jsonl").open("w", encoding="utf-8") as file:
        for document in documents:
            first = int(np.argmax(document.loss_mask))
            prompt = document.ids[: max(first, 1)].tolist()
            file.write(json.dumps({"prompt_ids": prompt, "text": tokenizer.decode(prompt)}) + "\n")
