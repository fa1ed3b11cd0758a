"""The board: one page per run with what its processes share: run id, names of the rings, stop and pause, one bell.

The flags are requests; each process looks at them where it waits. The page outlives its creator like a ring does.
"""

from __future__ import annotations

from types import TracebackType

from shm_ring import atomics, layout, segment
from shm_ring.errors import RingUsage
from shm_ring.layout import SegmentHeader
from shm_ring.names import board_name, ring_name
from shm_ring.segment import Segment
from shm_ring.spec import SlotSpec, check_equal


class Board:
    """The mapped page of a run. Use `create` or `open`."""

    def __init__(self, run: str, page: Segment) -> None:
        """Wrap a mapped page."""
        self.run, self._page = run, page
        self.bell_address = page.address + layout.BOARD_BELL

    @property
    def segment(self) -> Segment:
        """The mapping; raises RingUsage once the board is closed."""
        self._page.check_open()
        return self._page

    @classmethod
    def create(cls, run: str, spec: SlotSpec, num_rings: int, run_id: bytes) -> Board:
        """Make the page of a new run; raises RingLive or RingStale for a run name in use."""
        if len(run_id) != 16 or num_rings < 1:
            raise RingUsage(f"a run id has 16 bytes and a run at least one ring, got {len(run_id)} and {num_rings}")
        header = SegmentHeader(
            magic=layout.MAGIC_BOARD, version=0, data_offset=0, segment_bytes=layout.BOARD_BYTES, num_slots=num_rings,
            max_consumers=layout.MAX_CONSUMERS, stride_bytes=0, capacity_bytes=0, digest=b"", run_id=run_id,
            created_ns=0, creator_pid=0, ring_index=0,
        )  # fmt: skip
        return cls(run, segment.create(board_name(run), header, spec))

    @classmethod
    def open(cls, run: str, spec: SlotSpec | None = None, readonly: bool = False) -> Board:
        """Attach to the page of a run; raises RingMissing, RingMismatch, RingCorrupt."""
        page = segment.attach(board_name(run), layout.MAGIC_BOARD, readonly)
        if spec is not None:
            check_equal(page.name, spec, page.spec)
        return cls(run, page)

    @property
    def name(self) -> str:
        """Segment name."""
        return self._page.name

    @property
    def spec(self) -> SlotSpec:
        """What a slot of the run's rings holds."""
        return self._page.spec

    @property
    def run_id(self) -> bytes:
        """16 bytes that tell this run from others of the same name."""
        return self._page.header.run_id

    @property
    def ring_names(self) -> list[str]:
        """Names of the run's rings."""
        return [ring_name(self.run, k) for k in range(self._page.header.num_slots)]

    @property
    def stopped(self) -> bool:
        """Whether all processes are asked to leave."""
        return atomics.load_u32(self.segment.address + layout.BOARD_STOP) != 0

    @property
    def paused(self) -> bool:
        """Whether the producers are asked to pause."""
        return atomics.load_u32(self.segment.address + layout.BOARD_PAUSE) != 0

    def request_stop(self, on: bool = True) -> None:
        """Ask all processes of the run to leave (or take it back), and wake the waiting readers."""
        self._set(layout.BOARD_STOP, on)

    def request_pause(self, on: bool = True) -> None:
        """Ask the producers to pause, or to go on."""
        self._set(layout.BOARD_PAUSE, on)

    def _set(self, offset: int, on: bool) -> None:
        atomics.store_u32(self.segment.address + offset, int(on))
        atomics.ring_bell(self.bell_address)

    def adopt(self) -> None:
        """Take the creator's lock, as a launcher that resumes the run."""
        segment.adopt(self.segment)

    def unlink(self) -> None:
        """Remove the name; raises RingLive if another process supervises the run."""
        segment.remove(self.segment)

    def close(self) -> None:
        """Unmap the page; the name stays."""
        self._page.close()

    def __enter__(self) -> Board:
        """Return the open board."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Unmap."""
        self.close()
