"""What is asked for in the same moment: nothing is started once a run is being stopped, nothing stays paused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from configs.load import config_from
from ops.child import RUNNING, Child
from ops.devices import Map, Placement
from ops.hosts import OneHost
from ops.output import Output
from ops.paths import DRAFTER, TARGET
from ops.run import Interrupts, Launch
from ops.supervisor import Modules, Supervisor


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    monkeypatch.setattr(Child, "spawn", lambda self: names.append(self.name))
    return names


@pytest.fixture
def supervisor(tmp_path: Path) -> Supervisor:
    places = Map((Placement(TARGET, 0, None, 1), Placement(DRAFTER, 0, None, 1)))
    return Supervisor(config_from({}), tmp_path, places, Modules(), Output(tmp_path / "log"), OneHost(1, 1))


@pytest.mark.parametrize("stopped", [False, True])
def test_a_restart_that_was_asked_for_in_the_moment_of_the_stop_starts_nothing(
    stopped: bool, supervisor: Supervisor, started: list[str]
) -> None:
    supervisor.want_restart(DRAFTER)
    supervisor.want_restart(TARGET)
    if stopped:
        supervisor.stop()
    supervisor.tick()
    supervisor.tick()
    assert bool(started) != stopped, "without the stop both are started"
    assert supervisor.all_left


def test_a_second_ctrl_c_counts_from_the_moment_that_the_first_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _seconds: None)
    interrupts, stops, ticks = Interrupts(), [], iter(range(100))
    interrupts.add()
    launch = SimpleNamespace(
        commander=SimpleNamespace(), interrupts=interrupts, hosts=OneHost(1, 1),
        out=SimpleNamespace(say=lambda line: interrupts.add() if line.startswith("stopping") else None),
    )  # fmt: skip
    supervisor = SimpleNamespace(stop=lambda now=False: stops.append(now), all_left=False, tick=lambda: next(ticks))
    with pytest.raises(StopIteration):  # nothing leaves by itself
        Launch._stop(launch, supervisor)  # type: ignore[arg-type]
    assert stops == [False, True]


@pytest.mark.parametrize(("resumed", "told"), [(False, ["pause"]), (True, ["pause", "resume"])])
def test_a_process_that_becomes_ready_while_all_are_resumed_does_not_stay_paused(
    resumed: bool, told: list[str], supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def ask(_socket: Path, command: str, _limit_s: float) -> dict[str, object]:
        said.append(command)
        supervisor.paused = supervisor.paused and not resumed
        return {}

    monkeypatch.setattr("ops.supervisor.ask", ask)
    monkeypatch.setattr(Child, "reports_ready", True)
    supervisor.paused = True
    supervisor._look_at_start(supervisor.children[0], 0.0)
    assert said == told


@pytest.mark.parametrize("asked", ["pause", "resume"])
def test_a_process_that_was_too_busy_to_hear_is_told_again(
    asked: str, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("ops.supervisor.ask", lambda _socket, command, _limit_s: said.append(command) or {})
    monkeypatch.setattr(Child, "pid", 7)
    child, supervisor.paused = supervisor.children[0], asked == "pause"
    child.state = RUNNING
    for reply in ({}, {"pid": 6, "paused": not supervisor.paused}, {"pid": 7, "paused": supervisor.paused}):
        child.reply = reply
        supervisor._settle(child)
    assert said == [], "nothing known, another life, or as asked"
    child.reply = {"pid": 7, "paused": not supervisor.paused}
    supervisor._settle(child)
    assert said == [asked]
