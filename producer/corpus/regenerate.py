"""Rewrite the answers of a run's sources with the target itself, which is what a drafter should learn.

    python -m producer.corpus.regenerate --run-dir RUN       (or: python launch.py prepare CONFIG --regenerate)

Each row of a source becomes one line of CACHE/regenerated-KEY-SOURCE.jsonl, in order: a conversation with every answer
written anew after the new ones before it, a text as it is, a row that cannot be used as the reason why. So a run that
was interrupted goes on after the last whole line. Preparation then reads these files in the sources' place.
Exit codes: 0 done, 2 configuration, 3 data, 5 resources.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from configs.load import ConfigError, load_config
from configs.schema import Config, DataConfig, SourceConfig
from ops.telemetry import Log
from producer.corpus.answers import AnswerFailed, Rewriter, ServerRewriter, TransformersRewriter
from producer.corpus.cache import key_of, limited
from producer.corpus.conversation import BadRow, Conversation, conversation_of
from producer.corpus.sources import Row, SourceError, fingerprint, read_chunks
from producer.target import TargetError
from producer.target_source import TargetNotFound, check_weights, find_target

Item = Conversation | dict[str, Any]
"""A conversation to answer, or a line that is passed on as it is."""


def main() -> int:
    """Write the missing answers of the run named on the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m producer.corpus.regenerate", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    run_dir = parser.parse_args().run_dir
    log = Log("regenerate", 0)
    try:
        regenerate(load_config(run_dir / "config.yaml"), run_dir, log)
    except (ConfigError, TargetNotFound, TargetError, SourceError, AnswerFailed) as error:
        print(str(error), file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"regenerate: {error}", file=sys.stderr)
        return 5
    return 0


def regenerate(config: Config, run_dir: Path, log: Log) -> None:
    """Write what is missing of each source's file.

    Raises SourceError, AnswerFailed, TargetNotFound, TargetError, OSError.
    """
    rewriter: Rewriter | None = None
    for number, file in enumerate(regenerated_files(config, run_dir)):
        if file.exists():
            log("regenerate", detail=f"{config.data.sources[number].path}: answered before, in {file}")
            continue
        file.parent.mkdir(parents=True, exist_ok=True)
        rewriter = rewriter or _make_rewriter(config, log)
        _rewrite_source(config.data, number, file, rewriter, log)


def regenerated_files(config: Config, run_dir: Path) -> list[Path]:
    """Where the rewritten rows of each source are, or will be: named by everything that shapes them."""
    data = config.data
    asked = data.regenerate.model_dump(exclude={"enabled", "server", "batch_size", "timeout_s"})
    parts = {
        "target": [config.target.model, config.target.revision],
        "asked": asked,
        "kwargs": data.chat_template_kwargs,
        "max_documents": data.max_documents,
    }
    cache = cache_folder(data, run_dir)
    files = []
    for number, source in enumerate(data.sources):
        own = {**parts, "source": [source.path, source.kind, fingerprint(source, number)]}
        files.append(cache / f"regenerated-{key_of(own)}-{number}.jsonl")
    return files


def with_regenerated(config: Config, run_dir: Path) -> DataConfig:
    """The data section with the rewritten files in the sources' place. Raises SourceError if one is missing."""
    sources = []
    for source, file in zip(config.data.sources, regenerated_files(config, run_dir), strict=True):
        if not file.exists():
            raise SourceError(
                f"data.regenerate: the answers for {source.path} are not all written; run 'prepare' again"
            )
        name = source.name or source.path
        sources.append(SourceConfig(path=str(file), kind="auto", weight=source.weight, name=name))
    return config.data.model_copy(update={"sources": tuple(sources)})


CACHE_FOLDER = ".data"
"""Beside the run folders, where data.cache_folder is not set."""


def cache_folder(data: DataConfig, run_dir: Path) -> Path:
    """Where tokenised and rewritten data are kept."""
    return Path(data.cache_folder) if data.cache_folder else run_dir.parent / CACHE_FOLDER


def _make_rewriter(config: Config, log: Log) -> Rewriter:
    asked = config.data.regenerate
    if asked.server is not None:
        log("regenerate", server=asked.server, under_way=asked.batch_size)
        return ServerRewriter(asked, asked.server_model or config.target.model, config.data.chat_template_kwargs)
    folder = find_target(config.target.model, config.target.revision, lambda line: log("target", detail=line))
    check_weights(folder.path)
    device = os.environ.get("DFLASH_DEVICE", "cpu")
    log("regenerate", device=device, batch_size=asked.batch_size)
    return TransformersRewriter(asked, folder.path, config.target.dtype, device, config.data.chat_template_kwargs)


def _rewrite_source(data: DataConfig, number: int, file: Path, rewriter: Rewriter, log: Log) -> None:
    partial = file.with_suffix(".partial")
    done = _whole_lines(partial)
    if done:
        log("regenerate", detail=f"{data.sources[number].path}: going on after {done} rows")
    rows = (row for chunk in limited(_chunks(data, number), data.max_documents) for row in chunk.rows())
    items = (item_of(row, data.sources[number]) for row in islice(rows, done, None))
    began = shown = time.monotonic()
    written = 0
    with partial.open("a", encoding="utf-8") as out:
        for line in rewriter.rewrite(items):
            out.write(json.dumps(line, ensure_ascii=False) + "\n")
            out.flush()
            written += 1
            if time.monotonic() - shown > 0.5:
                shown = time.monotonic()
                _progress(f"regenerating: {done + written:,} rows, {written / (shown - began):.1f} rows/s")
    log("regenerate", detail=f"{data.sources[number].path}: {done + written} rows, {written} of them now", file=file)
    partial.rename(file)


def _chunks(data: DataConfig, number: int) -> Iterator[Any]:
    return read_chunks((data.sources[number],))


def item_of(row: Row, source: SourceConfig) -> Item:
    """What is to be done with a row; texts are passed on, and rows that cannot be used say why."""
    try:
        if row.content is None:
            raise BadRow(row.fault)
        is_text = source.kind == "text" or isinstance(row.content, str)
        conversation = None if is_text else conversation_of(row.content, answered=False)
    except BadRow as bad:
        return {"skipped": bad.reason, "place": row.place}
    if conversation is not None:
        return conversation
    text = row.content.get("text") if isinstance(row.content, dict) else row.content
    # nothing else of a row is passed on: dates and images of a table are no JSON
    is_known = isinstance(text, str) and source.kind != "chat"
    return {"text": text} if is_known else {"skipped": "no_known_fields", "place": row.place}


def _whole_lines(partial: Path) -> int:
    """Count the whole lines of an unfinished file, and cut off a torn one."""
    if not partial.exists():
        return 0
    lines = size = 0
    with partial.open("rb+") as file:
        for line in file:
            if line.endswith(b"\n"):
                lines += 1
                size += len(line)
        file.truncate(size)
    return lines


def _progress(text: str) -> None:
    sys.stdout.write(f"{text}\r")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
