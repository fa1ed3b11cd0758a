"""Once a run is being stopped, nothing is started any more, whatever was asked for in the same moment."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.load import config_from
from ops.child import Child
from ops.devices import Map, Placement
from ops.hosts import OneHost
from ops.output import Output
from ops.paths import DRAFTER, TARGET
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
