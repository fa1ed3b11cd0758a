"""What preparing data costs: memory, which must not grow with the corpus, and rows per second by number of processes.

Question: how much memory does `prepare` take for D synthetic conversations, beside what its libraries take alone, and
how much faster are several processes? The clock runs from the first row read to the last byte on the disk. Baseline: a
corpus of a tenth of the size (memory) and one process (speed), in the same run. Correctness: the same data digest from
one process and from several, and every row accounted for.

    python -m benchmarks.corpus --documents 200000
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

WORDS = 2000


def main() -> None:
    """Measure and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=200_000)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="whose tokenizer")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--one", nargs=3, metavar=("FILE", "WORKERS", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(Path(options.one[0]), int(options.one[1]), Path(options.one[2]), options.model)))
        return
    with tempfile.TemporaryDirectory() as folder:
        few, many = Path(folder) / "few.jsonl", Path(folder) / "many.jsonl"
        write_rows(few, options.documents // 10)
        write_rows(many, options.documents)
        runs = [
            run_one(options.model, file, workers, Path(folder) / str(number) / "run")
            for number, (file, workers) in enumerate([(few, 1), (few, options.workers), (many, options.workers)])
        ]
    assert runs[0]["data_digest"] == runs[1]["data_digest"], "processes changed the data"
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    facts = {"commit": commit.stdout.strip(), "machine": platform.processor() or platform.machine()}
    print(json.dumps({**facts, "cores": len(os.sched_getaffinity(0)), "model": options.model, "runs": runs}))


def run_one(model: str, file: Path, workers: int, folder: Path) -> dict[str, Any]:
    """Measure one corpus in a process of its own, since peak memory is a process's for life."""
    command = [sys.executable, "-m", "benchmarks.corpus", "--model", model]
    done = subprocess.run(
        [*command, "--one", str(file), str(workers), str(folder)], capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(file: Path, workers: int, folder: Path, model: str) -> dict[str, Any]:
    """Prepare the rows of `file` into `folder`; sizes in MB."""
    import transformers

    from configs.load import config_from
    from ops.telemetry import Log
    from producer.corpus.documents import Documents
    from producer.corpus.schedule import schedule_of
    from producer.prepare import prepare_data
    from producer.target_source import find_target

    target = find_target(model, None, lambda _line: None).path
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    config = config_from({"data": {"sources": [{"path": str(file)}], "workers": workers, "heldout_documents": 64}})
    before = _peak_mb(resource.RUSAGE_SELF)
    began = time.monotonic()
    report, digest = prepare_data(folder, config, tokenizer, target, Log("prepare", 0))
    seconds = time.monotonic() - began
    prepared = _peak_mb(resource.RUSAGE_SELF)
    began = time.monotonic()
    schedule = schedule_of(Documents(folder / "data"), digest, config)
    assert report.rows == report.used + report.heldout
    return {
        "documents": report.rows,
        "tokens": report.tokens,
        "workers": workers,
        "seconds": round(seconds, 1),
        "rows_per_s": round(report.rows / seconds),
        "libraries_mb": before,
        "peak_mb": prepared,
        "peak_of_a_helper_mb": _peak_mb(resource.RUSAGE_CHILDREN),
        "schedule_s": round(time.monotonic() - began, 2),
        "peak_with_schedule_mb": _peak_mb(resource.RUSAGE_SELF),
        "pack_fill": round(schedule.fill(), 4),
        "data_digest": digest[:16],
    }


def write_rows(file: Path, documents: int) -> None:
    """Write conversations of log-normal lengths, always the same."""
    draw = np.random.Generator(np.random.PCG64(0))
    words = np.asarray([f"word{number}" for number in range(WORDS)])
    with file.open("w") as out:
        for number in range(documents):
            lengths = np.clip(draw.lognormal(2.5, 0.7, 2).astype(int), 3, 400)
            texts = [" ".join(words[draw.integers(0, WORDS, length)]) for length in lengths]
            turns = [{"role": "user", "content": f"{number} {texts[0]}"}, {"role": "assistant", "content": texts[1]}]
            out.write(json.dumps({"messages": turns}) + "\n")


def _peak_mb(who: int) -> float:
    return round(resource.getrusage(who).ru_maxrss / 1e3, 1)


if __name__ == "__main__":
    main()
