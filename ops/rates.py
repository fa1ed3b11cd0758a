"""How fast a ring moves: its counters, now and up to half a minute ago.

The launcher looks twice a second and tells each status what it saw longest ago, so that a dashboard which has just been
opened, or draws a single picture, need not judge by what happens to pass in an instant: packs come in bursts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

WINDOW_S = 30.0
_COUNTERS = {"published": "published_per_s", "released": "released_per_s", "published_bytes": "bytes_per_s"}


class Rates:
    """The counters of one ring over the last WINDOW_S and the step before. Times are the host's time.monotonic()."""

    def __init__(self, earliest: Mapping[str, float] | None = None) -> None:
        """`earliest`: what another process of this host saw before."""
        self._seen: deque[Mapping[str, float]] = deque([earliest] if earliest else [])

    def see(self, now: float, values: Mapping[str, Any]) -> dict[str, float | None]:
        """Note the counters in `values`; returns the rates per second, None while only one moment is known."""
        seen = self._seen
        seen.append({"at_s": now} | {name: values[name] for name in _COUNTERS})
        while len(seen) > 2 and now - seen[1]["at_s"] >= WINDOW_S:
            seen.popleft()
        first, passed_s = seen[0], now - seen[0]["at_s"]
        return {
            rate: round((values[name] - first[name]) / passed_s, 3) if passed_s > 0 else None
            for name, rate in _COUNTERS.items()
        }

    @property
    def earliest(self) -> dict[str, float]:
        """The oldest counters that the rates are taken from."""
        return dict(self._seen[0])
