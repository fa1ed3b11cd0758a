"""From a tokenised corpus to what a run trains on: held-out documents and duplicates set apart, sources weighted.

Cheap beside tokenising (it reads a few bytes per document), so other held-out numbers or weights need no new tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs.schema import DataConfig
from producer.corpus.cache import content_digest, read_report
from producer.corpus.documents import DataError, Documents, data_digest, describe
from producer.corpus.report import DataReport, histogram
from producer.corpus.store import Corpus, write_view

HELDOUT_FILE = "heldout.jsonl"


def select(config: DataConfig, corpus_folder: Path, run_data: Path, tokenizer: Any) -> tuple[DataReport, str]:
    """Write the view of a corpus that a run trains on; returns the data report and the data's digest.

    Raises DataError where nothing is left, or a conservation law is broken.
    """
    report = read_report(corpus_folder)
    corpus = Corpus(corpus_folder)
    digests = corpus.digests().copy().view("S16").ravel()
    heldout = _choose_heldout(digests, config.heldout_documents)
    dropped = _repeats(digests) & ~heldout if config.deduplicate else np.zeros(len(digests), dtype=bool)
    row_of = np.repeat(np.arange(len(digests)), np.diff(corpus.rows()))
    kept = np.flatnonzero(~(heldout | dropped)[row_of])
    if not len(kept):
        raise DataError(_nothing_left(report, len(digests), config))
    digest = data_digest(content_digest(corpus_folder), kept, config)
    write_view(run_data, corpus_folder, kept, {"digest": digest})
    _write_heldout(run_data, corpus, np.flatnonzero(heldout), tokenizer)
    _complete(report, corpus, heldout, dropped, row_of)
    _add_sources(report, Documents(run_data), config)
    report.example = describe(Documents(run_data)[0], tokenizer)
    if broken := report.broken_laws():
        raise DataError(f"data: documents would be lost: {'; '.join(broken)} does not hold; please report this")
    return report, digest


def _nothing_left(report: DataReport, usable: int, config: DataConfig) -> str:
    """Say why there is nothing to train on: every usable row is held out, none is usable, or there is no row."""
    if usable:
        return (
            f"data.heldout_documents: {config.heldout_documents} would hold out all {usable} usable rows of "
            f"{report.rows}, and leave no usable document to train on; lower it"
        )
    if not report.rows:
        names = ", ".join(source.path for source in config.sources)
        return f"data.sources: no usable document, since there is not one row in {names}"
    reasons = "; ".join(
        f"{reason} {count}, first {report.first_place[reason]}" for reason, count in report.skipped.items()
    )
    return f"data: no usable document left of {report.rows} rows: {reasons}"


def _choose_heldout(digests: NDArray[Any], wanted: int) -> NDArray[np.bool_]:
    """Choose rows by the smallest digests, so that the choice does not depend on the order; duplicates go together."""
    chosen = np.sort(digests)[:wanted]
    return np.isin(digests, chosen)


def _repeats(digests: NDArray[Any]) -> NDArray[np.bool_]:
    """Which rows repeat an earlier one, [R]."""
    _, first = np.unique(digests, return_index=True)
    repeats = np.ones(len(digests), dtype=bool)
    repeats[first] = False
    return repeats


def _complete(
    report: DataReport,
    corpus: Corpus,
    heldout: NDArray[np.bool_],
    dropped: NDArray[np.bool_],
    row_of: NDArray[np.int64],
) -> None:
    """Account for what is set apart."""
    lengths = np.diff(corpus.offsets)
    kept = ~(heldout | dropped)
    report.used, report.heldout, report.duplicates_dropped = int(kept.sum()), int(heldout.sum()), int(dropped.sum())
    report.duplicates = int(_repeats(corpus.digests().copy().view("S16").ravel()).sum())
    report.documents = int(kept[row_of].sum())
    report.tokens = int(lengths[kept[row_of]].sum())
    apart = {"heldout": heldout, "dropped": dropped}
    for name, rows in apart.items():
        documents = np.flatnonzero(rows[row_of]).tolist()
        supervised = sum(int(corpus.mask[corpus.place(document)].sum()) for document in documents)
        setattr(report, f"supervised_{name}", supervised)
    report.supervised_tokens = int(corpus.counts()[1].sum()) - report.supervised_heldout - report.supervised_dropped
    report.lengths = histogram(lengths[kept[row_of]])


def _add_sources(report: DataReport, documents: Documents, config: DataConfig) -> None:
    """Work out each source's share of the tokens: as they are, and as an epoch takes them."""
    lengths, sources = documents.length_array, documents.sources()
    for number, (share, source) in enumerate(zip(report.sources, config.sources, strict=True)):
        own = lengths[sources == number]
        share.name, share.weight = source.name or source.path, source.weight
        share.documents, share.tokens = len(own), int(own.sum())
    total = sum(share.tokens for share in report.sources)
    weighted = sum(share.tokens * share.weight for share in report.sources)
    for share in report.sources:
        share.share_pct = round(100 * share.tokens / total, 2)
        share.weighted_share_pct = round(100 * share.tokens * share.weight / weighted, 2)


def _write_heldout(folder: Path, corpus: Corpus, rows: NDArray[np.int64], tokenizer: Any) -> None:
    """Write prompt (everything before the first supervised token) and answer of each held-out row's first document."""
    first_document = corpus.rows()
    with (folder / HELDOUT_FILE).open("w", encoding="utf-8") as file:
        for row in rows.tolist():
            place = corpus.place(int(first_document[row]))
            first = int(np.argmax(corpus.mask[place]))
            prompt = corpus.ids[place][: max(first, 1)].tolist()
            run = int(np.argmin(np.append(corpus.mask[place][first:], 0)))  # the answer: supervised without a gap
            answer = corpus.ids[place][first : first + run].tolist() if first else []
            row = {"prompt_ids": prompt, "answer_ids": answer, "text": tokenizer.decode(prompt)}
            file.write(json.dumps(row) + "\n")
