"""What a drafter process measures about itself: loss, accepted length, tokens per second, share of time starved.

Sums leave a GPU in one asynchronous copy per line; a line is written when its copy has arrived, usually a step later,
so that training never waits for it.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from consumer.distributed import Ranks
from consumer.step import Reading, TrainStep
from ops.control import Control
from ops.telemetry import Metrics
from shm_ring import Reader, Ring

MOST_ON_THE_WAY = 4


class Meter:
    """Writes one line of metrics every few steps; rates are over the time since the line before."""

    def __init__(self, metrics: Metrics, control: Control, rings: list[Ring], reader: Reader, ranks: Ranks) -> None:
        self._metrics, self._control, self._rings, self._reader, self._ranks = metrics, control, rings, reader, ranks
        self._tokens = 0
        self._last_step = -1
        self._last = time.monotonic()
        self._last_starved_s = reader.starved_s
        self._last_waited_s = ranks.waited_s
        self._on_the_way: deque[tuple[Reading, dict[str, Any]]] = deque()
        self.first_loss: float | None = None
        self.last_loss: float | None = None

    def trained(self, num_tokens: int) -> None:
        """Count the tokens of one pack."""
        self._tokens += num_tokens
        self._write_arrived(MOST_ON_THE_WAY)

    def write(self, step: TrainStep, packs_trained: int, **more: Any) -> None:
        """Begin a line, if a step was done since the last one; it is written when its sums are on the host."""
        if step.step == self._last_step or (self._last_step < 0 and step.step == 0):
            return
        self._last_step = step.step
        now = time.monotonic()
        passed_s = max(now - self._last, 1e-9)
        starved_s = self._reader.starved_s - self._last_starved_s
        line: dict[str, Any] = {
            "tokens_per_s": self._tokens / passed_s,
            "starved_pct": round(100 * min(1.0, starved_s / passed_s), 2),
            "occupancy": sum(ring.snapshot().occupancy for ring in self._rings),
            "packs_trained": packs_trained,
            "anchors": step.num_anchors,
            **more,
        }
        if self._ranks.world > 1:
            waited_s = self._ranks.waited_s - self._last_waited_s
            line["peers_pct"] = round(100 * min(1.0, waited_s / passed_s), 2)
            self._last_waited_s = self._ranks.waited_s
        self._tokens, self._last, self._last_starved_s = 0, now, self._reader.starved_s
        self._on_the_way.append((step.start_reading(), line))
        self._write_arrived(MOST_ON_THE_WAY)

    def flush(self) -> None:
        """Write the lines that are still on the way; waits for them."""
        self._write_arrived(0)

    def _write_arrived(self, may_remain: int) -> None:
        while self._on_the_way and (self._on_the_way[0][0].ready or len(self._on_the_way) > may_remain):
            reading, more = self._on_the_way.popleft()
            line = {**reading.result(), **more}
            loss = float(line["loss"])
            self.first_loss = loss if self.first_loss is None else self.first_loss
            self.last_loss = loss
            self._metrics.write(step=reading.step, **line)
            self._control.report(state="running", step=reading.step, **line)
