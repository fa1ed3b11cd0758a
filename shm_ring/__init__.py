"""A ring of shared-memory slots between GPU processes that survives kill -9 of any of them at any instruction.

One segment per producer; one 64-bit word per slot says FREE, READY or HELD and by whom. See docs/ring.md.
"""

from shm_ring import errors
from shm_ring.board import Board
from shm_ring.layout import MAX_CONSUMERS, MAX_CURSOR_BYTES, MAX_SLOTS, SlotHeader
from shm_ring.names import board_name, check_run, ring_name
from shm_ring.reader import Reader
from shm_ring.ring import Ring
from shm_ring.slot import ReadSlot, WriteSlot
from shm_ring.snapshot import ProcessState, SlotState, Snapshot
from shm_ring.spec import Field, SlotSpec
from shm_ring.writer import Writer

__all__ = [
    "MAX_CONSUMERS", "MAX_CURSOR_BYTES", "MAX_SLOTS", "Board", "Field", "ProcessState", "ReadSlot", "Reader", "Ring",
    "SlotHeader", "SlotSpec", "SlotState", "Snapshot", "WriteSlot", "Writer", "board_name", "check_run", "errors",
    "ring_name",
]  # fmt: skip
