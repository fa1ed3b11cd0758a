"""Everything that must be known before a ring can be made: target, documents, schedule. Writes RUN/plan.json.

Run as a program of its own (`python -m producer.prepare --run-dir RUN`), so that the launcher never imports torch.
Exit codes: 0 done, 2 configuration, 3 data, 5 resources.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from configs.load import ConfigError, load_config, require_sources
from configs.pack import longest_document, pack_fields
from configs.resume import named
from configs.run_files import RANDOM_WEIGHTS, plan_path, write_atomically
from configs.schema import Config
from ops.telemetry import Log
from producer.corpus.cache import fail_on_skipped, tokenized
from producer.corpus.chat import END_OF_TURN_OUTSIDE, has_markers
from producer.corpus.documents import DataError, Documents
from producer.corpus.regenerate import cache_folder, with_regenerated
from producer.corpus.report import DataReport
from producer.corpus.schedule import schedule_of
from producer.corpus.selection import select
from producer.corpus.sources import SourceError, passed_over
from producer.corpus.tokenizing import TokenizingFailed
from producer.drafter_check import check_drafter, check_resume, check_target
from producer.target import TargetDescription, TargetError, describe_target, load_tokenizer
from producer.target_source import TargetNotFound, find_target
from shm_ring import Field, SlotSpec

HEADER_BYTES = 1 << 16


def main() -> int:
    """Prepare the run named on the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m producer.prepare", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--on-gpu", action="store_true", help="the target will run on a GPU")
    arguments = parser.parse_args()
    log = Log("prepare", 0)
    try:
        prepare(arguments.run_dir, load_config(arguments.run_dir / "config.yaml"), log, arguments.on_gpu)
    except (ConfigError, TargetNotFound, TargetError, DataError, SourceError, TokenizingFailed) as error:
        print(str(error), file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"prepare: {error}", file=sys.stderr)
        return 5
    return 0


def prepare(run_dir: Path, config: Config, log: Log, on_gpu: bool) -> dict[str, Any]:
    """Find the target, read the data, plan the packs; writes and returns the plan. Refuses what could not start."""
    require_sources(config)
    folder = find_target(config.target.model, config.target.revision, lambda line: log("target", detail=line))
    tokenizer = load_tokenizer(folder.path)
    target = describe_target(folder.path, config.target.model, config.target, tokenizer, on_gpu)
    check_target(config, folder.path)
    log("target", mask_token=target.mask_token_id, taps=target.target_layer_ids, dtype=target.dtype)
    identity = identity_of(config, target, folder.path)
    check_drafter(run_dir, config, target, identity)
    report, digest = prepare_data(run_dir, config, tokenizer, folder.path, log, target.max_position_embeddings)
    documents = Documents(run_dir / "data")
    check_tokens(documents, target, tokenizer)
    identity["data"] = named(f"{len(documents)} documents, {report.tokens} tokens", digest)
    check_resume(run_dir, identity)
    schedule = schedule_of(documents, digest, config)
    if not schedule.num_packs:
        raise DataError(
            f"data.sources: the weights leave none of {len(documents)} documents in {config.training.epochs} epochs; "
            "raise a weight or training.epochs"
        )
    _report(log, report, schedule.num_packs, schedule.fill())
    plan = {
        "target": target.as_dict(),
        "target_origin": RANDOM_WEIGHTS if config.target.random_weights else folder.origin,
        "slot_spec": slot_spec(config, target, digest).to_json(),
        "data_digest": digest,
        "identity": identity,
        "data_report": report.as_dict(),
        "num_documents": len(documents),
        "num_packs": schedule.num_packs,
        "packs_per_epoch": schedule.packs_per_epoch,
        "pack_fill": round(schedule.fill(), 4),
        "draft_vocab": draft_vocabulary(documents, target, config.drafter.draft_vocab_size),
    }
    write_atomically(plan_path(run_dir), json.dumps(plan, indent=1))
    return plan


def identity_of(config: Config, target: TargetDescription, folder: Path) -> dict[str, Any]:
    """What a checkpoint of this run is bound to, without its data and its drafter."""
    return {
        "target.model": named(target.name, target_digest(folder)),
        "target.target_layer_ids": list(target.target_layer_ids),
        "pack.tokens": config.pack.tokens,
        "run.seed": config.run.seed,
    }


def prepare_data(
    run_dir: Path, config: Config, tokenizer: Any, folder: Path, log: Log, context: int | None = None
) -> tuple[DataReport, str]:
    """Tokenise the sources, or find them tokenised, and choose what is trained on; returns report and data digest.

    context: the target's, in tokens; a longer document is a long one, since states beyond it mean nothing. Raises
    DataError, SourceError, TokenizingFailed.
    """
    data = with_regenerated(config, run_dir) if config.data.regenerate.enabled else config.data
    asked = longest_document(data.max_document_tokens, config.pack.tokens)
    limit = longest_document(asked, config.pack.tokens, context)
    if limit < asked:
        log("data", detail=f"the longest document is {limit} tokens, the target's context, not {asked}")
    cache = cache_folder(data, run_dir)
    corpus = tokenized(
        data, tokenizer, str(folder), limit, cache, run_dir / "data", lambda line: log("data", detail=line), _progress
    )
    report, digest = select(data, corpus, run_dir / "data", tokenizer)
    if data.bad_rows == "fail":
        fail_on_skipped(report)
    template = str(tokenizer.chat_template or "")
    report.template = {
        "sha256": hashlib.sha256(template.encode()).hexdigest(),
        "kwargs": data.chat_template_kwargs,
        "spans": "generation markers" if has_markers(template) else "prefix renders",
    }
    report.warnings = [*passed_over(data.sources), *_warnings(report, data.end_of_turn)]
    return report, digest


def _progress(text: str) -> None:
    """Show a passing state: the launcher shows a part that ends in a carriage return in place, and does not log it."""
    sys.stdout.write(f"{text}\r")
    sys.stdout.flush()


def _warnings(report: DataReport, end_of_turn: bool) -> list[str]:
    warnings = []
    outside = report.notes.get(END_OF_TURN_OUTSIDE, 0)
    if outside:
        done = "they are supervised all the same" if end_of_turn else "left out, so the drafter never learns to end"
        other = "data.end_of_turn: false leaves them out" if end_of_turn else "data.end_of_turn: true includes them"
        warnings.append(
            f"the template's generation markers leave out the end of turn of {outside} answers; {done} ({other})"
        )
    return warnings


def slot_spec(config: Config, target: TargetDescription, data_digest: str) -> SlotSpec:
    """Describe a slot of this run's rings; both sides refuse a ring with another description."""
    fields = pack_fields(
        config.pack.tokens, len(target.target_layer_ids), target.hidden, target.dtype, config.target.final_hidden
    )
    meta = {
        "target": target.name,
        "target_layer_ids": list(target.target_layer_ids),
        "hidden": target.hidden,
        "vocab_size": target.vocab_size,
        "dtype": target.dtype,
        "pack_tokens": config.pack.tokens,
        "data_digest": data_digest[:16],
    }
    return SlotSpec(fields=tuple(Field(*field) for field in fields), meta=meta)


def draft_vocabulary(documents: Documents, target: TargetDescription, size: int | None) -> list[int] | None:
    """Choose the reduced output vocabulary: the most frequent supervised tokens, ascending; None for the whole one."""
    if size is None or size >= target.vocab_size:
        return None
    counts = documents.token_counts(target.vocab_size)
    chosen = np.argsort(-counts, kind="stable")[:size]
    return sorted(int(token) for token in chosen)


def target_digest(folder: Path) -> str:
    """Identity of a target wherever its folder stands: its config, and the names, sizes and headers of its weights."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as weights:
            digest.update(f"{file.name} {file.stat().st_size}".encode() + weights.read(HEADER_BYTES))
    return digest.hexdigest()


def check_tokens(documents: Documents, target: TargetDescription, tokenizer: Any) -> None:
    """Refuse token ids without an embedding row, and data that uses the mask token. Raises DataError.

    More embedding rows than tokens are normal (padded).
    """
    used = documents.used_ids()
    if used[-1] >= target.vocab_size:
        token = tokenizer.convert_ids_to_tokens(int(used[-1]))
        raise DataError(
            f"data: token id {used[-1]} ({token!r}) has no row in the target's embedding ({target.vocab_size} rows); "
            "the tokenizer does not belong to this target"
        )
    if target.mask_token_id in used:
        raise DataError(
            f"target.mask_token_id: {target.mask_token_id} occurs in the data; choose a row that the data never uses"
        )


def _report(log: Log, report: DataReport, num_packs: int, fill: float) -> None:
    """Log the numbers; the launcher draws the whole report."""
    log(
        "data",
        rows=report.rows,
        used=report.used,
        heldout=report.heldout,
        skipped=sum(report.skipped.values()),
        documents=report.documents,
        tokens=report.tokens,
        supervised_pct=round(100 * report.supervised_tokens / report.tokens, 1),
        duplicates=report.duplicates,
        truncated=report.truncated,
        packs=num_packs,
        fill_pct=round(100 * fill, 1),
    )
    for reason, count in report.skipped.items():
        log("skipped", reason=reason, count=count, first=report.first_place[reason])
    for warning in report.warnings:
        log("warning", detail=warning)


if __name__ == "__main__":
    raise SystemExit(main())
