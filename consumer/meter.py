"""What a drafter process measures about itself: loss, accepted length, tokens per second, where its time goes.

starved: its device stands still for lack of a pack. peers: for lack of the other ranks. staging: a pack comes over.
Sums leave a GPU in one asynchronous copy per line; a line is written when its copy has arrived, usually a step later,
so that training never waits for it.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch

from consumer.distributed import Ranks
from consumer.step import Reading, TrainStep
from gpu.device import marks_of
from ops.control import Control
from ops.telemetry import Metrics, Phases, shares
from shm_ring import Ring

MOST_ON_THE_WAY = 4
PHASES = ("step", "starved", "staging", "peers", "checkpoint", "evaluation", "other")


class Meter:
    """Writes one line of metrics every few steps; rates are over the time since the line before."""

    def __init__(
        self, metrics: Metrics, control: Control, rings: list[Ring], device: torch.device, ranks: Ranks, step: int
    ) -> None:
        """`device`: whose time is accounted for. `step`: the last one before this life, of which there is no line."""
        self.phases = Phases(mark=marks_of(device))
        """Told which of PHASES the process enters."""
        self._metrics, self._control, self._rings, self._ranks = metrics, control, rings, ranks
        self._phases = tuple(phase for phase in PHASES if phase != "peers" or ranks.world > 1)
        self._tokens = 0
        self._last_step = step
        self._last = time.monotonic()
        self._on_the_way: deque[tuple[Reading, dict[str, Any]]] = deque()
        self.first_loss: float | None = None
        self.last_loss: float | None = None

    def trained(self, num_tokens: int) -> None:
        """Count the tokens of one pack."""
        self._tokens += num_tokens
        self._write_arrived(MOST_ON_THE_WAY)

    def write(self, step: TrainStep, packs_trained: int, **more: Any) -> None:
        """Begin a line, if a step was done since the last one; it is written when its sums are on the host."""
        if step.step == self._last_step:
            return
        self._last_step = step.step
        now = time.monotonic()
        passed_s = max(now - self._last, 1e-9)
        spent_s = self.phases.take()
        if self._ranks.world == 1:
            spent_s["other"] = spent_s.get("other", 0.0) + spent_s.pop("peers", 0.0)
        line: dict[str, Any] = {
            "tokens_per_s": self._tokens / passed_s,
            **shares(spent_s, self._phases),
            "occupancy": sum(ring.snapshot().occupancy for ring in self._rings),
            "packs_trained": packs_trained,
            "anchors": step.num_anchors,
            **more,
            "spent_s": spent_s,
        }
        self._tokens, self._last = 0, now
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
