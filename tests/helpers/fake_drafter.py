"""Fake drafter: its weight is the number of its steps; it saves, resumes, stops and finishes as the real one does."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

from configs.load import load_config
from ops.control import Control
from ops.telemetry import Log, Metrics
from shm_ring import Reader, Ring, ring_name
from shm_ring.errors import RingEmpty, RingStopped
from tests.helpers.fake_run import SPEC, chatter, knobs, leave_at_start, may_end, rest, wait_unserved


class Fake:
    """The training loop."""

    def __init__(self, run_dir: Path, rank: int, control: Control) -> None:
        self.run_dir, self.rank, self.control = run_dir, rank, control
        self.config = load_config(run_dir / "config.yaml")
        self.log = Log("drafter", rank)
        self._last, self._starved_s = time.monotonic(), 0.0
        saved = sorted(int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step-*"))
        self.step = saved[-1] if saved else 0
        self.log("resumed", step=self.step, lr=self.config.optimizer.lr)

    def save(self) -> str:
        """Write a checkpoint as a folder renamed into place."""
        folder = self.run_dir / "checkpoints" / f"step-{self.step}"
        temporary = folder.with_name(f"tmp-{os.getpid()}")
        temporary.mkdir(parents=True)
        if folder.exists():
            temporary.rmdir()
        else:
            temporary.rename(folder)
        self.log("saved", step=self.step)
        return str(folder)

    def _starved_pct(self, reader: Reader) -> float:
        now, starved_s = time.monotonic(), reader.starved_s
        share = 100 * (starved_s - self._starved_s) / max(now - self._last, 1e-9)
        self._last, self._starved_s = now, starved_s
        return min(100.0, share)

    def train(self) -> None:
        """Take, step, release, until done or told to stop."""
        asked = knobs()
        goal = asked.get("steps", 20)
        rings = [Ring.open(ring_name(self.run_dir.name, k), SPEC) for k in range(len(self.config.target.devices))]
        with (
            Reader(rings, consumer_id=self.rank) as reader,
            Metrics(self.run_dir, "drafter", self.rank) as metrics,
        ):
            self.control.report(state="ready", step=self.step)
            while self.step < goal and not self.control.stopping:
                self.control.wait_while_paused()
                if asked.get("hold") and self.step == goal - 1 and not may_end(self.run_dir).exists():
                    rest(0.02)
                    continue
                try:
                    slot = reader.take(timeout_s=0.5, stop=lambda: self.control.stopping)
                except RingEmpty:
                    continue
                assert slot is not None
                rest(asked.get("step_s", 0.01))
                reader.release(slot)
                self.step += 1
                metrics.write(step=self.step, loss=10.0 / self.step, accept_len=1.5, tokens_per_s=500.0,
                              starved_pct=self._starved_pct(reader), accuracy=[0.5, 0.25],
                              occupancy=rings[0].snapshot().occupancy,
                              lr=self.config.optimizer.lr)  # fmt: skip
                self.control.report(state="running", step=self.step, settings_seen=self.control.settings)
                if self.step % asked.get("every", 5) == 0 or self.control.take_checkpoint_request():
                    self.save()
        for ring in rings:
            ring.close()
        self.control.report(saving=True)
        rest(asked.get("save_s", 0))
        folder = self.save()
        if self.step >= goal:
            final = {"steps": self.step, "packs_trained": self.step, "checkpoint": folder}
            (self.run_dir / "final.json").write_text(json.dumps(final | {"loss_first": 10.0, "loss_last": 0.5}))


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    arguments = parser.parse_args()
    wait_unserved(f"drafter{arguments.rank}", arguments.run_dir)
    with Control.start(arguments.run_dir, "drafter", arguments.rank) as control:
        leave_at_start(f"drafter{arguments.rank}", arguments.run_dir)
        chatter(f"drafter{arguments.rank}")
        fake = Fake(arguments.run_dir, arguments.rank, control)
        try:
            fake.train()
        except RingStopped:
            fake.save()
        while knobs().get("slow_stop") == "drafter":
            rest(0.1)


if __name__ == "__main__":
    main()
