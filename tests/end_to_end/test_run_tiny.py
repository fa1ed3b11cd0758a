"""A whole run through launch.py with a tiny random target: kill -9 of the drafter, Ctrl-C, resume, wrong input."""

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

from shm_ring.names import segments_of_run
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


def test_kill_9_of_the_drafter_loses_no_pack_and_reloads_no_target(tiny: Tiny) -> None:
    tiny.launch()
    tiny.wait_for(lambda: any(line["step"] >= 45 for line in tiny.metrics("drafter")))
    target_pid = tiny.pid_of("target")
    os.kill(tiny.pid_of("drafter"), signal.SIGKILL)
    tiny.wait_for(lambda: (tiny.dir / "logs" / "drafter0.log").read_text().count("resumed") == 1)
    assert tiny.pid_of("target") == target_pid
    code, out = tiny.end()
    assert code == 0, out
    assert (tiny.dir / "logs" / "target0.log").read_text().count("model loaded") == 1
    summary = json.loads((tiny.dir / "summary.json").read_text())
    assert summary["packs_trained"] == summary["steps"] == planned_packs(tiny)
    assert summary["loss_last"] < summary["loss_first"]
    for key in ("before", "after", "bigram", "zero_context"):
        assert 1.0 <= summary[f"heldout_accept_len_{key}"] <= 4.0
    assert (Path(summary["checkpoint"]) / "complete.json").is_file()
    heldout = json.loads((tiny.dir / "heldout.json").read_text())
    assert heldout["same_text_share"] == 1.0  # lossless: the text does not depend on what proposes
    tiny.assert_nothing_left()


def test_the_metrics_have_what_others_rely_on(tiny: Tiny) -> None:
    tiny.launch("--set", "training.epochs=1", "--set", "evaluation.enabled=false")
    code, out = tiny.end()
    assert code == 0, out
    drafter, target = tiny.metrics("drafter"), tiny.metrics("target")
    wanted = {"time", "role", "rank", "step", "loss", "accept_len", "tokens_per_s", "starved_pct", "occupancy"}
    assert all(wanted <= line.keys() for line in drafter)
    assert all({"pack_id", "tokens_per_s", "blocked_pct", "occupancy"} <= line.keys() for line in target)
    assert sorted(line["pack_id"] for line in target) == list(range(planned_packs(tiny)))
    assert {"config.yaml", "logs", "metrics.jsonl", "checkpoints", "summary.json"} <= {
        p.name for p in tiny.dir.iterdir()
    }


def test_ctrl_c_saves_and_a_second_launch_goes_on_where_it_stopped(tiny: Tiny) -> None:
    process = tiny.launch("--set", "evaluation.enabled=false")
    tiny.wait_for(lambda: any(line["step"] >= 10 for line in tiny.metrics("drafter")))
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    code, out = tiny.end()
    assert code == 130, out
    assert time.monotonic() - began < 15
    tiny.assert_nothing_left()
    log = tiny.dir / "logs" / "drafter0.log"
    stopped_at = max(int(path.name.removeprefix("step-")) for path in (tiny.dir / "checkpoints").glob("step-*"))
    assert stopped_at >= 10
    tiny.launch("--set", "evaluation.enabled=false")
    code, out = tiny.end()
    assert code == 0, out
    assert f"resumed | step={stopped_at}" in log.read_text()
    summary = json.loads((tiny.dir / "summary.json").read_text())
    assert summary["packs_trained"] == summary["steps"] == planned_packs(tiny)


def test_restart_of_the_drafter_alone_repeats_nothing(tiny: Tiny) -> None:
    tiny.launch("--set", "evaluation.enabled=false", "--set", "checkpoint.every_steps=1000")
    tiny.wait_for(lambda: any(line["step"] >= 10 for line in tiny.metrics("drafter")))
    command = [sys.executable, "launch.py", "restart", "drafter", str(tiny.dir)]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, timeout=LIMIT_S)
    code, out = tiny.end()
    assert code == 0, out
    begun = [json.loads(line)["pack_id"] for line in (tiny.dir / "journal.0.jsonl").read_text().splitlines()]
    assert sorted(begun) == list(range(planned_packs(tiny)))  # each pack once, over both lives
    assert (tiny.dir / "logs" / "target0.log").read_text().count("model loaded") == 1


def test_two_targets_share_the_packs_also_when_one_is_killed(tiny: Tiny) -> None:
    tiny.launch("--set", "evaluation.enabled=false", "--set", "target.devices=[cpu, cpu]")
    tiny.wait_for(lambda: any(line["step"] >= 10 for line in tiny.metrics("drafter")))
    os.kill(tiny.pid_of("target"), signal.SIGKILL)
    code, out = tiny.end()
    assert code == 0, out
    begun = [json.loads(line)["pack_id"] for line in (tiny.dir / "journal.0.jsonl").read_text().splitlines()]
    assert sorted(begun) == list(range(planned_packs(tiny)))  # each pack once
    makers = {(line["rank"], line["pack_id"] % 2) for line in tiny.metrics("target")}
    assert makers == {(0, 0), (1, 1)}
    tiny.assert_nothing_left()


@pytest.mark.parametrize(
    ("override", "code", "words"),
    [
        ("target.model=/nowhere/at/all", 2, "no folder /nowhere/at/all"),
        ("target.target_layer_ids=[1,99]", 2, "distinct ids in 0..5"),
        ("data.sources=[]", 3, "no usable document"),
        ("data.sources=[{path: /nowhere.jsonl}]", 3, "data.sources.0.path"),
        ("training.devices=[cpu, cpu]", 2, "one drafter process for now"),
        ("drafter.blok_size=8", 2, "did you mean drafter.block_size?"),
    ],
)
def test_wrong_input_is_one_clear_line_and_an_exit_code(tiny: Tiny, override: str, code: int, words: str) -> None:
    tiny.launch("--set", override)
    found, out = tiny.end()
    assert found == code, out
    assert words in out
    assert "Traceback" not in out
    tiny.assert_nothing_left()
