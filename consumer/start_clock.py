"""How long each part of a drafter's start takes, from the start of its process to its first trained step."""

from __future__ import annotations

import os
import time
from typing import Any

from shm_ring.liveness import boot_ns, own_start


class StartClock:
    """Adds up the seconds of a start by phase. A phase ends where the next begins."""

    def __init__(self) -> None:
        """The first phase began with the process."""
        self._began_s = own_start() / os.sysconf("SC_CLK_TCK")
        self._last_s = self._began_s
        self._seconds: dict[str, float] = {}

    def ends(self, phase: str) -> None:
        """Count the time since the last call as `phase`."""
        now_s = boot_ns() / 1e9
        self._seconds[f"{phase}_s"] = round(self._seconds.get(f"{phase}_s", 0.0) + now_s - self._last_s, 3)
        self._last_s = now_s

    def result(self) -> dict[str, Any]:
        """Seconds of each phase, of all, and when the last one ended (`at_ms`, since 1970)."""
        return {**self._seconds, "total_s": round(self._last_s - self._began_s, 3), "at_ms": time.time_ns() // 10**6}
