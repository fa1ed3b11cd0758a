"""A restart with settings that only the new process can refuse: those of before come back, and the run goes on."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import yaml

from tests.helpers.fake_runs import FOREVER, Runs, end, runs

__all__ = ["runs"]


def config_of(runs: Runs) -> dict[str, Any]:
    """What config.yaml says."""
    found: dict[str, Any] = yaml.safe_load((runs.run_dir / "config.yaml").read_text())
    return found


@pytest.mark.parametrize(("left_with", "answered"), [(2, 2), (5, 5), (1, 4)])
def test_the_drafter_goes_on_with_the_settings_of_before_and_the_command_says_why(
    runs: Runs, left_with: int, answered: int
) -> None:
    launcher = runs.launch(steps=FOREVER, step_s=0.02, refuse={"drafter0": ["optimizer", "lr", 0.25, left_with]})
    runs.until_step(7)
    before, target = config_of(runs), runs.process("target0")["pid"]
    answer = runs.ask("restart", "drafter", runs.name, "--set", "optimizer.lr=0.25", "training.threads=1")
    old = before["optimizer"]["lr"]
    line = (
        f"drafter0 refused optimizer.lr=0.25, training.threads=1 (code {left_with}): optimizer.lr: drafter0 cannot do "
        f"with 0.25; the run goes on with optimizer.lr={old}, training.threads=null"
    )
    assert (answer.returncode, answer.stderr.strip()) == (answered, line)
    assert config_of(runs) == before
    assert runs.process("drafter0")["state"] == "running"
    assert runs.process("drafter0")["restarts"] == 0, "it did not crash"
    assert runs.process("target0")["pid"] == target
    again = runs.ask("restart", "drafter", runs.name, "--set", "optimizer.lr=0.125")
    assert again.returncode == 0, again.stderr
    runs.until("a step with another rate", lambda: runs.metrics("drafter")[-1]["lr"] == 0.125)
    steps = [record["step"] for record in runs.metrics("drafter")]
    assert steps == list(range(1, len(steps) + 1)), "nothing is lost or trained twice"
    assert {record["lr"] for record in runs.metrics("drafter")} == {old, 0.125}
    launcher.send_signal(signal.SIGINT)
    code, out = end(launcher)
    assert code == 130, out
    assert f"warning: {line}" in out.splitlines()
    runs.assert_nothing_left()


def test_what_one_of_two_drafters_refuses_is_put_back_for_both(runs: Runs) -> None:
    refuse = {"drafter1": ["optimizer", "lr", 0.25, 5]}
    launcher = runs.launch("--set", "training.devices=[cpu, cpu]", steps=FOREVER, step_s=0.02, refuse=refuse)
    runs.until("both run", lambda: {record["rank"] for record in runs.metrics("drafter")} == {0, 1})
    before = config_of(runs)
    answer = runs.ask("restart", "drafter", runs.name, "--set", "optimizer.lr=0.25")
    assert answer.returncode == 5, answer.stderr
    assert answer.stderr.startswith("drafter1 refused optimizer.lr=0.25 (code 5)")
    assert config_of(runs) == before
    assert [runs.process(f"drafter{rank}")["state"] for rank in (0, 1)] == ["running", "running"]
    launcher.send_signal(signal.SIGINT)
    assert end(launcher)[0] == 130
    runs.assert_nothing_left()


def test_what_one_of_two_targets_refuses_is_put_back_for_both(runs: Runs) -> None:
    refuse = {"target1": ["target", "threads", 1, 2]}
    settings = ("--set", "target.devices=[cpu, cpu]")
    launcher = runs.launch(*settings, steps=FOREVER, step_s=0.02, refuse=refuse)
    runs.until("both run", lambda: {record["rank"] for record in runs.metrics("target")} == {0, 1})
    drafter, first = runs.process("drafter0")["pid"], runs.process("target0")["pid"]
    answer = runs.ask("restart", "target", runs.name, "--set", "target.threads=1")
    assert answer.returncode == 2, answer.stderr
    assert answer.stderr.startswith("target1 refused target.threads=1 (code 2)")
    assert config_of(runs)["target"]["threads"] is None
    runs.until("both run again", lambda: {runs.process(f"target{k}")["state"] for k in (0, 1)} == {"running"})
    assert runs.process("target0")["pid"] != first
    assert runs.process("drafter0")["pid"] == drafter
    launcher.send_signal(signal.SIGINT)
    assert end(launcher)[0] == 130
    runs.assert_nothing_left()


def test_a_refusal_of_settings_that_are_not_new_ends_the_run(runs: Runs) -> None:
    launcher = runs.launch(steps=FOREVER, step_s=0.02, refuse={"drafter0": ["optimizer", "lr", 0.25, 2]})
    runs.until_step(3)
    config = config_of(runs)
    config["optimizer"]["lr"] = 0.25
    (runs.run_dir / "config.yaml").write_text(yaml.safe_dump(config))  # by hand, behind the launcher's back
    assert runs.ask("restart", "drafter", runs.name).returncode == 4
    code, out = end(launcher)
    assert code == 2, out
    assert "drafter0 left with code 2" in out
    runs.assert_nothing_left()
