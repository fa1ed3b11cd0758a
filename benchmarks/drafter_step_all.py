"""Every measurement of the drafter's step in one run, into one result file with a summary of plain numbers.

    python -m benchmarks.drafter_step_all --out DIR --results benchmarks/results/drafter_step_HARDWARE_DATE.json

Each measurement is a process of its own (drafter_step.py says what is timed). Those of a group compile at the same
time and then measure one after another, alone on the GPU. The profile is drawn beside the result file.
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

LONGEST_S = 280

GROUPS = (
    (("27b", "speculators"), ("8b", "speculators"), ("0.6b", "speculators"), ("0.6b", "captured"), ("0.6b", "old")),
    (("27b", "captured"), ("8b", "captured"), ("27b", "old")),
)
"""What compiles at the same time (together it must fit in 139 GiB); within a group one measures after another."""


def measure_all(out: Path, picture: Path) -> None:
    """Run every measurement; one that fails or takes too long is reported and left out."""
    out.mkdir(parents=True, exist_ok=True)
    for group in GROUPS:
        with tempfile.TemporaryDirectory() as gate:
            environment = os.environ | {"STEP_GATE": gate, "STEP_GATE_COUNT": str(len(group))}
            running = {}
            for shape, variant in group:
                command = [sys.executable, "-m", "benchmarks.drafter_step", "--shape", shape, "--variant", variant]
                command += ["--out", str(out)]
                if (shape, variant) == ("27b", "captured"):
                    command += ["--picture", str(picture)]
                running[f"{shape}.{variant}"] = subprocess.Popen(command, env=environment)
            _wait_for(running, Path(gate))


def _wait_for(running: dict[str, subprocess.Popen[bytes]], gate: Path) -> None:
    """Wait until all have ended; the others need not wait at the gate for one that has failed."""
    until = time.monotonic() + LONGEST_S
    while running:
        for name, process in list(running.items()):
            if time.monotonic() > until:
                process.kill()
            code = process.poll()
            if code is not None:
                del running[name]
                if code:
                    (gate / f"ready.{name}").touch()
                    print(f"{name}: ended with code {code}", flush=True)
        time.sleep(0.1)


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
        for variant in ("fp8", "eager", "old"):
            if (name, variant) in by:
                summary[f"{name}.{variant}_step_ms"] = by[name, variant]["step_ms"]
    if ("27b", "captured") in by:
        summary["busy_pct"] = by["27b", "captured"]["breakdown"]["busy_pct"]
    target.write_text(json.dumps({"summary": summary, "commit": _commit(), "runs": runs}, indent=1) + "\n")


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or os.environ.get("COMMIT", "unknown")


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
