"""Ask a run for its status, as `launch.py status --json` does; again where its launcher is slow to answer."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from ops import commands
from ops.errors import NoAnswer


def status_of(run_dir: Path, limit_s: float) -> dict[str, Any]:
    """Return the run's status; raises NoAnswer after `limit_s` without one."""
    give_up = time.monotonic() + limit_s
    while True:
        try:
            return commands.status(run_dir)
        except NoAnswer:
            if time.monotonic() > give_up:
                raise
