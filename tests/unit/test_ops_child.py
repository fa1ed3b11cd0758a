"""One supervised process: its exit is seen whatever was asked of it meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ops.child import Child, child_environment
from ops.control import Control
from ops.devices import Placement
from ops.errors import Refused
from ops.messages import ask
from ops.paths import socket_path

ROOT = Path(__file__).resolve().parents[2]


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


@pytest.mark.parametrize(("module", "role"), [("producer", "target"), ("consumer", "drafter")])
def test_a_process_whose_place_is_taken_says_so_in_one_line(
    module: str, role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_RUNTIME_DIR", str(tmp_path / "s"))
    with Control.start(tmp_path / "run", role, 0):
        command = [sys.executable, "-m", module, "--run-dir", str(tmp_path / "run"), "--rank", "0"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)
    assert done.returncode == 2
    assert done.stderr == f"{role}0 of this run is already there (pid {os.getpid()}); stop it first\n"


def test_a_value_that_is_no_json_spoils_one_answer_and_not_the_serving_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DFLASH_RUNTIME_DIR", str(tmp_path / "s"))
    with Control.start(tmp_path / "run", "target", 0) as control:
        control.report(loss=object())
        with pytest.raises(Refused, match="status failed: PydanticSerializationError"):
            ask(socket_path(tmp_path / "run", "target", 0), "status", 300.0)
        control.report(loss=1.5)
        assert ask(socket_path(tmp_path / "run", "target", 0), "status", 300.0)["loss"] == 1.5
    assert "PydanticSerializationError" in capfd.readouterr().err
