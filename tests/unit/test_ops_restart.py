"""`restart` waits for its processes, also past a busy launcher, and what it changes holds from the next life on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from configs.load import config_from
from ops import commands
from ops.commander import Commander
from ops.devices import place
from ops.errors import NoAnswer
from ops.hosts import OneHost
from ops.metrics_reader import MetricsReader
from ops.output import Output
from ops.paths import DRAFTER, TARGET
from ops.run import Launch
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
