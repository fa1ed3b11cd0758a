"""How many CPU cores a process may use: fewer than there are in a container or a pod with a limit on processor time."""

from __future__ import annotations

import math
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def usable_cores(root: Path = _CGROUP) -> int:
    """Return the cores that the scheduler gives this process, no more than the container's quota is worth (at least 1).

    Threads beyond the quota do not only wait: the kernel then stops all of them for the rest of each 100 ms.
    """
    cores = len(os.sched_getaffinity(0))
    quota = _quota(root)
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def _quota(root: Path) -> float | None:
    """Processor time per time of the container (cgroup 2, then 1); None without a limit."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            quota, period = " ".join((root / name).read_text() for name in names).split()
            return int(quota) / int(period) if quota not in ("max", "-1") else None
        except (OSError, ValueError, ZeroDivisionError):
            continue
    return None
