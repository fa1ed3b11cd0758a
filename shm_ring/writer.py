"""The producer's end of one ring: acquire a FREE slot, fill it, publish it.

Never reads a payload and never changes a word that is not FREE. The one store that makes a pack exist is the word's
(sync point A); everything before it is private, so a death at any instruction leaves a legal ring.
"""

from __future__ import annotations

import os
import time
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING

from shm_ring import atomics, kill_points, layout, liveness, waiting
from shm_ring.errors import RingCorrupt, RingFull, RingOversize, RingOwned, RingTimeout, RingUsage
from shm_ring.layout import FREE, READY
from shm_ring.segment import Segment, check_words
from shm_ring.slot import WriteSlot
from shm_ring.snapshot import holders_text, role_lost

if TYPE_CHECKING:
    from shm_ring.board import Board

OLD_PRODUCER_WAIT_S = 30.0
_FLAGS = layout.OFFSET_PRODUCER + layout.RECORD_FLAGS
_HEARTBEAT = (layout.OFFSET_PRODUCER + layout.RECORD_HEARTBEAT) >> 3
_PUBLISHED = (layout.OFFSET_PRODUCER + layout.PRODUCER_PUBLISHED) >> 3
_BYTES = (layout.OFFSET_PRODUCER + layout.PRODUCER_BYTES) >> 3
_BLOCKED = layout.OFFSET_PRODUCER + layout.PRODUCER_BLOCKED_NS


class Writer:
    """The only producer of a ring, for as long as it is open. A context manager."""

    def __init__(self, segment: Segment, board: Board | None = None) -> None:
        """Take the producer's role; raises RingOwned, and RingTimeout while a killed producer lingers."""
        self._segment = segment
        self._bells = [segment.address + layout.OFFSET_READY_BELL] + ([board.bell_address] if board else [])
        self._free_bell = segment.address + layout.OFFSET_FREE_BELL
        self._pending: deque[WriteSlot] = deque()
        self._busy: set[int] = set()
        self._next_index = 0
        self._blocked_ns = 0
        self.last_seq = 0
        self.cursor = b""
        segment.enter()
        self._lock = liveness.RoleLock(segment.fd)
        try:
            self._attach()
        except BaseException:
            self._lock.close()
            segment.leave()
            raise

    def _attach(self) -> None:
        segment, at = self._segment, layout.OFFSET_PRODUCER
        if not self._lock.take(layout.LOCK_PRODUCER):
            raise RingOwned(role_lost(segment, "the producer's role", at))
        kill_points.reached("writer_locked")
        if os.fstat(segment.fd).st_nlink == 0:
            raise RingUsage(f"ring {segment.name!r} has been removed; a producer would write for nobody")
        self._wait_for_old_producer()
        check_words(segment)
        words = [atomics.load_u64(segment.words_address + 8 * i) for i in range(segment.num_slots)]
        self.last_seq = max(map(layout.word_seq, words))
        cursor = layout.unpack_cursor(segment.buffer, self.last_seq) if self.last_seq else b""
        if cursor is None:
            raise RingCorrupt(f"ring {segment.name!r} is damaged: no cursor of seq {self.last_seq}; start the run anew")
        self.cursor = cursor
        u64 = segment.u64
        segment.u32[(at + layout.RECORD_PID) >> 2] = os.getpid()
        u64[(at + layout.RECORD_START) >> 3] = liveness.own_start()
        u64[_HEARTBEAT] = liveness.boot_ns()
        self._attaches = u64[(at + layout.PRODUCER_ATTACHES) >> 3] + 1
        u64[_PUBLISHED], u64[_BYTES] = self.last_seq, self.last_seq * segment.spec.slot_bytes
        atomics.store_u32(segment.address + _FLAGS, 0)
        u64[(at + layout.PRODUCER_ATTACHES) >> 3] = self._attaches

    def _wait_for_old_producer(self) -> None:
        """Wait until a killed producer has left the system: its last GPU copy may land after its lock is gone."""
        segment, at = self._segment, layout.OFFSET_PRODUCER
        pid = segment.u32[(at + layout.RECORD_PID) >> 2]
        start = segment.u64[(at + layout.RECORD_START) >> 3]
        end = time.monotonic() + OLD_PRODUCER_WAIT_S
        while pid != os.getpid() and liveness.is_running(pid, start):
            if time.monotonic() > end:
                raise RingTimeout(
                    f"the old producer of ring {segment.name!r} (pid {pid}) lost its lock {OLD_PRODUCER_WAIT_S:g} s "
                    "ago and has not exited; end it, then start again"
                )
            time.sleep(0.01)

    @property
    def blocked_s(self) -> float:
        """Seconds this writer has waited for FREE slots."""
        return self._blocked_ns / 1e9

    @property
    def num_acquired(self) -> int:
        """Slots acquired and not yet published."""
        return len(self._pending)

    def acquire(self, timeout_s: float = 60.0, stop: waiting.Stop | None = None) -> WriteSlot:
        """Return a FREE slot to fill. Several may be acquired; they are published in the order of acquisition.

        Waits up to `timeout_s`. Raises RingFull that names who holds what, RingStopped if `stop` says so, RingUsage if
        every slot of the ring is already acquired.
        """
        self._lock.check()
        if len(self._pending) >= self._segment.num_slots:
            raise RingUsage(
                f"all {self._segment.num_slots} slots of ring {self._segment.name!r} are acquired; publish first"
            )
        index = self._find_free()
        if index is None:
            index = waiting.wait_until(
                self._find_free, (self._free_bell,), timeout_s, stop, self._count_blocked, self._full_error
            )
        slot = WriteSlot(self._segment, index)
        self._pending.append(slot)
        self._busy.add(index)
        self._next_index = (index + 1) % self._segment.num_slots
        kill_points.reached("after_acquire")
        return slot

    def _find_free(self) -> int | None:
        segment = self._segment
        words, num_slots = segment.words, segment.num_slots
        for step in range(num_slots):
            index = (self._next_index + step) % num_slots
            if words[index] & 3 != FREE or index in self._busy:
                continue
            # sync point B: pairs with the release store of FREE; the consumer's reads are over
            if atomics.load_u64(segment.words_address + 8 * index) & 3 == FREE:
                return index
        return None

    def _count_blocked(self, waited_ns: int) -> None:
        self._blocked_ns += waited_ns
        self._segment.add_u64(_BLOCKED, waited_ns)
        self._segment.u64[_HEARTBEAT] = liveness.boot_ns()

    def _full_error(self, waited_s: float) -> RingFull:
        return RingFull(f"ring {self._segment.name!r} full for {waited_s:.1f} s: {holders_text(self._segment)}")

    def publish(
        self,
        slot: WriteSlot,
        *,
        pack_id: int,
        epoch: int = 0,
        num_tokens: int = 0,
        num_documents: int = 0,
        checksum: int = 0,
        cursor: bytes = b"",
    ) -> int:
        """Make the oldest acquired slot READY and return its seq. Its payload must be complete (GPU copies done).

        `cursor` (at most 48 bytes) is handed to the next producer if this one dies right after. Raises RingUsage for
        another slot than the oldest acquired one, RingOversize for a cursor or number that does not fit.
        """
        self._lock.check()
        segment = self._segment
        if not self._pending or self._pending[0] is not slot:
            raise RingUsage(
                f"slot {slot.index} of ring {segment.name!r} is not the oldest acquired one; publish in order"
            )
        seq = self.last_seq + 1
        _check_fits(seq, pack_id, (epoch, num_tokens, num_documents, checksum), cursor)
        now_ns = liveness.boot_ns()
        kill_points.reached("before_publish")
        header = (seq, pack_id, epoch, num_tokens, num_documents, checksum, now_ns, self._attaches)
        layout.pack_slot_header(segment.buffer, slot.index, header)
        kill_points.reached("after_header")
        layout.pack_cursor(segment.buffer, seq, cursor)
        kill_points.reached("after_cursor")
        # sync point A: pairs with the consumer's compare-and-swap; from here on the pack exists
        atomics.store_u64(segment.words_address + 8 * slot.index, layout.word(seq, 0, READY))
        kill_points.reached("after_publish")
        for bell in self._bells:  # sync point E
            atomics.ring_bell(bell)
        kill_points.reached("after_bell")
        self._forget_oldest()
        self.last_seq, self.cursor = seq, cursor
        segment.u64[_HEARTBEAT], segment.u64[_PUBLISHED] = now_ns, seq
        segment.u64[_BYTES] += segment.spec.slot_bytes
        return seq

    def _forget_oldest(self) -> None:
        self._busy.discard(self._pending.popleft().index)

    def discard(self, slot: WriteSlot) -> None:
        """Give back an acquired slot without publishing it; nobody ever sees it."""
        if slot not in self._pending:
            raise RingUsage(f"slot {slot.index} of ring {self._segment.name!r} is not acquired")
        self._pending.remove(slot)
        self._busy.discard(slot.index)

    def heartbeat(self) -> None:
        """Tell the dashboard that this producer is at work (display only)."""
        self._lock.check()
        self._segment.u64[_HEARTBEAT] = liveness.boot_ns()

    def finish(self) -> None:
        """Declare the end of the data; readers return None once everything is taken. A new writer takes it back."""
        self._lock.check()
        if self._pending:
            raise RingUsage(f"{len(self._pending)} acquired slots of ring {self._segment.name!r} are not published")
        # sync point D: a reader that sees the flag sees every word published before it
        atomics.store_u32(self._segment.address + _FLAGS, layout.FLAG_END_OF_DATA)
        for bell in self._bells:
            atomics.ring_bell(bell)

    def reopen(self) -> None:
        """Take `finish` back: more packs will come. Readers wait again."""
        self._lock.check()
        atomics.store_u32(self._segment.address + _FLAGS, 0)

    def close(self) -> None:
        """Give up the role. Acquired, unpublished slots are forgotten."""
        if self._lock.is_open:
            self._segment.u32[(layout.OFFSET_PRODUCER + layout.RECORD_PID) >> 2] = 0
            self._lock.close()
            self._segment.leave()

    def __enter__(self) -> Writer:
        """Return the open writer."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; does not declare the end of the data."""
        self.close()


def _check_fits(seq: int, pack_id: int, counts: tuple[int, ...], cursor: bytes) -> None:
    if len(cursor) > layout.MAX_CURSOR_BYTES:
        raise RingOversize(f"a cursor of {len(cursor)} bytes does not fit the {layout.MAX_CURSOR_BYTES} of its cell")
    if seq > layout.MAX_SEQ or not 0 <= pack_id < 1 << 64 or min(counts) < 0 or max(counts) >= 1 << 32:
        raise RingOversize(f"seq {seq}, pack_id {pack_id} or a count of the pack does not fit its header field")
