"""A consumer's end of several rings: take a READY slot, use it, release it.

A slot word changes hands by one compare-and-swap (sync point A) and comes back by one store (sync point B). HELD stays
with its consumer across its death: the next life under the same id gets those slots first and decides by its journal.
Knows nothing of what is in a slot.
"""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Protocol

from shm_ring import atomics, kill_points, layout, liveness, waiting
from shm_ring.errors import RingCorrupt, RingEmpty, RingOwned, RingUsage
from shm_ring.layout import FREE, HELD, READY
from shm_ring.segment import Segment, check_words
from shm_ring.slot import ReadSlot
from shm_ring.snapshot import producer_text, role_lost

if TYPE_CHECKING:
    from shm_ring.board import Board

Pick = Literal["oldest", "random"]
NEVER = -2  # no seq follows it
_END_OF_DATA = object()


class HasSegment(Protocol):
    """Anything with a mapped segment: a Ring."""

    @property
    def segment(self) -> Segment: ...


class Reader:
    """Consumer `consumer_id` of one or more rings, for as long as it is open. A context manager.

    `pick`: "oldest" takes from the fullest ring its oldest READY slot, so that the seqs this reader takes from one ring
    ascend (redelivered and retired slots excepted); "random" draws among all READY slots of all rings with `seed`.
    `min_ready`: wait until so many slots are READY, as long as more can come. `max_age`: with "random", a slot that is
    more than this many seqs behind its ring's newest is taken first (None: 4 times the number of slots).
    `pick` and `min_ready` may be set at any time.
    """

    def __init__(
        self,
        rings: Sequence[HasSegment],
        consumer_id: int = 0,
        pick: Pick = "oldest",
        min_ready: int = 1,
        max_age: int | None = None,
        seed: int = 0,
        board: Board | None = None,
    ) -> None:
        """Take the role in every ring, or in none; raises RingOwned, RingCorrupt, RingUsage."""
        if not 0 <= consumer_id < layout.MAX_CONSUMERS:
            raise RingUsage(f"consumer id {consumer_id} is not within 0..{layout.MAX_CONSUMERS - 1}")
        self._segments = [ring.segment for ring in rings]
        if not self._segments or len({s.name for s in self._segments}) != len(self._segments):
            raise RingUsage(f"a reader needs rings with distinct names, got {[s.name for s in self._segments]}")
        self.consumer_id = consumer_id
        self.pick, self.min_ready = pick, min_ready
        self._max_age, self._rng, self._board = max_age, random.Random(seed), board
        self._bells = [s.address + layout.OFFSET_READY_BELL for s in self._segments]
        if board:
            self._bells.insert(0, board.bell_address)
        self._record = layout.consumer_record(consumer_id)
        self._starved_ns = 0
        self._turn = 0
        self._held: set[tuple[int, int]] = set()
        self._last_seqs = [NEVER] * len(self._segments)
        self._locks: list[liveness.RoleLock] = []
        self._by_name = {s.name: k for k, s in enumerate(self._segments)}
        try:
            for segment in self._segments:
                self._attach(segment)
            self._redeliver = deque(self._collect_held())
        except BaseException:
            self._close_locks()
            raise

    # -- attaching --------------------------------------------------------------------------------------------------

    def _attach(self, segment: Segment) -> None:
        segment.enter()
        lock = liveness.RoleLock(segment.fd)
        self._locks.append(lock)
        if not lock.take(layout.LOCK_CONSUMER_0 + self.consumer_id):
            raise RingOwned(role_lost(segment, f"consumer {self.consumer_id}", self._record))
        kill_points.reached("reader_locked")
        if os.fstat(segment.fd).st_nlink == 0:
            raise RingUsage(f"ring {segment.name!r} has been removed; nobody will publish in it")
        check_words(segment)
        at, u32, u64 = self._record, segment.u32, segment.u64
        u32[(at + layout.RECORD_PID) >> 2] = os.getpid()
        u64[(at + layout.RECORD_START) >> 3] = liveness.own_start()
        u64[(at + layout.RECORD_HEARTBEAT) >> 3] = liveness.boot_ns()
        u32[(at + layout.CONSUMER_ATTACHES) >> 2] += 1

    def _collect_held(self) -> list[ReadSlot]:
        """Find the slots that this consumer's previous life held, oldest first."""
        found = []
        for segment in self._segments:
            for index in range(segment.num_slots):
                value = atomics.load_u64(segment.words_address + 8 * index)
                if layout.word_state(value) == HELD and layout.word_consumer(value) == self.consumer_id:
                    header = layout.unpack_slot_header(segment.buffer, index)
                    found.append(ReadSlot(segment, index, value, header, redelivered=True))
        return sorted(found, key=lambda slot: (slot.header.published_ns, slot.header.seq))

    # -- taking -----------------------------------------------------------------------------------------------------

    @property
    def starved_s(self) -> float:
        """Seconds this reader has waited for READY slots."""
        return self._starved_ns / 1e9

    def take(
        self, timeout_s: float = 60.0, stop: waiting.Stop | None = None, waited_before_s: float = 0.0
    ) -> ReadSlot | None:
        """Return a slot, HELD by this consumer until `release` or `reject`; None only at the end of the data.

        The end: every producer has finished and no slot is READY (slots that other consumers hold are theirs). Waits up
        to `timeout_s`. Raises RingEmpty that names the producers' conditions, RingStopped if `stop` or the board says.
        `waited_before_s`: of a wait in slices, the time since its beginning; it reports itself as one.
        """
        for lock in self._locks:
            lock.check()
        if self._redeliver:
            slot = self._redeliver.popleft()
            return self._hand_out(slot)
        found = self._try_take()
        if found is None:
            found = waiting.wait_until(
                self._try_take, self._bells, timeout_s, self._stop_of(stop), self._count_starved, self._empty_error,
                waited_before_s,
            )  # fmt: skip
        return self._hand_out(found) if isinstance(found, ReadSlot) else None

    def _hand_out(self, slot: ReadSlot) -> ReadSlot:
        self._held.add((self._by_name[slot.segment.name], slot.index))
        u64, at = slot.segment.u64, self._record
        u64[(at + layout.CONSUMER_TAKEN) >> 3] += 1
        u64[(at + layout.CONSUMER_LAST_SEQ) >> 3] = slot.header.seq
        u64[(at + layout.RECORD_HEARTBEAT) >> 3] = liveness.boot_ns()
        return slot

    def _stop_of(self, stop: waiting.Stop | None) -> waiting.Stop | None:
        board = self._board
        if board is None:
            return stop
        return lambda: board.stopped or (stop is not None and stop())

    def _count_starved(self, waited_ns: int) -> None:
        self._starved_ns += waited_ns
        now_ns = liveness.boot_ns()
        self._segments[0].add_u64(self._record + layout.CONSUMER_STARVED_NS, waited_ns)
        for segment in self._segments:
            segment.u64[(self._record + layout.RECORD_HEARTBEAT) >> 3] = now_ns

    def _empty_error(self, waited_s: float) -> RingEmpty:
        wanted = f"{self.min_ready} READY slots" if self.min_ready > 1 else "a READY slot"
        producers = "; ".join(map(producer_text, self._segments))
        return RingEmpty(f"consumer {self.consumer_id} waited {waited_s:.1f} s for {wanted}: {producers}")

    def _try_take(self) -> ReadSlot | object | None:
        """Claim a slot by the rule of `pick`; None to wait, _END_OF_DATA at the end."""
        finished = all(map(self._is_finished, self._segments))  # before the scan: sync point D
        while True:
            ready = [self._scan(segment) for segment in self._segments]
            num_ready = sum(map(len, ready))
            if num_ready == 0:
                return _END_OF_DATA if finished else None
            if num_ready < self.min_ready and not finished and any(map(self._can_grow, self._segments)):
                return None
            ring, seq, index = self._choose(ready)
            slot = self._claim(self._segments[ring], seq, index)
            if slot is not None:
                self._turn = ring + 1
                self._last_seqs[ring] = seq if self.pick == "oldest" else NEVER
                return slot

    @staticmethod
    def _scan(segment: Segment) -> list[tuple[int, int]]:
        """List (seq, index) of the READY slots: a hint, confirmed by the claim."""
        return [(value >> 16, index) for index, value in enumerate(segment.words) if value & 3 == READY]

    @staticmethod
    def _is_finished(segment: Segment) -> bool:
        at = segment.address + layout.OFFSET_PRODUCER + layout.RECORD_FLAGS
        return bool(atomics.load_u32(at) & layout.FLAG_END_OF_DATA)

    def _can_grow(self, segment: Segment) -> bool:
        """Say whether more slots of this ring may become READY without this reader releasing one."""
        if self._is_finished(segment) or not any(value & 3 == FREE for value in segment.words):
            return False
        attached_before = segment.u64[(layout.OFFSET_PRODUCER + layout.PRODUCER_ATTACHES) >> 3] > 0
        return not attached_before or liveness.is_locked(segment.fd, layout.LOCK_PRODUCER)

    def _choose(self, ready: list[list[tuple[int, int]]]) -> tuple[int, int, int]:
        """Return (ring, seq, slot index) of the slot to claim."""
        if self.pick == "random":
            return self._too_old(ready) or self._draw(ready)
        num, ring = len(ready), 0
        if num > 1:
            ring = max(
                range(num), key=lambda k: (len(ready[k]) / self._segments[k].num_slots, -((k - self._turn) % num))
            )
        seq, index = min(ready[ring])
        if seq != self._last_seqs[ring] + 1:
            seq, index = self._oldest(self._segments[ring], seq, index)
        return ring, seq, index

    def _oldest(self, segment: Segment, seq: int, index: int) -> tuple[int, int]:
        """Return (seq, index) such that no older slot of the ring is READY, given one that was.

        Not needed for the seq right after the one this reader took last as the oldest: what was older was not READY
        then, and does not become so (slots of a retired consumer excepted).

        A scan is not one moment: it may pass a slot just before seq 8 is published there and meet seq 9 further on.
        But publication is in seq order: a scan begun after `seq` was seen READY meets every slot READY up to `seq`.
        One that finds only younger slots proves nothing about those and is repeated from the oldest of them.
        """
        while True:
            atomics.load_u64(segment.words_address + 8 * index)
            again, at = min(self._scan(segment), default=(seq, index))
            if again <= seq:
                return again, at
            seq, index = again, at

    def _draw(self, ready: list[list[tuple[int, int]]]) -> tuple[int, int, int]:
        flat = [(ring, seq, index) for ring, slots in enumerate(ready) for seq, index in slots]
        return self._rng.choice(flat)

    def _too_old(self, ready: list[list[tuple[int, int]]]) -> tuple[int, int, int] | None:
        for ring, slots in enumerate(ready):
            if slots:
                segment = self._segments[ring]
                seq, index = min(slots)
                limit = 4 * segment.num_slots if self._max_age is None else self._max_age
                if seq < (max(segment.words) >> 16) - limit:
                    return ring, seq, index
        return None

    def _claim(self, segment: Segment, seq: int, index: int) -> ReadSlot | None:
        held = layout.word(seq, self.consumer_id, HELD)
        # sync point A: pairs with the producer's store of READY; header and payload are complete
        if not atomics.swap_u64(segment.words_address + 8 * index, layout.word(seq, 0, READY), held):
            return None
        kill_points.reached("after_claim")
        header = layout.unpack_slot_header(segment.buffer, index)
        if header.seq != seq:
            raise RingCorrupt(
                f"ring {segment.name!r} is damaged: slot {index} is seq {seq}, its header says {header.seq}"
            )
        return ReadSlot(segment, index, held, header, redelivered=False)

    # -- giving back ------------------------------------------------------------------------------------------------

    def release(self, slot: ReadSlot) -> None:
        """Free a slot. Every read of it must be over (GPU copies synchronised) and the journal line written.

        Raises RingUsage for a slot that this reader does not hold.
        """
        self._free(slot)

    def reject(self, slot: ReadSlot) -> None:
        """Free a slot that is not fit for use, and count it; a poisoned pack never wedges the ring."""
        self._free(slot)
        slot.segment.u32[(self._record + layout.CONSUMER_REJECTED) >> 2] += 1

    def _free(self, slot: ReadSlot) -> None:
        segment = slot.segment
        key = (self._by_name.get(segment.name, -1), slot.index)
        if key not in self._held or segment is not self._segments[key[0]]:
            raise RingUsage(f"slot {slot.index} of ring {segment.name!r} is not held by this reader")
        self._locks[key[0]].check()
        kill_points.reached("before_release")
        self._held.discard(key)
        # sync point B: pairs with the producer's acquire load; from here on the payload may change
        atomics.store_u64(segment.words_address + 8 * slot.index, layout.word(slot.header.seq, 0, FREE))
        kill_points.reached("after_release")
        atomics.ring_bell(segment.address + layout.OFFSET_FREE_BELL)  # sync point F
        segment.add_u64(self._record + layout.CONSUMER_RELEASED, 1)

    def heartbeat(self) -> None:
        """Tell the dashboard that this consumer is at work (display only)."""
        self._locks[0].check()
        now_ns = liveness.boot_ns()
        for segment in self._segments:
            segment.u64[(self._record + layout.RECORD_HEARTBEAT) >> 3] = now_ns

    def close(self) -> None:
        """Give up the role. Slots still held stay HELD for the next life of this consumer id."""
        for lock, segment in zip(self._locks, self._segments, strict=False):
            if lock.is_open:
                segment.u32[(self._record + layout.RECORD_PID) >> 2] = 0
        self._close_locks()

    def _close_locks(self) -> None:
        for lock, segment in zip(self._locks, self._segments, strict=False):
            if lock.is_open:
                lock.close()
                segment.leave()

    def __enter__(self) -> Reader:
        """Return the open reader."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close without releasing anything."""
        self.close()
