"""What a target process measures about itself: tokens per second, where its time goes.

forward: the target reads. copy: a pack is checked and moved into its slot. blocked: the ring is full. data: packs are
laid out from their documents. Copying and waiting count as far as the device has no forward to do meanwhile.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from ops.control import Control
from ops.telemetry import Log, Metrics, Phases, shares
from producer.states import StateCheck
from shm_ring import Ring

RECENT_PACKS = 8
PHASES = ("forward", "copy", "blocked", "data", "other")


class Meter:
    """Writes one line of metrics per pack.

    Rates and shares are over the last RECENT_PACKS packs, since packs finish in bursts; spent_s is this line's alone.
    """

    def __init__(
        self, metrics: Metrics, control: Control, ring: Ring, phases: Phases, min_agreement: float, log: Log
    ) -> None:
        """`phases`: what the process tells which of PHASES it enters. `min_agreement`: one warning below it."""
        self.phases = phases
        self._metrics = metrics
        self._min_agreement = min_agreement
        self._log = log
        self._control = control
        self._ring = ring
        self._packs = 0
        self._tokens = 0
        self._recent = deque([(time.monotonic(), 0)], maxlen=RECENT_PACKS + 1)
        self._recently_spent: deque[dict[str, float]] = deque(maxlen=RECENT_PACKS)

    def packed(self, pack_id: int, num_tokens: int, padding: float, check: StateCheck) -> None:
        """Record one pack of `num_tokens` valid tokens. `padding`: share of all tokens read that were padding."""
        now = time.monotonic()
        self._packs += 1
        self._tokens += num_tokens
        self._recent.append((now, self._tokens))
        then, tokens_then = self._recent[0]
        passed_s = max(now - then, 1e-9)
        spent_s = self.phases.take()
        self._recently_spent.append(spent_s)
        recently = {phase: sum(each.get(phase, 0.0) for each in self._recently_spent) for phase in PHASES}
        values: dict[str, Any] = {
            "pack_id": pack_id,
            "tokens_per_s": (self._tokens - tokens_then) / passed_s,
            "tokens": self._tokens,
            **shares(recently, PHASES),
            "padding_pct": round(100 * padding, 2),
            "occupancy": self._ring.snapshot().occupancy,
            "spent_s": spent_s,
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
