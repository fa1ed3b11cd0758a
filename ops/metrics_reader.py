"""Follow a run's metrics.jsonl: the latest line, a short history and running means of each process.

With a listener new lines come as messages (ops/feed.py); the file is read at the beginning, after a gap, and once in a
while, since a run whose launcher is gone publishes nothing.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ops.feed import Listener
from ops.telemetry import METRICS_FILE

LOOK_EVERY_S = 1.0
HISTORY = 600
_CHUNK = 1 << 20
Key = tuple[str, int]


class MetricsReader:
    """Reads what was appended since the last poll(); torn lines are skipped, an unfinished one waits for its end."""

    def __init__(
        self, run_dir: Path, start: int | None = None, history: int = HISTORY, listener: Listener | None = None
    ) -> None:
        """Begin at byte `start`; None: at most the last MiB of what is there. The caller closes `listener`."""
        self._listener, self._look_at_s = listener, 0.0
        self.path = run_dir / METRICS_FILE
        size = self.path.stat().st_size if self.path.exists() else 0
        self._at = max(0, size - _CHUNK) if start is None else start
        self._rest = b""
        self._skip_first = start is None and self._at > 0
        self._history = history
        self.first: dict[Key, dict[str, Any]] = {}
        self.latest: dict[Key, dict[str, Any]] = {}
        self.series: dict[Key, deque[dict[str, Any]]] = {}
        self._sums: dict[tuple[Key, str], tuple[float, int]] = {}

    def poll(self) -> int:
        """Read new lines; return how many there were."""
        return len(list(self.read()))

    def read(self, to_the_end: bool = False) -> Iterator[dict[str, Any]]:
        """Read new lines one by one; `to_the_end`: also those that the listener has not brought yet."""
        self._look_at_s = 0.0 if to_the_end else self._look_at_s
        for record in self._from_file() if self._listener is None else self._heard(self._listener):
            self._add((record["role"], record["rank"]), record)
            yield record

    def lead(self, role: str) -> Key:
        """The process of a role with the lowest rank that has written anything here; rank 0 if none has."""
        return min((key for key in self.latest if key[0] == role), default=(role, 0))

    def mean(self, role: str, name: str) -> float | None:
        """Mean of a number over the lines of each process but its first (warm-up), summed over the processes."""
        means = [total / count for (key, what), (total, count) in self._sums.items() if (key[0], what) == (role, name)]
        return sum(means) if means else None

    def now(self, role: str, name: str) -> list[float]:
        """Latest value of a number in each process of a role that has it."""
        values = [record.get(name) for key, record in sorted(self.latest.items()) if key[0] == role]
        return [float(value) for value in values if isinstance(value, (int, float))]

    def _add(self, key: Key, record: dict[str, Any]) -> None:
        for name in ("tokens_per_s", "starved_pct", "blocked_pct"):
            value = record.get(name)
            if isinstance(value, (int, float)):
                total, seen = self._sums.get((key, name), (0.0, 0))
                is_second = seen == 1 and len(self.series.get(key, ())) == 1
                self._sums[key, name] = (value, 1) if is_second else (total + value, seen + 1)
        self.first.setdefault(key, record)
        self.latest[key] = record
        self.series.setdefault(key, deque(maxlen=self._history)).append(record)

    def _heard(self, listener: Listener) -> Iterator[dict[str, Any]]:
        messages = listener.receive()
        if time.monotonic() >= self._look_at_s:
            yield from self._from_file()
        for message in messages:
            if message.is_greeting or message.start > self._at:
                yield from self._from_file()
            elif message.start == self._at:
                yield from self._split(message.line)

    def _from_file(self) -> Iterator[dict[str, Any]]:
        self._look_at_s = time.monotonic() + LOOK_EVERY_S
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            if file.seek(0, 2) < self._at:  # replaced by a shorter file
                self._at, self._rest = 0, b""
            file.seek(self._at)
            while chunk := file.read(_CHUNK):
                yield from self._split(chunk)

    def _split(self, chunk: bytes) -> Iterator[dict[str, Any]]:
        """Go on in the file by `chunk`."""
        self._at += len(chunk)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            if self._skip_first:
                self._skip_first = False
                continue
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if _is_metrics(record):
                yield record


def _is_metrics(record: Any) -> bool:
    if not isinstance(record, dict) or not isinstance(record.get("role"), str):
        return False
    return isinstance(record.get("rank"), int) and all(
        isinstance(record.get(n), (int, float)) for n in ("time", "step")
    )
