"""How many anchors a step draws where `anchors.num: auto` leaves it open: more while the drafters wait for packs.

A drafter that waits for the target could learn more from each pack for nothing. A step's time grows at most in
proportion to its anchors (the context is read all the same), so at size A with a share b of busy time, size A' keeps it
busy for at most b A'/A. It is taken where that leaves SPARE idle, one size at a time, and given up where less than FULL
is idle. What was given up for being too large is not taken again until packs come more slowly: hence no swinging.

Every rank concludes from the turns, which are the same on all of them (distributed.py), so nothing else is sent.
"""

from __future__ import annotations

from typing import NamedTuple

from configs.schema import AnchorsConfig
from consumer.distributed import Turn

SPARE, FULL = 0.05, 0.02


class Change(NamedTuple):
    """A decision; starved_pct: what it was made on, in percent of time."""

    before: int
    now: int
    starved_pct: float


class _Mark(NamedTuple):
    """Where measuring began."""

    step: int
    elapsed_s: float
    starved_s: tuple[float, ...]


def next_size(sizes: tuple[int, ...], size: int, starved: float) -> int:
    """Return the size to go on with. `starved`: share of time idle for lack of packs, 0 to 1."""
    place = sizes.index(size)
    if starved < FULL:
        return sizes[max(0, place - 1)]
    larger = sizes[min(place + 1, len(sizes) - 1)]
    return larger if (1 - starved) * larger <= (1 - SPARE) * size else size


class AnchorSize:
    """Chooses every `review_steps` steps; as many more are not measured at the start, after a change, after a pause."""

    def __init__(self, config: AnchorsConfig, recorded: int | None = None) -> None:
        """Begin with the size `recorded` in a checkpoint, or the next smaller one there is, or the smallest."""
        self.sizes, self._every = config.choices, config.review_steps
        self.size = max((size for size in self.sizes if size <= (recorded or 0)), default=self.sizes[0])
        self._begin_at: int | None = None
        self._mark: _Mark | None = None

    def hear(self, step: int, turn: Turn, in_a_step: bool = False) -> Change | None:
        """Follow a turn after `step` steps; returns the change where one is due, which all ranks then make at once.

        `in_a_step`: micro-steps wait for the rest of their step, so nothing is changed; a pause is heard all the same.
        """
        if len(self.sizes) == 1:
            return None
        if turn.paused or self._begin_at is None:
            self._mark, self._begin_at = None, step + self._every
        if in_a_step or step < self._begin_at:
            return None
        now = _Mark(step, turn.elapsed_s, turn.starved_s)
        mark, self._mark = self._mark, self._mark or now
        if mark is None or step - mark.step < self._every:
            return None
        self._mark = now
        # a rank that waits for another's pack counts as fed, so the one that waited longest says how it is
        waited_s = max(after - before for before, after in zip(mark.starved_s, now.starved_s, strict=True))
        starved = min(1.0, waited_s / max(now.elapsed_s - mark.elapsed_s, 1e-9))
        before, self.size = self.size, next_size(self.sizes, self.size, starved)
        if self.size == before:
            return None
        self._begin_at = None
        return Change(before, self.size, round(100 * starved, 1))
