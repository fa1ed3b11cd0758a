"""A process leaves its state in shared memory for its successor: one file in /dev/shm, beside the run's rings.

    0     8   magic
    8     8   complete: 1 when everything else is written, 0 before anything is overwritten
    16    8   step
    24    8   bytes of data
    32    8   bytes of the description, JSON, which follows the data
    4096      data

The launcher makes it empty and holds its lock (byte 255, as of a ring) as long as the run lives, so it outlasts both
processes; nothing is taken from /dev/shm before someone writes. A writer that dies in between leaves `complete` 0.
Knows nothing of what the data are, nor of whether they are still wanted (configs/resume.py).
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
from typing import Any

from shm_ring import layout, liveness, shared_memory
from shm_ring.errors import NoSharedMemory, RingLive, RingMissing
from shm_ring.names import SHM_DIR, state_name

_HEADER = struct.Struct("<QQQQQ")
_COMPLETE = struct.Struct("<Q")
_OFFSET_COMPLETE, OFFSET_DATA = 8, 4096
ROOM_SHARE = 0.9
"""Most of the free memory that a state may take; the rest is left to others."""


class Handover:
    """The file in this process: `data` after `map`; a description that is complete, or none."""

    def __init__(self, name: str, fd: int) -> None:
        """Take over a descriptor; use `create` or `open`."""
        self.name = name
        self._fd = fd
        self._lock: liveness.RoleLock | None = None
        self._mapping: mmap.mmap | None = None
        self._data_bytes = 0

    @classmethod
    def create(cls, run: str) -> Handover:
        """Make an empty file, or take over one that was left, and hold its lock; raises RingLive if another does."""
        name = state_name(run)
        with contextlib.suppress(shared_memory.Existing):
            os.close(shared_memory.create_exclusive(name))
        made = cls(name, shared_memory.open_existing(name, readonly=False))
        made._lock = liveness.RoleLock(made._fd)
        if not made._lock.take(layout.LOCK_CREATOR):
            made.close()
            raise RingLive(f"{SHM_DIR}{name} is in use by another launch of this run")
        return made

    @classmethod
    def open(cls, run: str) -> Handover | None:
        """Open the file of a run; None where its launcher made none."""
        name = state_name(run)
        try:
            return cls(name, shared_memory.open_existing(name, readonly=False))
        except RingMissing:
            return None

    @property
    def path(self) -> str:
        """Where the file is."""
        return SHM_DIR + self.name

    def read(self) -> tuple[int, dict[str, Any]] | None:
        """Return step and description of a complete state, None where there is none."""
        raw = os.pread(self._fd, _HEADER.size, 0)
        if len(raw) < _HEADER.size:
            return None
        magic, complete, step, data_bytes, text_bytes = _HEADER.unpack(raw)
        size = os.fstat(self._fd).st_size
        if magic != layout.MAGIC_STATE or complete != 1 or size < OFFSET_DATA + data_bytes + text_bytes:
            return None
        text = os.pread(self._fd, text_bytes, OFFSET_DATA + data_bytes)
        return step, json.loads(text)

    def map(self, num_bytes: int) -> mmap.mmap:
        """Return the mapping, with room for `num_bytes` of data from OFFSET_DATA on; raises NoSharedMemory.

        The memory is taken when it is first written to. What is there stays as it is.
        """
        if self._mapping is None or len(self._mapping) < OFFSET_DATA + num_bytes:
            info = os.fstat(self._fd)
            self._check_room(OFFSET_DATA + num_bytes - info.st_blocks * 512)
            if info.st_size < OFFSET_DATA + num_bytes:
                os.ftruncate(self._fd, OFFSET_DATA + num_bytes)
            self._mapping = mmap.mmap(self._fd, OFFSET_DATA + num_bytes)
        self._data_bytes = num_bytes
        return self._mapping

    def _check_room(self, wanted: int) -> None:
        """Room is checked, not reserved: to reserve it here would zero it by one thread, at 3 GB/s."""
        found = {
            f"free in {SHM_DIR}": shared_memory.shm_free_bytes(),
            "left of the container's memory": shared_memory.container_free_bytes(),
            "available memory": shared_memory.memory_available_bytes(),
        }
        for what, num_bytes in found.items():
            if num_bytes is not None and wanted > ROOM_SHARE * num_bytes:
                raise NoSharedMemory(
                    f"{SHM_DIR}{self.name}: {wanted / 1e9:.2f} GB wanted, {num_bytes / 1e9:.2f} GB {what}, of which "
                    f"{ROOM_SHARE:.0%} may be taken"
                )

    def begin(self) -> None:
        """Say that the data are about to be overwritten: what was complete is not any more."""
        os.pwrite(self._fd, _HEADER.pack(layout.MAGIC_STATE, 0, 0, 0, 0), 0)

    def finish(self, step: int, description: dict[str, Any]) -> None:
        """Say that the data are written, with a description of them; raises NoSharedMemory."""
        text = json.dumps(description).encode()
        try:
            written = os.pwrite(self._fd, text, OFFSET_DATA + self._data_bytes)
        except OSError as why:
            raise NoSharedMemory(f"{SHM_DIR}{self.name}: {why.strerror}") from None
        if written < len(text):  # the memory ran out in the middle
            raise NoSharedMemory(f"{SHM_DIR}{self.name}: {written} of {len(text)} bytes of the description fit")
        os.pwrite(self._fd, _HEADER.pack(layout.MAGIC_STATE, 0, step, self._data_bytes, len(text)), 0)
        os.pwrite(self._fd, _COMPLETE.pack(1), _OFFSET_COMPLETE)

    def remove(self) -> None:
        """Remove the name; the memory goes with the last mapping."""
        shared_memory.unlink(self.name)

    def close(self) -> None:
        """Give back lock and descriptor; a mapping goes with the last tensor that uses it."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._mapping = None
