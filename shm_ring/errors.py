"""The one error tree of the ring.

Every message says where, what was expected, what was found and what to do, in one line. `exit_code` is what a program
should leave with when it lets the error end it: 2 configuration, 3 data, 4 a peer, 5 resources, 0 asked to stop.
"""

from __future__ import annotations


class RingError(Exception):
    """Base of everything that shm_ring raises on purpose."""

    exit_code = 2


class RingUsage(RingError):
    """The caller broke the protocol: published out of order, released a slot twice, used a ring after a fork."""


class RingName(RingError):
    """A run or segment name that is too long or has characters outside [A-Za-z0-9_.-]."""


class RingMissing(RingError):
    """No segment of that name is visible here."""


class RingPermission(RingError):
    """The segment belongs to another user, or its mode forbids the access."""


class RingExists(RingError):
    """A segment of that name is already there."""


class RingLive(RingExists):
    """The name is in use: at least one process holds a lock on the segment."""


class RingStale(RingExists):
    """The name was left by a run of which no process lives: resume it or clean it."""


class RingOwned(RingError):
    """The role (the producer, or one consumer id) is taken by a living process."""


class RingMismatch(RingError):
    """Both sides disagree on the contents of a slot."""


class RingVersion(RingMismatch):
    """Both sides disagree on the layout of the segment."""


class RingCorrupt(RingError):
    """The bytes of the segment contradict each other; nothing is repaired."""

    exit_code = 3


class RingOversize(RingError):
    """A record is larger than its field of the slot."""

    exit_code = 3


class RingTimeout(RingError):
    """A wait ended without what it waited for; the message names who holds what."""

    exit_code = 4


class RingFull(RingTimeout):
    """No slot became FREE in time."""


class RingEmpty(RingTimeout):
    """No slot became READY in time, and the data has not ended."""


class RingStopped(RingError):
    """The caller's `stop` (or the board's stop flag) ended a wait."""

    exit_code = 0


class NoSharedMemory(RingError):
    """The segment does not fit into /dev/shm, the memory, or the container's limit."""

    exit_code = 5


class MissingLibrary(RingError, ImportError):
    """libatomic, or the kernel interface that the ring needs, is not there."""

    exit_code = 5
