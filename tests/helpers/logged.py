"""Run a command of several processes; where it fails, everything that they said is in the assertion."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tests.helpers.tiny_run import REPOSITORY

STOP_S = 40.0  # torchrun kills workers that do not leave after 30 s


def start(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, with all that it says in `log`."""
    with log.open("ab") as file:
        return subprocess.Popen(
            command, cwd=REPOSITORY, env=os.environ | environment, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it started. Asked first: torchrun's workers have sessions of their own, and only it can
    end them.
    """
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def end_all(processes: Sequence[subprocess.Popen[bytes]], logs: Iterable[Path], timeout_s: float) -> str:
    """Wait until all have left with code 0 and return what they said; raises AssertionError with it otherwise."""
    late = False
    for process in processes:
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            late = True
        if late:
            stop(process)
    said = "\n".join(f"--- {log}\n{log.read_text(errors='replace')}" for log in logs)
    assert not late, f"not done within {timeout_s:g} s\n{said}"
    codes = [process.returncode for process in processes]
    assert set(codes) == {0}, f"exit codes {codes}\n{said}"
    return said
