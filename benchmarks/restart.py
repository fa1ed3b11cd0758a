"""How long does `restart drafter` keep a run from training? Any configuration; through memory, and through the disk.

    python -m benchmarks.restart CONFIG [--set ...] [--restarts 3] [--steps 30] [--no-disk] --out FILE

Launches the run, waits for steps, and restarts its drafters again and again. The clock: from just before the command is
sent to the end of the new process's first training step, on the device, as that process writes it (`start` in
metrics.jsonl), with the phases of its start; `left_s` is what passed before the new process began. The baseline is the
same restart with `checkpoint.handover: false`: the state is written to disk and hashed, read and hashed. Each life has
to begin with the step and packs that the one before left with; the last checkpoint has to hold each pack once.
Random documents are written where the configuration's own are not there. At the 27B shape, with two GPUs:

    python -m benchmarks.restart configs/eight_gpus_7_1.yaml --set target.devices=[cuda:0] \\
        --set training.devices=[cuda:1] --set training.log_every_steps=1
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.pipeline import facts
from benchmarks.whole_run import check_records, write_documents
from configs.load import load_config
from ops import commands
from ops.paths import DRAFTER
from ops.run import run_folder
from ops.telemetry import METRICS_FILE

LIMIT_S = 560.0
_POLL_S = 0.05


class Restarted:
    """A run whose drafters are restarted."""

    def __init__(self, config: str, settings: Sequence[str], log: Path, limit_s: float = LIMIT_S) -> None:
        """Write documents if there are none, and launch."""
        loaded = load_config(config, settings)
        source = Path(loaded.data.sources[0].path)
        if source.suffix == ".jsonl" and not source.exists():
            write_documents(source)
        self.folder, self.limit_s = run_folder(loaded), limit_s
        words = [word for each in settings for word in ("--set", each)]
        with log.open("wb") as file:
            command = [sys.executable, "launch.py", config, *words]
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        self._log = log

    def lines(self) -> list[dict[str, Any]]:
        """Rank 0's lines of metrics so far."""
        path = self.folder / METRICS_FILE
        whole = path.read_text().split("\n")[:-1] if path.exists() else []
        return [line for line in map(json.loads, whole) if (line["role"], line["rank"]) == (DRAFTER, 0)]

    def wait_for(self, what: Callable[[], Any]) -> Any:
        """Wait until something is true, and return it; raises RuntimeError if the run ends, or takes too long."""
        give_up = time.monotonic() + self.limit_s
        while not (found := what()):
            if self.process.poll() is not None or time.monotonic() > give_up:
                raise RuntimeError(f"the run did not get there; see {self._log} and {self.folder}/logs")
            time.sleep(_POLL_S)
        return found

    def wait_for_steps(self, count: int) -> None:
        """Wait for so many more steps."""
        begun = self.lines()[-1]["step"] if self.lines() else 0
        self.wait_for(lambda: (lines := self.lines()) and lines[-1]["step"] >= begun + count)

    def restart(self, settings: Sequence[str] = ()) -> dict[str, Any]:
        """Restart the drafters; returns seconds until the first step, its phases, and how the state came over."""
        before = time.time()
        commands.command(self.folder, "restart", role=DRAFTER, rank=None, set=list(settings))
        line = self.wait_for(lambda: self._first_line_after(before))
        start = line["start"]
        seconds = start["at_ms"] / 1e3 - before
        phases = {key: value for key, value in start.items() if key.endswith("_s") and key != "total_s"}
        return {
            "through": "memory" if start["handed_over"] else "disk",
            "seconds": round(seconds, 3),
            "left_s": round(seconds - start["total_s"], 3),
            "phases": phases,
            "step": line["step"],
        }

    def _first_line_after(self, when_s: float) -> dict[str, Any] | None:
        found = [line for line in self.lines() if line.get("start", {}).get("at_ms", 0) > when_s * 1e3]
        return found[0] if found else None

    def events(self, name: str) -> list[str]:
        """Log lines of the first drafter about an event."""
        path = self.folder / "logs" / "drafter0.log"
        return [line for line in path.read_text().splitlines() if f"| {name} |" in line]

    def end(self) -> None:
        """Stop gracefully; kill if that takes too long."""
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGINT)
            try:
                self.process.wait(self.limit_s)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


def measure(run: Restarted, restarts: int, steps: int, through_disk: bool) -> dict[str, Any]:
    """Restart through memory several times, then, if asked for, through the disk."""
    run.wait_for_steps(steps)
    found: list[dict[str, Any]] = []
    for _ in range(restarts):
        found.append(run.restart())
        run.wait_for_steps(steps)
    if through_disk:  # the life that leaves first was started with the hand-over on: that one counts for nothing
        run.restart(["checkpoint.handover=false"])
        run.wait_for_steps(steps)
        found.append(run.restart())
        run.wait_for_steps(steps)
    result: dict[str, Any] = {"restarts": found}
    for way in ("memory", "disk"):
        seconds = [each["seconds"] for each in found if each["through"] == way]
        if seconds:
            result[way] = {"median_s": statistics.median(seconds), "min_s": min(seconds), "max_s": max(seconds)}
    return result


def check(run: Restarted) -> dict[str, Any]:
    """Compare where each life began with where the one before ended."""
    resumed = [_values(line) for line in run.events("resumed")]
    left = [_values(line) for line in run.events("handed over")]
    wrong = [each for each in left if (each["step"], each["packs"]) not in {(r["step"], r["packs"]) for r in resumed}]
    return {"lives": len(resumed) + 1, "handed_over": left, "begun_elsewhere": wrong}


def _values(line: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in line.rpartition("| ")[2].split() if "=" in word)


def main() -> int:
    """Launch, restart, stop, check; prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--restarts", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30, help="steps before each restart")
    parser.add_argument("--no-disk", action="store_true", help="leave the baseline out")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="longest wait, in seconds")
    parser.add_argument("--out", type=Path, default=Path("runs/restart.json"))
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    run = Restarted(arguments.config, arguments.set, arguments.out.with_suffix(".log"), arguments.limit)
    result: dict[str, Any] = {"config": arguments.config, "settings": arguments.set, "cores": os.cpu_count()}
    result["date"] = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        result |= measure(run, arguments.restarts, arguments.steps, not arguments.no_disk)
        result["lives"] = check(run)
    finally:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
        run.end()
    result |= facts()
    result["records"] = check_records(run.folder)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0 if not result["lives"]["begun_elsewhere"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
