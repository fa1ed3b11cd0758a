"""One supervised process: its exit is seen whatever was asked of it meanwhile."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ops.child import Child, child_environment
from ops.commander import _pass_on
from ops.commands import passed_on
from ops.control import Control
from ops.devices import Placement
from ops.errors import NoAnswer, NoResource, NotRunning, OpsError, Refused
from ops.locks import holder_pid
from ops.messages import Server, ask, lock_of
from ops.paths import log_path, socket_path
from ops.telemetry import Log

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
def test_a_process_whose_place_is_taken_says_so_in_one_line(module: str, role: str, tmp_path: Path) -> None:
    with Control.start(tmp_path / "run", role, 0):
        command = [sys.executable, "-m", module, "--run-dir", str(tmp_path / "run"), "--rank", "0"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)
    assert done.returncode == 2
    assert done.stderr == f"{role}0 of this run is already there (pid {os.getpid()}); stop it first\n"


def test_a_value_that_is_no_json_spoils_one_answer_and_not_the_serving_thread(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with Control.start(tmp_path / "run", "target", 0) as control:
        control.report(loss=object())
        with pytest.raises(Refused, match="status failed: PydanticSerializationError"):
            ask(socket_path(tmp_path / "run", "target", 0), "status", 300.0)
        control.report(loss=1.5)
        assert ask(socket_path(tmp_path / "run", "target", 0), "status", 300.0)["loss"] == 1.5
    assert "PydanticSerializationError" in capfd.readouterr().err


def test_the_lock_of_a_socket_does_not_grow_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """systemd-tmpfiles removes files of /tmp that are ten days old; without its lock a process seems not to run."""
    monkeypatch.setattr("ops.messages.TOUCH_S", 0.0)
    socket = socket_path(tmp_path / "run", "target", 0)
    with Control.start(tmp_path / "run", "target", 0):
        os.utime(lock_of(socket), (0, 0))
        for _ in range(2):  # what follows the first answer is done before the second
            ask(socket, "status", 300.0)
        assert lock_of(socket).stat().st_mtime > 0


def test_a_socket_that_cannot_be_bound_is_one_line_and_leaves_the_lock(runtime_root: Path) -> None:
    path = runtime_root / "launcher.sock"
    (path / "in_the_way").mkdir(parents=True)
    server = Server(path, lambda _request: {})
    with pytest.raises(NoResource, match=r"cannot listen at .*launcher\.sock \(Address already in use\)"):
        server.start()
    assert holder_pid(lock_of(path)) == 0
    server.close()


def test_a_command_is_passed_on_to_all_processes_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    children = [Child(Placement("target", rank, None, 1), "none", tmp_path) for rank in range(3)]
    monkeypatch.setattr(Child, "pid", 1)
    together = threading.Barrier(len(children), timeout=300)

    def answer(path: Path, *_: object) -> dict[str, object]:
        together.wait()
        if path.stem == "target1":
            raise NoAnswer("target1 is suspended")
        return {}

    monkeypatch.setattr("ops.commander.ask", answer)
    assert _pass_on(children, "pause") == {
        "done": ["target0", "target2"],
        "later": [],
        "failed": {"target1": "target1 is suspended"},
    }


@pytest.mark.parametrize(
    ("state", "silence", "command", "kind"),
    [
        ("starting", NotRunning, "pause", "later"),  # imports come before the socket
        ("starting", NotRunning, "set", "later"),  # config.yaml, which it reads after that, has it
        ("starting", NotRunning, "checkpoint", "failed"),
        ("restarting", None, "pause", "later"),
        ("restarting", None, "checkpoint", "failed"),
        ("starting", NoAnswer, "resume", "later"),  # the supervisor tells it when it is ready
        ("starting", NoAnswer, "set", "failed"),  # it may have read config.yaml before
        ("running", NoAnswer, "pause", "failed"),
        ("finished", None, "pause", ""),  # there is nothing to stand still
    ],
)
def test_what_a_process_that_cannot_hear_a_command_does_later(
    state: str, silence: type[OpsError] | None, command: str, kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    child = Child(Placement("drafter", 0, None, 1), "none", tmp_path)
    child.state = state
    monkeypatch.setattr(Child, "pid", 1 if silence else None)

    def refuse(*_: object) -> None:
        assert silence is not None
        raise silence("no answer")

    monkeypatch.setattr("ops.commander.ask", refuse)
    reply = _pass_on([child], command)
    assert [name for name in ("done", "later", "failed") if reply[name]] == [kind] * bool(kind)
    if kind == "later":
        assert passed_on(reply, command) == [f"{command}: drafter0 when it is ready"]
    if kind == "failed":
        with pytest.raises(NoAnswer, match=r"^drafter0: "):
            passed_on(reply, command)


def test_what_a_process_warns_of_in_its_log_is_heard_once_and_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = log_path(tmp_path, "drafter0")
    path.parent.mkdir()
    path.write_text('12:00:00 drafter0 | warning | detail="of an earlier launch"\n')
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: None)
    child = Child(Placement("drafter", 0, None, 1), "nothing", tmp_path)
    assert child.new_warnings() == []
    child.spawn()
    said = io.StringIO()
    log = Log("drafter", 0)
    with contextlib.redirect_stdout(said):
        log("warning", detail='no "graph": a=1')
        log("step", captured=False)
        log("warning", detail="short")
    with path.open("a") as file:
        file.write(said.getvalue().rstrip("\n"))
    assert child.new_warnings() == ['no "graph": a=1'], "the last line may not be whole yet"
    with path.open("a") as file:
        file.write("\n" + said.getvalue())
    assert child.new_warnings() == ["short"]
    child.spawn()
    with path.open("a") as file:
        file.write(said.getvalue() + "12:00:01 drafter0 | warning | detail=another\n")
    assert child.new_warnings() == ["another"]
    assert child.new_warnings() == []


def test_a_process_shows_the_runs_name_in_its_title() -> None:
    look = "from pathlib import Path; print(Path('/proc/self/cmdline').read_bytes().rstrip(b'\\0').decode())"
    code = f"from ops.control import set_title; set_title('dflash demo target0'); {look}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.startswith("dflash demo target0")
