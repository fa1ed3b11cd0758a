"""Tokenised data are kept under a key of everything that shaped them, and found again by it.

CACHE/KEY/          a corpus (store.py) with key.json and report.json, complete or not there at all
CACHE/KEY.lock      flock of the process that makes it; another run with the same key waits
RUN/data/key.json   what shaped the data of that run last time: a changed key says what changed
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from configs.run_files import write_atomically
from configs.schema import DataConfig
from producer.corpus.documents import DataError
from producer.corpus.report import DataReport, SourceShare
from producer.corpus.sources import fingerprint, read_chunks
from producer.corpus.store import CorpusWriter
from producer.corpus.tokenizing import RowTokenizer, tokenize

TOKENIZING_VERSION = 3
"""Raised whenever this code makes other tokens or masks of the same rows."""

Say = Callable[[str], None]
Progress = Callable[[str], None]
_PROGRESS_EVERY_S = 0.5
_SHOWN = 120


def key_parts(config: DataConfig, tokenizer: Any, limit: int) -> dict[str, Any]:
    """Everything that shapes the tokenised data, by the name a person would give it. Raises SourceError."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise DataError("target.model: its tokenizer is not a fast one; text offsets are needed for the loss mask")
    parts: dict[str, Any] = {}
    for number, source in enumerate(config.sources):
        parts[f"data.sources.{number}"] = [source.path, source.kind, source.subset, source.split, source.revision]
        for place, state in enumerate(fingerprint(source, number)):
            parts[f"data.sources.{number} content {place}"] = state
    return parts | {
        "tokenizer": _sha256(backend.to_str() + json.dumps(tokenizer.special_tokens_map, default=str)),
        "chat template": str(tokenizer.chat_template or ""),
        "data.chat_template_kwargs": config.chat_template_kwargs,
        "data.end_of_turn": config.end_of_turn,
        "data.empty_reasoning": config.empty_reasoning,
        "longest document (data.max_document_tokens, pack.tokens)": limit,
        "data.long_documents": config.long_documents,
        "data.max_documents": config.max_documents,
        "tokenising code version": TOKENIZING_VERSION,
    }


def key_of(parts: dict[str, Any]) -> str:
    """The key: 24 hex digits."""
    return _sha256(json.dumps(parts, sort_keys=True))[:24]


def changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Name what differs between two keys' parts, with both values."""
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return [f"{name}: {_difference(old.get(name), new.get(name))}" for name in names]


def tokenized(
    config: DataConfig, tokenizer: Any, tokenizer_folder: str, limit: int, cache: Path, run_data: Path, say: Say,
    progress: Progress,
) -> Path:  # fmt: skip
    """Return the folder of the tokenised corpus: from the cache, or made now.

    Raises DataError (bad rows with data.bad_rows: fail), SourceError, TokenizingFailed, OSError.
    """
    parts = key_parts(config, tokenizer, limit)
    key = key_of(parts)
    folder = cache / key
    cache.mkdir(parents=True, exist_ok=True)
    run_data.mkdir(parents=True, exist_ok=True)
    with _locked(cache / f"{key}.lock", lambda: say(f"waiting for another run that tokenises the same data ({key})")):
        if (folder / "report.json").exists():
            say(f"tokenised data found in the cache: {folder}")
        else:
            _say_why(run_data / "key.json", parts, say)
            partial = cache / f"{key}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            try:
                _make(config, tokenizer, tokenizer_folder, limit, partial, say, progress)
                (partial / "key.json").write_text(json.dumps(parts))
                partial.rename(folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    write_atomically(run_data / "key.json", json.dumps(parts))
    return folder


def read_report(folder: Path) -> DataReport:
    """The report of a corpus, before held-out documents and duplicates are set apart."""
    return DataReport.from_dict(json.loads((folder / "report.json").read_text()))


def content_digest(folder: Path) -> str:
    """Identity of a corpus's tokens and masks."""
    return str(json.loads((folder / "content.json").read_text())["sha256"])


def _make(
    config: DataConfig, tokenizer: Any, tokenizer_folder: str, limit: int, folder: Path, say: Say, progress: Progress
) -> None:
    report = DataReport(sources=[SourceShare(source.name or source.path, source.weight) for source in config.sources])
    rows = RowTokenizer(config, tokenizer, limit)
    digest = hashlib.sha256()
    began = shown = time.monotonic()
    chunks = limited(read_chunks(config.sources), config.max_documents)
    with closing(CorpusWriter(folder)) as writer:
        for batch in tokenize(chunks, rows, tokenizer_folder, config, limit):
            if batch.skipped and config.bad_rows == "fail":
                _fail(*batch.skipped[0])
            report.count(batch)
            writer.append(batch.ids, batch.mask, batch.row_sizes, batch.row_digests, batch.source)
            for ids, mask in zip(batch.ids, batch.mask, strict=True):
                digest.update(len(ids).to_bytes(8, "little"))
                digest.update(ids.data)
                digest.update(mask.data)
            report.documents += len(batch.ids)
            report.tokens += sum(map(len, batch.ids))
            now = time.monotonic()
            if now - shown >= _PROGRESS_EVERY_S:
                shown = now
                per_s = report.rows / (now - began)
                progress(f"tokenising: {report.rows:,} rows, {report.tokens:,} tokens, {per_s:,.0f} rows/s")
    seconds = time.monotonic() - began
    say(f"tokenised {report.rows:,} rows, {report.tokens:,} tokens in {seconds:.1f} s")
    (folder / "content.json").write_text(json.dumps({"sha256": digest.hexdigest()}))
    write_atomically(folder / "report.json", json.dumps(report.as_dict()))


def fail_on_skipped(report: DataReport) -> None:
    """Raise DataError for the first skipped row of a report, for data.bad_rows: fail with cached data."""
    for reason, place in report.first_place.items():
        _fail(reason, place, reason)


def _fail(reason: str, place: str, detail: str) -> None:
    more = f" ({detail})" if detail != reason else ""
    raise DataError(f"{place}: {reason}{more}; mend the row, or set data.bad_rows: skip")


def limited(chunks: Iterator[Any], limit: int | None) -> Iterator[Any]:
    """Stop after `limit` rows."""
    left = limit
    for chunk in chunks:
        if left is None:
            yield chunk
            continue
        if left <= 0:
            return
        yield chunk._replace(items=chunk.items[:left])
        left -= len(chunk.items)


@contextmanager
def _locked(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _say_why(known: Path, parts: dict[str, Any], say: Say) -> None:
    """Say what changed since this run's data were made last, if they were."""
    if not known.exists():
        return
    differ = changes(json.loads(known.read_text()), parts)
    if differ:
        say(f"tokenising again, since these changed: {'; '.join(differ)}")
    else:
        say("tokenising again, since the cached data are gone")


def _difference(old: Any, new: Any) -> str:
    """Two values, short ones whole, of long ones the first place where they differ."""
    before, after = ("nothing" if value is None else str(value) for value in (old, new))
    if max(len(before), len(after)) <= _SHOWN:
        return f"{before!r} -> {after!r}"
    at = next((n for n, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after)))
    start = max(0, at - 20)
    return f"at character {at}: {before[start : at + 40]!r} -> {after[start : at + 40]!r}"


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
