"""`restart` waits for its processes, also past a busy launcher, and what it changes holds from the next life on."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from configs.load import config_from, load_config
from ops import commands
from ops.child import STARTING, Child
from ops.commander import Commander
from ops.devices import place
from ops.errors import NoAnswer, NoResource
from ops.hosts import OneHost
from ops.messages import Request
from ops.metrics_reader import MetricsReader
from ops.output import Output
from ops.paths import DRAFTER, TARGET
from ops.run import Launch
from ops.run_folder import write_config
from ops.supervisor import Modules, Supervisor


def test_a_launcher_that_is_busy_for_a_while_does_not_end_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: Iterator[dict[str, Any] | None] = iter(
        [None, {"name": "drafter0", "pid": 7, "state": "running"}, {"name": "drafter0", "pid": 8, "state": "running"}]
    )

    def status(_run_dir: Path) -> dict[str, Any]:
        if (process := next(answers)) is None:
            raise NoAnswer("launcher did not answer")
        return {"processes": [process]}

    monkeypatch.setattr(commands, "command", lambda *_, **__: {"accepted": ["drafter0"], "pids": {"drafter0": 7}})
    monkeypatch.setattr(commands, "launcher_pid", lambda _run_dir: 1)
    monkeypatch.setattr(commands, "status", status)
    monkeypatch.setattr("time.sleep", lambda _seconds: None)
    (line,) = commands.restart(Path("run"), "drafter", [], limit_s=3600)
    assert line.startswith("drafter0: pid 7 -> 8, ready again")


def test_a_changed_number_of_threads_holds_from_the_next_life_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process takes it from its environment, which is the launcher's to make."""
    monkeypatch.setenv("DFLASH_RUNTIME_DIR", str(tmp_path / "s"))
    monkeypatch.setattr("ops.commander.usable_cores", lambda: 8)
    config = config_from({"target": {"devices": ["cpu"] * 3}, "training": {"devices": ["cpu"], "threads": 1}})
    supervisor = Supervisor(config, tmp_path, place(config, [], 8), Modules(), Output(tmp_path / "log"), OneHost(3, 1))
    commander = Commander(config, tmp_path, 1, lambda: None, OneHost(3, 1))

    def threads(role: str) -> list[str]:
        return [child.placement.environment["OMP_NUM_THREADS"] for child in supervisor.side(role)]

    assert (threads(TARGET), threads(DRAFTER)) == (["2"] * 3, ["1"])
    commander._restart(supervisor, {"role": TARGET, "rank": 1}, ["target.threads=4"])
    assert (threads(TARGET), threads(DRAFTER)) == (["4"] * 3, ["1"]), "as config.yaml says for all targets from now on"
    commander._restart(supervisor, {"role": DRAFTER, "rank": None}, ["training.threads=null"])
    assert (threads(TARGET), threads(DRAFTER)) == (["4"] * 3, ["2"])


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Commander, Supervisor]:
    """A commander and a supervisor of a run with a target and two drafters that are not started."""
    monkeypatch.setenv("DFLASH_RUNTIME_DIR", str(tmp_path / "s"))
    monkeypatch.setattr(Child, "spawn", lambda self: setattr(self, "state", STARTING))
    config = config_from({"target": {"devices": ["cpu"]}, "training": {"devices": ["cpu", "cpu"]}})
    write_config(tmp_path, config)
    supervisor = Supervisor(config, tmp_path, place(config, [], 8), Modules(), Output(tmp_path / "log"), OneHost(1, 2))
    commander = Commander(config, tmp_path, 1, lambda: None, OneHost(1, 2))
    commander.watch(supervisor, ())
    commander.state = "running"
    return commander, supervisor


def restart(commander: Commander, *overrides: str) -> int:
    """Ask for a restart of the drafters; returns its number."""
    return int(commander._handle(Request(command="restart", args={"role": DRAFTER, "set": overrides}))["number"])


def refuse(supervisor: Supervisor, rank: int = 0) -> None:
    """Let a drafter that was just started leave with 2."""
    supervisor.tick()
    supervisor._left(supervisor.side(DRAFTER)[rank], 2)


def test_settings_that_came_while_others_were_not_ready_go_with_them(run: tuple[Commander, Supervisor]) -> None:
    commander, supervisor = run
    before = commander.config
    numbers = restart(commander, "optimizer.lr=0.5"), restart(commander, "optimizer.lr=0.25", "loss.gamma=3")
    commander._handle(Request(command="set", args={"set": ["training.log_every_steps=7"]}))
    refuse(supervisor)
    assert supervisor.refusal is not None
    assert supervisor.refusal.numbers == numbers
    assert commander.config.optimizer == before.optimizer
    assert commander.config.loss == before.loss
    assert commander.config.training.log_every_steps == 7, "what was set meanwhile is not theirs"
    assert load_config(commander.run_dir / "config.yaml") == commander.config


def test_settings_that_all_became_ready_with_are_not_put_back_any_more(
    run: tuple[Commander, Supervisor], monkeypatch: pytest.MonkeyPatch
) -> None:
    commander, supervisor = run
    restart(commander, "optimizer.lr=0.5")
    supervisor.tick()
    with monkeypatch.context() as ready:
        ready.setattr(Child, "reports_ready", True)
        supervisor.tick()
    assert supervisor.new_settings == {}
    refuse(supervisor)
    assert supervisor.refusal is None
    assert supervisor.failure is not None
    assert supervisor.failure.exit_code == 2
    assert commander.config.optimizer.lr == 0.5


def full(*_: object) -> None:
    """Stand for a disk that takes nothing."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "config.yaml")


def test_a_disk_that_does_not_take_the_new_settings_changes_nothing(
    run: tuple[Commander, Supervisor], monkeypatch: pytest.MonkeyPatch
) -> None:
    commander, supervisor = run
    before = commander.config
    monkeypatch.setattr("ops.changes.write_config", full)
    with pytest.raises(
        NoResource, match=r"^config.yaml: cannot be used \(No space left on device\); free space there$"
    ):
        restart(commander, "optimizer.lr=0.5")
    assert commander.config == before
    assert supervisor.new_settings == {}


def test_a_disk_that_does_not_take_the_old_settings_back_ends_the_run(
    run: tuple[Commander, Supervisor], monkeypatch: pytest.MonkeyPatch
) -> None:
    commander, supervisor = run
    restart(commander, "optimizer.lr=0.5")
    monkeypatch.setattr("ops.changes.write_config", full)
    refuse(supervisor)
    assert supervisor.failure is not None
    assert supervisor.failure.exit_code == 2
    assert "config.yaml cannot be put back" in str(supervisor.failure)


def test_the_limit_that_ends_a_run_is_that_of_its_last_restart(tmp_path: Path) -> None:
    (tmp_path / "final.json").write_text(json.dumps({"steps": 20, "packs_trained": 20}))
    (tmp_path / "plan.json").write_text(json.dumps({"num_packs": 300}))
    launch = SimpleNamespace(
        run_dir=tmp_path, config=config_from({}), metrics=MetricsReader(tmp_path),
        commander=SimpleNamespace(config=config_from({"training": {"max_steps": 20}})),
        out=SimpleNamespace(show=lambda _table: None),
    )  # fmt: skip
    assert Launch._summarise(launch) == 0  # type: ignore[arg-type]
    assert json.loads((tmp_path / "summary.json").read_text())["ended_by"] == "training.max_steps (20)"
