"""Fake target: publishes packs until it is told to stop, and says once that its model is loaded."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from pathlib import Path

from ops.control import Control
from ops.telemetry import Log, Metrics
from shm_ring import Ring, ring_name
from shm_ring.errors import RingStopped
from tests.helpers.fake_run import SPEC, chatter, knobs, leave_at_start, rest


def main() -> None:
    """Publish."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    arguments = parser.parse_args()
    with Control.start(arguments.run_dir, "target", arguments.rank) as control:
        leave_at_start(f"target{arguments.rank}", arguments.run_dir)
        chatter(f"target{arguments.rank}")
        with contextlib.suppress(RingStopped):
            _publish(arguments.run_dir, arguments.rank, control)
        while knobs().get("slow_stop") == "target":
            rest(0.1)


def _publish(run_dir: Path, rank: int, control: Control) -> None:
    log, began, packs, blocked_s = Log("target", rank), time.monotonic(), 0, 0.0
    log("model loaded")
    late_exit = knobs().get("late_exit", {}).get(f"target{rank}")
    ring = Ring.open(ring_name(run_dir.name, rank), SPEC)
    with ring.writer() as writer, Metrics(run_dir, "target", rank) as metrics:
        control.report(state="ready")
        while not control.stopping:
            control.wait_while_paused()
            slot = writer.acquire(timeout_s=600, stop=lambda: control.stopping)
            rest(knobs().get("pack_s", 0))
            pack_id = writer.last_seq
            slot.array("input_ids")[:] = pack_id
            writer.publish(slot, pack_id=pack_id, num_tokens=16, checksum=0)
            now = time.monotonic()
            share = min(100.0, 100 * (writer.blocked_s - blocked_s) / max(now - began, 1e-9))
            began, blocked_s = now, writer.blocked_s
            metrics.write(step=pack_id, pack_id=pack_id, tokens_per_s=1000.0, blocked_pct=share,
                          occupancy=ring.snapshot().occupancy)  # fmt: skip
            control.report(state="running", step=pack_id)
            del slot
            packs += 1
            if late_exit is not None and packs == 3:
                sys.exit(late_exit)
    ring.close()


if __name__ == "__main__":
    main()
