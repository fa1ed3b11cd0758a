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


@pytest.fixture
def step() -> torch.cuda.CUDAGraph:
    """A captured step that takes about STEP_S."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1000)
    begin.record()
    torch.cuda._sleep(10_000_000)
    end.record()
    torch.cuda.synchronize()
    cycles = int(10_000_000 * STEP_S * 1e3 / begin.elapsed_time(end))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.cuda._sleep(cycles)
    graph.replay()
    torch.cuda.synchronize()
    return graph


@pytest.fixture
def no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("no_synchronisation")
def test_a_host_that_waits_all_the_time_starves_its_gpu_only_while_that_has_nothing_to_do(
    step: torch.cuda.CUDAGraph,
) -> None:
    phases = Phases(mark=marks_of(DEVICE))
    phases.begin("starved")
    phases.take()
    for _ in range(10):
        phases.begin("step")
        step.replay()
        phases.begin("starved")  # at once: the host waits, the device has STEP_S to do
        time.sleep(2 * STEP_S)
    spent = phases.take()
    assert shares(spent, PHASES)["starved_pct"] == pytest.approx(50, abs=8)
    assert sum(spent.values()) == pytest.approx(20 * STEP_S, rel=0.15)


@pytest.mark.usefixtures("no_synchronisation")
def test_a_gpu_with_work_queued_does_not_starve_and_its_seconds_come_when_they_have_passed(
    step: torch.cuda.CUDAGraph,
) -> None:
    phases = Phases(mark=marks_of(DEVICE))
    for _ in range(10):
        phases.begin("starved")
        phases.begin("staging")
        phases.begin("step")
        step.replay()
    early = phases.take()
    assert early.get("step", 0.0) < 10 * STEP_S * 0.9, "the device cannot have done it yet"
    time.sleep(12 * STEP_S)
    late = phases.take()
    spent = {phase: early.get(phase, 0.0) + late.get(phase, 0.0) for phase in PHASES}
    assert spent["step"] >= 10 * STEP_S * 0.9
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
