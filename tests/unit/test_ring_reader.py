"""What the reader promises, in one process."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest

from shm_ring import (
    Reader,
    Ring,
    errors,
    waiting,
)
from shm_ring.segment import Segment
from tests.helpers.ring_api import Make, new_ring, publish, run, take, take_ids

__all__ = ["new_ring", "run"]


# -- the reader


def test_none_comes_only_when_every_producer_has_finished_and_all_is_taken(new_ring: Make) -> None:
    rings = [new_ring(), new_ring()]
    with rings[0].writer() as a, rings[1].writer() as b, Reader(rings) as reader:
        publish(a, 1)
        publish(b, 2)
        a.finish()
        assert sorted(take_ids(reader, 2)) == [1, 2]
        with pytest.raises(errors.RingEmpty, match=r"r0' has finished.*r1' is alive"):
            reader.take(timeout_s=0)
        publish(b, 3)
        b.finish()
        assert take_ids(reader, 1) == [3]
        assert reader.take(timeout_s=0) is None
    with rings[1].writer(), Reader(rings) as reader, pytest.raises(errors.RingEmpty):
        reader.take(timeout_s=0)


def test_finish_with_unpublished_slots_is_refused(new_ring: Make) -> None:
    with new_ring().writer() as writer:
        writer.acquire()
        with pytest.raises(errors.RingUsage, match="1 acquired"):
            writer.finish()


def test_oldest_takes_from_the_fullest_ring_in_seq_order(new_ring: Make) -> None:
    rings = [new_ring(4), new_ring(4)]
    with rings[0].writer() as a, rings[1].writer() as b, Reader(rings) as reader:
        publish(a, 1, 2)
        publish(b, 11, 12, 13)
        assert take_ids(reader, 5) == [11, 1, 12, 2, 13]


def test_oldest_does_not_trust_a_scan_that_was_overtaken(new_ring: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by the 5:3 storm: seq 1 goes to another consumer, and the second scan passes slot 1 just before seq 2."""
    ring = new_ring(4)
    scans = 0

    def overtaken(segment: Segment) -> list[tuple[int, int]]:
        nonlocal scans
        scans += 1
        if scans != 2:
            return Reader._scan(segment)
        assert take_ids(other, 1) == [1]
        publish(writer, 2, 3)
        return [found for found in Reader._scan(segment) if found[0] != 2]

    with ring.writer() as writer, Reader([ring], 0) as reader, Reader([ring], 1) as other:
        publish(writer, 1)
        monkeypatch.setattr(reader, "_scan", overtaken)
        assert take_ids(reader, 2) == [2, 3]


def test_random_pull_is_seeded_and_shuffles(new_ring: Make) -> None:
    orders = []
    for seed in (1, 1, 2):
        ring = new_ring(16)
        with ring.writer() as writer, Reader([ring], pick="random", seed=seed) as reader:
            publish(writer, *range(16))
            orders.append(take_ids(reader, 16))
    assert orders[0] == orders[1] != orders[2]
    assert all(sorted(order) == list(range(16)) != order for order in orders)


@pytest.mark.parametrize("max_age", [None, 5, 0])
def test_no_slot_grows_older_than_max_age_under_random_pull(new_ring: Make, max_age: int | None) -> None:
    ring = new_ring(4)
    limit = 16 if max_age is None else max_age
    ages = []
    with ring.writer() as writer, Reader([ring], pick="random", max_age=max_age, seed=3) as reader:
        publish(writer, 1, 2, 3, 4)
        for pack_id in range(5, 2000):
            slot = take(reader)
            ages.append(writer.last_seq - slot.header.seq)
            reader.release(slot)
            publish(writer, pack_id)
    # Several may pass the limit in one step and only one is taken at a time: S - 1 more at most.
    assert max(ages) <= limit + 4
    assert max_age == 0 or max(ages) > 3, "the draw never left a slot behind: the limit was not tested"


def test_random_pull_without_the_limit_would_starve_a_slot_longer(new_ring: Make) -> None:
    ring = new_ring(4)
    with ring.writer() as writer, Reader([ring], pick="random", max_age=10**9, seed=3) as reader:
        publish(writer, 1, 2, 3, 4)
        ages = []
        for pack_id in range(5, 2000):
            slot = take(reader)
            ages.append(writer.last_seq - slot.header.seq)
            reader.release(slot)
            publish(writer, pack_id)
    assert max(ages) > 20


def test_min_ready_waits_while_more_can_come(new_ring: Make) -> None:
    ring = new_ring(6)
    with ring.writer() as writer, Reader([ring], min_ready=3) as reader:
        publish(writer, 1, 2)
        with pytest.raises(errors.RingEmpty, match="for 3 READY slots"):
            reader.take(timeout_s=0)
        publish(writer, 3)
        assert take_ids(reader, 1) == [1]
        with pytest.raises(errors.RingEmpty):
            reader.take(timeout_s=0)
        reader.min_ready = 1
        assert take_ids(reader, 1) == [2]


def test_min_ready_never_strands_the_tail_of_the_data(new_ring: Make) -> None:
    ring = new_ring(6)
    with Reader([ring], min_ready=5) as reader:
        writer = ring.writer()
        publish(writer, 1, 2)
        writer.finish()
        assert take_ids(reader, 2) == [1, 2]
        assert reader.take(timeout_s=0) is None
        writer.close()
        with ring.writer() as writer:
            publish(writer, 3)
            with pytest.raises(errors.RingEmpty):
                reader.take(timeout_s=0)
        assert take_ids(reader, 1) == [3], "a dead producer adds nothing"


def test_min_ready_gives_way_when_the_reader_itself_holds_the_rest(new_ring: Make) -> None:
    ring = new_ring(3)
    with ring.writer() as writer, Reader([ring], min_ready=3) as reader:
        publish(writer, 1, 2, 3)
        held = [take(reader) for _ in range(3)]
        assert [slot.header.pack_id for slot in held] == [1, 2, 3]


def test_min_ready_waits_for_producers_that_have_not_come_yet(new_ring: Make) -> None:
    rings = [new_ring(3), new_ring(3)]
    with rings[0].writer() as writer, Reader(rings, min_ready=2) as reader:
        publish(writer, 1)
        writer.close()
        with pytest.raises(errors.RingEmpty, match="never attached"):
            reader.take(timeout_s=0)


def test_held_slots_come_back_to_their_consumer_and_to_no_other(new_ring: Make) -> None:
    ring = new_ring(4)
    with ring.writer() as writer:
        publish(writer, 1, 2, 3, 4)
        with Reader([ring], consumer_id=1) as reader:
            take(reader)
            take(reader)
        with Reader([ring], consumer_id=0) as other:
            assert take_ids(other, 1) == [3]
            with Reader([ring], consumer_id=1, pick="random", min_ready=4) as reader:
                slots = [take(reader), take(reader)]
                assert [(s.header.pack_id, s.redelivered) for s in slots] == [(1, True), (2, True)]
                for slot in slots:
                    reader.release(slot)
            again = take(other)
            assert (again.header.pack_id, again.redelivered) == (4, False)


def test_consumers_join_and_leave_at_any_time(new_ring: Make) -> None:
    ring = new_ring(4)
    seen = []
    with ring.writer() as writer:
        for round_ in range(12):
            publish(writer, *range(round_ * 4, round_ * 4 + 4))
            for consumer in (round_ % 5, 40 + round_ % 3):
                with Reader([ring], consumer_id=consumer) as reader:
                    seen += take_ids(reader, 2)
    assert seen == list(range(48))
    snapshot = ring.snapshot()
    assert sum(c.released for c in snapshot.consumers) == 48
    assert {c.consumer_id for c in snapshot.consumers} == {0, 1, 2, 3, 4, 40, 41, 42}


def test_a_slot_is_given_back_once_and_only_by_its_holder(new_ring: Make) -> None:
    ring = new_ring(2)
    with ring.writer() as writer, Reader([ring], 0) as reader, Reader([ring], 1) as other:
        publish(writer, 1)
        slot = take(reader)
        with pytest.raises(errors.RingUsage, match="not held by this reader"):
            other.release(slot)
        reader.release(slot)
        with pytest.raises(errors.RingUsage, match="not held by this reader"):
            reader.release(slot)


def test_a_rejected_slot_is_counted_and_freed(new_ring: Make) -> None:
    ring = new_ring(2)
    with ring.writer() as writer, Reader([ring]) as reader:
        for pack_id in range(10):
            publish(writer, pack_id)
            (reader.reject if pack_id % 2 else reader.release)(take(reader))
    snapshot = ring.snapshot()
    assert (snapshot.rejected, snapshot.released, snapshot.free) == (5, 10, 2)


def test_taken_arrays_cannot_be_written(new_ring: Make) -> None:
    ring = new_ring(2)
    with ring.writer() as writer, Reader([ring]) as reader:
        publish(writer, 1)
        view = take(reader).array("ids")
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1


def test_arrays_outlive_the_closing_of_their_ring(new_ring: Make) -> None:
    ring = new_ring(2)
    other = Ring.open(ring.name)
    with ring.writer() as writer, Reader([other]) as reader:
        publish(writer, 5)
        view = take(reader).array("ids")
    other.close()
    gc.collect()
    assert int(view.sum()) == 5 * 256


def test_a_wait_in_slices_reports_itself_as_one_at_1_s_10_s_and_then_every_30_s(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = [0.0]
    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(waiting.atomics, "wait_bells", lambda _bells, cap_s: clock.__setitem__(0, clock[0] + cap_s))
    before_s, empty = 0.0, lambda waited_s: errors.RingEmpty(f"{waited_s:.0f}")
    while before_s < 95.0:
        began = clock[0]
        with pytest.raises(errors.RingEmpty):
            waiting.wait_until(lambda: None, (), 2.0, None, lambda _ns: None, empty, before_s)
        before_s += clock[0] - began
    assert [record.getMessage() for record in caplog.records] == [f"ring | waiting | {s}" for s in (1, 10, 30, 60, 90)]
