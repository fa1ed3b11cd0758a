"""A drafter that waits for a pack keeps the reason why it was stopped, and reports its wait as one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from consumer.distributed import AT_END, NOTHING_YET
from consumer.intake import Intake
from ops.control import RESTART, Control
from ops.telemetry import Phases
from shm_ring.errors import RingStopped, RingTimeout


class EmptyRing:
    """A reader that waits until somebody stops: the command arrives during the wait, or the board says so."""

    def __init__(self, control: Control, reason: str) -> None:
        self.control, self.reason = control, reason

    def take(self, timeout_s: float, stop: Any, waited_before_s: float) -> None:  # noqa: ARG002
        if self.reason:
            self.control.stop(self.reason)
            assert stop()
        raise RingStopped("stopped")


@pytest.mark.parametrize(("asked", "expected"), [(RESTART, RESTART), ("asked", "asked"), ("", "ring stopped")])
def test_a_stop_during_the_wait_keeps_its_reason(asked: str, expected: str, tmp_path: Path) -> None:
    control = Control(tmp_path, "drafter", 0)
    ring: Any = EmptyRing(control, asked)
    journal: Any = set()
    offer = Intake(ring, journal, control, Phases()).offer(0.0)
    assert (offer.pack_id, bool(offer.stop)) == (NOTHING_YET, True)
    assert control.stop_reason == expected


class SlowRing:
    """A reader whose packs come after so many slices of waiting; notes how long it was told that the wait has been."""

    def __init__(self, slices: int) -> None:
        self.left, self.told = slices, list[float]()

    def take(self, timeout_s: float, stop: Any, waited_before_s: float) -> Any:  # noqa: ARG002
        self.told.append(waited_before_s)
        self.left -= 1
        if self.left < 0:
            return None
        raise RingTimeout("empty")


def test_slices_of_a_wait_are_told_to_the_ring_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ring: Any = SlowRing(3)
    journal: Any = set()
    intake = Intake(ring, journal, Control(tmp_path, "drafter", 0), Phases())
    clock = iter(range(0, 1000, 2))
    monkeypatch.setattr("consumer.intake.time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    assert [intake.offer(0.0).pack_id for _ in range(4)] == [NOTHING_YET] * 3 + [AT_END]
    assert ring.told == [0.0, 2.0, 4.0, 6.0]
    intake.offer(0.0)
    assert ring.told[-1] == 0.0, "the next wait is another one"
