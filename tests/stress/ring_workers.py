"""What the processes of the ring's stress tests do: a producer and a consumer whose packs prove themselves.

Every byte of a payload follows from (ring, seq), and pack_id is seq - 1: a torn, stale, doubled or missing pack shows.
The consumer's journal is one 32-byte record per pack, written in one call before the slot is released.
Run as a program: `ring_workers.py produce NAME TARGET` or `ring_workers.py consume JOURNAL ID NAME...`.
"""

from __future__ import annotations

import os
import struct
import sys
import time
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shm_ring import Board, Field, Reader, ReadSlot, Ring, SlotSpec, errors, kill_points

NUM_WORDS = 2048
SPEC = SlotSpec((Field("words", "uint64", (NUM_WORDS,)), Field("tail", "uint8", (24,))), {"for": "stress"})
RECORD = struct.Struct("<IIQQQ")  # ring, redelivered, seq, pack_id, life
EXIT_TORN, EXIT_ORDER, EXIT_CURSOR = 13, 14, 15
_STEPS = np.arange(NUM_WORDS, dtype=np.uint64)


def pattern(ring_index: int, seq: int) -> npt.NDArray[np.uint64]:
    """Return the payload of a pack."""
    first = (seq * 0x9E3779B97F4A7C15 + (ring_index + 1) * 0xC2B2AE3D27D4EB4F) & 0xFFFFFFFFFFFFFFFF
    return _STEPS * np.uint64(0x100000001B3) + np.uint64(first)


def produce(name: str, target: int, board: Board | None = None) -> None:
    """Publish packs up to `target`, or until the board says pause; two slots in flight, each written in halves."""
    ring = Ring.open(name, SPEC)
    with ring.writer(board) as writer:
        next_pack = int.from_bytes(writer.cursor, "little")
        if next_pack != writer.last_seq:
            os._exit(EXIT_CURSOR)
        pending: deque[tuple[object, int]] = deque()
        while next_pack + len(pending) < target and not (board and board.paused):
            try:
                slot = writer.acquire(timeout_s=0.0 if pending else 60.0)
            except errors.RingFull:  # never wait for a slot while keeping one back: the consumers may wait for that one
                next_pack = _publish_oldest(writer, pending, next_pack)
                continue
            seq = next_pack + len(pending) + 1
            words = pattern(ring.ring_index, seq)
            view = slot.array("words")
            view[: NUM_WORDS // 2] = words[: NUM_WORDS // 2]
            kill_points.reached("after_half")
            view[NUM_WORDS // 2 :] = words[NUM_WORDS // 2 :]
            slot.array("tail")[:] = seq & 0xFF
            pending.append((slot, zlib.crc32(words)))
            if len(pending) == min(2, ring.num_slots):
                next_pack = _publish_oldest(writer, pending, next_pack)
        while pending:
            next_pack = _publish_oldest(writer, pending, next_pack)
        writer.finish()


def _publish_oldest(writer, pending, pack_id: int) -> int:  # type: ignore[no-untyped-def]
    slot, checksum = pending.popleft()
    writer.publish(slot, pack_id=pack_id, checksum=checksum, cursor=(pack_id + 1).to_bytes(8, "little"))
    return pack_id + 1


def read_journal(path: Path) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield the whole records of a journal."""
    raw = path.read_bytes() if path.exists() else b""
    yield from RECORD.iter_unpack(raw[: len(raw) // RECORD.size * RECORD.size])


def _is_sound(slot: ReadSlot) -> bool:
    seq = slot.header.seq
    words = slot.array("words")
    return (
        slot.header.pack_id == seq - 1
        and bool((words == pattern(slot.ring_index, seq)).all())
        and bool((slot.array("tail") == seq & 0xFF).all())
        and zlib.crc32(words) == slot.header.checksum
    )


def consume(
    journal: Path, consumer_id: int, names: Sequence[str], board: Board | None = None, pick: str = "oldest"
) -> int:
    """Journal every pack once, holding up to two and releasing them in either order; return how many were skipped."""
    done = {(ring, seq) for ring, _, seq, _, _ in read_journal(journal)}
    skipped, held, last = 0, deque[ReadSlot](), dict[int, int]()
    life = time.monotonic_ns()
    fd = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    with Reader([Ring.open(n, SPEC) for n in names], consumer_id, pick, board=board, seed=life) as reader:  # type: ignore[arg-type]
        while (slot := reader.take(timeout_s=60)) is not None:
            seq = slot.header.seq
            if not _is_sound(slot):
                os._exit(EXIT_TORN)
            if pick == "oldest" and not slot.redelivered:
                if seq <= last.get(slot.ring_index, 0):
                    os._exit(EXIT_ORDER)
                last[slot.ring_index] = seq
            if (slot.ring_index, seq) in done:
                skipped += 1
            else:
                os.write(fd, RECORD.pack(slot.ring_index, slot.redelivered, seq, slot.header.pack_id, life))
                done.add((slot.ring_index, seq))
            held.append(slot)
            if len(held) == 2:
                reader.release(held.pop() if seq % 3 else held.popleft())
            if len(held) == 2 or reader_is_short(names, held):
                reader.release(held.popleft())
        while held:
            reader.release(held.popleft())
    os.close(fd)
    return skipped


def reader_is_short(names: Sequence[str], held: Sequence[ReadSlot]) -> bool:
    """Say whether holding on to a slot could starve a small ring."""
    return any(slot.segment.num_slots <= 2 for slot in held) or len(names) == 0


def main(args: list[str]) -> None:
    """Run one role; see the head of the file."""
    if args[0] == "produce":
        produce(args[1], int(args[2]))
    elif args[0] == "consume":
        print(consume(Path(args[1]), int(args[2]), args[3:]))


if __name__ == "__main__":
    main(sys.argv[1:])
