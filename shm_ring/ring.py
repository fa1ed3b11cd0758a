"""The ring's public face: make, open, resume, look into, retire, clean and remove."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from shm_ring import layout, segment, shared_memory
from shm_ring.errors import RingError, RingUsage
from shm_ring.layout import SegmentHeader, SlotHeader
from shm_ring.names import OURS, PREFIX, check_name, find_segments, segments_of_run
from shm_ring.retire import retire_consumer
from shm_ring.segment import MAGIC_WAIT_S, Segment
from shm_ring.snapshot import Snapshot, take_pack_ids, take_snapshot
from shm_ring.spec import SlotSpec, check_equal
from shm_ring.writer import Writer

if TYPE_CHECKING:
    from shm_ring.board import Board


class Ring:
    """One producer's slots, mapped into this process. Use `create` or `open`. A context manager that unmaps."""

    def __init__(self, mapped: Segment) -> None:
        """Wrap a mapped segment."""
        self._mapped = mapped

    @property
    def segment(self) -> Segment:
        """The mapping; raises RingUsage once the ring is closed."""
        self._mapped.check_open()
        return self._mapped

    @classmethod
    def create(
        cls, name: str, spec: SlotSpec, num_slots: int = 16, ring_index: int = 0, run_id: bytes | None = None
    ) -> Ring:
        """Make a new ring with all its memory and hold it as its creator until `close`.

        Raises RingLive for a name in use, RingStale for a left-over, NoSharedMemory, RingName, RingPermission.
        """
        if not 1 <= num_slots <= layout.MAX_SLOTS:
            raise RingUsage(f"a ring has 1 to {layout.MAX_SLOTS} slots, got {num_slots}")
        run_id = uuid.uuid4().bytes if run_id is None else run_id
        if len(run_id) != 16 or not 0 <= ring_index < 1 << 32:
            raise RingUsage(f"a run id has 16 bytes and a ring index 32 bits, got {len(run_id)} bytes and {ring_index}")
        header = SegmentHeader(
            magic=layout.MAGIC_RING, version=0, data_offset=0, num_slots=num_slots,
            segment_bytes=layout.ring_bytes(num_slots, spec.slot_bytes), max_consumers=layout.MAX_CONSUMERS,
            stride_bytes=layout.slot_stride(spec.slot_bytes), digest=b"",
            capacity_bytes=spec.slot_bytes, run_id=run_id, created_ns=0, creator_pid=0, ring_index=ring_index,
        )  # fmt: skip
        return cls(segment.create(name, header, spec))

    @classmethod
    def open(
        cls, name: str, spec: SlotSpec | None = None, readonly: bool = False, wait_s: float = MAGIC_WAIT_S
    ) -> Ring:
        """Attach to a ring, waiting up to `wait_s` for its creator to finish, and check everything in it.

        Raises RingMissing, RingPermission, RingStale (half-made), RingVersion, RingCorrupt, and RingMismatch if `spec`
        differs from the ring's.
        """
        mapped = segment.attach(name, layout.MAGIC_RING, readonly, wait_s)
        try:
            if spec is not None:
                check_equal(mapped.name, spec, mapped.spec)
            segment.check_words(mapped)
        except BaseException:
            mapped.close()
            raise
        return cls(mapped)

    @classmethod
    def resume(cls, name: str, spec: SlotSpec | None = None) -> Ring:
        """Open a left-over ring and become its creator; raises RingLive if another process is."""
        ring = cls.open(name, spec)
        try:
            segment.adopt(ring.segment)
        except BaseException:
            ring.close()
            raise
        return ring

    @property
    def name(self) -> str:
        """Segment name."""
        return self._mapped.name

    @property
    def spec(self) -> SlotSpec:
        """What a slot holds."""
        return self._mapped.spec

    @property
    def num_slots(self) -> int:
        """Slots of this ring."""
        return self._mapped.num_slots

    @property
    def ring_index(self) -> int:
        """Index of this ring in its run."""
        return self._mapped.header.ring_index

    @property
    def run_id(self) -> bytes:
        """The 16 bytes that the creator gave."""
        return self._mapped.header.run_id

    @property
    def nbytes(self) -> int:
        """Bytes of the whole segment."""
        return self._mapped.header.segment_bytes

    def writer(self, board: Board | None = None) -> Writer:
        """Become the ring's producer; with a board, its bell is rung too. Raises RingOwned."""
        return Writer(self.segment, board)

    def snapshot(self) -> Snapshot:
        """Return what is going on; only reads."""
        return take_snapshot(self.segment)

    def pack_ids(self) -> frozenset[int]:
        """Return the packs that are READY or HELD now; only reads. A slot that changes hands meanwhile counts."""
        return take_pack_ids(self.segment)

    def retire(
        self, consumer_id: int, is_committed: Callable[[SlotHeader], bool]
    ) -> tuple[list[SlotHeader], list[SlotHeader]]:
        """Give up a dead consumer for good; return the slots freed and the slots made READY again. See retire.py."""
        return retire_consumer(self.segment, consumer_id, is_committed)

    def unlink(self) -> None:
        """Remove the name, once no producer, consumer or other creator is attached; raises RingLive otherwise."""
        segment.remove(self.segment)

    def close(self) -> None:
        """Unmap; the name and its contents stay. Arrays still in use keep the memory until they go."""
        self._mapped.close()

    def __enter__(self) -> Ring:
        """Return the open ring."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Unmap."""
        self.close()

    @staticmethod
    def find(prefix: str = PREFIX) -> list[str]:
        """Return the segments, rings and boards, whose names begin with `prefix`."""
        return find_segments(prefix)

    @staticmethod
    def clean(prefix: str = PREFIX) -> list[tuple[str, str]]:
        """Remove the left-overs whose names begin with `prefix`; see `clean_segments`."""
        return clean_segments(find_segments(prefix))

    @staticmethod
    def clean_run(run: str) -> list[tuple[str, str]]:
        """Remove the left-overs of exactly this run; see `clean_segments`."""
        return clean_segments(segments_of_run(run))


def clean_segments(names: list[str]) -> list[tuple[str, str]]:
    """Remove those segments that are ours and of which no process lives; return what became of each.

    Ours: this user's, with our magic, or without any but with a name of our pattern. Others are not touched or listed.
    """
    results = []
    for name in names:
        try:
            fd = shared_memory.open_existing(check_name(name), readonly=False)
        except RingError:
            continue
        try:
            if _is_ours(fd, name):
                removed = shared_memory.take_all_and_unlink(fd, name)
                results.append((name, "removed" if removed else f"live, held by {segment.lock_holders(fd)}"))
        finally:
            os.close(fd)
    return results


def _is_ours(fd: int, name: str) -> bool:
    if os.fstat(fd).st_uid != os.geteuid():
        return False
    magic = int.from_bytes(os.pread(fd, 8, 0), "little")
    known = magic in (layout.MAGIC_RING, layout.MAGIC_BOARD, layout.MAGIC_STATE)
    return known or (magic == 0 and OURS.fullmatch(name) is not None)
