"""What this rank has to offer: takes slots, and drops packs that came twice.

A wait never lasts longer than SLICE_S, however long the ring stays empty: the ranks meet in between, so that none of
them waits for another without an end, and a stop reaches all. The ring reports the slices as one wait.
"""

from __future__ import annotations

import time

from consumer.distributed import AT_END, NOTHING_YET, Offer
from consumer.journal import Journal
from ops.control import Control
from ops.telemetry import Phases
from shm_ring import Reader, ReadSlot
from shm_ring.errors import RingStopped, RingTimeout

SLICE_S = 2.0


class Intake:
    """Holds at most one slot, from the moment it is taken until `release`."""

    def __init__(self, reader: Reader, journal: Journal, control: Control, phases: Phases) -> None:
        self.slot: ReadSlot | None = None
        self._reader, self._journal, self._control, self._phases = reader, journal, control, phases
        self._waited_s = 0.0

    def offer(self, elapsed_s: float) -> Offer:
        """Take a slot if none is held, waiting up to SLICE_S, and say what there is and what was asked meanwhile."""
        control = self._control
        pack_id = NOTHING_YET
        self._phases.begin("other" if control.paused else "starved")
        if not (control.stopping or control.paused):
            pack_id = self._take()
            self._phases.begin("peers")  # from here on this rank waits for none but the others
        return Offer(
            pack_id, int(control.stopping), int(control.paused), int(control.take_checkpoint_request()),
            int(elapsed_s * 1e3), int(self._phases.total_s("starved") * 1e3),
        )  # fmt: skip

    def release(self) -> None:
        """Give the slot back, its bytes being elsewhere or not wanted; harmless without one."""
        slot, self.slot = self.slot, None
        if slot is not None:
            self._reader.release(slot)

    def _take(self) -> int:
        if self.slot is not None and self.slot.header.pack_id in self._journal:  # trained by another rank meanwhile
            self.release()
        while self.slot is None:
            began = time.monotonic()
            try:
                slot = self._reader.take(SLICE_S, lambda: self._control.stopping, self._waited_s)
            except RingStopped:
                if not self._control.stopping:  # else this process was asked to, and knows why
                    self._control.stop("ring stopped")
                return NOTHING_YET
            except RingTimeout:
                self._waited_s += time.monotonic() - began
                return NOTHING_YET
            self._waited_s = 0.0
            if slot is None:
                return AT_END
            if slot.header.pack_id in self._journal:  # extracted twice, or held over a crash and already trained
                self._reader.release(slot)
                continue
            self.slot = slot
        return self.slot.header.pack_id
