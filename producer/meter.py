"""What a target process measures about itself: tokens per second, share of time blocked by a full ring."""

from __future__ import annotations

import time

from ops.control import Control
from ops.telemetry import Metrics
from shm_ring import Ring, Writer


class Meter:
    """Writes one line of metrics per pack; rates are over the time since the line before."""

    def __init__(self, metrics: Metrics, control: Control, ring: Ring, writer: Writer) -> None:
        self._metrics = metrics
        self._control = control
        self._ring = ring
        self._writer = writer
        self._packs = 0
        self._tokens = 0
        self._start = self._last = time.monotonic()
        self._last_blocked_s = writer.blocked_s

    def packed(self, pack_id: int, num_tokens: int) -> None:
        """Record one pack of `num_tokens` valid tokens."""
        now = time.monotonic()
        self._packs += 1
        self._tokens += num_tokens
        passed_s = max(now - self._last, 1e-9)
        blocked_s = self._writer.blocked_s - self._last_blocked_s
        self._last, self._last_blocked_s = now, self._writer.blocked_s
        values = {
            "pack_id": pack_id,
            "tokens_per_s": num_tokens / passed_s,
            "tokens": self._tokens,
            "blocked_pct": round(100 * min(1.0, blocked_s / passed_s), 2),
            "occupancy": self._ring.snapshot().occupancy,
        }
        self._metrics.write(step=self._packs, **values)
        self._control.report(state="running", step=self._packs, **values)
