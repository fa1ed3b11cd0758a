"""One supervised process: its exit is seen whatever was asked of it meanwhile."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ops.child import Child, child_environment
from ops.devices import Placement


def test_the_exit_of_a_process_that_left_before_it_was_asked_to_stop_is_seen(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    child = Child(Placement("drafter", 0, None, 1), "json.tool_that_does_not_exist", tmp_path)
    child.spawn()
    pid = child.pid
    assert pid is not None
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # it has left and nobody has reaped it
    child.ask_to_stop(limit_s=1.0)  # no control socket answers, so a signal is sent
    assert child.poll() == 1
    assert child.pid is None


def test_compiled_kernels_are_kept_in_the_runs_folder_unless_the_user_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    environment = child_environment(tmp_path)
    assert Path(environment["TORCHINDUCTOR_CACHE_DIR"]).is_relative_to(tmp_path)
    assert environment["TRITON_CACHE_DIR"] == "/elsewhere"
