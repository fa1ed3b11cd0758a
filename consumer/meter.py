"""What a drafter process measures about itself: loss, accepted length, tokens per second, share of time starved."""

from __future__ import annotations

import time
from typing import Any

from consumer.distributed import Ranks
from consumer.step import TrainStep
from ops.control import Control
from ops.telemetry import Metrics
from shm_ring import Reader, Ring


class Meter:
    """Writes one line of metrics every few steps; rates are over the time since the line before."""

    def __init__(self, metrics: Metrics, control: Control, rings: list[Ring], reader: Reader, ranks: Ranks) -> None:
        self._metrics, self._control, self._rings, self._reader, self._ranks = metrics, control, rings, reader, ranks
        self._tokens = 0
        self._last_step = -1
        self._last = time.monotonic()
        self._last_starved_s = reader.starved_s
        self._last_waited_s = ranks.waited_s
        self.first_loss: float | None = None
        self.last_loss: float | None = None

    def trained(self, num_tokens: int) -> None:
        """Count the tokens of one pack."""
        self._tokens += num_tokens

    def write(self, step: TrainStep, packs_trained: int, **more: Any) -> None:
        """Write a line, if a step was done since the last one."""
        if step.step == self._last_step or (self._last_step < 0 and step.step == 0):
            return
        self._last_step = step.step
        now = time.monotonic()
        passed_s = max(now - self._last, 1e-9)
        starved_s = self._reader.starved_s - self._last_starved_s
        values = step.metrics()
        loss = float(values["loss"])  # type: ignore[arg-type]
        self.first_loss = loss if self.first_loss is None else self.first_loss
        self.last_loss = loss
        line: dict[str, Any] = {
            **values,
            "tokens_per_s": self._tokens / passed_s,
            "starved_pct": round(100 * min(1.0, starved_s / passed_s), 2),
            "occupancy": sum(ring.snapshot().occupancy for ring in self._rings),
            "packs_trained": packs_trained,
            **more,
        }
        if self._ranks.world > 1:
            waited_s = self._ranks.waited_s - self._last_waited_s
            line["peers_pct"] = round(100 * min(1.0, waited_s / passed_s), 2)
            self._last_waited_s = self._ranks.waited_s
        self._metrics.write(step=step.step, **line)
        self._control.report(state="running", step=step.step, **line)
        self._tokens, self._last, self._last_starved_s = 0, now, self._reader.starved_s
