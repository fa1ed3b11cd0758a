"""Where the time goes: every second belongs to one phase; a device's are counted when it has passed them."""

from __future__ import annotations

import pytest

from ops.telemetry import Phases, shares


class Device:
    """A stream that does queued work of known length; its clock and the host's are the test's."""

    def __init__(self) -> None:
        self.host_s = 0.0
        self.busy_until_s = 0.0

    def queue(self, seconds: float) -> None:
        """Give the device work, which it begins when it has done what it has."""
        self.busy_until_s = max(self.busy_until_s, self.host_s) + seconds

    def mark(self) -> DeviceMark:
        """An event behind all queued work: an idle device reaches it at once."""
        self.busy_until_s = max(self.busy_until_s, self.host_s)
        return DeviceMark(self, self.busy_until_s)


class DeviceMark:
    """The event."""

    def __init__(self, device: Device, at_s: float) -> None:
        self._device, self.at_s = device, at_s

    def query(self) -> bool:
        return self._device.host_s >= self.at_s

    def elapsed_time(self, later: DeviceMark, /) -> float:
        assert self.query(), "asked before it has passed"
        assert later.query(), "asked before it has passed"
        return 1e3 * (later.at_s - self.at_s)


@pytest.fixture
def device() -> Device:
    return Device()


def test_a_host_that_waits_while_the_device_works_is_not_starving(device: Device) -> None:
    """The host waits 96 % of the time; the device runs dry for 39 % of it."""
    phases = Phases("starved", device.mark)
    for _ in range(10):
        phases.begin("step")
        device.queue(0.61)  # queued in 0.04 s
        device.host_s += 0.04
        phases.begin("starved")
        device.host_s += 0.96
    spent = phases.take()
    assert shares(spent, ("step", "starved")) == {"step_pct": pytest.approx(61), "starved_pct": pytest.approx(39)}


def test_a_device_that_always_has_work_never_starves(device: Device) -> None:
    phases = Phases("starved", device.mark)
    for _ in range(5):
        phases.begin("step")
        device.queue(1.0)
        phases.begin("starved")
        device.host_s += 0.9
    device.host_s += 10.0
    phases.begin("other")
    spent = phases.take()
    assert spent["step"] == pytest.approx(5.0)
    assert spent["starved"] == pytest.approx(9.5)  # only after the last step


def test_what_the_device_has_not_reached_is_counted_later_and_nothing_is_lost(device: Device) -> None:
    phases = Phases("other", device.mark)
    taken: list[dict[str, float]] = []
    for number in range(20):
        phases.begin(("step", "staging")[number % 2])
        device.queue(0.3)
        device.host_s += 0.1
        taken.append(phases.take())
    assert sum(sum(each.values()) for each in taken) < device.busy_until_s
    device.host_s = device.busy_until_s
    taken.append(phases.take())
    assert sum(sum(each.values()) for each in taken) == pytest.approx(device.busy_until_s)
    assert phases.total_s("step") == pytest.approx(3.0)
    assert phases.total_s("staging") == pytest.approx(3.0)


def test_beginning_the_same_phase_again_makes_no_mark(device: Device) -> None:
    marks = 0

    def counted() -> DeviceMark:
        nonlocal marks
        marks += 1
        return device.mark()

    phases = Phases("starved", counted)
    for _ in range(100):
        phases.begin("starved")
    assert marks == 1


def test_without_time_there_are_no_shares() -> None:
    assert shares({}, ("step",)) == {}
    assert shares({"step": 0.0}, ("step",)) == {}
