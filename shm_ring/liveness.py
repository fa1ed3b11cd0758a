"""Who lives: OFD record locks on the segment, and what /proc says about a pid.

The kernel drops an OFD lock when the last descriptor of that open file is closed, so a lock tells life from death
without clocks, heartbeats or pid files, and survives SIGSTOP. The pid in a record is for messages only, with its start
time so that a reused pid is not mistaken for its former owner.
Each role has its own open file: Python's mmap keeps a duplicate of the descriptor it was given, and a lock on that file
would outlive its owner in every forked child.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
import weakref

from shm_ring.errors import RingUsage

_FLOCK = struct.Struct("hhxxxxqqixxxx")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

_held: weakref.WeakSet[RoleLock] = weakref.WeakSet()


class RoleLock:
    """An exclusive lock on one byte of a segment, alive as long as this process and this object."""

    def __init__(self, segment_fd: int) -> None:
        """Open the segment behind `segment_fd` once more; nothing is locked yet."""
        self.fd = os.open(f"/proc/self/fd/{segment_fd}", os.O_RDWR | os.O_CLOEXEC)
        _held.add(self)

    def take(self, start: int, length: int = 1) -> bool:
        """Lock bytes without waiting; False if anyone else holds one of them."""
        try:
            fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def drop(self, start: int, length: int = 1) -> None:
        """Unlock bytes."""
        fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, start, length, 0))

    @property
    def is_open(self) -> bool:
        """False after close, and in a forked child."""
        return self.fd >= 0

    def check(self) -> None:
        """Raise RingUsage if this end was closed, or belongs to the parent of this process."""
        if self.fd < 0:
            raise RingUsage("this end of the ring is closed, or was opened before a fork: attach again in this process")

    def close(self) -> None:
        """Give the lock back."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def _close_in_child() -> None:
    for lock in list(_held):
        lock.close()


os.register_at_fork(after_in_child=_close_in_child)


def is_locked(fd: int, start: int, length: int = 1) -> bool:
    """Say whether any open file other than `fd` holds one of the bytes; works on a read-only descriptor."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
    kind: int = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))[0]
    return kind != fcntl.F_UNLCK


def process_state(pid: int) -> tuple[str, int] | None:
    """Return (state letter, start time in clock ticks since boot) of a pid, or None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            raw = f.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = raw[raw.rindex(b")") + 2 :].split()
    return fields[0].decode(), int(fields[19])


def own_start() -> int:
    """Return this process's start time in clock ticks since boot."""
    return start_of(os.getpid())


def start_of(pid: int) -> int:
    """Return a process's start time in clock ticks since boot; 0 where there is no such process."""
    state = process_state(pid)
    return state[1] if state else 0


def is_running(pid: int, start: int) -> bool:
    """Say whether the process with this pid AND start time is still there; a zombie is not (its memory is gone)."""
    state = process_state(pid) if pid else None
    return state is not None and state[1] == start and state[0] not in "ZX"


def is_stopped(pid: int, start: int) -> bool:
    """Say whether the process is stopped by a signal or a debugger."""
    state = process_state(pid) if pid else None
    return state is not None and state[1] == start and state[0] in "Tt"


def boot_ns() -> int:
    """Nanoseconds since boot, suspend included: the clock of heartbeats and `published_ns`, never of a decision."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def started_at(start: int) -> str:
    """Return the wall-clock time of a start given in ticks since boot, for messages."""
    age_s = boot_ns() / 1e9 - start / _TICKS_PER_S
    return time.strftime("%H:%M:%S", time.localtime(time.time() - age_s))
