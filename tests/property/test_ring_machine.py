"""Random calls on the real shared memory against a model in plain Python: one producer, three consumers, crashes."""

from __future__ import annotations

import os
import uuid
from collections import deque

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from shm_ring import Field, Reader, ReadSlot, Ring, SlotSpec, Writer, WriteSlot, atomics, errors, layout, ring_name

NUM_SLOTS, NUM_CONSUMERS, NUM_WORDS = 3, 2, 8
SPEC = SlotSpec((Field("words", "uint64", (NUM_WORDS,)),))
CONSUMERS = st.integers(0, NUM_CONSUMERS - 1)


class RingMachine(RuleBasedStateMachine):
    """The ring does what the dicts say."""

    def __init__(self) -> None:
        """Make a ring; nobody is attached."""
        super().__init__()
        self.ring = Ring.create(ring_name(f"machine.{os.getpid()}.{uuid.uuid4().hex[:6]}", 0), SPEC, NUM_SLOTS)
        self.writer: Writer | None = None
        self.readers: dict[int, Reader] = {}
        self.acquired: deque[WriteSlot] = deque()
        self.ready: dict[int, int] = {}  # seq -> slot index
        self.held: dict[int, dict[int, ReadSlot | None]] = {c: {} for c in range(NUM_CONSUMERS)}  # None: of a past life
        self.freed: set[int] = set()
        self.rejected = 0
        self.last_seq, self.cursor, self.finished = 0, b"", False

    def teardown(self) -> None:
        """Close everything; the ring must then be removable."""
        if self.writer:
            self.writer.close()
        for reader in self.readers.values():
            reader.close()
        self.ring.unlink()
        self.ring.close()

    # -- the producer

    @precondition(lambda self: self.writer is None)
    @rule()
    def attach_writer(self) -> None:
        """A new writer knows what the last one published."""
        self.writer = self.ring.writer()
        self.finished = False
        assert (self.writer.last_seq, self.writer.cursor) == (self.last_seq, self.cursor)

    @precondition(lambda self: self.writer is not None)
    @rule(crash=st.booleans())
    def lose_writer(self, crash: bool) -> None:
        """The writer closes, or is gone without a word; what it acquired is forgotten."""
        assert self.writer is not None
        if crash:
            self.writer._lock.close()
            self.ring.segment.leave()
        else:
            self.writer.close()
        self.writer = None
        self.acquired.clear()

    @precondition(lambda self: self.writer is not None)
    @rule()
    def acquire(self) -> None:
        """A slot is acquired exactly if one is FREE and not acquired yet."""
        assert self.writer is not None
        free = NUM_SLOTS - len(self.ready) - sum(map(len, self.held.values()))
        if len(self.acquired) < free:
            slot = self.writer.acquire(timeout_s=0)
            assert slot.index not in [s.index for s in self.acquired]
            assert slot.index not in self.ready.values()
            self.acquired.append(slot)
        else:
            with pytest.raises((errors.RingFull, errors.RingUsage)):
                self.writer.acquire(timeout_s=0)

    @precondition(lambda self: self.acquired)
    @rule(pick=st.integers(0, NUM_SLOTS - 1), half=st.booleans())
    def write_half(self, pick: int, half: bool) -> None:
        """Write half of some acquired slot; nobody may ever see it like that."""
        slot = self.acquired[pick % len(self.acquired)]
        slot.array("words")[half * NUM_WORDS // 2 : (1 + half) * NUM_WORDS // 2] = 0xDEAD

    @precondition(lambda self: self.acquired)
    @rule(cursor=st.binary(max_size=48))
    def publish(self, cursor: bytes) -> None:
        """Fill and publish the oldest acquired slot."""
        assert self.writer is not None
        slot = self.acquired.popleft()
        slot.array("words")[:] = self.last_seq + 1
        assert self.writer.publish(slot, pack_id=1000 + self.last_seq + 1, cursor=cursor) == self.last_seq + 1
        self.last_seq, self.cursor = self.last_seq + 1, cursor
        self.ready[self.last_seq] = slot.index

    @precondition(lambda self: self.writer is not None)
    @rule(num=st.integers(1, NUM_SLOTS))
    def publish_several(self, num: int) -> None:
        """Acquire and publish while there is room."""
        assert self.writer is not None
        for _ in range(num):
            self.acquire()
            if self.acquired:
                self.publish(b"")

    @precondition(lambda self: len(self.acquired) > 1)
    @rule()
    def publish_out_of_order(self) -> None:
        """Another than the oldest acquired slot is refused."""
        assert self.writer is not None
        with pytest.raises(errors.RingUsage):
            self.writer.publish(self.acquired[1], pack_id=0)

    @precondition(lambda self: self.acquired)
    @rule()
    def discard(self) -> None:
        """Give back the youngest acquired slot."""
        assert self.writer is not None
        self.writer.discard(self.acquired.pop())

    @precondition(lambda self: self.writer is not None and not self.acquired)
    @rule()
    def finish(self) -> None:
        """End the data."""
        assert self.writer is not None
        self.writer.finish()
        self.finished = True

    # -- the consumers

    @rule(consumer=CONSUMERS, pick=st.sampled_from(["oldest", "random"]), seed=st.integers(0, 9))
    def attach_reader(self, consumer: int, pick: str, seed: int) -> None:
        """A role is given once; a second attach is refused and changes nothing."""
        if consumer in self.readers:
            with pytest.raises(errors.RingOwned):
                Reader([self.ring], consumer)
        else:
            self.readers[consumer] = Reader([self.ring], consumer, pick, seed=seed)  # type: ignore[arg-type]

    @precondition(lambda self: self.readers)
    @rule(data=st.data(), crash=st.booleans())
    def lose_reader(self, data: st.DataObject, crash: bool) -> None:
        """The reader closes, or is gone without a word; its slots stay HELD."""
        consumer = data.draw(st.sampled_from(sorted(self.readers)))
        reader = self.readers.pop(consumer)
        if crash:
            reader._close_locks()
        else:
            reader.close()
        self.held[consumer] = dict.fromkeys(self.held[consumer])

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        """Own slots of a past life first, then READY ones by the rule of `pick`, then the end or a timeout."""
        consumer = data.draw(st.sampled_from(sorted(self.readers)))
        reader = self.readers[consumer]
        waiting = sorted(seq for seq, slot in self.held[consumer].items() if slot is None)
        if not waiting and not self.ready:
            if self.finished:
                assert reader.take(timeout_s=0) is None
            else:
                with pytest.raises(errors.RingEmpty):
                    reader.take(timeout_s=0)
            return
        slot = reader.take(timeout_s=0)
        assert slot is not None
        seq = slot.header.seq
        assert slot.redelivered == bool(waiting)
        if waiting:
            assert seq == waiting[0]
        else:
            assert slot.index == self.ready.pop(seq)
            assert reader.pick == "random" or seq < min(self.ready, default=seq + 1)
        assert slot.header.pack_id == 1000 + seq
        assert slot.array("words").tolist() == [seq] * NUM_WORDS
        self.held[consumer][seq] = slot

    @precondition(lambda self: any(slot for held in self.held.values() for slot in held.values()))
    @rule(data=st.data(), reject=st.booleans())
    def release(self, data: st.DataObject, reject: bool) -> None:
        """Release any slot in hand, in any order; twice is refused."""
        mine = [(c, seq) for c, held in self.held.items() for seq, slot in held.items() if slot]
        consumer, seq = data.draw(st.sampled_from(mine))
        slot = self.held[consumer].pop(seq)
        assert slot is not None
        reader = self.readers[consumer]
        (reader.reject if reject else reader.release)(slot)
        self.rejected += reject
        self.freed.add(seq)
        with pytest.raises(errors.RingUsage):
            reader.release(slot)

    @rule(consumer=CONSUMERS, committed=st.booleans())
    def retire(self, consumer: int, committed: bool) -> None:
        """A living consumer is not retired; a dead one's slots are freed or given back."""
        if consumer in self.readers:
            with pytest.raises(errors.RingOwned):
                self.ring.retire(consumer, lambda _: True)
            return
        slots = {s.seq: s.index for s in self.ring.snapshot().slots if s.consumer == consumer}
        freed, again = self.ring.retire(consumer, lambda _: committed)
        assert {h.seq for h in (freed if committed else again)} == self.held[consumer].keys() == slots.keys()
        if committed:
            self.freed |= slots.keys()
        else:
            self.ready |= slots
        self.held[consumer] = {}

    # -- others

    @rule(offset=st.integers(0, layout.HEADER_BYTES - 1), flip=st.integers(1, 255))
    def those_who_have_no_place_here(self, offset: int, flip: int) -> None:
        """A damaged header, a second launch and a second producer are refused and harm nobody."""
        buffer = self.ring.segment.buffer
        buffer[offset] ^= flip
        with pytest.raises(errors.RingError):
            Ring.open(self.ring.name, wait_s=0.0)
        buffer[offset] ^= flip
        with pytest.raises(errors.RingLive):
            Ring.create(self.ring.name, SPEC, 2)
        if self.writer:
            with pytest.raises(errors.RingOwned):
                self.ring.writer()

    @invariant()
    def the_snapshot_says_what_the_model_says(self) -> None:
        """States, owners, counts."""
        snapshot = self.ring.snapshot()
        assert {s.seq: s.index for s in snapshot.slots if s.state == "READY"} == self.ready
        for consumer, held in self.held.items():
            assert {s.seq for s in snapshot.slots if s.consumer == consumer} == held.keys()
        assert snapshot.free + snapshot.ready + snapshot.held == NUM_SLOTS
        assert (snapshot.published, snapshot.released) == (self.last_seq, len(self.freed))
        assert (snapshot.rejected, snapshot.end_of_data) == (self.rejected, self.finished)
        assert snapshot.producer.alive == (self.writer is not None)
        assert {c.consumer_id for c in snapshot.consumers if c.alive} == self.readers.keys()


TestRingMachine = RingMachine.TestCase
TestRingMachine.settings = settings(
    max_examples=80, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def _give_back_held(reader: Reader) -> list[ReadSlot]:
    slots = collect_held(reader)
    for slot in slots:
        atomics.store_u64(slot.segment.words_address + 8 * slot.index, layout.word(slot.header.seq, 0, layout.READY))
    return []


def _one_cursor_cell(buffer: memoryview, seq: int, cursor: bytes) -> None:
    if seq % 2 == 0:
        pack_cursor(buffer, seq, cursor)


collect_held, pack_cursor = Reader._collect_held, layout.pack_cursor
SEEDED = [(Reader, "_collect_held", _give_back_held), (layout, "pack_cursor", _one_cursor_cell)]


@pytest.mark.parametrize(("owner", "name", "bug"), SEEDED)
def test_the_machine_finds_a_seeded_bug(owner: object, name: str, bug: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, name, bug)
    quick = settings(
        TestRingMachine.settings, max_examples=300, database=None, phases=[Phase.generate], derandomize=True
    )
    with pytest.raises((AssertionError, errors.RingCorrupt)):
        run_state_machine_as_test(RingMachine, settings=quick)
