"""A run whose drafter counts documents, under kill -9 of everything, with other numbers of processes at each launch.

`python -m tests.stress.counter_storm --seconds S --seed N --folder DIR` prints one JSON object. Real producers with a
tiny target, real rings, supervisor, journal and checkpoints; see tests/helpers/counter_drafter.py. Forbidden outcomes,
looked for in every checkpoint that appears and at the end: a document counted twice in an epoch, a document missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors.numpy import load_file

from configs.load import load_config
from configs.run_files import from_ranges, read_plan
from ops import commands
from ops.errors import OpsError
from ops.run_folder import last_lines
from producer.corpus.documents import Documents
from producer.corpus.schedule import Schedule, schedule_of
from shm_ring.liveness import process_state
from tests.helpers.counter_drafter import DIGITS, MAX_DOCUMENTS, digit_table
from tests.helpers.tiny_target import save_target

ROOT = Path(__file__).parents[2]
EPOCHS = 2
CHECKPOINT_EVERY = 20
HOLD_AT = 105
"""The step that a run does not go beyond while deeds are planned; some packs after a checkpoint."""
DEEDS = ("target", "drafter", "launcher", "stop", "restart")
LIMIT_S = 240.0


class Storm:
    """One run, launched again and again until it is done."""

    def __init__(self, folder: Path, documents: int, seed: int, step_s: float, most: int) -> None:
        self.folder, self.random, self.most = folder, random.Random(seed), most
        self.name = f"storm-{os.getpid()}"
        self.run_dir = folder / "runs" / self.name
        self.target = save_target(folder / "target", num_layers=3, hidden=32)
        self.happened: Counter[str] = Counter()
        self.shapes: list[tuple[int, int]] = []
        self.planned: list[str] = []
        """What is done first, before chance decides."""
        self.faults: list[str] = []
        self.checked: set[str] = set()
        self.hold = folder / "hold"
        self.hold.write_text(str(HOLD_AT))
        with (folder / "numbered.jsonl").open("w") as file:
            for number in range(documents):
                text = f"{number:0{DIGITS}} " + "x" * self.random.randint(8, 90)
                file.write(json.dumps({"text": text}) + "\n")
        self.config = folder / "storm.yaml"
        self.config.write_text(yaml.safe_dump(self._settings()))
        self.environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "COUNTER_STEP_S": str(step_s),
            "COUNTER_TARGET": str(self.target),
            "DFLASH_RUNTIME_DIR": str(folder / "s"),
            "CUDA_VISIBLE_DEVICES": "",
            "HOLD_FILE": str(self.hold),
        }
        os.environ["DFLASH_RUNTIME_DIR"] = str(folder / "s")
        self.launcher: subprocess.Popen[bytes] | None = None

    def _settings(self) -> dict[str, Any]:
        return {
            "run": {"name": self.name, "folder": str(self.folder / "runs")},
            "target": {"model": str(self.target), "target_layer_ids": [0, 1], "devices": ["cpu"], "threads": 1},
            "data": {"sources": [{"path": str(self.folder / "numbered.jsonl"), "kind": "text"}], "workers": 1},
            "pack": {"tokens": 256, "window_packs": 4},
            "ring": {"num_slots": 4},
            "drafter": {"num_layers": 1, "block_size": 4, "layout": "full", "head_dim": 16},
            "anchors": {"num": 4},
            "training": {"devices": ["cpu"], "threads": 1, "epochs": EPOCHS, "log_every_steps": 20},
            "checkpoint": {"every_steps": CHECKPOINT_EVERY, "keep": 2},
            "supervisor": {"backoff_s": 0.05, "max_restarts": 100000, "stop_timeout_s": 10},
        }

    def launch(self) -> None:
        """Start a launcher with numbers of targets and drafters of its own."""
        before = self.shapes[-1][0] if self.shapes else 0
        targets = self.random.choice([number for number in range(1, self.most + 1) if number != before])
        shape = targets, self.random.randint(1, min(2, self.most))
        self.shapes.append(shape)
        devices = [f"[{', '.join(['cpu'] * number)}]" for number in shape]
        log = (self.folder / "launcher.out").open("ab")
        self.launcher = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.counter_launch", str(self.config),
             "--set", f"target.devices={devices[0]}", "--set", f"training.devices={devices[1]}"],
            cwd=ROOT, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        log.close()

    def running(self) -> list[dict[str, Any]]:
        """The processes that are past their start."""
        with contextlib.suppress(OpsError, OSError, ValueError):
            return [each for each in commands.status(self.run_dir)["processes"] if each["state"] == "running"]
        return []

    def disturb(self) -> None:
        """Do one evil thing, if there is something to do it to."""
        assert self.launcher is not None
        alive = self.running()
        if not alive:
            return
        what = self.planned[0] if self.planned else self.random.choices(DEEDS, [8, 8, 2, 1, 1])[0]
        if what in ("target", "drafter"):
            pids = [each["pid"] for each in alive if each["role"] == what and each["pid"]]
            if not pids or (what == "drafter" and self.planned and not self.stopped_with_work_at_stake(pids)):
                return
            _signal([self.random.choice(pids)], signal.SIGKILL)
            _signal(pids, signal.SIGCONT)
        elif what == "launcher":
            self.launcher.kill()
            self.launcher.wait()
        elif what == "stop":
            self.launcher.send_signal(signal.SIGINT)
            self.launcher.wait(timeout=LIMIT_S)
        else:
            try:
                commands.command(self.run_dir, "restart", role="drafter", rank=None, set=[])
            except OpsError:
                return
        self.happened[what] += 1
        del self.planned[:1]

    def stopped_with_work_at_stake(self, drafters: list[int]) -> bool:
        """Wait a while for packs that are begun and in no checkpoint; if so, leave the drafters stopped (SIGSTOP)."""
        give_up = time.monotonic() + 2
        while time.monotonic() < give_up:
            _signal(drafters, signal.SIGSTOP)  # else a checkpoint may come before the death
            while any((state := process_state(pid)) is not None and state[0] not in "TtZX" for pid in drafters):
                time.sleep(0.001)
            begun = {pack for path in self.run_dir.glob("journal.*.jsonl") for pack in packs_in(path)}
            if len(begun - self.saved()) >= 3:
                return True
            _signal(drafters, signal.SIGCONT)
            time.sleep(0.02)
        return False

    def saved(self) -> frozenset[int]:
        """The packs in the newest checkpoint; none while there is no checkpoint."""
        for folder in sorted((self.run_dir / "checkpoints").glob("step-*"), key=step_of, reverse=True):
            with contextlib.suppress(OSError, ValueError):  # being written, or deleted meanwhile
                return from_ranges(json.loads((folder / "checkpoint.json").read_text())["trained"])
        return frozenset()

    def run(self, seconds: float, every_s: float) -> None:
        """Disturb the run for that long, then let it finish."""
        end = time.monotonic() + seconds
        give_up = end + LIMIT_S
        self.launch()
        try:
            while time.monotonic() < give_up:
                assert self.launcher is not None
                code = self.launcher.poll()
                if code == 0:
                    break
                if code in (2, 3, 5) and not self.waited_for_orphans():
                    self.faults.append(f"launcher left with {code}")
                    break
                if code is not None:
                    self.happened["launches"] += 1
                    self.launch()
                if time.monotonic() < end or self.planned:
                    self.disturb()
                if not self.planned:
                    self.hold.unlink(missing_ok=True)
                self.check_checkpoints()
                time.sleep(self.random.uniform(0.2, 1.0) * every_s)
            else:
                self.faults.append("the run did not finish")
        finally:
            if self.launcher is not None and self.launcher.poll() is None:
                self.launcher.send_signal(signal.SIGINT)
                self.launcher.wait(timeout=60)
        self.check_checkpoints(final=True)

    def waited_for_orphans(self) -> bool:
        """Whether the launcher left because processes of the one before it, which was killed, had not left yet."""
        return "are still there" in "\n".join(last_lines(self.folder / "launcher.out", 3))

    def check_checkpoints(self, final: bool = False) -> None:
        """Compare the counts in each checkpoint with the packs that it says are in it."""
        folders = sorted((self.run_dir / "checkpoints").glob("step-*"), key=step_of)
        for folder in folders:
            try:
                made = f"{folder.name} {folder.stat().st_ino}"
                if made in self.checked:
                    continue
                counts = load_file(folder / "state.safetensors")["counts"]
                trained = from_ranges(json.loads((folder / "checkpoint.json").read_text())["trained"])
            except (OSError, ValueError):  # deleted meanwhile, as it may be
                continue
            self.checked.add(made)
            wanted = self.counts_of(trained)
            if not np.array_equal(counts, wanted):
                wrong = np.flatnonzero(counts != wanted)
                self.faults.append(
                    f"{folder.name}: {len(wrong)} documents miscounted, document {wrong[0]} "
                    f"{counts[wrong[0]]:g} times and not {wanted[wrong[0]]:g}"
                )
        if final:
            self._check_sum(load_file(folders[-1] / "state.safetensors")["counts"])

    def _check_sum(self, counts: Any) -> None:
        """The law: the final weight is the sum over document ids, of all epochs."""
        numbers = np.arange(MAX_DOCUMENTS)
        documents = len(Documents(self.run_dir / "data"))
        found, wanted = int(counts @ numbers), EPOCHS * documents * (documents - 1) // 2
        if found != wanted:
            self.faults.append(f"final sum over document ids {found}, expected {wanted}")

    def counts_of(self, packs: frozenset[int]) -> Any:
        """How often each document is in these packs, by the schedule."""
        schedule, numbers = self.schedule
        counts = np.zeros(MAX_DOCUMENTS)
        for pack in packs:
            for document in schedule.documents(pack):
                counts[numbers[document]] += 1
        return counts

    @cached_property
    def schedule(self) -> tuple[Schedule, list[int]]:
        """The schedule, the same in every launch, and the number that each document begins with."""
        plan, config = read_plan(self.run_dir), load_config(self.run_dir / "config.yaml")
        documents = Documents(self.run_dir / "data")
        digits = digit_table(self.target)
        heads = [documents[document].ids[:DIGITS].tolist() for document in range(len(documents))]
        numbers = [int("".join(digits[token] for token in head)) for head in heads]
        return schedule_of(documents, plan["data_digest"], config, plan["packs_per_epoch"]), numbers

    def report(self) -> dict[str, Any]:
        """What happened, and what was found."""
        plan = read_plan(self.run_dir)
        begun = sum(len(packs_in(path)) for path in self.run_dir.glob("journal.*.jsonl"))
        return {
            "faults": self.faults,
            "happened": dict(self.happened),
            "shapes": self.shapes,
            "packs": plan["num_packs"],
            "documents": plan["num_documents"],
            "packs_begun": begun,
            "checkpoints_checked": len(self.checked),
        }


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint's name."""
    return int(checkpoint.name.removeprefix("step-"))


def packs_in(journal: Path) -> list[int]:
    """The packs that a journal says were begun; a line that a kill cut off says nothing."""
    lines = journal.read_text(errors="replace").splitlines()
    return [int(json.loads(line)["pack_id"]) for line in lines if line.startswith("{") and line.endswith("}")]


def main() -> None:
    """Run one storm."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--every-s", type=float, default=2.0, help="longest wait between two evil deeds")
    parser.add_argument("--documents", type=int, default=1500)
    parser.add_argument("--step-s", type=float, default=0.02)
    parser.add_argument("--most", type=int, default=3, help="most targets; at most two drafters")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", nargs="*", choices=DEEDS, default=[], help="deeds that come first")
    options = parser.parse_args()
    storm = Storm(options.folder, options.documents, options.seed, options.step_s, options.most)
    storm.planned = list(options.first)
    storm.run(options.seconds, options.every_s)
    print(json.dumps(storm.report()))


if __name__ == "__main__":
    main()
