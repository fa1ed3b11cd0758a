"""What is going on in a ring, for the dashboard and for messages. Only reads; works on a read-only mapping.

Costs about 50 us for 16 slots and 2 consumers. The words are read one after the other, so under load the picture may
mix two neighbouring moments; each slot is in exactly one state, and free + ready + held is always the number of slots.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from shm_ring import atomics, layout, liveness
from shm_ring.layout import FREE, HELD, READY, STATE_NAMES
from shm_ring.segment import Segment


@dataclass(frozen=True)
class SlotState:
    """One slot: `state` is FREE, READY or HELD; `consumer` is None unless HELD; `seq` 0 means never published."""

    index: int
    state: str
    consumer: int | None
    seq: int


@dataclass(frozen=True)
class ProcessState:
    """One end of the ring. `alive` is its lock, not its heartbeat; `pid` is None after a clean close."""

    role: str
    consumer_id: int | None
    pid: int | None
    alive: bool
    stopped: bool
    heartbeat_age_s: float | None
    attaches: int
    waited_s: float
    taken: int = 0
    released: int = 0
    rejected: int = 0
    last_seq: int = 0


@dataclass(frozen=True)
class Snapshot:
    """One ring at one moment. `published` and `released` count packs since the ring was made; `blocked_s` and
    `starved_s` are sums over all lives of the producer and of the consumers."""

    name: str
    ring_index: int
    num_slots: int
    slot_bytes: int
    slots: tuple[SlotState, ...]
    free: int
    ready: int
    held: int
    published: int
    released: int
    rejected: int
    published_bytes: int
    end_of_data: bool
    blocked_s: float
    starved_s: float
    producer: ProcessState
    consumers: tuple[ProcessState, ...]

    @property
    def occupancy(self) -> int:
        """READY and HELD slots."""
        return self.ready + self.held

    @property
    def held_by(self) -> dict[int, tuple[int, ...]]:
        """Slot indices held by each consumer."""
        held: dict[int, list[int]] = defaultdict(list)
        for slot in self.slots:
            if slot.consumer is not None:
                held[slot.consumer].append(slot.index)
        return {consumer: tuple(indices) for consumer, indices in sorted(held.items())}


def _age_s(segment: Segment, record: int, now_ns: int) -> float | None:
    beat = segment.u64[(record + layout.RECORD_HEARTBEAT) >> 3]
    return max(0, now_ns - beat) / 1e9 if beat else None


def producer_state(segment: Segment, now_ns: int) -> ProcessState:
    """Describe the producer of a ring."""
    record = layout.OFFSET_PRODUCER
    u64 = segment.u64
    pid, start = segment.u32[record >> 2], u64[(record + layout.RECORD_START) >> 3]
    alive = liveness.is_locked(segment.fd, layout.LOCK_PRODUCER)
    return ProcessState(
        role="producer", consumer_id=None, pid=pid or None, alive=alive,
        stopped=alive and liveness.is_stopped(pid, start), heartbeat_age_s=_age_s(segment, record, now_ns),
        attaches=u64[(record + layout.PRODUCER_ATTACHES) >> 3],
        waited_s=u64[(record + layout.PRODUCER_BLOCKED_NS) >> 3] / 1e9,
        last_seq=u64[(record + layout.PRODUCER_PUBLISHED) >> 3],
    )  # fmt: skip


def consumer_state(segment: Segment, consumer_id: int, now_ns: int) -> ProcessState:
    """Describe one consumer of a ring."""
    record = layout.consumer_record(consumer_id)
    u32, u64 = segment.u32, segment.u64
    pid, start = u32[record >> 2], u64[(record + layout.RECORD_START) >> 3]
    alive = liveness.is_locked(segment.fd, layout.LOCK_CONSUMER_0 + consumer_id)
    return ProcessState(
        role="consumer", consumer_id=consumer_id, pid=pid or None, alive=alive,
        stopped=alive and liveness.is_stopped(pid, start), heartbeat_age_s=_age_s(segment, record, now_ns),
        attaches=u32[(record + layout.CONSUMER_ATTACHES) >> 2],
        waited_s=u64[(record + layout.CONSUMER_STARVED_NS) >> 3] / 1e9,
        taken=u64[(record + layout.CONSUMER_TAKEN) >> 3], released=u64[(record + layout.CONSUMER_RELEASED) >> 3],
        rejected=u32[(record + layout.CONSUMER_REJECTED) >> 2], last_seq=u64[(record + layout.CONSUMER_LAST_SEQ) >> 3],
    )  # fmt: skip


def _known_consumers(segment: Segment) -> list[int]:
    records = [(c, layout.consumer_record(c)) for c in range(layout.MAX_CONSUMERS)]
    return [c for c, record in records if segment.u32[(record + layout.CONSUMER_ATTACHES) >> 2]]


def read_slots(segment: Segment) -> tuple[SlotState, ...]:
    """Read every slot word once."""
    slots = []
    for index in range(segment.num_slots):
        value = atomics.load_u64(segment.words_address + 8 * index)
        state = layout.word_state(value)
        consumer = layout.word_consumer(value) if state == HELD else None
        name = STATE_NAMES[state] if state <= HELD else "CORRUPT"
        slots.append(SlotState(index, name, consumer, layout.word_seq(value)))
    return tuple(slots)


def take_pack_ids(segment: Segment) -> frozenset[int]:
    """Return the pack ids in the READY and HELD slots; a header rewritten during the read is read again.

    A slot released meanwhile counts while its header is still that of the pack.
    """
    found = set()
    for index in range(segment.num_slots):
        address = segment.words_address + 8 * index
        value = atomics.load_u64(address)
        while layout.word_state(value) != FREE:
            pack_id = layout.unpack_slot_header(segment.buffer, index).pack_id
            again = atomics.load_u64(address)
            if layout.word_seq(again) == layout.word_seq(value):
                header_seq = layout.unpack_slot_header(segment.buffer, index).seq
                if layout.word_state(again) != FREE or header_seq == layout.word_seq(value):
                    found.add(pack_id)
                break
            value = again
    return frozenset(found)


def take_snapshot(segment: Segment) -> Snapshot:
    """Return the state of a ring; see Snapshot."""
    now_ns = liveness.boot_ns()
    slots = read_slots(segment)
    counts = {name: sum(slot.state == name for slot in slots) for name in STATE_NAMES}
    consumers = tuple(consumer_state(segment, c, now_ns) for c in _known_consumers(segment))
    producer = producer_state(segment, now_ns)
    published = max(slot.seq for slot in slots)
    ready, held = counts[STATE_NAMES[READY]], counts[STATE_NAMES[HELD]]
    flags = atomics.load_u32(segment.address + layout.OFFSET_PRODUCER + layout.RECORD_FLAGS)
    return Snapshot(
        name=segment.name, ring_index=segment.header.ring_index, num_slots=segment.num_slots,
        slot_bytes=segment.spec.slot_bytes, slots=slots, free=counts[STATE_NAMES[FREE]], ready=ready, held=held,
        published=published, released=max(0, published - ready - held), rejected=sum(c.rejected for c in consumers),
        published_bytes=published * segment.spec.slot_bytes, end_of_data=bool(flags & layout.FLAG_END_OF_DATA),
        blocked_s=producer.waited_s, starved_s=sum(c.waited_s for c in consumers), producer=producer,
        consumers=consumers,
    )  # fmt: skip


def _condition(who: ProcessState) -> str:
    if who.stopped:
        return f"is stopped (pid {who.pid}, state T); resume it with SIGCONT or restart it"
    if who.alive:
        return f"is alive (pid {who.pid})"
    if who.attaches == 0:
        return "has never attached"
    return f"is gone (last pid {who.pid or 'closed cleanly'}); restart it under the same id, or retire it"


def holders_text(segment: Segment) -> str:
    """Say who holds which slots of a full ring and in what condition they are."""
    slots, now_ns = read_slots(segment), liveness.boot_ns()
    held: dict[int, list[int]] = defaultdict(list)
    for slot in slots:
        if slot.consumer is not None:
            held[slot.consumer].append(slot.index)
    parts = []
    for consumer, indices in sorted(held.items()):
        numbers = ", ".join(map(str, indices))
        parts.append(
            f"consumer {consumer} holds slot{'s' * (len(indices) > 1)} {numbers} and "
            + _condition(consumer_state(segment, consumer, now_ns))
        )
    ready = sum(slot.state == STATE_NAMES[READY] for slot in slots)
    if ready:
        alive = [c for c in _known_consumers(segment) if liveness.is_locked(segment.fd, layout.LOCK_CONSUMER_0 + c)]
        takers = ", ".join(f"{c} ({_condition(consumer_state(segment, c, now_ns))})" for c in alive)
        parts.append(f"{ready} READY to be taken, attached consumers: {takers or 'none'}")
    return "; ".join(parts) or "every slot is FREE but already acquired by this producer"


def producer_text(segment: Segment) -> str:
    """Say what the producer of an empty ring is doing."""
    state = producer_state(segment, liveness.boot_ns())
    slots = read_slots(segment)
    held = sum(slot.state == STATE_NAMES[HELD] for slot in slots)
    if atomics.load_u32(segment.address + layout.OFFSET_PRODUCER + layout.RECORD_FLAGS) & layout.FLAG_END_OF_DATA:
        what = "has finished"
    elif state.attaches and not state.alive:
        what = f"is gone (last pid {state.pid or 'closed cleanly'}); restart it"
    else:
        what = _condition(state)
    return f"producer of {segment.name!r} {what}, {sum(s.state == 'READY' for s in slots)} READY, {held} HELD"


def role_lost(segment: Segment, role: str, record: int) -> str:
    """Word the refusal of a role that a living process has."""
    pid, start = segment.u32[record >> 2], segment.u64[(record + layout.RECORD_START) >> 3]
    since = f", which runs since {liveness.started_at(start)}" if start else ""
    return (
        f"{role} of ring {segment.name!r} is attached by pid {pid or 'unknown'}{since}; stop it first or use another id"
    )
