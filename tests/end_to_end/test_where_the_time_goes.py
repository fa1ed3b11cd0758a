"""Where the time of a whole run goes: a target that became slower is found and named by the real processes' meters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ops.doctor import compare, describe, read_report
from tests.helpers.tiny_run import LIMIT_S, REPOSITORY, Tiny, tiny

__all__ = ["tiny"]

SLOTS, STEPS = 40, 30
QUIET = ("--set", f"training.max_steps={STEPS}", "--set", "evaluation.enabled=false")
FAST = ("--set", f"ring.num_slots={SLOTS}")


def test_l11_a_target_that_became_slower_is_named_with_its_phase_and_the_occupancy_stays_near_zero(tiny: Tiny) -> None:
    tiny.launch(*QUIET, *FAST, hold_at=0)
    tiny.wait_for(lambda: tiny.status()["occupancy"] == SLOTS)  # more than the drafter takes: it never waits
    tiny.let_go()
    code, out = tiny.end()
    assert code == 0, out
    before = read_report(tiny.dir)
    slow = [sys.executable, "-m", "tests.helpers.slow_target", str(tiny.config), "--name", f"{tiny.name}.s", *QUIET]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        slow, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    slow_dir: Path = tiny.dir.with_name(f"{tiny.name}.s")
    now = read_report(slow_dir)
    assert now.verdict.kind == "target-bound", describe(now)
    assert now.sides["target"].pct["forward"] > 80, describe(now)
    assert now.sides["drafter"].pct["starved"] > 50, describe(now)
    assert now.sides["drafter"].values["occupancy"] <= 1
    lines = compare(now, before)
    assert "because of the target's forward: " in lines[0]
    assert any("the drafter lost" in line and "it waits for the target" in line for line in lines)
