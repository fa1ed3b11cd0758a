"""The control end of a process: commands are acknowledged, signals and the launcher's death ask for a stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ops.control import LAUNCHER_ENV, Control
from ops.errors import NoAnswer, NotRunning, Refused, RunTaken
from ops.messages import Request, Server, ask
from ops.paths import MAX_SOCKET_CHARS, runtime_dir, socket_path

PATIENCE_S = 300.0
"""For what comes without fail: a process may stand still for a while."""


@pytest.fixture(autouse=True)
def _by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LAUNCHER_ENV, raising=False)


@pytest.fixture
def control(tmp_path: Path) -> Iterator[Control]:
    with Control.start(tmp_path / "run", role="target", rank=0) as started:
        yield started


def _socket(tmp_path: Path) -> Path:
    return socket_path(tmp_path / "run", "target", 0)


def _ask(tmp_path: Path, command: str, **args: Any) -> dict[str, Any]:
    return ask(_socket(tmp_path), command, PATIENCE_S, **args)


def test_fifty_fresh_clients_each_get_an_acknowledgement_of_their_first_message(
    control: Control, tmp_path: Path
) -> None:
    for number in range(50):
        paused = number % 2 == 0
        reply = _ask(tmp_path, "pause" if paused else "resume")
        assert reply["paused"] is paused
        assert control.paused is paused


def test_status_carries_what_the_process_reported(control: Control, tmp_path: Path) -> None:
    assert _ask(tmp_path, "status")["state"] == "starting"
    control.report(state="running", step=7, loss=2.5)
    control.report(step=8)
    reply = _ask(tmp_path, "status")
    assert (reply["state"], reply["step"], reply["loss"], reply["pid"]) == ("running", 8, 2.5, os.getpid())
    assert (reply["role"], reply["rank"]) == ("target", 0)


def test_stop_may_be_sent_twice(control: Control, tmp_path: Path) -> None:
    assert not control.stopping
    assert _ask(tmp_path, "stop")["stopping"] is True
    assert _ask(tmp_path, "stop")["stopping"] is True
    assert control.stopping
    assert control.stop_reason == "asked"


def test_a_checkpoint_request_is_taken_once(control: Control, tmp_path: Path) -> None:
    assert not control.take_checkpoint_request()
    _ask(tmp_path, "checkpoint")
    assert control.take_checkpoint_request()
    assert not control.take_checkpoint_request()


def test_settings_accumulate(control: Control, tmp_path: Path) -> None:
    _ask(tmp_path, "set", **{"ring.min_ready": 2})
    _ask(tmp_path, "set", **{"ring.pick": "random"})
    assert control.settings == {"ring.min_ready": 2, "ring.pick": "random"}


def test_a_paused_process_goes_on_when_asked_to_stop(control: Control, tmp_path: Path) -> None:
    _ask(tmp_path, "pause")
    waiter = threading.Thread(target=control.wait_while_paused)
    waiter.start()
    assert waiter.is_alive()
    _ask(tmp_path, "stop")
    waiter.join(PATIENCE_S)
    assert not waiter.is_alive()


@pytest.mark.usefixtures("control")
def test_an_unknown_command_is_refused_and_the_process_goes_on_answering(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="does not know the command 'dance'"):
        _ask(tmp_path, "dance")
    assert _ask(tmp_path, "status")["pid"] == os.getpid()


def test_another_protocol_version_is_refused_with_both_versions(control: Control, tmp_path: Path) -> None:
    import zmq

    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    try:
        socket.connect(f"ipc://{_socket(tmp_path)}")
        socket.send(Request(command="stop", version=99).model_dump_json().encode())
        assert socket.poll(int(1000 * PATIENCE_S))
        assert b"protocol 99 asked, this process speaks 1" in socket.recv()
    finally:
        socket.close()
        context.term()
    assert not control.stopping


@pytest.mark.usefixtures("control")
def test_the_same_role_and_rank_twice_is_refused_with_the_first_pid(tmp_path: Path) -> None:
    with pytest.raises(RunTaken, match=f"target0 of this run is already there \\(pid {os.getpid()}\\)"):
        Control.start(tmp_path / "run", role="target", rank=0)
    assert _ask(tmp_path, "status")["pid"] == os.getpid()


def test_nobody_there_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(NotRunning, match="drafter0 is not running"):
        ask(socket_path(tmp_path / "run", "drafter", 0), "status", timeout_s=PATIENCE_S)


def test_a_silent_process_is_given_up_after_the_timeout(tmp_path: Path) -> None:
    code = f"""
import signal, os
from ops.control import Control
with Control.start({str(tmp_path / "run")!r}, "target", 0):
    print("up", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        try:
            os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
            with pytest.raises(NoAnswer, match=r"did not answer 'status' within 0\.3 s"):
                ask(_socket(tmp_path), "status", timeout_s=0.3)
        finally:
            child.kill()


def test_sigterm_asks_for_a_stop_and_handlers_come_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with Control.start(tmp_path / "run", role="drafter", rank=3) as control:
        os.kill(os.getpid(), signal.SIGINT)
        assert not control.stopping
        os.kill(os.getpid(), signal.SIGTERM)
        assert control.stopping
        assert control.stop_reason == "signal"
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_the_socket_is_gone_after_close_and_its_folder_is_private(tmp_path: Path) -> None:
    with Control.start(tmp_path / "run", role="target", rank=0):
        assert _socket(tmp_path).is_socket()
        assert runtime_dir(tmp_path / "run").stat().st_mode & 0o077 == 0
    assert not _socket(tmp_path).exists()


def test_a_server_whose_thread_stands_still_while_it_is_closed_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a process was suspended in that moment: close() waits no longer for the thread, which still polls."""
    monkeypatch.setattr("ops.messages._JOIN_S", 0.0)
    runtime_dir(tmp_path / "run", create=True)
    server = Server(_socket(tmp_path), lambda _request: {}).start()
    closer = threading.Thread(target=server.close, daemon=True)
    closer.start()
    closer.join(PATIENCE_S)
    assert not closer.is_alive()
    assert not _socket(tmp_path).exists()


def test_a_long_run_folder_gives_a_socket_path_within_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DFLASH_RUNTIME_DIR")
    monkeypatch.setenv("TMPDIR", "/" + "t" * 150)
    long = tmp_path / ("d" * 150) / ("r" * 64)
    other = tmp_path / ("e" * 150) / ("r" * 64)
    assert len(str(socket_path(long, "drafter", 47))) <= MAX_SOCKET_CHARS
    assert socket_path(long, "drafter", 47) != socket_path(other, "drafter", 47)


@pytest.mark.parametrize(
    "mark", ["os.environ[LAUNCHER_ENV] = launcher_mark()", "os.environ['TORCHELASTIC_RUN_ID'] = 'none'"]
)
def test_a_child_leaves_when_its_launcher_or_torchrun_is_killed(mark: str, tmp_path: Path) -> None:
    """The launcher stands for itself here: a process that starts one child and is killed; the child is never ended."""
    child = f"""
import ops.control
from ops.control import Control
ops.control.ORPHAN_LIMIT_S = 1e9
with Control.start({str(tmp_path / "run")!r}, "target", 0) as control:
    print("up", flush=True)
    while not control.stopping:
        control._running.clear()
        control.wait_while_paused()
    print(control.stop_reason, flush=True)
"""
    launcher = f"""
import os, subprocess, sys
from ops.control import LAUNCHER_ENV, launcher_mark
{mark}
subprocess.Popen([sys.executable, "-c", {child!r}]).wait()
"""
    with subprocess.Popen([sys.executable, "-c", launcher], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.kill()
        assert process.stdout.readline() in (b"launcher died\n", b"signal\n")
        assert process.stdout.read() == b""  # the child has gone too: nobody holds the pipe


def test_an_orphan_that_does_not_stop_is_ended(tmp_path: Path) -> None:
    child = f"""
import threading, ops.control
ops.control.ORPHAN_LIMIT_S = 0.5
with ops.control.Control.start({str(tmp_path / "run")!r}, "target", 0):
    print("up", flush=True)
    while True:
        threading.Event().wait(60)
"""
    launcher = f"""
import os, subprocess, sys
from ops.control import LAUNCHER_ENV, launcher_mark
os.environ[LAUNCHER_ENV] = launcher_mark()
subprocess.Popen([sys.executable, "-c", {child!r}]).wait()
"""
    with subprocess.Popen([sys.executable, "-c", launcher], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"up\n"
        process.kill()
        assert process.stdout.read() == b""
        assert b"did not leave by itself: ended" in process.stderr.read()
