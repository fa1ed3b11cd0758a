"""Everything that must be known before a ring can be made: target, documents, schedule. Writes RUN/plan.json.

Run as a program of its own (`python -m producer.prepare --run-dir RUN`), so that the launcher never imports torch.
Exit codes: 0 done, 2 configuration, 3 data, 5 resources.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import transformers

from configs.load import ConfigError, load_config
from configs.pack import pack_fields
from configs.run_files import plan_path, write_atomically
from configs.schema import Config
from ops.telemetry import Log
from producer.corpus.documents import DataError, DataReport, Documents, build_documents
from producer.corpus.packing import choose_buckets
from producer.corpus.schedule import Schedule
from producer.corpus.sources import SourceError
from producer.target import TargetDescription, TargetError, describe_target
from producer.target_source import TargetNotFound, find_target
from shm_ring import Field, SlotSpec


def main() -> int:
    """Prepare the run named on the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m producer.prepare", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--on-gpu", action="store_true", help="the target will run on a GPU")
    arguments = parser.parse_args()
    log = Log("prepare", 0)
    try:
        prepare(arguments.run_dir, load_config(arguments.run_dir / "config.yaml"), log, arguments.on_gpu)
    except (ConfigError, TargetNotFound, TargetError, DataError, SourceError) as error:
        print(str(error), file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"prepare: {error}", file=sys.stderr)
        return 5
    return 0


def prepare(run_dir: Path, config: Config, log: Log, on_gpu: bool) -> dict[str, Any]:
    """Find the target, read the data, plan the packs; writes and returns the plan."""
    folder = find_target(config.target.model, config.target.revision, lambda line: log("target", detail=line))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder.path)
    target = describe_target(folder.path, config.target.model, config.target, tokenizer, on_gpu)
    log("data", sources=len(config.data.sources))
    report = build_documents(config.data, tokenizer, config.pack.tokens, run_dir / "data")
    documents = Documents(run_dir / "data")
    _check_tokens(documents, target)
    digest = documents.digest
    schedule = Schedule(documents.lengths, digest, config.run.seed, config.training.epochs, config.pack.tokens)
    _report(log, report, schedule)
    plan = {
        "target": target.as_dict(),
        "target_origin": folder.origin,
        "slot_spec": slot_spec(config, target, digest).to_json(),
        "data_digest": digest,
        "data_report": report.as_dict(),
        "num_documents": len(documents),
        "num_packs": schedule.num_packs,
        "packs_per_epoch": schedule.packs_per_epoch,
        "pack_fill": round(schedule.fill(), 4),
        "row_buckets": choose_buckets(documents.lengths, config.pack.row_buckets),
        "draft_vocab": draft_vocabulary(documents, target, config.drafter.draft_vocab_size),
    }
    write_atomically(plan_path(run_dir), json.dumps(plan, indent=1))
    return plan


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


def _check_tokens(documents: Documents, target: TargetDescription) -> None:
    """Refuse token ids without an embedding row, and data that uses the mask token."""
    largest = max(int(documents[number].ids.max()) for number in range(len(documents)))
    if largest >= target.vocab_size:
        raise DataError(
            f"data: token id {largest} has no row in the target's embedding ({target.vocab_size} rows); "
            "the tokenizer does not belong to this target"
        )
    if any(bool((documents[number].ids == target.mask_token_id).any()) for number in range(len(documents))):
        raise DataError(
            f"target.mask_token_id: {target.mask_token_id} occurs in the data; choose a row that the data never uses"
        )


def _report(log: Log, report: DataReport, schedule: Schedule) -> None:
    share = report.supervised_tokens / report.tokens
    log(
        "data",
        rows=report.rows,
        used=report.used,
        heldout=report.heldout,
        documents=report.documents,
        tokens=report.tokens,
        supervised_pct=round(100 * share, 1),
        duplicates=report.duplicates,
        truncated=report.truncated,
        packs=schedule.num_packs,
        fill_pct=round(100 * schedule.fill(), 1),
    )
    for reason, count in report.skipped.items():
        log("skipped", reason=reason, count=count, first=report.first_place[reason])


if __name__ == "__main__":
    raise SystemExit(main())
