"""Slow beside the drafters, whatever the speed of the machine: wait until they have stood idle for most of the time."""

from __future__ import annotations

import time
from collections.abc import Callable

from shm_ring import Ring

LEAST_S = 0.05
_POLL_S = 0.002


class Starving:
    """Looks at how long the consumers of a ring wait for packs."""

    def __init__(self, ring: Ring, share: float) -> None:
        """`share`: of the time, 0 to 1."""
        self._ring, self._share = ring, share
        self._since = time.monotonic()
        self._before: dict[int, float] = {}

    def wait(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Return once each living consumer has waited for that share of the time since the last return, and the caller
        has been here for as much of it; at once if none lives any more, or on `stop`. Waits for the first one to come.
        """
        came, has_lived = time.monotonic(), bool(self._before)
        while True:
            now = time.monotonic()
            waited = {each.consumer_id: each.waited_s for each in self._ring.snapshot().consumers if each.alive}
            if (not waited and has_lived) or stop():
                break
            if not waited:
                came = self._since = now
            elif now - came >= max(LEAST_S, self._share * (now - self._since)) and all(
                so_far - self._before.get(consumer or 0, 0.0) >= self._share * (now - self._since)
                for consumer, so_far in waited.items()
            ):
                break
            has_lived |= bool(waited)
            time.sleep(_POLL_S)
        self._since, self._before = now, {consumer or 0: so_far for consumer, so_far in waited.items()}
