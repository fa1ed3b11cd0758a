"""A mapped segment: made once, checked at every attach, and torn down without ever leaving a view on unmapped memory.

Knows the header and the schema text; knows nothing of slots in use. Trade-off: attaching reads and checks everything
(about a millisecond), so that a doubtful segment is a one-line refusal and never a bus error later.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import struct
import time
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from shm_ring import atomics, kill_points, layout, liveness, shared_memory
from shm_ring.errors import RingCorrupt, RingLive, RingMissing, RingPermission, RingStale, RingUsage, RingVersion
from shm_ring.layout import SegmentHeader
from shm_ring.names import check_name
from shm_ring.spec import SlotSpec

MAGIC_WAIT_S = 5.0
_HALF_MADE_GRACE_S = 0.25
_POLL_S = 0.002


class Segment:
    """The mapping of one ring or board in this process, with its header and spec."""

    def __init__(self, name: str, fd: int, header: SegmentHeader, spec: SlotSpec, readonly: bool) -> None:
        """Map the whole segment; takes over `fd`. Use `create` or `attach`."""
        self.name, self.fd, self.header, self.spec, self.readonly = name, fd, header, spec, readonly
        access = mmap.ACCESS_READ if readonly else mmap.ACCESS_WRITE
        self.mapping = mmap.mmap(fd, header.segment_bytes, access=access)
        self.buffer = memoryview(self.mapping)
        # Arrays hold `base`, and `base` holds the mapping: it cannot go while any view of a slot is alive.
        self.base: npt.NDArray[np.uint8] | None = np.frombuffer(self.mapping, np.uint8)
        self.address: int = self.base.__array_interface__["data"][0]
        self.u32 = self.buffer[: layout.DATA_OFFSET].cast("I")
        self.u64 = self.buffer[: layout.DATA_OFFSET].cast("Q")
        words_end = layout.OFFSET_WORDS + 8 * header.num_slots
        self.words = self.buffer[layout.OFFSET_WORDS : words_end].cast("Q")  # a hint; confirm by an atomic on word_at
        self.words_address = self.address + layout.OFFSET_WORDS
        self.num_slots = header.num_slots
        self.creator: liveness.RoleLock | None = None
        self._num_ends = 0  # open writers and readers; the mapping stays as long as they do
        self._closing = False

    def payload_offset(self, slot_index: int) -> int:
        """Offset of a slot's payload in the segment."""
        return layout.DATA_OFFSET + slot_index * self.header.stride_bytes

    def add_u64(self, offset: int, amount: int) -> None:
        """Add to a counter that only this process writes."""
        self.u64[offset >> 3] += amount

    def drop_creator(self) -> None:
        """Give back the creator's lock."""
        if self.creator:
            self.creator.close()
            self.creator = None

    def check_open(self) -> None:
        """Raise RingUsage after `close`."""
        if self._closing:
            raise RingUsage(f"segment {self.name!r} is closed in this process; open it again")

    def enter(self) -> None:
        """Count a writer or reader in."""
        self.check_open()
        self._num_ends += 1

    def leave(self) -> None:
        """Count a writer or reader out; the last one after `close` unmaps."""
        self._num_ends -= 1
        if self._closing and self._num_ends == 0:
            self._unmap()

    def close(self) -> None:
        """Give back the creator's lock and unmap, once every end is closed and every array of a slot is gone."""
        self.drop_creator()
        if not self._closing:
            self._closing = True
            if self._num_ends == 0:
                self._unmap()

    def _unmap(self) -> None:
        os.close(self.fd)
        self.fd = -1
        for view in (self.words, self.u64, self.u32, self.buffer):
            view.release()
        self.base = None
        with contextlib.suppress(BufferError):  # an array of a slot is alive; the mapping goes with it
            self.mapping.close()


def create(name: str, header: SegmentHeader, spec: SlotSpec) -> Segment:
    """Make a new segment under the creator's lock and return it mapped.

    `header` needs no digest, crc or creation fields. Raises RingLive or RingStale for a name in use, NoSharedMemory.
    """
    name = check_name(name)
    text = spec.to_json().encode()
    if len(text) > layout.MAX_SCHEMA_BYTES:
        raise RingCorrupt(f"the schema text has {len(text)} bytes, the segment has room for {layout.MAX_SCHEMA_BYTES}")
    try:
        fd = shared_memory.create_exclusive(name)
    except shared_memory.Existing:
        raise _taken(name) from None
    kill_points.reached("create_empty")
    creator = liveness.RoleLock(fd)
    try:
        if not creator.take(layout.LOCK_CREATOR) or os.fstat(fd).st_nlink == 0:
            raise RingLive(f"segment {name!r} was removed by another process while it was being made; try again")
        shared_memory.allocate(fd, name, header.segment_bytes)
        header = replace(
            header, digest=spec.digest, created_ns=liveness.boot_ns(), creator_pid=os.getpid(),
            version=layout.LAYOUT_VERSION, data_offset=layout.DATA_OFFSET,
        )  # fmt: skip
        segment = Segment(name, fd, header, spec, readonly=False)
    except BaseException:
        creator.close()
        if os.fstat(fd).st_nlink:
            shared_memory.unlink(name)
        os.close(fd)
        raise
    segment.creator = creator
    _write_header(segment, text)
    return segment


def _write_header(segment: Segment, text: bytes) -> None:
    buffer = segment.buffer
    buffer[: layout.HEADER_BYTES] = segment.header.pack()
    head = text[: layout.SCHEMA_HEAD_BYTES]
    buffer[layout.OFFSET_SCHEMA_HEAD : layout.OFFSET_SCHEMA_HEAD + len(head)] = head
    struct.pack_into("<I", buffer, layout.OFFSET_SCHEMA, len(text))
    buffer[layout.OFFSET_SCHEMA + 4 : layout.OFFSET_SCHEMA + 4 + len(text)] = text
    kill_points.reached("create_before_magic")
    atomics.store_u64(segment.address, segment.header.magic)  # sync point C: pairs with the load in `attach`


def _taken(name: str) -> RingLive | RingStale:
    """Describe who has the name: a living run, or a left-over."""
    try:
        fd = shared_memory.open_existing(name, readonly=True)
    except RingMissing:
        return RingLive(f"segment {name!r} was being removed by another process; try again")
    except RingPermission as why:
        return RingLive(str(why))
    try:
        raw = os.pread(fd, layout.HEADER_BYTES, 0).ljust(layout.HEADER_BYTES, b"\0")
        holders = lock_holders(fd, raw)
        if holders:
            return RingLive(
                f"segment {name!r} is in use by a living run ({holders}); choose another run name or stop it"
            )
        header = SegmentHeader.unpack(raw)
        what = "was left half-made" if header.magic == 0 else f"was left by a run of pid {header.creator_pid}"
        return RingStale(f"segment {name!r} {what}, of which no process lives: resume that run, or clean it away")
    finally:
        os.close(fd)


def lock_holders(fd: int, raw: bytes = b"") -> str:
    """Name the living roles of a segment with their pids, or return an empty text."""
    if not liveness.is_locked(fd, 0, layout.NUM_LOCKS):
        return ""
    raw = (
        raw
        if len(raw) >= layout.HEADER_BYTES
        else os.pread(fd, layout.HEADER_BYTES, 0).ljust(layout.HEADER_BYTES, b"\0")
    )
    found = []
    if liveness.is_locked(fd, layout.LOCK_CREATOR):
        found.append(f"creator pid {SegmentHeader.unpack(raw).creator_pid or 'unknown'}")
    records = [("producer", layout.LOCK_PRODUCER, layout.OFFSET_PRODUCER)]
    records += [(f"consumer {c}", 1 + c, layout.consumer_record(c)) for c in range(layout.MAX_CONSUMERS)]
    for role, byte, offset in records:
        if liveness.is_locked(fd, byte):
            found.append(f"{role} pid {int.from_bytes(os.pread(fd, 4, offset), 'little') or 'unknown'}")
    return ", ".join(found) or "an unknown process"


def attach(name: str, magic: int, readonly: bool, wait_s: float = MAGIC_WAIT_S) -> Segment:
    """Open an existing segment, check everything in it, and map it.

    Waits up to `wait_s` for the creator to finish. Raises RingMissing, RingPermission, RingStale, RingVersion,
    RingCorrupt.
    """
    name = check_name(name)
    fd = shared_memory.open_existing(name, readonly)
    try:
        raw = _wait_for_magic(fd, name, wait_s)
        header = _checked_header(fd, name, raw, magic)
        spec = _checked_schema(fd, name, header)
        segment = Segment(name, fd, header, spec, readonly)
    except BaseException:
        os.close(fd)
        raise
    atomics.load_u64(segment.address)  # sync point C: everything stored before the magic is now visible
    return segment


def adopt(segment: Segment) -> None:
    """Take the creator's lock of an existing segment; raises RingLive if a living process has it."""
    lock = liveness.RoleLock(segment.fd)
    if not lock.take(layout.LOCK_CREATOR):
        lock.close()
        raise RingLive(f"segment {segment.name!r} is supervised by a living process ({lock_holders(segment.fd)})")
    if os.fstat(segment.fd).st_nlink == 0:
        lock.close()
        raise RingLive(f"segment {segment.name!r} was removed by another process; start again")
    segment.creator = lock


def remove(segment: Segment) -> None:
    """Remove the name once nobody else is attached; raises RingLive otherwise, and keeps the creator's lock then."""
    was_creator = segment.creator is not None
    segment.drop_creator()
    if not shared_memory.take_all_and_unlink(segment.fd, segment.name):
        holders = lock_holders(segment.fd)
        if was_creator:
            adopt(segment)
        raise RingLive(f"segment {segment.name!r} is in use ({holders}); it stays")


def _wait_for_magic(fd: int, name: str, wait_s: float) -> bytes:
    begun = time.monotonic()
    while True:
        raw = os.pread(fd, layout.HEADER_BYTES, 0)
        if raw[:8].strip(b"\0"):
            return raw.ljust(layout.HEADER_BYTES, b"\0")
        waited = time.monotonic() - begun
        if waited > min(wait_s, _HALF_MADE_GRACE_S) and not liveness.is_locked(fd, layout.LOCK_CREATOR):
            raise RingStale(f"segment {name!r} is half-made and its creator is gone: clean it away and start again")
        if waited > wait_s:
            raise RingStale(
                f"segment {name!r} got no header within {wait_s:g} s although its creator lives; start again"
            )
        time.sleep(_POLL_S)


def _checked_header(fd: int, name: str, raw: bytes, magic: int) -> SegmentHeader:
    header = SegmentHeader.unpack(raw)
    if header.magic != magic:
        raise RingCorrupt(
            f"segment {name!r} is not what it should be: magic {raw[:8]!r}, {magic.to_bytes(8, 'little')!r} expected"
        )
    if header.version != layout.LAYOUT_VERSION:
        raise RingVersion(
            f"segment {name!r} has layout version {header.version}, this program has {layout.LAYOUT_VERSION}: "
            "restart both sides with one version of the program"
        )
    info = os.fstat(fd)
    expected = layout.DATA_OFFSET + header.num_slots * header.stride_bytes
    checks = {
        "header crc": header.crc == struct.unpack_from("<I", header.pack(), layout.OFFSET_CRC)[0],
        "reserved bytes": not any(raw[layout.OFFSET_CRC + 4 :]),
        "data offset": header.data_offset == layout.DATA_OFFSET,
        "number of slots": 1 <= header.num_slots <= layout.MAX_SLOTS,
        "maximum of consumers": header.max_consumers == layout.MAX_CONSUMERS,
        "slot stride": header.stride_bytes % layout.ALIGN_SLOT_BYTES == 0
        and header.capacity_bytes <= header.stride_bytes,
        "segment bytes": header.segment_bytes == info.st_size and header.segment_bytes == expected,
        "allocated pages (the file has holes)": info.st_blocks * 512 >= header.segment_bytes,
    }
    wrong = [what for what, good in checks.items() if not good]
    if wrong:
        raise RingCorrupt(
            f"segment {name!r} is damaged: {', '.join(wrong)} wrong; it is left as it is, remove it and start anew"
        )
    return header


def _checked_schema(fd: int, name: str, header: SegmentHeader) -> SlotSpec:
    length = int.from_bytes(os.pread(fd, 4, layout.OFFSET_SCHEMA), "little")
    text = os.pread(fd, min(length, layout.MAX_SCHEMA_BYTES), layout.OFFSET_SCHEMA + 4)
    if hashlib.sha256(text).digest() != header.digest:
        raise RingCorrupt(
            f"segment {name!r} is damaged: schema text does not match its digest; remove it and start anew"
        )
    spec = SlotSpec.from_json(text.decode())
    if header.magic == layout.MAGIC_RING and spec.slot_bytes != header.capacity_bytes:
        raise RingCorrupt(
            f"segment {name!r} is damaged: slots of {header.capacity_bytes} bytes, schema of {spec.slot_bytes}"
        )
    return spec


def check_words(segment: Segment) -> None:
    """Raise RingCorrupt if a slot word, or its header, is not one that the protocol can produce.

    Runs beside living processes: a seq lives in one slot for ever, and a header changes only while its word is FREE.
    """
    seen: dict[int, int] = {}
    for index in range(segment.num_slots):
        at = segment.words_address + 8 * index
        value = atomics.load_u64(at)
        seq, consumer, state = layout.word_seq(value), layout.word_consumer(value), layout.word_state(value)
        header_seq = layout.unpack_slot_header(segment.buffer, index).seq
        wrong = (
            "state 3" if state > layout.HELD
            else "a consumer in a word that is not HELD" if consumer and state != layout.HELD
            else f"consumer {consumer}" if consumer >= layout.MAX_CONSUMERS
            else "a seq of 0" if seq == 0 and state != layout.FREE
            else f"seq {seq}, also in slot {seen[seq]}" if seq in seen
            else f"seq {seq} over a header of seq {header_seq}"
            if state != layout.FREE and header_seq != seq and atomics.load_u64(at) == value
            else ""
        )  # fmt: skip
        if wrong:
            raise RingCorrupt(
                f"ring {segment.name!r} is damaged: the word of slot {index} is {value:#018x} ({wrong}); "
                "it is left as it is, remove it and start anew"
            )
        if seq:
            seen[seq] = index
