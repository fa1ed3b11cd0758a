"""Read a word that another core keeps flipping between all zeros and all ones, and count values that are neither.

    python tests/stress/ring_torn.py aligned|straddling|words

`straddling` lays the word across a cache line, where the processor does tear: the control that shows the test can fail.
`words` reads as the reader's scan does, through the memoryview. The two processes are pinned to different cores; the
number of flips the reader saw is printed, because two processes that share a core see none and prove nothing. Where
others take the cores it reads on, until it has seen enough, or until the caller gives up.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from shm_ring import atomics

ONES = (1 << 64) - 1
OFFSETS = {"aligned": 64, "straddling": 60, "words": 64}
MIN_FLIPS = 1000


def flip_forever(address: int) -> None:
    """Store 0 and all ones in turn."""
    cell = ctypes.c_uint64.from_address(address)
    while True:
        if address % 8:
            cell.value = 0
            cell.value = ONES
        else:
            atomics.store_u64(address, 0)
            atomics.store_u64(address, ONES)


def read_for(seconds: float, kind: str, memory: mmap.mmap, address: int) -> tuple[int, int, int]:
    """Return (reads, flips seen, torn values)."""
    view = memoryview(memory)[:128].cast("Q")
    cell = ctypes.c_uint64.from_address(address)
    reads = flips = torn = last = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end or flips < MIN_FLIPS or (kind == "straddling" and not torn):
        for _ in range(1000):
            value = view[8] if kind == "words" else cell.value if kind == "straddling" else atomics.load_u64(address)
            reads += 1
            if value != last:
                flips += 1
                last = value
                torn += value not in (0, ONES)
    view.release()
    return reads, flips, torn


def main(kind: str, seconds: float = 2.0) -> None:
    """Pin both processes, run, print the counts."""
    cores = sorted(os.sched_getaffinity(0))
    memory = mmap.mmap(-1, 4096)
    anchor = ctypes.c_char.from_buffer(memory)
    address = ctypes.addressof(anchor) + OFFSETS[kind]
    pid = os.fork()
    if pid == 0:
        os.sched_setaffinity(0, {cores[0]})
        flip_forever(address)
    try:
        os.sched_setaffinity(0, {cores[-1]})
        print(*read_for(seconds, kind, memory, address))
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main(sys.argv[1])
