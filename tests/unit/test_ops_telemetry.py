"""Metrics are whole lines whatever happens to their writers; log lines read as role, event, key=value."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from ops.output import Output
from ops.telemetry import METRICS_FILE, Log, Metrics, end_last_line


def _lines(run_dir: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run_dir / METRICS_FILE).read_text().splitlines()]


def test_a_line_begins_with_time_role_rank_and_step(tmp_path: Path) -> None:
    with Metrics(tmp_path, "drafter", 1) as metrics:
        metrics.write(step=3, loss=1.5, accuracy=[0.25, 0.5])
    (line,) = _lines(tmp_path)
    assert list(line) == ["time", "role", "rank", "step", "loss", "accuracy"]
    assert line["role"] == "drafter"
    assert line["rank"] == 1
    assert line["accuracy"] == [0.25, 0.5]


def test_numbers_that_json_does_not_know_become_null_and_scalars_become_numbers(tmp_path: Path) -> None:
    with Metrics(tmp_path, "drafter", 0) as metrics:
        metrics.write(step=1, loss=float("nan"), accuracy=[float("inf")], lr=np.float32(0.5), pack_id=np.int64(9))
    (line,) = _lines(tmp_path)
    assert (line["loss"], line["accuracy"], line["lr"], line["pack_id"]) == (None, [None], 0.5, 9)


def test_a_torn_last_line_does_not_swallow_the_next(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).write_text('{"time": 1, "ro')
    end_last_line(tmp_path)
    end_last_line(tmp_path)
    with Metrics(tmp_path, "target", 0) as metrics:
        metrics.write(step=1)
    assert len((tmp_path / METRICS_FILE).read_text().splitlines()) == 2
    assert json.loads((tmp_path / METRICS_FILE).read_text().splitlines()[-1])["step"] == 1


def test_a_full_disk_is_said_once_and_does_not_end_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Metrics(tmp_path, "target", 0) as metrics:
        metrics.write(step=1)
        with monkeypatch.context() as full:
            full.setattr("ops.telemetry.os.write", _no_space)
            metrics.write(step=2)
            metrics.write(step=3)
        metrics.write(step=4)
    assert [line["step"] for line in _lines(tmp_path)] == [1, 4]
    assert capsys.readouterr().err == "metrics are lost from step 2 on: No space left on device\n"


def _no_space(_fd: int, _data: bytes) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_lines_of_three_processes_never_mix(tmp_path: Path) -> None:
    code = (
        "import sys; from ops.telemetry import Metrics\n"
        f"with Metrics({str(tmp_path)!r}, 'target', int(sys.argv[1])) as m:\n"
        "    for step in range(1000): m.write(step=step, text='x' * 200)\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(rank)]) for rank in range(3)]
    assert [writer.wait(300) for writer in writers] == [0, 0, 0]
    lines = _lines(tmp_path)
    for rank in range(3):
        assert [line["step"] for line in lines if line["rank"] == rank] == list(range(1000))


def test_what_the_ring_reports_is_a_line_of_the_process_with_its_time_and_said_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Log("prepare", 0)
    Log("drafter", 1)
    logging.getLogger("shm_ring").warning("ring | waiting | consumer 1 waited 1.0 s")
    out = capsys.readouterr().out
    assert re.fullmatch(r"\d\d:\d\d:\d\d drafter1 \| ring \| waiting \| consumer 1 waited 1\.0 s\n", out)


def test_a_log_line_is_role_event_and_fields(capsys: pytest.CaptureFixture[str]) -> None:
    Log("drafter", 0)("checkpoint saved", step=5, seconds=0.25, path="a b")
    out = capsys.readouterr().out
    assert out.partition(" ")[2] == 'drafter0 | checkpoint saved | step=5 seconds=0.25 path="a b"\n'


def test_a_newline_in_a_value_stays_on_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    Log("launcher")("stop", why="one\ntwo")
    assert capsys.readouterr().out.count("\n") == 1


def test_a_log_on_a_full_disk_ends_no_process() -> None:
    code = """
from ops.telemetry import Log, complain
Log("drafter", 0)("checkpoint", step=3)
complain("no space")
"""
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([sys.executable, "-u", "-c", code], stdout=full, stderr=full, timeout=300, check=False)
    assert done.returncode == 0


def test_the_launchers_log_on_a_full_disk_is_said_once_and_the_console_goes_on() -> None:
    console = io.StringIO()
    out = Output(Path("/dev/full"), Console(file=console, width=200))
    out.say("one")
    out.warn("two")
    assert console.getvalue().splitlines() == [
        "warning: /dev/full: No space left on device; lines are lost there", "one", "warning: two",
    ]  # fmt: skip


class _LostTerminal(io.StringIO):
    """A terminal that is gone at some moment: each write fails from then on, as with EIO."""

    lost = False

    def write(self, text: str) -> int:
        if self.lost:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().write(text)


@pytest.mark.parametrize("lost_at", ["before", "meanwhile", "last"])
def test_a_terminal_that_is_lost_while_lines_are_live_ends_nothing(lost_at: str, tmp_path: Path) -> None:
    terminal = _LostTerminal()
    terminal.lost = lost_at == "before"
    out = Output(tmp_path / "log", Console(file=terminal, force_terminal=True, width=80, _environ={"TERM": "xterm"}))
    with out.live():
        terminal.lost |= lost_at == "meanwhile"
        out.update(["target", "drafter"])
        terminal.lost = True
    out.say("the end table comes next")
    assert (tmp_path / "log").read_text().endswith("the end table comes next\n")
