"""Lines of metrics: begun at their step, written when their sums have arrived, in order, never lost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from consumer.meter import MOST_ON_THE_WAY, Meter


class FakeReading:
    """Sums that arrive when the test says so."""

    def __init__(self, step: int) -> None:
        self.step, self.ready, self.waited = step, False, False

    def result(self) -> dict[str, Any]:
        self.waited |= not self.ready
        return {"loss": float(self.step), "skipped_steps": 0.0}


class Steps:
    """Stands for a TrainStep."""

    def __init__(self) -> None:
        self.step, self.num_anchors = 0, 16
        self.readings: list[FakeReading] = []

    def start_reading(self) -> FakeReading:
        self.readings.append(FakeReading(self.step))
        return self.readings[-1]


@pytest.fixture
def meter():
    lines: list[dict[str, Any]] = []
    made = Meter(
        SimpleNamespace(write=lambda **line: lines.append(line)),
        SimpleNamespace(report=lambda **_: None),
        [SimpleNamespace(snapshot=lambda: SimpleNamespace(occupancy=3))],
        torch.device("cpu"),
        SimpleNamespace(world=1),
        step=0,
    )
    return made, lines


def write(meter: Meter, steps: Steps) -> None:
    steps.step += 1
    meter.write(steps, packs_trained=steps.step)


def test_a_line_waits_for_its_sums_and_keeps_its_step(meter):
    made, lines = meter
    steps = Steps()
    write(made, steps)
    assert lines == []
    steps.readings[0].ready = True
    steps.step = 5
    made.trained(100)
    assert [(line["step"], line["loss"], line["packs_trained"]) for line in lines] == [(1, 1.0, 1)]
    assert not steps.readings[0].waited


def test_a_life_without_a_step_writes_no_line(meter):
    made, lines = meter
    steps = Steps()
    made.write(steps, packs_trained=0)
    made.flush()
    assert lines == []


def test_lines_are_written_in_order(meter):
    made, lines = meter
    steps = Steps()
    for _ in range(3):
        write(made, steps)
    steps.readings[1].ready = True
    made.trained(1)
    assert lines == []
    steps.readings[0].ready = True
    made.trained(1)
    assert [line["step"] for line in lines] == [1, 2]


def test_more_than_a_few_on_the_way_are_waited_for(meter):
    made, lines = meter
    steps = Steps()
    for _ in range(MOST_ON_THE_WAY + 2):
        write(made, steps)
    assert [line["step"] for line in lines] == [1, 2]
    assert [reading.waited for reading in steps.readings] == [True, True] + [False] * MOST_ON_THE_WAY


def test_flush_writes_what_is_left_and_the_last_loss_is_that_of_the_last_line(meter):
    made, lines = meter
    steps = Steps()
    for _ in range(3):
        write(made, steps)
    made.flush()
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert (made.first_loss, made.last_loss) == (1.0, 3.0)


def test_no_second_line_without_a_step(meter):
    made, lines = meter
    steps = Steps()
    write(made, steps)
    made.write(steps, packs_trained=1)
    made.flush()
    assert len(lines) == 1
