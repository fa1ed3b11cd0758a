"""Where a GPU's time goes: events in its stream tell a waiting host from an idle device, without a synchronisation."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from consumer.meter import PHASES
from gpu.device import marks_of
from ops.telemetry import Phases, shares

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICE = torch.device("cuda")
STEP_S = 0.03


class Step:
    """A captured step of roughly STEP_S; events around each replay say what it really took, at whatever clock."""

    def __init__(self) -> None:
        begin, end = _events()
        torch.cuda._sleep(400_000_000)  # an idle chip raises its clock first
        begin.record()
        torch.cuda._sleep(10_000_000)
        end.record()
        torch.cuda.synchronize()
        cycles = int(10_000_000 * STEP_S * 1e3 / begin.elapsed_time(end))
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            torch.cuda._sleep(cycles)
        self._graph.replay()
        torch.cuda.synchronize()
        self._around: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def replay(self) -> None:
        """Queue one step."""
        begin, end = _events()
        begin.record()
        self._graph.replay()
        end.record()
        self._around.append((begin, end))

    def wait(self) -> float:
        """Wait for all of them; returns the seconds that the device spent on them."""
        while not self._around[-1][1].query():
            time.sleep(0.001)
        return sum(begin.elapsed_time(end) for begin, end in self._around) / 1e3


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


@pytest.fixture
def step() -> Step:
    return Step()


@pytest.fixture
def no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("no_synchronisation")
def test_a_host_that_waits_all_the_time_starves_its_gpu_only_while_that_has_nothing_to_do(
    step: Step,
) -> None:
    phases = Phases(mark=marks_of(DEVICE))
    phases.begin("starved")
    phases.take()
    began = time.perf_counter()
    for _ in range(10):
        phases.begin("step")
        step.replay()
        phases.begin("starved")  # at once: the host waits, the device has STEP_S to do
        time.sleep(2 * STEP_S)
    phases.begin("other")
    busy_s, passed_s = step.wait(), time.perf_counter() - began
    spent = phases.take()
    assert sum(spent.values()) == pytest.approx(passed_s, abs=0.02)
    assert shares(spent, PHASES)["starved_pct"] == pytest.approx(100 * (1 - busy_s / passed_s), abs=3)


@pytest.mark.usefixtures("no_synchronisation")
def test_a_gpu_with_work_queued_does_not_starve_and_its_seconds_come_when_they_have_passed(
    step: Step,
) -> None:
    phases = Phases(mark=marks_of(DEVICE))
    for _ in range(10):
        phases.begin("starved")
        phases.begin("staging")
        phases.begin("step")
        step.replay()
    early = phases.take()
    assert early.get("step", 0.0) < 10 * STEP_S * 0.9, "the device cannot have done it yet"
    busy_s = step.wait()
    late = phases.take()
    spent = {phase: early.get(phase, 0.0) + late.get(phase, 0.0) for phase in PHASES}
    assert spent["step"] == pytest.approx(busy_s, rel=0.05)
    assert spent["starved"] < 0.01 * spent["step"]


def test_what_a_mark_costs_is_shown() -> None:
    phases, count = Phases(mark=marks_of(DEVICE)), 20_000
    began = time.perf_counter()
    for _ in range(count // 4):
        for phase in ("starved", "staging", "step", "other"):
            phases.begin(phase)
    print(f"a change of phase costs the host {(time.perf_counter() - began) / count * 1e6:.2f} us")
    torch.cuda.synchronize()
    assert sum(phases.take().values()) > 0
