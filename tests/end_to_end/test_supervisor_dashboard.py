"""The dashboard beside a living run: in a pipe, as JSON, as SVG, and over the restarts of both sides."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ops.view import Viewer
from shm_ring import ring_name
from tests.helpers.fake_runs import FOREVER, LIMIT_S, ROOT, Runs, runs

__all__ = ["runs"]


def picture_judged(runs: Runs, kind: str) -> dict[str, Any]:
    """The first picture with this verdict: lines of the start, when both sides wait, count for half a minute."""
    runs.until_step(1)

    def picture() -> dict[str, Any] | None:
        seen: dict[str, Any] = json.loads(runs.ask("dashboard", runs.name, "--json").stdout)
        return seen if seen["verdict"]["kind"] == kind and seen["rings"][0]["published_per_s"] else None

    found: dict[str, Any] = runs.until(f"the verdict {kind}", picture)
    return found


def follower(runs: Runs, *words: str) -> subprocess.Popen[str]:
    """Start a subcommand that stays beside the run."""
    command = [sys.executable, "launch.py", *words, runs.name, "--folder", str(runs.folder / "runs")]
    started = subprocess.Popen(
        command, cwd=ROOT, env=runs.environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    runs.started.append(started)
    return started


def test_one_picture_as_text_json_and_svg(runs: Runs) -> None:
    runs.launch(steps=FOREVER, step_s=0.05)
    picture = picture_judged(runs, "drafter-bound")

    def once() -> str:
        text = runs.ask("dashboard", runs.name, "--once")
        assert text.returncode == 0, text.stderr
        return text.stdout if "drafter-bound" in text.stdout else ""

    shown = runs.until("the same in words", once)
    assert "\x1b" not in shown, "no escape sequences in a pipe"
    assert "ring 0" in shown
    assert picture["state"] == "running"
    assert [process["name"] for process in picture["processes"]] == ["target0", "drafter0"]
    assert picture["rings"][0]["published_per_s"] > 0
    svg = runs.folder / "d.svg"
    assert runs.ask("dashboard", runs.name, "--svg", str(svg)).returncode == 0
    assert svg.read_text().startswith("<svg")
    assert "drafter0" in svg.read_text()


def test_a_slow_target_is_judged_target_bound(runs: Runs) -> None:
    runs.launch(steps=FOREVER, step_s=0, pack_s=0.05)
    runs.until("an almost empty ring beside it", lambda: picture_judged(runs, "target-bound")["occupancy"] <= 1)


def test_a_view_lives_through_the_restart_of_both_sides_and_leaves_the_ring_alone(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ops.view.STATUS_EVERY_S", 0.0)
    runs.launch(steps=FOREVER, step_s=0.02)
    runs.until_step(3)
    segment = Path(f"/dev/shm{ring_name(runs.name, 0)}")
    inode = segment.stat().st_ino
    with Viewer(runs.run_dir) as viewer:
        for name in ("drafter0", "target0"):
            pid = runs.process(name)["pid"]
            os.kill(pid, signal.SIGKILL)

            def restarted(name: str = name) -> bool:
                seen = {process["name"]: process for process in viewer.look()["processes"]}
                return bool(seen[name].get("restarts") == 1 and seen[name]["state"] == "running")

            runs.until(f"the view sees {name} again", restarted)
        before = viewer.look()["rings"][0]["published"]
        runs.until("packs go on", lambda: viewer.look()["rings"][0]["published"] > before)
    assert segment.stat().st_ino == inode


def test_a_piped_dashboard_prints_plain_lines_and_ends_with_the_run(runs: Runs) -> None:
    launcher = runs.launch(steps=60, step_s=0.01, hold=True)
    runs.until_step(2)
    piped = follower(runs, "dashboard")
    assert piped.stdout is not None
    first = piped.stdout.readline()
    runs.let_end()
    rest, _ = piped.communicate(timeout=LIMIT_S)
    assert piped.returncode == 0, rest
    assert first.startswith("run ")
    assert rest.count("run ") >= 1
    assert "finished" in rest
    assert launcher.wait(LIMIT_S) == 0


def test_a_run_of_the_past_is_shown_from_its_files(runs: Runs) -> None:
    assert runs.launch(steps=10).wait(LIMIT_S) == 0
    picture = json.loads(runs.ask("dashboard", runs.name, "--json").stdout)
    assert picture["state"] == "finished"
    assert {process["state"] for process in picture["processes"]} == {"finished"}
    assert picture["rings"] == []
    assert next(p["step"] for p in picture["processes"] if p["name"] == "drafter0") == 10
    status = runs.ask("status", runs.name)
    assert status.returncode == 0
    assert "finished" in status.stdout


def test_telemetry_follows_a_run_to_its_end(runs: Runs) -> None:
    launcher = runs.launch(steps=40, step_s=0.02, hold=True)
    runs.until_step(1)
    telemetry = follower(runs, "telemetry", "--prometheus", "0")
    assert telemetry.stdout is not None
    assert telemetry.stdout.readline().startswith("http://127.0.0.1:")
    runs.let_end()
    said, _ = telemetry.communicate(timeout=LIMIT_S)
    assert telemetry.returncode == 0, said
    lines = len((runs.run_dir / "metrics.jsonl").read_text().splitlines())
    assert said.splitlines()[-1] == f"{lines} lines of metrics exported"
    assert launcher.wait(LIMIT_S) == 0


@pytest.mark.skipif(not Path("/usr/bin/tmux").exists(), reason="tmux is not installed")
def test_the_screen_works_in_a_terminal_and_q_leaves_the_run_alone(runs: Runs) -> None:
    runs.launch(steps=FOREVER, step_s=0.02)
    runs.until_step(2)
    tmux = ["tmux", "-S", str(runs.folder / "tmux")]
    shown = f"{sys.executable} launch.py dashboard {runs.name} --folder {runs.folder / 'runs'}"
    start = [*tmux, "new-session", "-d", "-x", "100", "-y", "30", f"{shown}; echo left with $?; cat"]
    subprocess.run(start, cwd=ROOT, env=runs.environment, check=True)

    def screen() -> str:
        return subprocess.run([*tmux, "capture-pane", "-p"], capture_output=True, text=True, check=True).stdout

    try:
        runs.until("the picture", lambda: "q or Ctrl-C leaves" in screen() and "drafter0  running" in screen())
        subprocess.run([*tmux, "send-keys", "q"], check=True)
        runs.until("it has left", lambda: "left with 0" in screen())
    finally:
        subprocess.run([*tmux, "kill-server"], check=True)
    assert runs.status()["state"] == "running"
