"""A lock file that names its holder: one flock, dropped by the kernel when the holder dies.

A second bind on an ipc socket silently takes it over, so every socket and every run is guarded by one of these.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import weakref
from pathlib import Path

_LEAVING_S = 0.4
_LOOKED_AT_S = 30.0

_held: weakref.WeakSet[FileLock] = weakref.WeakSet()


class FileLock:
    """An exclusive lock on a file, with the holder's pid written in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1

    def take(self) -> int:
        """Take the lock; returns 0, or the pid of the living holder (-1 if unknown).

        Waits a moment for a holder that is just leaving, and longer while others only look: holder_pid() holds the
        lock shared for microseconds, but its process may stand still meanwhile.
        """
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        began = time.monotonic()
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                looked_at = _is_only_looked_at(fd)
                if time.monotonic() - began > (_LOOKED_AT_S if looked_at else _LEAVING_S):
                    pid = -1 if looked_at else _read_pid(fd)
                    os.close(fd)
                    return pid
                time.sleep(0.02)
        with contextlib.suppress(OSError):  # a full disk: who holds it is not written, and shown as -1
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        self._fd = fd
        _held.add(self)
        return 0

    @property
    def held(self) -> bool:
        """Whether this object holds the lock."""
        return self._fd >= 0

    def touch(self) -> None:
        """Renew the file's time: what clears old files out of /tmp would take it from a run of weeks."""
        if self.held:
            with contextlib.suppress(OSError):
                os.utime(self._fd)

    def drop(self) -> None:
        """Give the lock back; the file stays, since removing it would let two holders in."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def holder_pid(path: Path) -> int:
    """Return the pid of the living holder of a lock file, 0 if nobody holds it, -1 if the holder is unknown."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return 0
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read_pid(fd)
    else:
        return 0
    finally:
        os.close(fd)


def _is_only_looked_at(fd: int) -> bool:
    """Whether nobody but holder_pid() keeps the lock from being taken."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(fd, fcntl.LOCK_UN)
    return True


def _read_pid(fd: int) -> int:
    text = os.pread(fd, 32, 0).decode(errors="replace").strip()
    return int(text) if text.isdigit() else -1


def _close_in_child() -> None:
    for lock in list(_held):  # a forked child would keep the lock alive after its parent's death
        lock.drop()


os.register_at_fork(after_in_child=_close_in_child)
