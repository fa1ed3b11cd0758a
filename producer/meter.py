"""What a target process measures about itself: tokens per second, share of time blocked by a full ring."""

from __future__ import annotations

import time
from collections import deque

from ops.control import Control
from ops.telemetry import Log, Metrics
from producer.states import StateCheck
from shm_ring import Ring, Writer

RECENT_PACKS = 8


class Meter:
    """Writes one line of metrics per pack; rates are over the last RECENT_PACKS packs, since packs finish in bursts."""

    def __init__(
        self, metrics: Metrics, control: Control, ring: Ring, writer: Writer, min_agreement: float, log: Log
    ) -> None:
        """`min_agreement`: below this target agreement one warning is logged."""
        self._metrics = metrics
        self._min_agreement = min_agreement
        self._log = log
        self._control = control
        self._ring = ring
        self._writer = writer
        self._packs = 0
        self._tokens = 0
        self._recent = deque([(time.monotonic(), 0, writer.blocked_s)], maxlen=RECENT_PACKS + 1)

    def packed(self, pack_id: int, num_tokens: int, padding: float, check: StateCheck) -> None:
        """Record one pack of `num_tokens` valid tokens. `padding`: share of all tokens read that were padding."""
        now = time.monotonic()
        self._packs += 1
        self._tokens += num_tokens
        self._recent.append((now, self._tokens, self._writer.blocked_s))
        then, tokens_then, blocked_then_s = self._recent[0]
        passed_s = max(now - then, 1e-9)
        values: dict[str, float] = {
            "pack_id": pack_id,
            "tokens_per_s": (self._tokens - tokens_then) / passed_s,
            "tokens": self._tokens,
            "blocked_pct": round(100 * min(1.0, (self._writer.blocked_s - blocked_then_s) / passed_s), 2),
            "padding_pct": round(100 * padding, 2),
            "occupancy": self._ring.snapshot().occupancy,
        }
        if check.agreement is not None:
            values["target_agreement"] = round(check.agreement, 4)
            self._warn(check)
        self._metrics.write(step=self._packs, **values)
        self._control.report(state="running", step=self._packs, **values)

    def _warn(self, check: StateCheck) -> None:
        """Say once that the answers seem not to be the target's own."""
        if check.agreement is None or not check.agreement_settled or check.agreement >= self._min_agreement:
            return
        self._log(
            "warning",
            detail=f"{100 * check.agreement:.0f} % of the supervised tokens are the target's own greedy choice, "
            f"expected at least {100 * self._min_agreement:.0f} % (target.min_agreement): the answers were not "
            "produced by this target; regenerate them, or use loss.labels: target_argmax",
        )
        self._min_agreement = 0.0
