"""One way to wait, used by both ends: look, spin a little, then sleep on doorbells with a cap of 100 ms.

A dead peer rings no bell, and a bell may be lost with a process between its store and its ring; the cap bounds both.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from shm_ring import atomics
from shm_ring.errors import RingStopped, RingTimeout

CAP_S = 0.1
NUM_SPINS = 20
_REPORTS_S = (1.0, 10.0)
_REPORT_EVERY_S = 30.0

T = TypeVar("T")
Stop = Callable[[], bool]
_log = logging.getLogger("shm_ring")


def wait_until(
    look: Callable[[], T | None],
    bells: Sequence[int],
    timeout_s: float,
    stop: Stop | None,
    on_pause: Callable[[int], None],
    timeout_error: Callable[[float], RingTimeout],
    waited_before_s: float = 0.0,
) -> T:
    """Return the first result of `look` that is not None.

    `bells` are addresses; `on_pause` gets the nanoseconds waited since its last call, at least every 100 ms. Raises
    RingStopped when `stop` says so, and `timeout_error(waited seconds)` after `timeout_s`. `waited_before_s`: a long
    wait in slices reports itself as one; so many seconds of it are over.
    """
    for _ in range(NUM_SPINS):
        found = look()
        if found is not None:
            return found
    begun = last = time.monotonic()
    next_report = 0
    while _report_time(next_report) <= waited_before_s:
        next_report += 1
    try:
        while True:
            seen = [(bell, atomics.load_u32(bell)) for bell in bells]
            found = look()
            if found is not None:
                return found
            now = time.monotonic()
            on_pause(int((now - last) * 1e9))
            last, waited = now, now - begun
            if stop is not None and stop():
                raise RingStopped("asked to stop while waiting on the ring")
            whole = waited_before_s + waited
            if whole >= _report_time(next_report):  # before the end, which may be that of a slice only
                next_report += 1
                _log.warning("ring | waiting | %s", timeout_error(whole))
            if waited >= timeout_s:
                raise timeout_error(whole)
            atomics.wait_bells(seen, min(CAP_S, timeout_s - waited))
    finally:
        on_pause(int((time.monotonic() - last) * 1e9))


def _report_time(number: int) -> float:
    if number < len(_REPORTS_S):
        return _REPORTS_S[number]
    return _REPORT_EVERY_S * (number - len(_REPORTS_S) + 1)
