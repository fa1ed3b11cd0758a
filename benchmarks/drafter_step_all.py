"""Every measurement of the drafter's step in one run, into one result file with a summary of plain numbers.

    python -m benchmarks.drafter_step_all --out DIR --results benchmarks/results/drafter_step_HARDWARE_DATE.json

Each measurement is a process of its own (drafter_step.py says what is timed), all on one GPU. Those of a group compile
at the same time, then each measures its products and its steps alone on the GPU. The compiler is given speculators'
mask at the very beginning (drafter_step_speculators.py). The profile is drawn beside the result file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.drafter_step import SIZES
from benchmarks.drafter_step_speculators import MaskTrial

LONGEST_S = 280
GROUPS = (
    (("27b", "captured"), ("0.6b", "captured"), ("0.6b", "eager"), ("0.6b", "old")),
    (("8b", "captured"), ("8b", "old"), ("27b", "old")),
    (("27b", "speculators"), ("8b", "speculators"), ("0.6b", "speculators")),
)
"""What compiles at the same time (together it must fit in 139 GiB)."""


def measure_all(out: Path, picture: Path) -> None:
    """Run every measurement; one that fails or takes too long is reported and left out."""
    out.mkdir(parents=True, exist_ok=True)
    ahead = [MaskTrial(name) for name in SIZES]  # what they compile stays in the compiler's cache
    try:
        for group in GROUPS:
            if any(variant == "speculators" for _, variant in group):
                for name, trial in zip(SIZES, ahead, strict=True):
                    print(f"speculators' own mask, {name}: came back: {trial.came_back()}", flush=True)
            _measure_group(group, out, picture)
    finally:
        for trial in ahead:
            trial.end()


def _measure_group(group: tuple[tuple[str, str], ...], out: Path, picture: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"STEP_TURN": f"{folder}/turn"}
        running = {}
        for shape, variant in group:
            command = [sys.executable, "-m", "benchmarks.drafter_step", "--shape", shape, "--variant", variant]
            command += ["--out", str(out)]
            if (shape, variant) == ("27b", "captured"):
                command += ["--picture", str(picture)]
            running[f"{shape}.{variant}"] = subprocess.Popen(command, env=environment)
        until = time.monotonic() + LONGEST_S
        for name, process in running.items():
            try:
                code = process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
            if code:
                print(f"{name}: ended with code {code}", flush=True)


def collect(folder: Path, target: Path) -> None:
    """Put all measurements of a folder into one result file with the summary."""
    runs = [json.loads(path.read_text()) for path in sorted(folder.glob("step_*.json"))]
    by = {(run["shape"], run["variant"]): run for run in runs}
    summary: dict[str, float] = {}
    for name in SIZES:
        mine, theirs = by.get((name, "captured")), by.get((name, "speculators"))
        if mine:
            summary |= {
                f"{name}.step_ms": mine["step_ms"],
                f"{name}.tflops": mine["tflops"],
                f"{name}.tflops_executed": mine["tflops_executed"],
                f"{name}.peak_gb": mine["peak_gb"],
            }
        if mine and theirs:
            summary[f"{name}.ratio_to_speculators"] = mine["step_ms"] / theirs["step_ms"]
            summary[f"{name}.peak_gb_speculators"] = theirs["peak_gb"]
            for variant in ("speculators_log_rarely", "speculators_mask_once"):
                if other := by.get((name, variant)):
                    summary[f"{name}.ratio_to_{variant}"] = mine["step_ms"] / other["step_ms"]
        for variant in ("fp8", "eager", "old"):
            if (name, variant) in by:
                summary[f"{name}.{variant}_step_ms"] = by[name, variant]["step_ms"]
    if ("27b", "captured") in by:
        summary["busy_pct"] = by["27b", "captured"]["breakdown"]["busy_pct"]
    target.write_text(json.dumps({"summary": summary, "commit": _commit(), "runs": runs}, indent=1) + "\n")


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return os.environ.get("COMMIT") or done.stdout.strip() or "unknown"


def main() -> None:
    """Measure everything, then collect; --collect: only the latter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--collect", action="store_true")
    arguments = parser.parse_args()
    if not arguments.collect:
        measure_all(arguments.out, arguments.results.with_suffix(".png"))
    collect(arguments.out, arguments.results)


if __name__ == "__main__":
    main()
