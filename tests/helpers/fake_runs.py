"""Launches of the fake run from a test: real launcher processes, seen and commanded as a user would."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shm_ring.names import SHM_DIR, segments_of_run, state_name
from tests.helpers.asking import status_of
from tests.helpers.fake_run import may_end, may_start

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120.0
"""A watchdog, far above what anything takes: a machine may stand still for a while."""
FOREVER = 10**9
"""Steps of a run that ends only because it is told to."""


class Runs:
    """Launches of one test, in its own folders; what is left is killed at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = f"t{os.getpid()}-{folder.name[-12:].replace('_', '-')}"
        self.started: list[subprocess.Popen[str]] = []
        self.environment = os.environ | {"DFLASH_RUNTIME_DIR": str(folder / "s"), "CUDA_VISIBLE_DEVICES": ""}
        (folder / "c.yaml").write_text(
            "target: {devices: [cpu]}\ntraining: {devices: [cpu]}\nring: {num_slots: 4}\n"
            "data: {sources: [{path: read-by-none.jsonl}]}\n"
            "supervisor: {backoff_s: 0.05, stop_timeout_s: 60}\n"
        )

    @property
    def run_dir(self) -> Path:
        """The run's folder."""
        return self.folder / "runs" / self.name

    def launch(self, *arguments: str, name: str = "", **knobs: Any) -> subprocess.Popen[str]:
        """Start a launcher in a process group of its own, as a shell does."""
        options = ["--name", name or self.name, "--set", f"run.folder={self.folder / 'runs'}", *arguments]
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.fake_launch", str(self.folder / "c.yaml"), *options],
            cwd=ROOT, env=self.environment | {"FAKE": json.dumps(knobs)}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0,
        )  # fmt: skip
        self.started.append(process)
        return process

    def ask(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a subcommand from another terminal."""
        command = [sys.executable, "launch.py", *words, "--folder", str(self.folder / "runs")]
        return subprocess.run(command, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=LIMIT_S)

    def status(self) -> dict[str, Any]:
        """The run's status, as `launch.py status --json` gives it."""
        return status_of(self.run_dir, LIMIT_S)

    def process(self, name: str) -> dict[str, Any]:
        """The status of one process; empty before it is known."""
        return next((each for each in self.status()["processes"] if each["name"] == name), {})

    def until(self, what: str, condition: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
        """Wait for a condition; fails with the launcher's log."""
        give_up = time.monotonic() + limit_s
        while time.monotonic() < give_up:
            if value := condition():
                return value
            time.sleep(0.05)
        pytest.fail(f"not within {limit_s} s: {what}\n{self.log('launcher')}")

    def let_end(self, name: str = "") -> None:
        """Let the drafters of a run with the knob `hold` make their last step."""
        may_end(self.run_dir.with_name(name or self.name)).touch()

    def let_start(self, name: str) -> None:
        """Let a process of the knob `start_wait` start, in this life and in later ones."""
        may_start(self.run_dir, name).touch()

    def until_step(self, step: int) -> None:
        """Wait until the drafter has made a step."""
        self.until(f"step {step}", lambda: any(line.get("step", 0) >= step for line in self.metrics("drafter")))

    def metrics(self, role: str) -> list[dict[str, Any]]:
        """Metrics of one side."""
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        records = [json.loads(line) for line in lines if line.endswith("\n")]
        return [record for record in records if record["role"] == role]

    def log(self, name: str) -> str:
        """Text of a log file; empty before it is there."""
        path = self.run_dir / "logs" / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def processes(self) -> list[int]:
        """Pids of all living processes of this test, by environment or, since a title may overwrite that, by title."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                environment = (entry / "environ").read_bytes()
                title = (entry / "cmdline").read_bytes()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            ours = f"DFLASH_RUNTIME_DIR={self.folder / 's'}".encode() in environment or self.name.encode() in title
            if ours and state != "Z":
                found.append(int(entry.name))
        return found

    def assert_nothing_left(self) -> None:
        """No process, no segment, no socket."""
        assert self.processes() == []
        assert segments_of_run(self.name) == []
        assert not Path(SHM_DIR + state_name(self.name)).exists()
        assert list((self.folder / "s").glob("*/*")) == []


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runs]:
    monkeypatch.setenv("DFLASH_RUNTIME_DIR", str(tmp_path / "s"))
    made = Runs(tmp_path)
    yield made
    for process in made.started:
        if process.poll() is None:
            process.kill()
        if process.stdout is not None:
            process.stdout.close()
        process.wait()
    for pid in made.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for name in segments_of_run(made.name):
        os.unlink(f"{SHM_DIR}{name}")
    Path(SHM_DIR + state_name(made.name)).unlink(missing_ok=True)


def end(process: subprocess.Popen[str], limit_s: float = LIMIT_S) -> tuple[int, str]:
    """Wait for a launcher; returns its exit code and what it printed."""
    out, _ = process.communicate(timeout=limit_s)
    return process.returncode, out
