"""Commands for a process that is just starting and has no control socket yet: what is said is what holds."""

from __future__ import annotations

import signal

from tests.helpers.fake_runs import FOREVER, Runs, end, runs

__all__ = ["runs"]


def test_a_process_that_starts_is_paused_when_it_is_ready_and_the_command_says_so(runs: Runs) -> None:
    launcher = runs.launch(steps=FOREVER, step_s=0.02, unserved=["drafter0"])
    runs.until("a ready target", lambda: runs.process("target0").get("state") == "running")
    assert runs.process("drafter0")["state"] == "starting"
    asked = runs.ask("checkpoint", runs.name)
    assert asked.returncode == 4
    assert asked.stderr.strip().endswith("; ask again when it is ready")
    said = runs.ask("set", "training.log_every_steps=3", runs.name)
    assert (said.returncode, said.stdout) == (0, "set: target0, drafter0 when it is ready\n"), said.stderr
    said = runs.ask("pause", runs.name)
    assert (said.returncode, said.stdout) == (0, "pause: target0, drafter0 when it is ready\n"), said.stderr
    runs.let_start("drafter0")
    runs.until("it stands still", lambda: runs.process("drafter0").get("paused"))
    assert "log_every_steps: 3" in (runs.run_dir / "config.yaml").read_text(), "which it has read since"
    runs.until("the run knows", lambda: runs.status()["state"] == "paused")
    assert runs.ask("resume", runs.name).stdout == "resume: target0, drafter0\n"
    runs.until_step(5)
    launcher.send_signal(signal.SIGINT)
    assert end(launcher)[0] == 130
    runs.assert_nothing_left()
