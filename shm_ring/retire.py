"""Retiring a consumer that never comes back: its slots are freed or given to the others, by what it had committed."""

from __future__ import annotations

from collections.abc import Callable

from shm_ring import atomics, kill_points, layout, liveness
from shm_ring.errors import RingOwned, RingUsage
from shm_ring.layout import FREE, HELD, READY, SlotHeader
from shm_ring.segment import Segment
from shm_ring.snapshot import role_lost


def retire_consumer(
    segment: Segment, consumer_id: int, is_committed: Callable[[SlotHeader], bool]
) -> tuple[list[SlotHeader], list[SlotHeader]]:
    """Under the consumer's own lock, free its committed slots and make the rest READY again; return both lists.

    Raises RingOwned while the consumer lives. May be repeated after a death in the middle.
    """
    if not 0 <= consumer_id < layout.MAX_CONSUMERS:
        raise RingUsage(f"consumer id {consumer_id} is not within 0..{layout.MAX_CONSUMERS - 1}")
    lock = liveness.RoleLock(segment.fd)
    freed: list[SlotHeader] = []
    given_back: list[SlotHeader] = []
    try:
        if not lock.take(layout.LOCK_CONSUMER_0 + consumer_id):
            raise RingOwned(role_lost(segment, f"consumer {consumer_id}", layout.consumer_record(consumer_id)))
        for index in range(segment.num_slots):
            at = segment.words_address + 8 * index
            value = atomics.load_u64(at)
            if layout.word_state(value) != HELD or layout.word_consumer(value) != consumer_id:
                continue
            header = layout.unpack_slot_header(segment.buffer, index)
            committed = is_committed(header)
            (freed if committed else given_back).append(header)
            atomics.store_u64(at, layout.word(header.seq, 0, FREE if committed else READY))
            kill_points.reached("mid_retire")
    finally:
        lock.close()
    atomics.ring_bell(segment.address + layout.OFFSET_FREE_BELL)
    atomics.ring_bell(segment.address + layout.OFFSET_READY_BELL)
    return freed, given_back
