"""Which packs this producer still has to make: its share, less what is trained, less what is in its ring.

Nothing is remembered over a crash: the answer follows from the schedule, the drafter's records and the ring itself.
The ring is read BEFORE the journal: a pack is journalled before its slot is released, so a pack that leaves the ring
between the two reads is found in the journal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from pathlib import Path

from configs.run_files import Trained, read_journals, read_trained
from shm_ring import Ring


class Todo:
    """The queue of pack ids of producer `rank` of `world`. Refreshed when the drafter side begins a new generation."""

    def __init__(self, run_dir: Path, ring: Ring, num_packs: int, rank: int, world: int) -> None:
        self._run_dir = run_dir
        self._ring = ring
        self._share = range(rank, num_packs, world)
        self._generation = -1
        self._stamp: tuple[int, int] | None = None
        self._queue: deque[int] = deque()

    @property
    def generation(self) -> int:
        """The drafter generation the queue was made for; -1 before any drafter has started."""
        return self._generation

    def refresh(self, under_way: Collection[int] = ()) -> bool:
        """Make the queue anew if a new generation began (one stat call otherwise). Returns whether it did.

        `under_way`: packs taken that will be in the ring in a moment; they are not queued again.
        """
        try:
            status = (self._run_dir / "trained.json").stat()
        except FileNotFoundError:
            return False
        stamp = (status.st_ino, status.st_mtime_ns)
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        trained = read_trained(self._run_dir)
        if trained is None or trained.generation == self._generation:
            return False
        self._rebuild(trained, under_way)
        return True

    def take(self, limit: int) -> list[int]:
        """Remove and return up to `limit` pack ids, lowest first."""
        return [self._queue.popleft() for _ in range(min(limit, len(self._queue)))]

    def __len__(self) -> int:
        return len(self._queue)

    def _rebuild(self, trained: Trained, under_way: Collection[int]) -> None:
        in_ring = self._ring.pack_ids()
        done = trained.packs | in_ring | frozenset(under_way) | read_journals(self._run_dir, trained.generation)
        self._queue = deque(pack_id for pack_id in self._share if pack_id not in done)
        self._generation = trained.generation
