"""What the writer, the board and the snapshot promise, in one process."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
import uuid
from collections.abc import Sequence

import numpy as np
import pytest

from shm_ring import (
    Board,
    Field,
    Reader,
    Ring,
    SlotSpec,
    atomics,
    errors,
    layout,
    liveness,
    waiting,
)
from tests.helpers.ring_api import PATIENCE_S, SPEC, Make, new_ring, publish, run, take, take_ids

__all__ = ["new_ring", "run"]


# -- the writer


def test_several_slots_may_be_acquired_and_are_published_in_order(new_ring: Make) -> None:
    ring = new_ring(3)
    with ring.writer() as writer, Reader([ring]) as reader:
        first, second, third = (writer.acquire() for _ in range(3))
        with pytest.raises(errors.RingUsage, match="all 3 slots"):
            writer.acquire()
        with pytest.raises(errors.RingUsage, match="publish in order"):
            writer.publish(second, pack_id=2)
        writer.publish(first, pack_id=1)
        writer.discard(second)
        writer.publish(third, pack_id=3)
        assert take_ids(reader, 2) == [1, 3]
        assert ring.snapshot().free == 3


def test_acquired_slots_are_unseen_until_published_and_forgotten_at_close(new_ring: Make) -> None:
    ring = new_ring(2)
    with ring.writer() as writer, Reader([ring]) as reader:
        writer.acquire().array("ids")[:] = 7
        with pytest.raises(errors.RingEmpty):
            reader.take(timeout_s=0)
    with ring.writer() as writer, Reader([ring]) as reader:
        publish(writer, 1, 2)
        assert take_ids(reader, 2) == [1, 2]


def test_the_next_writer_goes_on_after_the_last_published(new_ring: Make) -> None:
    ring = new_ring(2)
    with ring.writer() as writer:
        assert (writer.cursor, writer.last_seq) == (b"", 0)
        writer.publish(writer.acquire(), pack_id=1, cursor=b"first")
        writer.publish(writer.acquire(), pack_id=2, cursor=b"x" * 48)
        assert (writer.cursor, writer.last_seq) == (b"x" * 48, 2)
    with ring.writer() as writer:
        assert (writer.cursor, writer.last_seq) == (b"x" * 48, 2)


def test_an_oversize_record_is_an_error_that_names_both_sizes_and_writes_nothing(new_ring: Make) -> None:
    with new_ring(1).writer() as writer:
        slot = writer.acquire()
        slot.write("ids", np.arange(256, dtype=np.int32))
        with pytest.raises(errors.RingOversize, match=r"1028 bytes.*1024 bytes") as caught:
            slot.write("ids", np.zeros(257, np.int32))
        assert caught.value.exit_code == 3
        with pytest.raises(errors.RingUsage, match="int64"):
            slot.write("ids", np.zeros(3, np.int64))
        with pytest.raises(errors.RingOversize):
            slot.write("features", np.zeros((1, 9), np.uint16))
        assert slot.array("ids").tolist() == list(range(256))
        with pytest.raises(errors.RingOversize, match="49 bytes"):
            writer.publish(slot, pack_id=1, cursor=bytes(49))
        with pytest.raises(errors.RingOversize, match="pack_id"):
            writer.publish(slot, pack_id=-1)
        with pytest.raises(errors.RingUsage, match="no field 'nope'; it has ids, features"):
            slot.array("nope")


def test_a_full_ring_names_the_holders_and_their_condition(new_ring: Make) -> None:
    ring = new_ring(3)
    with ring.writer() as writer, Reader([ring], consumer_id=4) as reader:
        publish(writer, 1, 2, 3)
        take(reader)
        take(reader)
        with pytest.raises(errors.RingFull, match=rf"consumer 4 holds slots 0, 1 and is alive \(pid {os.getpid()}\)"):
            writer.acquire(timeout_s=0.02)
        assert writer.blocked_s >= 0.02
        assert ring.snapshot().blocked_s == pytest.approx(writer.blocked_s)
        reader.close()
        with pytest.raises(errors.RingFull, match=r"holds slots 0, 1 and is gone .*retire"):
            writer.acquire(timeout_s=0)


def test_waits_end_when_asked_to_stop(new_ring: Make) -> None:
    ring = new_ring(1)
    with ring.writer() as writer, Reader([ring]) as reader:
        with pytest.raises(errors.RingStopped):
            reader.take(timeout_s=60, stop=lambda: True)
        publish(writer, 1)
        with pytest.raises(errors.RingStopped):
            writer.acquire(timeout_s=60, stop=lambda: True)


def test_a_release_wakes_a_waiting_writer(new_ring: Make) -> None:
    ring = new_ring(1)
    with ring.writer() as writer, Reader([ring]) as reader:
        publish(writer, 1)
        slot = take(reader)
        waits = threading.Event()
        thread = threading.Thread(target=publish, args=(writer, 2))
        original = atomics.wait_bells

        def note(*args: object) -> None:
            waits.set()
            original(*args)  # type: ignore[arg-type]

        atomics.wait_bells = note  # type: ignore[assignment]
        try:
            thread.start()
            assert waits.wait(PATIENCE_S)
            reader.release(slot)
            thread.join(PATIENCE_S)
        finally:
            atomics.wait_bells = original
        assert not thread.is_alive()
        assert take_ids(reader, 1) == [2]


# -- retiring


def test_retire_frees_the_committed_and_gives_back_the_rest(new_ring: Make) -> None:
    ring = new_ring(4)
    with ring.writer() as writer:
        publish(writer, 1, 2, 3, 4)
        with Reader([ring], 7) as reader:
            for _ in range(3):
                take(reader)
            with pytest.raises(errors.RingOwned, match="consumer 7"):
                ring.retire(7, lambda _: True)
        freed, again = ring.retire(7, lambda header: header.pack_id == 2)
        assert ([h.pack_id for h in freed], [h.pack_id for h in again]) == ([2], [1, 3])
        with Reader([ring], 0) as reader:
            assert take_ids(reader, 3) == [1, 3, 4]
        with Reader([ring], 7) as reader, pytest.raises(errors.RingEmpty):
            reader.take(timeout_s=0)


# -- snapshot


def test_a_snapshot_of_a_read_only_ring_tells_everything(new_ring: Make) -> None:
    ring = new_ring(4)
    with ring.writer() as writer, Reader([ring], 3) as reader, Ring.open(ring.name, readonly=True) as watched:
        publish(writer, 1, 2, 3)
        take(reader)
        snapshot = watched.snapshot()
        assert (snapshot.free, snapshot.ready, snapshot.held, snapshot.occupancy) == (1, 2, 1, 3)
        assert (snapshot.published, snapshot.released, snapshot.published_bytes) == (3, 0, 3 * SPEC.slot_bytes)
        assert [s.state for s in snapshot.slots] == ["HELD", "READY", "READY", "FREE"]
        assert (snapshot.slots[0].consumer, snapshot.slots[0].seq) == (3, 1)
        assert snapshot.held_by == {3: (0,)}
        assert (snapshot.producer.pid, snapshot.producer.alive, snapshot.producer.stopped) == (os.getpid(), True, False)
        (consumer,) = snapshot.consumers
        assert (consumer.consumer_id, consumer.alive, consumer.taken, consumer.last_seq) == (3, True, 1, 1)
        assert consumer.heartbeat_age_s is not None
        assert 0 <= consumer.heartbeat_age_s < 60
        reader.close()
        assert not watched.snapshot().consumers[0].alive
        with pytest.raises((TypeError, ValueError)):
            watched.segment.u64[0] = 0


def test_free_ready_and_held_always_add_up_while_the_ring_runs(new_ring: Make) -> None:
    ring = new_ring(4)
    done = threading.Event()
    counts = []

    def watch() -> None:
        with Ring.open(ring.name, readonly=True) as watched:
            while not done.is_set():
                snapshot = watched.snapshot()
                counts.append((snapshot.free, snapshot.ready, snapshot.held))

    thread = threading.Thread(target=watch)
    with ring.writer() as writer, Reader([ring]) as reader:
        thread.start()
        try:
            for pack_id in itertools.count():
                publish(writer, pack_id)
                take_ids(reader, 1)
                if len(counts) >= 200 and len(set(counts)) > 1:  # it has moved while it was watched
                    break
        finally:
            done.set()
            thread.join()
    assert all(sum(count) == 4 for count in counts)


# -- the board


def test_the_board_wakes_and_stops_readers_and_carries_the_schema(run: str, new_ring: Make) -> None:
    rings = [new_ring(2), new_ring(2)]
    run_id = uuid.uuid4().bytes
    with Board.create(run, SPEC, 2, run_id) as board, Board.open(run, SPEC) as other:
        assert (other.run_id, other.spec, other.ring_names) == (run_id, SPEC, [r.name for r in rings])
        assert (other.stopped, other.paused) == (False, False)
        board.request_pause()
        assert (other.stopped, other.paused) == (False, True)
        board.request_pause(False)
        with rings[1].writer(board) as writer, Reader(rings, board=other) as reader:
            before = atomics.load_u32(board.bell_address)
            publish(writer, 1)
            assert atomics.load_u32(board.bell_address) == before + 1
            assert take_ids(reader, 1) == [1]
            thread = threading.Timer(0.05, board.request_stop)
            thread.start()
            with pytest.raises(errors.RingStopped):
                reader.take(timeout_s=PATIENCE_S)
            thread.join()
        with pytest.raises(errors.RingMismatch):
            Board.open(run, SlotSpec((Field("other", "int8", (1,)),)))
        board.unlink()


@pytest.mark.parametrize("missing", ["futex", "futex_waitv"])
def test_the_ring_works_where_the_kernel_lacks(missing: str, new_ring: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomics, "_missing", {missing})
    rings = [new_ring(1), new_ring(1)]
    num = 200

    def produce(ring: Ring, first: int) -> None:
        with ring.writer() as writer:
            publish(writer, *range(first, first + num))
            writer.finish()

    threads = [threading.Thread(target=produce, args=(ring, k * num)) for k, ring in enumerate(rings)]
    with Reader(rings) as reader:
        for thread in threads:
            thread.start()
        assert sorted(take_ids(reader, 2 * num)) == list(range(2 * num))
        assert reader.take(timeout_s=PATIENCE_S) is None
    for thread in threads:
        thread.join()


# -- costs and processes


@pytest.mark.parametrize("end", ["writer", "reader"])
def test_a_wait_sleeps_in_the_kernel_and_looks_a_few_times_a_second(
    new_ring: Make, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sleep that came back at once would be thousands a second; benchmarks/ring.py measures the share of a core."""
    rings = [new_ring(1), new_ring(1)]
    sleeps, real = [], atomics.wait_bells

    def counted(bells: Sequence[tuple[int, int]], limit_s: float) -> None:
        sleeps.append(limit_s)
        real(bells, limit_s)

    monkeypatch.setattr(atomics, "wait_bells", counted)
    with rings[0].writer() as writer, Reader(rings) as reader:
        if end == "writer":
            publish(writer, 1)
        with pytest.raises(errors.RingTimeout):
            (writer.acquire if end == "writer" else reader.take)(timeout_s=2.0)
    turn_s = atomics._ROTATE_S if "futex_waitv" in atomics._missing else waiting.CAP_S
    assert 1 <= len(sleeps) <= 2 * 2.0 / turn_s
    assert max(sleeps) <= waiting.CAP_S


def test_no_wait_depends_on_the_wall_clock_or_the_heartbeat_clock(
    new_ring: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    jumps = iter(range(1, 10**9))
    monkeypatch.setattr(time, "time", lambda: (-1) ** next(jumps) * 1e10)
    monkeypatch.setattr(liveness, "boot_ns", lambda: next(jumps) % 2 * 10**17)
    ring = new_ring(2)
    with ring.writer() as writer, Reader([ring]) as reader:
        for pack_id in range(50):
            publish(writer, pack_id)
            assert take_ids(reader, 1) == [pack_id]
        begun = time.monotonic()
        with pytest.raises(errors.RingEmpty):
            reader.take(timeout_s=0.2)
        assert time.monotonic() - begun >= 0.2
        assert ring.snapshot().producer.alive


def test_a_forked_child_neither_keeps_nor_uses_its_parents_roles(new_ring: Make) -> None:
    ring = new_ring(2)
    ready_r, ready_w = os.pipe()
    go_r, go_w = os.pipe()
    writer, reader = ring.writer(), Reader([ring])
    publish(writer, 1)
    slot = take(reader)
    pid = os.fork()
    if pid == 0:
        uses = (writer.acquire, reader.take, lambda: reader.release(slot), writer.finish)
        refused = 0
        for use in uses:
            try:
                use()
            except errors.RingUsage:
                refused += 1
        os.write(ready_w, bytes([refused]))
        os.read(go_r, 1)
        os._exit(0)
    assert os.read(ready_r, 1) == b"\x04"
    writer.close()
    reader.close()
    ring.writer().close()  # would be refused if the child still held the lock
    with Reader([ring]) as again:
        assert take(again).redelivered
    os.write(go_w, b"x")
    assert os.waitpid(pid, 0)[1] == 0
    for fd in (ready_r, ready_w, go_r, go_w):
        os.close(fd)


def test_a_new_writer_waits_until_the_old_process_has_left(new_ring: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = new_ring(2)
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    try:
        monkeypatch.setattr("shm_ring.writer.OLD_PRODUCER_WAIT_S", 0.1)
        state = liveness.process_state(pid)
        assert state is not None
        ring.segment.u32[layout.OFFSET_PRODUCER // 4] = pid
        ring.segment.u64[(layout.OFFSET_PRODUCER + layout.RECORD_START) // 8] = state[1]
        with pytest.raises(errors.RingTimeout, match=rf"pid {pid}\) lost its lock .* has not exited"):
            ring.writer()
    finally:
        os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    with ring.writer() as writer:  # a zombie has left: its memory and its files are gone
        publish(writer, 1)
    os.waitpid(pid, 0)


def test_the_packs_in_a_ring_are_those_ready_or_held(new_ring: Make) -> None:
    ring = new_ring(4)
    with ring.writer() as writer, Reader([ring]) as reader:
        assert ring.pack_ids() == frozenset()
        publish(writer, 11, 12, 13)
        take_ids(reader, 1)
        take(reader)
        assert ring.pack_ids() == {12, 13}


def test_the_end_of_the_data_can_be_taken_back(new_ring: Make) -> None:
    ring = new_ring(2)
    with ring.writer() as writer, Reader([ring]) as reader:
        writer.finish()
        assert reader.take(timeout_s=0) is None
        writer.reopen()
        with pytest.raises(errors.RingEmpty):
            reader.take(timeout_s=0)
        publish(writer, 1)
        assert take_ids(reader, 1) == [1]
