"""`restart` waits for its processes, also past a launcher that is too busy to answer for a while."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ops import commands
from ops.errors import NoAnswer


def test_a_launcher_that_is_busy_for_a_while_does_not_end_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: Iterator[dict[str, Any] | None] = iter(
        [None, {"name": "drafter0", "pid": 7, "state": "running"}, {"name": "drafter0", "pid": 8, "state": "running"}]
    )

    def status(_run_dir: Path) -> dict[str, Any]:
        if (process := next(answers)) is None:
            raise NoAnswer("launcher did not answer")
        return {"processes": [process]}

    monkeypatch.setattr(commands, "command", lambda *_, **__: {"accepted": ["drafter0"], "pids": {"drafter0": 7}})
    monkeypatch.setattr(commands, "launcher_pid", lambda _run_dir: 1)
    monkeypatch.setattr(commands, "status", status)
    monkeypatch.setattr("time.sleep", lambda _seconds: None)
    (line,) = commands.restart(Path("run"), "drafter", [], limit_s=3600)
    assert line.startswith("drafter0: pid 7 -> 8, ready again")
