"""What the fake processes share: their knobs (environment variable FAKE, a JSON object) and a tiny pack.

The fakes are real processes on the real ring, control and telemetry; only the models are missing. Knobs:
  steps        steps until the drafter is done (default 20)      step_s    duration of a drafter step (0.01)
  every        steps between its checkpoints (5)                 pack_s    duration of a target's pack (0)
  slow_stop    role that ignores a stop                          start_exit  {"target0": code} left with at start
  start_once   like start_exit, only in the first life           late_exit {"target0": code} left with at its 3rd pack
  refuse       {"drafter0": ["optimizer", "lr", 0.5, code]} left with at start where that setting has that value
  save_s       duration of the last checkpoint (0)               chatter   lines of 200 characters to log at start (0)
  heldout      values of heldout.json                            prepare_exit  code of preparation
  start_s      {"target0": seconds} that its start takes      start_wait  names that wait for may_start() to begin
  unserved     names that wait for may_start() before they have a control socket
  hold         true: the drafters' last step waits for may_end(), so that the run cannot end before a test is ready
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from configs.load import load_config
from shm_ring import Field, SlotSpec

SPEC = SlotSpec((Field("input_ids", "int32", (16,)),), {"fake": 1})


def knobs() -> dict[str, Any]:
    """Read the knobs."""
    values: dict[str, Any] = json.loads(os.environ.get("FAKE", "{}"))
    return values


def leave_at_start(name: str, run_dir: Path) -> None:
    """Leave with the code that the knobs ask for, after 30 lines of log, or take the time that they ask for."""
    asked = knobs()
    code = asked.get("start_exit", {}).get(name)
    mark = run_dir / f"{name}.started"
    if code is None and not mark.exists():
        code = asked.get("start_once", {}).get(name)
    mark.touch()
    section, key, value, refusal = asked.get("refuse", {}).get(name, ("run", "name", "", 0))
    if getattr(getattr(load_config(run_dir / "config.yaml"), section), key) == value:
        print(f"{section}.{key}: {name} cannot do with {value}", flush=True)
        sys.exit(int(refusal))
    if code is not None:
        for number in range(30):
            print(f"{name} line {number}")
        print(f"{name}: no such target: /does/not/exist", flush=True)
        sys.exit(int(code))
    rest(asked.get("start_s", {}).get(name, 0))
    while name in asked.get("start_wait", ()) and not may_start(run_dir, name).exists():
        rest(0.02)


def wait_unserved(name: str, run_dir: Path) -> None:
    """Stand for imports that take as long as a test wants."""
    while name in knobs().get("unserved", ()) and not may_start(run_dir, name).exists():
        rest(0.02)


def may_start(run_dir: Path, name: str) -> Path:
    """The file that a process of the knobs `start_wait` and `unserved` waits for."""
    return run_dir / f"{name}.may_start"


def may_end(run_dir: Path) -> Path:
    """The file that the drafters' last step waits for if the knob `hold` is set."""
    return run_dir / "may_end"


def chatter(name: str) -> None:
    """Log the lines that the knobs ask for."""
    for number in range(knobs().get("chatter", 0)):
        print(f"{name} chatter {number:06} ".ljust(200, "x"))


def rest(seconds: float) -> None:
    """Stand for work of a known duration."""
    time.sleep(seconds)
