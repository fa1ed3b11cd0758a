"""Named places at which a test may have this process killed: SHM_RING_KILL_AT=name or name:n for the n-th passage.

`ARMED` is decided once at import; where it is False the code pays one attribute test per place.
"""

from __future__ import annotations

import os
import signal

POINTS = frozenset(
    {
        "create_empty", "create_before_magic", "writer_locked", "after_acquire", "after_half", "before_publish",
        "after_header", "after_cursor", "after_publish", "after_bell", "reader_locked", "after_claim", "before_release",
        "after_release", "mid_retire",
    }
)  # fmt: skip

_name, _, _count = os.environ.get("SHM_RING_KILL_AT", "").partition(":")
_left = int(_count or 1)
ARMED = bool(_name)
if ARMED and _name not in POINTS:
    raise ValueError(f"SHM_RING_KILL_AT={_name!r} is not a kill point; known: {', '.join(sorted(POINTS))}")


def reached(point: str) -> None:
    """SIGKILL this process if it is the chosen point's chosen passage."""
    global _left
    if ARMED and point == _name:
        _left -= 1
        if _left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
