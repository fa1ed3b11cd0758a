"""A whole run of the tiny random target through launch.py, as a user starts it."""

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
import yaml

from configs.run_files import newest_step, write_atomically
from ops.metrics_reader import MetricsReader
from shm_ring.liveness import process_state
from shm_ring.names import SHM_DIR, segments_of_run, state_name
from tests.helpers.asking import status_of
from tests.helpers.tiny_target import save_target, write_chats

REPOSITORY = Path(__file__).parents[2]
LIMIT_S = 240.0
"""A watchdog, far above what anything takes: a machine may stand still for a while."""


class Tiny:
    """One run of the tiny target in a folder of its own."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name, self.folder, self.dir = name, folder, folder / "runs" / name
        config = {
            "run": {"name": name, "folder": str(folder / "runs")},
            "target": {"model": str(save_target(folder / "target")), "num_taps": 3, "devices": ["cpu"], "threads": 1},
            "data": {"sources": [{"path": str(write_chats(folder / "chats.jsonl", 240))}], "heldout_documents": 6},
            "pack": {"tokens": 128, "window_packs": 2},
            "ring": {"num_slots": 4},
            "drafter": {"num_layers": 1, "block_size": 4, "layout": "full", "head_dim": 16},
            "anchors": {"num": 16},
            "optimizer": {"lr": 1e-3},
            "training": {"devices": ["cpu"], "threads": 1, "epochs": 4, "log_every_steps": 5},
            "checkpoint": {"every_steps": 20},
            "evaluation": {"enabled": True, "max_new_tokens": 8},
            "supervisor": {"backoff_s": 0.1},
        }
        self.config = folder / "tiny.yaml"
        self.config.write_text(yaml.safe_dump(config))
        self.process: subprocess.Popen[str] | None = None

    def launch(self, *arguments: str, hold_at: int | None = None) -> subprocess.Popen[str]:
        """Start the launcher. `hold_at`: the drafters make no step after that one before `let_go` (held_launch.py)."""
        if hold_at is not None:
            self.hold(hold_at)
        program = ["launch.py"] if hold_at is None else ["-m", "tests.helpers.held_launch"]
        self.process = subprocess.Popen(
            [sys.executable, *program, str(self.config), *arguments],
            cwd=REPOSITORY,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "HOLD_FILE": str(self.folder / "hold")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        return self.process

    def hold(self, step: int) -> None:
        """Let the drafters of a held run go on to another step."""
        write_atomically(self.folder / "hold", str(step))

    def let_go(self) -> None:
        """Let the drafters of a held run go on to their end."""
        (self.folder / "hold").unlink()

    def end(self) -> tuple[int, str]:
        assert self.process is not None
        try:
            out, _ = self.process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            logs = "\n".join(
                path.read_text(errors="replace")[-2000:] for path in sorted((self.dir / "logs").glob("*.log"))
            )
            raise AssertionError(f"the run did not end within {LIMIT_S} s; logs:\n{logs}") from None
        return self.process.returncode, out

    def metrics(self, role: str) -> list[dict[str, Any]]:
        return metrics_in(self.dir, role)

    def wait_for_step(self, step: int) -> None:
        """Wait until the metrics show that a drafter has made a step."""
        self.wait_for(lambda: any(line["step"] >= step for line in self.metrics("drafter")))

    def wait_for_checkpoint(self, step: int) -> None:
        """Wait until a checkpoint of this step or of a later one is complete on disk."""
        self.wait_for(lambda: newest_step(self.dir) >= step)

    def log(self, name: str) -> str:
        """The whole lines of a log; empty before it is there."""
        return log_in(self.dir, name)

    def status(self) -> dict[str, Any]:
        """The run's status, as `launch.py status --json` gives it."""
        return status_of(self.dir, LIMIT_S)

    def pid_of(self, role: str) -> int:
        return next(int(process["pid"]) for process in self.status()["processes"] if process["role"] == role)

    def wait_for(self, what: Callable[[], object]) -> None:
        assert self.process is not None
        give_up = time.monotonic() + LIMIT_S
        while not what():
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < give_up, "the run made no progress"
            time.sleep(0.05)

    def kill_everything(self) -> None:
        """End launcher and processes at once, so that none of them hears of another's death, and see them gone."""
        assert self.process is not None
        pids = [self.process.pid, *(int(each["pid"]) for each in self.status()["processes"] if each["pid"])]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        self.process.communicate()
        give_up = time.monotonic() + LIMIT_S
        while left := [pid for pid in pids if (state := process_state(pid)) is not None and state[0] not in "ZX"]:
            assert time.monotonic() < give_up, f"killed, and still there: {left}"
            time.sleep(0.02)

    def assert_nothing_left(self) -> None:
        assert segments_of_run(self.name) == []
        assert not Path(SHM_DIR + state_name(self.name)).exists()


def log_in(run_dir: Path, name: str) -> str:
    """The whole lines of a process's log, also while it is written; empty before it is there."""
    with contextlib.suppress(FileNotFoundError):
        text = (run_dir / "logs" / f"{name}.log").read_text(errors="replace")
        return text[: text.rfind("\n") + 1]
    return ""


def metrics_in(run_dir: Path, role: str) -> list[dict[str, Any]]:
    """Lines of metrics of one side. A line that is being written, or that a kill has torn, is none."""
    return [record for record in MetricsReader(run_dir, start=0).read() if record["role"] == role]


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Tiny]:
    run = Tiny(tmp_path, f"tiny-{os.getpid()}-{tmp_path.name[-12:]}")
    yield run
    if run.process is not None and run.process.poll() is None:
        os.killpg(run.process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.process.communicate(timeout=60)
        if run.process.poll() is None:
            run.process.kill()
            run.process.communicate()


def planned_packs(tiny: Tiny) -> int:
    return int(json.loads((tiny.dir / "plan.json").read_text())["num_packs"])
