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

from shm_ring.names import SHM_DIR, segments_of_run, state_name
from tests.helpers.tiny_target import save_target, write_chats

REPOSITORY = Path(__file__).parents[2]
LIMIT_S = 150.0


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

    def launch(self, *arguments: str) -> subprocess.Popen[str]:
        self.process = subprocess.Popen(
            [sys.executable, "launch.py", str(self.config), *arguments],
            cwd=REPOSITORY,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        return self.process

    def end(self) -> tuple[int, str]:
        assert self.process is not None
        try:
            out, _ = self.process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            logs = "\n".join(path.read_text()[-2000:] for path in sorted((self.dir / "logs").glob("*.log")))
            raise AssertionError(f"the run did not end within {LIMIT_S} s; logs:\n{logs}") from None
        return self.process.returncode, out

    def metrics(self, role: str) -> list[dict[str, Any]]:
        with contextlib.suppress(FileNotFoundError):
            lines = (self.dir / "metrics.jsonl").read_text().splitlines()
            return [line for line in map(json.loads, lines) if line["role"] == role]
        return []

    def log(self, name: str) -> str:
        """The whole lines of a log, also while it is written; empty before it is there."""
        with contextlib.suppress(FileNotFoundError):
            text = (self.dir / "logs" / f"{name}.log").read_text(errors="replace")
            return text[: text.rfind("\n") + 1]
        return ""

    def status(self) -> dict[str, Any]:
        command = [sys.executable, "launch.py", "status", str(self.dir), "--json"]
        answer = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True)
        status: dict[str, Any] = json.loads(answer.stdout)
        return status

    def pid_of(self, role: str) -> int:
        return next(int(process["pid"]) for process in self.status()["processes"] if process["role"] == role)

    def wait_for(self, what: Callable[[], object]) -> None:
        assert self.process is not None
        give_up = time.monotonic() + LIMIT_S
        while not what():
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < give_up, "the run made no progress"
            time.sleep(0.05)

    def assert_nothing_left(self) -> None:
        assert segments_of_run(self.name) == []
        assert not Path(SHM_DIR + state_name(self.name)).exists()


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Tiny]:
    run = Tiny(tmp_path, f"tiny-{os.getpid()}-{tmp_path.name[-12:]}")
    yield run
    if run.process is not None and run.process.poll() is None:
        os.killpg(run.process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.process.communicate(timeout=30)
        if run.process.poll() is None:
            run.process.kill()
            run.process.communicate()


def planned_packs(tiny: Tiny) -> int:
    return int(json.loads((tiny.dir / "plan.json").read_text())["num_packs"])
