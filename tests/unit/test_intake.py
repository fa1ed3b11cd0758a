"""A drafter that waits for a pack keeps the reason why it was stopped: only with it does it hand its state over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from consumer.distributed import NOTHING_YET
from consumer.intake import Intake
from ops.control import RESTART, Control
from ops.telemetry import Phases
from shm_ring.errors import RingStopped


class EmptyRing:
    """A reader that waits until somebody stops: the command arrives during the wait, or the board says so."""

    def __init__(self, control: Control, reason: str) -> None:
        self.control, self.reason = control, reason

    def take(self, timeout_s: float, stop: Any) -> None:  # noqa: ARG002
        if self.reason:
            self.control.stop(self.reason)
            assert stop()
        raise RingStopped("stopped")


@pytest.mark.parametrize(("asked", "expected"), [(RESTART, RESTART), ("asked", "asked"), ("", "ring stopped")])
def test_a_stop_during_the_wait_keeps_its_reason(asked: str, expected: str, tmp_path: Path) -> None:
    control = Control(tmp_path, "drafter", 0)
    ring: Any = EmptyRing(control, asked)
    journal: Any = set()
    log: Any = None
    offer = Intake(ring, journal, control, log, Phases()).offer(0.0)
    assert (offer.pack_id, bool(offer.stop)) == (NOTHING_YET, True)
    assert control.stop_reason == expected
