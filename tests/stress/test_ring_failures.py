"""The failure matrix of docs/ring.md, row by row, with real processes killed at named points."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import ring_workers
from ring_workers import SPEC, pattern

from shm_ring import Reader, ReadSlot, Ring, Snapshot, Writer, errors, layout, liveness, ring_name

ROOT = Path(__file__).resolve().parents[2]
WORKER = ROOT / "tests" / "stress" / "ring_workers.py"
WATCHDOG_S = 120.0


@pytest.fixture
def ring() -> Iterator[Ring]:
    made = Ring.create(ring_name(f"matrix.{os.getpid()}.{uuid.uuid4().hex[:6]}", 0), SPEC, num_slots=4)
    yield made
    with suppress(errors.RingError):
        made.unlink()
    made.close()
    assert Ring.find(made.name) == []


started: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def no_process_outlives_its_test() -> Iterator[None]:
    yield
    while started:
        with started.pop() as process:
            process.kill()


def start(*args: object, kill_at: str = "") -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SHM_RING_KILL_AT": kill_at, "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, str(WORKER), *map(str, args)]
    started.append(subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE))
    return started[-1]


def ends(process: subprocess.Popen[str]) -> int:
    return process.wait(WATCHDOG_S)


def until(ring: Ring, claim: Callable[[Snapshot], bool]) -> Snapshot:
    """Wait for a state of the ring; the watchdog shows the state it stuck in."""
    end = time.monotonic() + WATCHDOG_S
    while not claim(snapshot := ring.snapshot()):
        assert time.monotonic() < end, f"never came: {snapshot}"
        select.select([], [], [], 0.002)
    return snapshot


def publish(writer: Writer, ring: Ring, *seqs: int) -> None:
    for seq in seqs:
        slot = writer.acquire(timeout_s=WATCHDOG_S)
        slot.array("words")[:] = pattern(ring.ring_index, seq)
        slot.array("tail")[:] = seq & 0xFF
        checksum = ring_workers.zlib.crc32(slot.array("words"))
        writer.publish(slot, pack_id=seq - 1, checksum=checksum, cursor=seq.to_bytes(8, "little"))


def take(reader: Reader) -> ReadSlot:
    slot = reader.take(timeout_s=WATCHDOG_S)
    assert slot is not None
    return slot


def journalled(*journals: Path) -> list[int]:
    return sorted(seq for path in journals for _, _, seq, _, _ in ring_workers.read_journal(path))


# -- a producer dies


@pytest.mark.parametrize(
    ("point", "published"),
    [
        ("writer_locked", 0), ("after_acquire:3", 1), ("after_half:3", 1), ("before_publish:3", 2),
        ("after_header:3", 2), ("after_cursor:3", 2), ("after_publish:3", 3), ("after_bell:3", 3),
    ],
)  # fmt: skip
def test_a_producer_killed_at_any_point_goes_on_without_gap_or_double(
    ring: Ring, tmp_path: Path, point: str, published: int
) -> None:
    assert ends(start("produce", ring.name, 20, kill_at=point)) == -signal.SIGKILL
    snapshot = ring.snapshot()
    assert (snapshot.published, snapshot.ready, snapshot.held) == (published, published, 0)
    assert not snapshot.producer.alive
    producer = start("produce", ring.name, 20)
    consumer = start("consume", tmp_path / "journal", 0, ring.name)
    assert (ends(producer), ends(consumer)) == (0, 0)
    assert journalled(tmp_path / "journal") == list(range(1, 21))
    assert ring.snapshot().occupancy == 0


# -- a consumer dies


@pytest.mark.parametrize(
    ("point", "held", "skipped"), [("reader_locked", 0, 0), ("after_claim:3", 2, 1), ("before_release:3", 2, 2)]
)
def test_a_consumer_killed_at_any_point_gets_its_slots_back_and_trains_each_once(
    ring: Ring, tmp_path: Path, point: str, held: int, skipped: int
) -> None:
    journal = tmp_path / "journal"
    producer = start("produce", ring.name, 20)
    assert ends(start("consume", journal, 0, ring.name, kill_at=point)) == -signal.SIGKILL
    assert len(ring.snapshot().held_by.get(0, ())) == held
    again = start("consume", journal, 0, ring.name)
    out, _ = again.communicate(timeout=WATCHDOG_S)
    assert (again.returncode, ends(producer)) == (0, 0)
    assert int(out) == skipped, "only what the journal had before the death is skipped"
    assert journalled(journal) == list(range(1, 21))


def test_a_dead_consumers_slots_wait_for_it_while_the_others_go_on(ring: Ring, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    producer = start("produce", ring.name, 30)
    assert ends(start("consume", first, 0, ring.name, kill_at="after_claim:3")) == -signal.SIGKILL
    other = start("consume", second, 1, ring.name)
    assert (ends(other), ends(producer)) == (0, 0)
    assert ring.snapshot().held_by.keys() == {0}
    assert ends(start("consume", first, 0, ring.name)) == 0
    assert journalled(first, second) == list(range(1, 31))


def test_both_may_die_at_once(ring: Ring, tmp_path: Path) -> None:
    producer = start("produce", ring.name, 20, kill_at="after_cursor:8")
    consumer = start("consume", tmp_path / "journal", 0, ring.name, kill_at="before_release:6")
    assert (ends(producer), ends(consumer)) == (-signal.SIGKILL, -signal.SIGKILL)
    producer = start("produce", ring.name, 20)
    consumer = start("consume", tmp_path / "journal", 0, ring.name)
    assert (ends(producer), ends(consumer)) == (0, 0)
    assert journalled(tmp_path / "journal") == list(range(1, 21))


def test_a_retired_consumers_packs_are_trained_once_by_the_others(ring: Ring, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    producer = start("produce", ring.name, 20)
    assert ends(start("consume", first, 0, ring.name, kill_at="before_release:4")) == -signal.SIGKILL
    done = set(journalled(first))
    freed, again = ring.retire(0, lambda header: header.seq in done)
    assert len(freed) == 2
    assert again == []
    consumer = start("consume", second, 1, ring.name)
    assert (ends(consumer), ends(producer)) == (0, 0)
    assert journalled(first, second) == list(range(1, 21))


def test_a_retire_killed_in_the_middle_is_simply_repeated(ring: Ring) -> None:
    with ring.writer() as writer, Reader([ring], 5) as reader:
        publish(writer, ring, 1, 2, 3)
        for _ in range(3):
            take(reader)
    code = "import sys; from shm_ring import *; Ring.open(sys.argv[1]).retire(5, lambda h: h.seq == 1)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SHM_RING_KILL_AT": "mid_retire:2"}
    died = subprocess.run([sys.executable, "-c", code, ring.name], env=environment, check=False)
    assert died.returncode == -signal.SIGKILL
    snapshot = ring.snapshot()
    assert (snapshot.free, snapshot.ready, snapshot.held) == (2, 1, 1)
    freed, again = ring.retire(5, lambda header: header.seq == 1)
    assert ([h.seq for h in freed], [h.seq for h in again]) == ([], [3])


# -- weights: what the ring cannot know


def test_with_a_journal_and_re_extraction_the_weights_see_every_pack_exactly_once(ring: Ring, tmp_path: Path) -> None:
    """A drafter whose weight is the sum of its packs, saved every 4 steps, dies after a step and before the release."""
    num_packs, every = 23, 4
    state = tmp_path / "checkpoint"
    state.write_text("0 0")  # weight, steps
    journal: list[int] = []  # pack ids in step order; stands for the file
    extracted = iter(range(num_packs))
    todo: list[int] = []
    deaths = 0
    with ring.writer() as writer:
        while True:
            weight, step = map(int, state.read_text().split())
            lost, journal = journal[step:], journal[:step]
            with Reader([ring], 0) as reader:
                redelivered = {slot.header.pack_id for slot in reader._redeliver}
                todo += [pack_id for pack_id in lost if pack_id not in redelivered]
                dies_in = 6 if deaths < 3 else 10**9
                while dies_in:
                    while (
                        ring.snapshot().free and (pack_id := todo.pop(0) if todo else next(extracted, None)) is not None
                    ):
                        writer.publish(writer.acquire(), pack_id=pack_id)
                    if not ring.snapshot().occupancy:
                        break
                    slot = take(reader)
                    assert slot.header.pack_id not in journal
                    weight, step, dies_in = weight + 1 + slot.header.pack_id, step + 1, dies_in - 1
                    journal.append(slot.header.pack_id)
                    if dies_in == 0:
                        deaths += 1
                        break  # killed between the step and the release; weight and step are gone
                    reader.release(slot)
                    if step % every == 0:
                        state.write_text(f"{weight} {step}")
                else:
                    continue
                if dies_in:
                    break
    assert deaths == 3
    assert Counter(journal) == Counter(range(num_packs))
    assert weight == sum(range(1, num_packs + 1))


# -- the launcher dies


def test_the_ring_and_its_ends_outlive_the_creator_and_a_new_one_takes_over(tmp_path: Path) -> None:
    name = ring_name(f"matrix.{os.getpid()}.{uuid.uuid4().hex[:6]}", 0)
    code = (
        "import signal, sys; from shm_ring import *; r = Ring.create(sys.argv[1], SlotSpec.from_json(sys.argv[2]), 4)\n"
        "print('made', flush=True); signal.pause()"
    )
    creator: subprocess.Popen[str] = subprocess.Popen(
        [sys.executable, "-c", code, name, SPEC.to_json()], env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    started.append(creator)
    assert creator.stdout is not None
    assert creator.stdout.readline() == "made\n"
    producer = start("produce", name, 40)
    with Ring.open(name, readonly=True) as watched:
        until(watched, lambda s: s.ready == 4 and s.blocked_s > 0)
        creator.kill()
        assert ends(creator) == -signal.SIGKILL
        assert not liveness.is_locked(watched.segment.fd, layout.LOCK_CREATOR)
        with pytest.raises(errors.RingLive, match=f"producer pid {producer.pid}"):
            Ring.create(name, SPEC, 4)
    with Ring.resume(name, SPEC) as ring:
        consumer = start("consume", tmp_path / "journal", 0, name)
        assert (ends(producer), ends(consumer)) == (0, 0)
        assert journalled(tmp_path / "journal") == list(range(1, 41))
        ring.unlink()


# -- a peer is stopped


def test_a_stopped_consumer_keeps_its_slots_and_is_shown_as_stopped(ring: Ring, tmp_path: Path) -> None:
    consumer = start("consume", tmp_path / "journal", 0, ring.name)
    with ring.writer() as writer:
        until(ring, lambda s: any(c.alive for c in s.consumers))
        publish(writer, ring, 1)
        until(ring, lambda s: s.held == 1)
        os.kill(consumer.pid, signal.SIGSTOP)
        until(ring, lambda s: s.consumers[0].stopped)
        publish(writer, ring, 2, 3, 4)
        with pytest.raises(
            errors.RingFull, match=rf"consumer 0 holds slot 0 and is stopped \(pid {consumer.pid}, state T"
        ):
            writer.acquire(timeout_s=0.3)
        with pytest.raises(errors.RingOwned):
            Reader([ring], 0)
        with Reader([ring], 1) as other:
            slot = take(other)
            assert slot.header.seq == 2
            other.release(slot)
        os.kill(consumer.pid, signal.SIGCONT)
        publish(writer, ring, 5)
        writer.finish()
    assert ends(consumer) == 0
    assert journalled(tmp_path / "journal") == [1, 3, 4, 5]


def test_a_stopped_producer_is_not_robbed_and_readers_wait(ring: Ring, tmp_path: Path) -> None:
    producer = start("produce", ring.name, 30)
    until(ring, lambda s: s.ready == 4 and s.blocked_s > 0)
    os.kill(producer.pid, signal.SIGSTOP)
    until(ring, lambda s: s.producer.stopped)
    with pytest.raises(errors.RingOwned, match=f"pid {producer.pid}"):
        ring.writer()
    with Reader([ring], 1) as reader:
        for _ in range(4):
            reader.release(take(reader))
        with pytest.raises(errors.RingEmpty, match=rf"is stopped \(pid {producer.pid}, state T\)"):
            reader.take(timeout_s=0.3)
    os.kill(producer.pid, signal.SIGCONT)
    consumer = start("consume", tmp_path / "journal", 0, ring.name)
    assert (ends(producer), ends(consumer)) == (0, 0)
    assert journalled(tmp_path / "journal") == list(range(5, 31))


# -- a dead process whose child lives


def test_a_forked_child_does_not_keep_its_dead_parents_role_alive(ring: Ring) -> None:
    code = (
        "import os, signal, sys; from shm_ring import *; w = Ring.open(sys.argv[1]).writer()\n"
        "pid = os.fork()\n"
        "if pid: print(pid, flush=True)\n"
        "signal.pause()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, ring.name], env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    started.append(parent)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        assert ring.snapshot().producer.alive
        parent.kill()
        assert ends(parent) == -signal.SIGKILL
        assert liveness.process_state(child) is not None
        ring.writer().close()
    finally:
        os.kill(child, signal.SIGKILL)


# -- a poisoned pack


def test_poisoned_packs_are_rejected_and_the_ring_runs_on(ring: Ring) -> None:
    good = []
    with ring.writer() as writer, Reader([ring]) as reader:
        for seq in range(1, 31):
            publish(writer, ring, seq)
            slot = take(reader)
            if seq % 7 == 0:
                ring.segment.buffer[ring.segment.payload_offset(slot.index) + 100] ^= 1
            if ring_workers._is_sound(slot):
                good.append(seq)
                reader.release(slot)
            else:
                reader.reject(slot)
    assert good == [seq for seq in range(1, 31) if seq % 7]
    snapshot = ring.snapshot()
    assert (snapshot.rejected, snapshot.free) == (4, 4)


def test_a_liveness_lock_is_gone_soon_after_kill_9(ring: Ring) -> None:
    process = start("produce", ring.name, 1 << 40)
    until(ring, lambda s: s.ready == 4 and s.blocked_s > 0)
    process.kill()
    ends(process)
    assert not ring.snapshot().producer.alive
    ring.writer().close()
