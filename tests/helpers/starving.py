"""Slow beside the drafters, whatever the speed of the machine: wait until they have stood idle for most of the time."""

from __future__ import annotations

import time
from collections.abc import Callable

from shm_ring import Ring

LEAST_S = 0.05
_POLL_S = 0.002


class Starving:
    """Looks at how long the consumers of a ring wait for packs."""

    def __init__(self, ring: Ring, share: float, own_share: float = 0.0) -> None:
        """Shares of the time, 0 to 1: that the consumer waits for packs which waits longest, and that is spent here."""
        self._ring, self._share, self._own_share = ring, share, own_share
        self._since = time.monotonic()
        self._before: dict[int, float] = {}

    def wait(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Return once both shares of the time since the last return are reached; at once if no consumer lives any more,
        or on `stop`. Waits for the first consumer to come.
        """
        came, has_lived = time.monotonic(), bool(self._before)
        while True:
            now = time.monotonic()
            waited = {each.consumer_id or 0: each.waited_s for each in self._ring.snapshot().consumers if each.alive}
            if (not waited and has_lived) or stop():
                break
            passed_s = now - self._since
            longest_s = max((so_far - self._before.get(each, 0.0) for each, so_far in waited.items()), default=0.0)
            if not waited:
                came = self._since = now
            elif now - came >= max(LEAST_S, self._own_share * passed_s) and longest_s >= self._share * passed_s:
                break
            has_lived |= bool(waited)
            time.sleep(_POLL_S)
        self._since, self._before = now, waited
