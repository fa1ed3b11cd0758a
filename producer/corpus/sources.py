"""Read rows from files: JSON lines, plain text, folders of them, or files inside an installed package.

Knows nothing of tokens. Each row comes with the place it stands at, so that a refusal can name file and line.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from configs.schema import SourceConfig


class SourceError(Exception):
    """A source cannot be read at all. Exit code 3."""

    exit_code = 3


class Row(NamedTuple):
    """One row as read: its content (a mapping, or a string for plain text; None if not valid JSON) and its place."""

    content: dict[str, Any] | str | None
    place: str
    source: int


def read_rows(sources: tuple[SourceConfig, ...]) -> Iterator[Row]:
    """Yield the rows of all sources in order. Raises SourceError for a missing or empty source."""
    for number, source in enumerate(sources):
        files = list(_files(source.path))
        if not files:
            raise SourceError(f"data.sources.{number}.path: no .jsonl, .txt, .md, .rst or .py file at {source.path}")
        for file in files:
            yield from _read_file(file, number)


def _files(path: str) -> Iterator[Path]:
    location = locate(path)
    if location.is_dir():
        kinds = {".jsonl", ".txt", ".md", ".rst", ".py"}
        yield from (file for file in sorted(location.rglob("*")) if file.suffix in kinds and file.is_file())
    elif location.is_file():
        yield location


def locate(path: str) -> Path:
    """Turn a source path into a path on disk; "package:NAME/FILE" points inside an installed package."""
    if not path.startswith("package:"):
        return Path(path).expanduser()
    name, _, inside = path.removeprefix("package:").partition("/")
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise SourceError(f"data source {path}: the package {name} is not installed")
    return Path(spec.origin).parent / inside


def _read_file(file: Path, source: int) -> Iterator[Row]:
    if file.suffix != ".jsonl":
        yield Row(file.read_text(encoding="utf-8", errors="replace"), str(file), source)
        return
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                content = json.loads(line)
            except ValueError:
                content = None
            yield Row(content if isinstance(content, dict | str) else None, f"{file}:{number}", source)
