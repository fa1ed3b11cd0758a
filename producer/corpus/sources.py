"""Read rows from JSON lines, Parquet, Hugging Face datasets and plain text, in chunks. Knows nothing of tokens.

The suffix says what a file holds. A file of another suffix, or of none, is refused: nothing would tell rows from text.

A chunk is what one tokenising process works on: some rows of one file as they were read (lines of JSON are decoded
later, in that process), and the number of the first. Only a few chunks exist at a time, whatever the corpus's size.
Each row comes with the place it stands at, so that a refusal can name file and line.
"""

from __future__ import annotations

import codecs
import importlib.util
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from configs.schema import SourceConfig

LINES = {".jsonl", ".ndjson"}
TEXTS = {".txt", ".md", ".rst", ".py"}
PARQUET = ".parquet"
SUFFIXES = LINES | TEXTS | {PARQUET}
UNREAD = {".json", ".csv", ".tsv", ".arrow", ".gz", ".zst", ".xz", ".bz2", ".zip", ".tar"}
"""Suffixes of files that may well hold rows, which are not read: said where a folder has some beside what is read."""
SAVED_DATASET = ("dataset_dict.json", "dataset_info.json")
ROWS_PER_CHUNK = 256


class SourceError(Exception):
    """A source cannot be read at all. Exit code 3."""

    exit_code = 3


class Row(NamedTuple):
    """One row: content (a mapping, a list of turns, or plain text), place, and why it cannot be read."""

    content: dict[str, Any] | list[Any] | str | None
    place: str
    fault: str = ""


class Chunk(NamedTuple):
    """Rows of one source as read: `items` are lines of JSON (bytes), mappings, or one whole text (str, or a Row)."""

    source: int
    origin: str
    first: int
    items: list[Any]

    def rows(self) -> Iterator[Row]:
        """Decode the rows; empty lines are passed over."""
        for number, item in enumerate(self.items, start=self.first):
            place = self.origin if isinstance(item, str) else f"{self.origin}:{number}"
            if isinstance(item, Row):
                yield item
            elif not isinstance(item, bytes):
                yield Row(item, place)
            elif item.strip():
                yield _decode(item, place)


_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def _is_unicode(content: Any) -> bool:
    """Whether no text of the row holds half of a surrogate pair, which no tokenizer takes."""
    try:
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _decode(line: bytes, place: str) -> Row:
    try:
        content = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return Row(None, place, "not_utf8")
    except (ValueError, RecursionError):  # the second: brackets without end
        return Row(None, place, "not_json")
    if _SURROGATE.search(line) and not _is_unicode(content):
        return Row(None, place, "lone_surrogate")
    return Row(content, place) if isinstance(content, dict | list | str) else Row(None, place, "not_an_object")


def read_chunks(sources: tuple[SourceConfig, ...], size: int = ROWS_PER_CHUNK) -> Iterator[Chunk]:
    """Yield the rows of all sources in order, `size` at a time.

    Raises SourceError for a source that is missing, empty, or of a kind that is not read.
    """
    for number, source in enumerate(sources):
        try:
            if _is_dataset(source):
                yield from _dataset_chunks(source, number, size)
                continue
            for file in _files(source, number):
                yield from _file_chunks(file, number, size)
        except OSError as error:
            raise SourceError(f"data.sources.{number}.path: {source.path}: {error.strerror or error}") from None


def fingerprint(source: SourceConfig, number: int) -> list[str]:
    """Tell this state of a source from any other: name, size and time of each file, or the dataset's own fingerprint.

    Raises SourceError.
    """
    if _is_dataset(source):
        return [str(_load_dataset(source, number)._fingerprint)]
    return [
        f"{file} {file.stat().st_size} bytes, changed {file.stat().st_mtime_ns} ns" for file in _files(source, number)
    ]


def locate(path: str) -> Path:
    """Turn a source path into a path on disk; "package:NAME/FILE" points inside an installed package."""
    if not path.startswith("package:"):
        return Path(path).expanduser()
    name, _, inside = path.removeprefix("package:").partition("/")
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # a part of a package that is not there, or no name at all
        spec = None
    if spec is None or spec.origin is None:
        raise SourceError(f"data source {path}: the package {name} is not installed")
    return Path(spec.origin).parent / inside


def check_files(sources: Sequence[SourceConfig]) -> None:
    """Look for the files of every source that is not a data set's, reading none. Raises SourceError."""
    for number, source in enumerate(sources):
        if not _is_dataset(source):
            _files(source, number)


def passed_over(sources: Sequence[SourceConfig]) -> list[str]:
    """One line for each source that is a folder with files of rows that are not read."""
    lines = []
    for number, source in enumerate(sources):
        if _is_dataset(source) or not (folder := locate(source.path)).is_dir():
            continue
        counts = Counter(_kind(file) for file in folder.rglob("*") if _kind(file) in UNREAD and file.is_file())
        if counts:
            kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
            lines.append(
                f"data.sources.{number}.path: files in {source.path} are not read: {kinds}; unpack them, or convert "
                "their rows to .jsonl, one a line"
            )
    return lines


def _files(source: SourceConfig, number: int) -> list[Path]:
    location, known = locate(source.path), ", ".join(sorted(SUFFIXES))
    if location.is_dir():
        files = [file for file in sorted(location.rglob("*")) if _kind(file) in SUFFIXES and file.is_file()]
    else:
        files = [location] if location.is_file() else []
    if not files:
        raise SourceError(
            f"data.sources.{number}.path: no {known} file at {source.path}; give a file, a folder, "
            '"package:NAME/FILE" or "dataset:NAME"'
        )
    if _kind(files[0]) not in SUFFIXES:
        raise SourceError(
            f"data.sources.{number}.path: {source.path}: expected one of {known}, got {_described(files[0])}"
        )
    return files


def _kind(file: Path) -> str:
    return file.suffix.lower()


def _described(file: Path) -> str:
    """Say what a file is that is not read, and what to do."""
    with file.open("rb") as content:
        begins = content.read(1 << 16).removeprefix(codecs.BOM_UTF8).lstrip()[:1]
    if _kind(file) == ".json" and begins == b"[":
        return f"a JSON array; write its rows one a line: jq -c '.[]' {file.name} > {file.stem}.jsonl"
    if _kind(file) == ".json":
        return "a .json file; if it has one row a line, rename it to .jsonl, else convert it to that"
    found = f"a {file.suffix} file" if file.suffix else "a name without a suffix"
    return f"{found}; convert rows to .jsonl, one a line, or name a plain text .txt"


def _file_chunks(file: Path, source: int, size: int) -> Iterator[Chunk]:
    if _kind(file) == PARQUET:
        yield from _parquet_chunks(file, source, size)
    elif _kind(file) in LINES:
        with file.open("rb") as lines:
            first = 1
            while items := list(islice(lines, size)):
                yield Chunk(source, str(file), first, items)
                first += len(items)
    else:
        yield Chunk(source, str(file), 1, [_text(file)])


def _text(file: Path) -> str | Row:
    """Return the text of a file; a Row with its fault where it is not UTF-8."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        return Row(None, f"{file}, byte {error.start} (0x{error.object[error.start]:02x})", "not_utf8")


def _parquet_chunks(file: Path, source: int, size: int) -> Iterator[Chunk]:
    import pyarrow
    import pyarrow.parquet

    first = 1
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=size):
                yield Chunk(source, str(file), first, batch.to_pylist())
                first += batch.num_rows
    except (pyarrow.ArrowException, OverflowError, ValueError) as error:  # a date beyond Python's years is one too
        raise SourceError(f"{file}: not a Parquet file that can be read: {str(error).splitlines()[0]}") from None


def _is_dataset(source: SourceConfig) -> bool:
    """Whether the source is read by the `datasets` library: named so, or a folder that it has saved."""
    if source.path.startswith(("dataset:", "package:")):
        return source.path.startswith("dataset:")
    return any((Path(source.path).expanduser() / name).is_file() for name in SAVED_DATASET)


def _dataset_chunks(source: SourceConfig, number: int, size: int) -> Iterator[Chunk]:
    dataset = _load_dataset(source, number)
    origin = f"{source.path}[{source.split}]"
    for first in range(0, len(dataset), size):
        columns = dataset[first : first + size]
        names = list(columns)
        rows = [dict(zip(names, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        yield Chunk(number, origin, first, rows)


def _load_dataset(source: SourceConfig, number: int) -> Any:
    try:
        import datasets
    except ImportError:
        raise SourceError(
            f"data.sources.{number}.path: {source.path} is read with the package datasets, which is not installed; "
            "pip install 'dflash-ring[data]'"
        ) from None
    name = source.path.removeprefix("dataset:")
    folder = Path(name).expanduser()
    datasets.disable_progress_bars()
    try:
        if any((folder / marker).is_file() for marker in SAVED_DATASET):
            found = datasets.load_from_disk(str(folder))
            return found[source.split] if isinstance(found, datasets.DatasetDict) else found
        return datasets.load_dataset(name, source.subset, split=source.split, revision=source.revision)
    except Exception as error:  # the library raises what its readers raise; all of it is about this one source
        raise SourceError(
            f"data.sources.{number}.path: {source.path} (subset {source.subset}, split {source.split}): "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        ) from None
