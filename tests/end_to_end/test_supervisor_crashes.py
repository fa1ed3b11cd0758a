"""The supervisor with real processes, real signals and kill -9; the programs are fakes (tests/helpers/fake_run.py)."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from shm_ring.names import segments_of_run
from tests.helpers.fake_runs import FOREVER, LIMIT_S, Runs, end, runs

__all__ = ["runs"]


def killed_in(out: str) -> list[str]:
    """Names of the processes that a launcher had to kill because they did not stop."""
    return re.findall(r"(\w+) \(pid \d+\) did not stop in time: killed", out)


def answer(runs: Runs, *words: str) -> subprocess.CompletedProcess[str]:
    """What a command says; given again while a process of the run is too slow to answer (code 4)."""

    def asked() -> subprocess.CompletedProcess[str] | None:
        done = runs.ask(*words)
        return None if done.returncode == 4 else done

    found: subprocess.CompletedProcess[str] = runs.until(f"an answer to {words[0]}", asked)
    return found


def test_a_run_ends_with_its_summary_and_leaves_nothing(runs: Runs) -> None:
    code, out = end(runs.launch("--set", "evaluation.enabled=true", steps=30))
    assert code == 0, out
    summary = json.loads((runs.run_dir / "summary.json").read_text())
    assert summary["steps"] == summary["packs_trained"] == 30
    assert summary["heldout_accept_len_after"] == 1.1
    assert Path(summary["checkpoint"]).is_dir()
    assert {"time", "role", "rank", "step", "loss", "occupancy"} <= runs.metrics("drafter")[0].keys()
    assert "target0: cpu" in out
    assert "held-out accepted length" in out
    told = "evaluation: the target decodes all held-out prompts, up to 32 tokens each, with the first weights"
    assert 0 < out.index(told) < out.index("evaluation: evaluating")
    runs.assert_nothing_left()


def test_a_killed_drafter_comes_back_from_its_checkpoint_and_the_target_stays(runs: Runs) -> None:
    launcher = runs.launch(steps=60, step_s=0.02, hold=True)
    runs.until_step(12)
    target, drafter = runs.process("target0"), runs.process("drafter0")
    os.kill(drafter["pid"], signal.SIGKILL)
    again = runs.until("a new drafter", lambda: (p := runs.process("drafter0"))["restarts"] == 1 and p)
    assert again["pid"] != drafter["pid"]
    assert runs.process("target0")["pid"] == target["pid"]
    runs.let_end()
    code, out = end(launcher)
    assert code == 0, out
    assert "drafter0 died (signal SIGKILL); restart 1 of 5" in out
    assert runs.log("target0").count("model loaded") == 1
    resumed = [
        int(line.partition("step=")[2].split()[0])
        for line in runs.log("drafter0").splitlines()
        if "| resumed |" in line
    ]
    assert resumed[0] == 0
    assert resumed[1] >= 10
    assert [line["step"] for line in runs.metrics("drafter")][-1] == 60
    runs.assert_nothing_left()


def test_a_killed_target_comes_back_and_the_drafter_stays(runs: Runs) -> None:
    launcher = runs.launch(steps=60, step_s=0.02, hold=True)
    runs.until_step(5)
    drafter = runs.process("drafter0")["pid"]
    os.kill(runs.process("target0")["pid"], signal.SIGKILL)
    again = runs.until("a new target", lambda: (p := runs.process("target0")).get("restarts") == 1 and p)
    assert again["packs"] >= 5, "those of its first life count"
    assert f"{again['name']}: " in (said := answer(runs, "status", runs.name).stdout)
    assert " packs, 1 restarts" in said
    assert runs.process("drafter0")["pid"] == drafter
    runs.let_end()
    code, out = end(launcher)
    assert code == 0, out
    runs.assert_nothing_left()


def test_a_target_killed_while_starting_is_started_again_if_another_has_started(runs: Runs) -> None:
    knobs = {"steps": 60, "step_s": 0.02, "start_wait": ["target1"], "hold": True}
    launcher = runs.launch("--set", "target.devices=[cpu, cpu]", **knobs)
    runs.until("a ready target", lambda: runs.process("target0").get("state") == "running")
    assert runs.process("target1")["state"] == "starting"
    os.kill(runs.process("target1")["pid"], signal.SIGKILL)
    runs.let_start("target1")
    runs.until("it has started", lambda: runs.process("target1").get("state") == "running")
    runs.let_end()
    code, out = end(launcher)
    assert code == 0, out
    assert "target1 died (signal SIGKILL); restart 1 of 5" in out
    runs.assert_nothing_left()


def test_a_target_killed_while_starting_ends_the_run_if_none_has_started(runs: Runs) -> None:
    settings = ("--set", "target.devices=[cpu, cpu]", "--set", "supervisor.stop_timeout_s=1")
    launcher = runs.launch(*settings, start_wait=["target0", "target1"])
    runs.until("the processes' start", lambda: "target1: cpu" in runs.log("launcher"))
    os.kill(runs.process("target1")["pid"], signal.SIGKILL)
    code, out = end(launcher)
    assert code == 4, out
    assert "target1 left with signal SIGKILL while starting" in out
    runs.assert_nothing_left()


def test_restart_drafter_with_another_learning_rate_keeps_the_target(runs: Runs) -> None:
    launcher = runs.launch(steps=FOREVER, step_s=0.02)
    runs.until_step(7)
    target = runs.process("target0")["pid"]
    answer = runs.ask("restart", "drafter", runs.name, "--set", "optimizer.lr=0.25")
    assert answer.returncode == 0, answer.stderr
    assert "ready again after" in answer.stdout
    assert runs.process("target0")["pid"] == target
    assert "lr: 0.25" in (runs.run_dir / "config.yaml").read_text()
    assert (runs.run_dir / "config.yaml.1").exists()
    runs.until("a step with the new rate", lambda: runs.metrics("drafter")[-1]["lr"] == 0.25)
    steps = [line["step"] for line in runs.metrics("drafter")]
    assert steps == sorted(set(steps)), "the drafter saved before it left, so no step is made twice"
    assert runs.process("drafter0")["restarts"] == 0
    launcher.send_signal(signal.SIGINT)
    assert end(launcher)[0] == 130
    runs.assert_nothing_left()


def test_a_restart_that_would_change_what_a_pack_is_is_refused(runs: Runs) -> None:
    runs.launch(steps=FOREVER, step_s=0.02)
    runs.until_step(1)
    before = runs.process("drafter0")["pid"]
    for key, value in {"pack.tokens": 64, "target.num_taps": 3, "ring.num_slots": 9, "optimiser.lr": 1}.items():
        refused = answer(runs, "restart", "drafter", runs.name, "--set", f"{key}={value}")
        assert refused.returncode == 2
        assert key.removesuffix(".lr") in refused.stderr
    assert runs.process("drafter0")["pid"] == before
    assert not (runs.run_dir / "config.yaml.1").exists()


def test_ctrl_c_is_graceful_and_the_drafter_saves(runs: Runs) -> None:
    launcher = runs.launch(steps=FOREVER, step_s=0.02, every=FOREVER)
    runs.until_step(5)
    os.killpg(launcher.pid, signal.SIGINT)
    code, out = end(launcher)
    assert code == 130, out
    assert "did not stop in time" not in out
    (saved,) = (runs.run_dir / "checkpoints").glob("step-*")
    assert int(saved.name[5:]) == runs.metrics("drafter")[-1]["step"]
    assert "interrupted at step" in out
    runs.assert_nothing_left()


def test_a_process_that_does_not_stop_is_killed_within_the_limit(runs: Runs) -> None:
    launcher = runs.launch("--set", "supervisor.stop_timeout_s=1", steps=FOREVER, slow_stop="target")
    runs.until_step(2)
    os.killpg(launcher.pid, signal.SIGINT)
    code, out = end(launcher)
    assert code == 130
    assert killed_in(out).count("target0") == 1
    runs.assert_nothing_left()


def test_a_drafter_that_writes_its_last_checkpoint_is_given_the_time(runs: Runs) -> None:
    launcher = runs.launch("--set", "supervisor.stop_timeout_s=8", steps=FOREVER, save_s=10, every=FOREVER)
    runs.until_step(2)
    os.killpg(launcher.pid, signal.SIGINT)
    code, out = end(launcher)
    assert code == 130
    assert "drafter0" not in killed_in(out)
    assert len(list((runs.run_dir / "checkpoints").iterdir())) == 1
    runs.assert_nothing_left()


def test_a_second_ctrl_c_ends_at_once(runs: Runs) -> None:
    launcher = runs.launch("--set", "supervisor.stop_timeout_s=600", steps=FOREVER, slow_stop="drafter")
    runs.until_step(2)
    os.killpg(launcher.pid, signal.SIGINT)
    runs.until("the graceful stop", lambda: "stopping: both sides" in runs.log("launcher"))
    os.killpg(launcher.pid, signal.SIGINT)
    code, out = end(launcher)
    assert code == 130
    assert "ending at once" in out
    assert killed_in(out) == []
    runs.assert_nothing_left()


def test_a_suspended_process_is_shown_and_ended(runs: Runs) -> None:
    launcher = runs.launch("--set", "supervisor.stop_timeout_s=1", steps=FOREVER, step_s=0.02)
    runs.until_step(2)
    os.kill(runs.process("drafter0")["pid"], signal.SIGSTOP)
    runs.until("it is shown", lambda: runs.process("drafter0")["state"] == "suspended")
    os.killpg(launcher.pid, signal.SIGINT)
    assert end(launcher)[0] == 130
    runs.assert_nothing_left()


def test_children_of_a_killed_launcher_leave_and_the_next_launch_takes_over(runs: Runs) -> None:
    launcher = runs.launch(steps=60, step_s=0.05, hold=True)
    runs.until_step(6)
    launcher.kill()
    launcher.wait()
    runs.until("the children have left", lambda: not runs.processes())
    assert segments_of_run(runs.name), "the rings stay for the next launch to find"
    assert "its launcher died" in answer(runs, "status", runs.name).stdout
    code, out = end(runs.launch(steps=60, step_s=0.01))
    assert code == 0, out
    assert "left-over segments of an earlier launch" in out
    assert "resumed | step=0" in runs.log("drafter0")
    assert runs.log("drafter0").count("resumed | step=0") == 1
    runs.assert_nothing_left()


def test_a_launch_right_after_the_launcher_was_killed_waits_for_the_orphans(runs: Runs) -> None:
    launcher = runs.launch(steps=60, step_s=0.05, hold=True)
    runs.until_step(2)
    launcher.kill()
    code, out = end(runs.launch(steps=60, step_s=0.01))
    assert code == 0, out
    runs.until("the last of them is gone", lambda: not runs.processes())
    runs.assert_nothing_left()


def test_a_launch_waits_for_orphans_that_were_loading_when_the_launcher_was_killed(runs: Runs) -> None:
    launcher = runs.launch(steps=60, step_s=0.05, start_s={"target0": 600})
    runs.until("a process without a ring", lambda: runs.process("target0").get("says") == "starting")
    launcher.kill()
    launcher.wait()
    code, out = end(runs.launch(steps=20, step_s=0.01))
    assert code == 0, out
    runs.assert_nothing_left()


def test_everything_killed_at_once_can_be_launched_again(runs: Runs) -> None:
    launcher = runs.launch(steps=60, step_s=0.05, hold=True)
    runs.until_step(2)
    pids = [launcher.pid, *(set(runs.processes()) - {launcher.pid})]
    for number in (signal.SIGSTOP, signal.SIGKILL):  # so that none of them hears of another's death
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
    launcher.wait()
    code, out = end(runs.launch(steps=60, step_s=0.01))
    assert code == 0, out
    runs.until("the last of them is gone", lambda: not runs.processes())
    runs.assert_nothing_left()


def test_the_same_name_twice_is_refused_with_the_first_pid_and_the_first_goes_on(runs: Runs) -> None:
    first = runs.launch(steps=100, step_s=0.02, hold=True)
    runs.until_step(2)
    code, out = end(runs.launch(steps=5))
    assert code == 2
    assert f"already running (launcher pid {first.pid})" in out
    runs.let_end()
    assert end(first)[0] == 0


def test_lines_of_three_talkative_processes_stay_in_their_logs_and_the_console_is_the_launchers(runs: Runs) -> None:
    code, out = end(runs.launch("--set", "target.devices=[cpu, cpu]", steps=10, chatter=1000))
    assert code == 0, out
    names = ("target0", "target1", "drafter0")
    for name in names:
        spoken = [line for line in runs.log(name).splitlines() if "chatter" in line]
        assert spoken == [f"{name} chatter {number:06} ".ljust(200, "x") for number in range(1000)]
    assert "chatter" not in out
    said = [line for line in out.splitlines() if sum(name in line for name in names) > 1]
    assert said == [], "each line of the console speaks of one process"


def test_two_runs_side_by_side_do_not_touch_each_other(runs: Runs) -> None:
    first = runs.launch(steps=40, step_s=0.02)
    second = runs.launch(name=f"{runs.name}.b", steps=40, step_s=0.02)
    assert end(first)[0] == 0
    assert end(second)[0] == 0
    assert segments_of_run(f"{runs.name}.b") == []
    runs.assert_nothing_left()


@pytest.mark.parametrize(("code", "expected"), [(1, 4), (2, 2), (3, 3), (5, 5)])
def test_a_child_that_dies_at_start_ends_the_run_with_its_last_lines_and_code(
    runs: Runs, code: int, expected: int
) -> None:
    launcher = runs.launch(steps=FOREVER, start_exit={"target0": code})
    returned, out = end(launcher)
    assert returned == expected
    assert f"target0 left with code {code}" in out
    lines = out.splitlines()
    assert "    target0: no such target: /does/not/exist" in lines
    assert "    target0 line 11" in lines
    assert "    target0 line 10" not in lines
    runs.assert_nothing_left()


def test_a_target_that_dies_in_every_life_ends_the_run_after_max_restarts(runs: Runs) -> None:
    launcher = runs.launch("--set", "supervisor.max_restarts=2", steps=FOREVER, pack_s=0.2, late_exit={"target0": 1})
    code, out = end(launcher)
    assert code == 4
    assert "restart 2 of 2" in out
    assert "after 2 restarts (supervisor.max_restarts)" in out
    runs.assert_nothing_left()


def test_a_process_that_cannot_be_started_again_ends_the_run_in_order(runs: Runs) -> None:
    launcher = runs.launch(steps=100_000, step_s=0.01)
    runs.until_step(6)
    log = runs.run_dir / "logs" / "target0.log"
    log.rename(log.with_suffix(".old"))
    log.mkdir()
    os.kill(runs.process("target0")["pid"], signal.SIGKILL)
    code, out = end(launcher)
    assert code == 5, out
    assert f"target0 cannot be started (Is a directory: {log})" in out
    saved = max(int(path.name.removeprefix("step-")) for path in (runs.run_dir / "checkpoints").glob("step-*"))
    assert saved == runs.metrics("drafter")[-1]["step"], "the drafter was stopped and has saved"
    runs.assert_nothing_left()


def test_a_cause_that_would_repeat_is_not_restarted(runs: Runs) -> None:
    code, out = end(runs.launch(steps=FOREVER, pack_s=0.2, late_exit={"target0": 3}))
    assert code == 3
    assert "restart 1" not in out
    runs.assert_nothing_left()


def test_preparation_that_fails_ends_the_run_with_its_code(runs: Runs) -> None:
    code, out = end(runs.launch(prepare_exit=3))
    assert code == 3
    assert [line for line in out.splitlines() if "/does/not/exist" in line] == [
        "prepare: data.sources: /does/not/exist: no such file"
    ]
    assert out.splitlines()[-1] == f"prepare ended with code 3; see above, or {runs.run_dir}/logs/prepare.log"
    runs.assert_nothing_left()


@pytest.mark.parametrize("refusal", [{"prepare_exit": 2}, {"start_exit": {"target0": 2}}])
def test_a_finished_run_stays_finished_when_another_launch_of_it_is_refused(
    runs: Runs, refusal: dict[str, object]
) -> None:
    assert end(runs.launch(steps=5))[0] == 0
    results = ("config.yaml", "final.json", "summary.json")
    before = {name: (runs.run_dir / name).read_text() for name in results}
    code, out = end(runs.launch("--set", "optimizer.lr=0.25", steps=10, **refusal))
    assert code == 2, out
    assert {name: (runs.run_dir / name).read_text() for name in results} == before
    assert not list(runs.run_dir.glob("*.1"))
    assert answer(runs, "status", runs.name).stdout.startswith(f"run {runs.name}: finished")
    for command in (["pause"], ["restart", "drafter"], ["set", "ring.min_ready=2"]):
        assert runs.ask(*command, runs.name).returncode == 2
    code, out = end(runs.launch("--set", "optimizer.lr=0.25", steps=10))
    assert code == 0, out
    assert {path.name for path in runs.run_dir.glob("*.1")} == {f"{name}.1" for name in results}


def test_ctrl_c_during_preparation_ends_with_130(runs: Runs) -> None:
    launcher = runs.launch(prepare_s=3600)
    runs.until("preparation", lambda: "preparing 2" in runs.log("prepare"))
    os.killpg(launcher.pid, signal.SIGINT)
    assert end(launcher)[0] == 130
    runs.assert_nothing_left()


def test_preparation_leaves_with_a_killed_launcher(runs: Runs) -> None:
    launcher = runs.launch(prepare_s=3600)
    runs.until("preparation", lambda: "preparing 2" in runs.log("prepare"))
    launcher.kill()
    launcher.wait()
    runs.until("it has left", lambda: not runs.processes())


def test_stop_from_another_terminal_waits_for_the_end_and_may_be_repeated(runs: Runs) -> None:
    launcher = runs.launch(steps=FOREVER, step_s=0.02)
    runs.until_step(2)
    answer = runs.ask("stop", runs.name)
    assert answer.returncode == 0, answer.stderr
    assert end(launcher)[0] == 130
    runs.assert_nothing_left()
    again = runs.ask("stop", runs.name)
    assert again.returncode == 0
    assert "is not running" in again.stdout


def test_pause_checkpoint_set_and_resume_reach_the_processes(runs: Runs) -> None:
    launcher = runs.launch(steps=FOREVER, step_s=0.02, every=FOREVER)
    runs.until("both run", lambda: runs.status()["state"] == "running")
    assert answer(runs, "pause", runs.name).stdout == "pause: target0, drafter0\n"
    assert json.loads(answer(runs, "status", runs.name, "--json").stdout)["state"] == "paused"
    assert answer(runs, "checkpoint", runs.name).stdout.startswith("checkpoint: asked drafter0; ")
    assert answer(runs, "set", "ring.min_ready=2", "training.log_every_steps=3", runs.name).returncode == 0
    assert answer(runs, "set", "optimizer.lr=3", runs.name).returncode == 2
    assert answer(runs, "resume", runs.name).returncode == 0
    runs.until("the checkpoint", lambda: list((runs.run_dir / "checkpoints").glob("step-*")))
    seen = runs.until("the settings", lambda: runs.process("drafter0").get("settings_seen"))
    assert seen == {"ring.min_ready": 2, "training.log_every_steps": 3}
    launcher.send_signal(signal.SIGINT)
    assert end(launcher)[0] == 130


def test_a_full_ring_costs_the_waiting_target_almost_no_processor_time(runs: Runs) -> None:
    runs.launch(steps=FOREVER, step_s=3600)
    target = runs.until("a full ring", lambda: runs.status()["occupancy"] == 4 and runs.process("target0"))
    ticks = os.sysconf("SC_CLK_TCK")

    def cpu_s() -> float:
        fields = Path(f"/proc/{target['pid']}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / ticks

    before, began = cpu_s(), time.monotonic()
    runs.until("four seconds", lambda: time.monotonic() - began > 4)
    assert (cpu_s() - before) / (time.monotonic() - began) < 0.05


def test_a_console_that_goes_away_does_not_end_the_run(runs: Runs) -> None:
    launcher = runs.launch(steps=60, step_s=0.02)
    assert launcher.stdout is not None
    launcher.stdout.readline()
    launcher.stdout.close()
    assert launcher.wait(LIMIT_S) == 0
    assert json.loads((runs.run_dir / "summary.json").read_text())["steps"] == 60


def test_several_producers_and_drafters_restart_as_their_sides_need(runs: Runs) -> None:
    launcher = runs.launch(
        "--set", "target.devices=[cpu, cpu]", "--set", "training.devices=[cpu, cpu]", steps=150, step_s=0.02, hold=True
    )
    runs.until("all are ready", lambda: runs.status()["state"] == "running")
    before = {process["name"]: process["pid"] for process in runs.status()["processes"]}
    assert sorted(before) == ["drafter0", "drafter1", "target0", "target1"]
    os.kill(before["drafter1"], signal.SIGKILL)
    runs.until("both drafters are new", lambda: all(
        runs.process(name).get("pid") not in (None, before[name]) for name in ("drafter0", "drafter1")
    ))  # fmt: skip
    answer = runs.ask("restart", "target:1", runs.name)
    assert answer.returncode == 0, answer.stderr
    after = {process["name"]: process["pid"] for process in runs.status()["processes"]}
    assert after["target0"] == before["target0"]
    assert after["target1"] != before["target1"]
    runs.let_end()
    code, out = end(launcher)
    assert code == 0, out
    runs.assert_nothing_left()


def test_old_results_are_kept_when_a_finished_run_is_launched_again(runs: Runs) -> None:
    assert end(runs.launch(steps=10))[0] == 0
    assert end(runs.launch(steps=20))[0] == 0
    assert json.loads((runs.run_dir / "summary.json.1").read_text())["steps"] == 10
    assert json.loads((runs.run_dir / "summary.json").read_text())["steps"] == 20
    assert [line["step"] for line in runs.metrics("drafter")] == list(range(1, 21))


def test_a_detached_run_goes_on_without_its_terminal(runs: Runs) -> None:
    code, out = end(runs.launch("--detach", steps=60, step_s=0.02, hold=True))
    assert code == 0, out
    assert "in the background, launcher pid" in out
    code, again = end(runs.launch("--detach", steps=60))
    assert code == 2
    assert "already running" in again
    runs.let_end()
    runs.until("the end", lambda: (runs.run_dir / "summary.json").exists())
    runs.until("it has left", lambda: not runs.processes())
    runs.assert_nothing_left()
