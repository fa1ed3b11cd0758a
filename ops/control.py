"""The control end of a target or drafter process: stop, pause, checkpoint, live settings, and a watch on the launcher.

Start it before anything slow is loaded. It owns SIGTERM (stop after this step) and ignores SIGINT (the terminal's
Ctrl-C reaches the launcher, which asks for a stop). If the launcher dies, the process is asked to stop too, and ended
from this thread if it has not left by itself after ORPHAN_LIMIT_S. Knows nothing of packs, steps or torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from ops.errors import OpsError as OpsError  # what `start` raises, for both sides' __main__
from ops.errors import Refused
from ops.errors import file_fault as file_fault
from ops.messages import Request, Server
from ops.paths import label, runtime_dir, socket_path
from ops.telemetry import complain
from shm_ring.liveness import is_running, own_start, start_of

ORPHAN_LIMIT_S = 8.0
EXIT_PEER_DIED = 4
LAUNCHER_ENV = "DFLASH_LAUNCHER"
"""Environment variable "pid:start" that the launcher gives its children. Without it torchrun is watched, or nobody."""
TORCHRUN_ENV = "TORCHELASTIC_RUN_ID"
RESTART = "restart"
"""Stop reason of a process that is started again at once, on this host."""
READY_STATES = ("ready", "running", "finished")
_PR_SET_PDEATHSIG = 1
_PAUSE_POLL_S = 0.2


class Control:
    """What others asked of this process. Attributes may be read from any thread; use as a context manager."""

    def __init__(self, run_dir: Path, role: str, rank: int) -> None:
        self.settings: dict[str, Any] = {}
        """Live settings by their configuration name, for example {"training.log_every_steps": 5}."""
        self.stop_reason = ""
        """Why the process should stop: "asked", RESTART, "signal", "launcher died" or "ring stopped"; else empty."""
        self._identity = {"role": role, "rank": rank, "pid": os.getpid(), "started": round(time.time(), 3)}
        self._state: dict[str, Any] = {"state": "starting"}
        self._stopping = False  # a plain flag: a signal handler must take no lock
        self._running = threading.Event()
        self._running.set()
        self._checkpoint_asked = threading.Event()
        self._lock = threading.Lock()
        self._launcher = launcher_of(os.environ)
        if LAUNCHER_ENV not in os.environ and TORCHRUN_ENV in os.environ:  # its agent takes the launcher's place
            self._launcher = (os.getppid(), start_of(os.getppid()))
        self._orphaned_at: float | None = None
        self._old_handlers: dict[int, Any] = {}
        runtime_dir(run_dir, create=True)
        self._server = Server(socket_path(run_dir, role, rank), self._handle, self._watch_launcher)
        self._ready_mark = ready_mark(socket_path(run_dir, role, rank))
        self._marked_ready = False
        self._title = f"dflash {Path(run_dir).resolve().name} {label(role, rank)}"

    @classmethod
    def start(cls, run_dir: Path | str, role: str, rank: int = 0) -> Control:
        """Take over signals, bind the socket and serve.

        Raises RunTaken if this role and rank already runs, NoResource where there is no place for its socket.
        """
        control = cls(Path(run_dir), role, rank)
        control._server.start()
        control._take_signals()
        if os.getppid() == control._launcher[0] and LAUNCHER_ENV in os.environ:
            die_with_parent(signal.SIGTERM)
        control._watch_launcher()  # it may have died before the line above
        set_title(control._title)
        return control

    @property
    def stopping(self) -> bool:
        """Whether the process should finish its step, save and leave."""
        return self._stopping

    @property
    def paused(self) -> bool:
        """Whether the process should stand still."""
        return not self._running.is_set()

    def wait_while_paused(self) -> None:
        """Stand still until resumed or asked to stop."""
        while not self.stopping and not self._running.wait(_PAUSE_POLL_S):
            pass

    def take_checkpoint_request(self) -> bool:
        """Say whether a checkpoint was asked for since the last call."""
        with self._lock:
            asked = self._checkpoint_asked.is_set()
            self._checkpoint_asked.clear()
        return asked

    def report(self, state: str | None = None, **values: Any) -> None:
        """Merge values into what `status` answers; state is starting, ready, running or finished."""
        if state is not None:
            values["state"] = state
        with self._lock:
            self._state |= values
        if not self._marked_ready and self._state["state"] in READY_STATES:
            self._marked_ready = True
            with contextlib.suppress(OSError):  # a full /tmp; then a death within the next half second is one at start
                self._ready_mark.write_text(str(os.getpid()))

    def stop(self, reason: str = "asked") -> None:
        """Ask the process to stop, as `stop` from outside does; may be called again."""
        if not self.stopping or self.stop_reason == RESTART:  # nobody may come after it any more
            self.stop_reason = reason
        self._stopping = True

    def close(self) -> None:
        """Stop serving and give signals back."""
        self._server.close()
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        self._old_handlers.clear()

    def __enter__(self) -> Control:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _handle(self, request: Request) -> dict[str, Any]:
        if request.command == "stop":
            self.stop(RESTART if request.args.get(RESTART) else "asked")
        elif request.command == "pause":
            self._running.clear()
        elif request.command == "resume":
            self._running.set()
        elif request.command == "checkpoint":
            self._checkpoint_asked.set()
        elif request.command == "set":
            self.settings = {**self.settings, **request.args}
        elif request.command != "status":
            raise Refused(f"{self._identity['role']} does not know the command {request.command!r}")
        return self._status()

    def _status(self) -> dict[str, Any]:
        with self._lock:
            state = dict(self._state)
        return {**self._identity, **state, "paused": self.paused, "stopping": self.stopping, "settings": self.settings}

    def _take_signals(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._old_handlers[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._on_signal)
        self._old_handlers[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.stop("signal")

    def _watch_launcher(self) -> None:
        """Notice the launcher's death; end the process when it has outstayed its limit."""
        pid, start = self._launcher
        if not pid:
            return
        if self._orphaned_at is None:
            if not is_running(pid, start):
                self._orphaned_at = time.monotonic()
                self.stop("launcher died")
        elif time.monotonic() - self._orphaned_at > ORPHAN_LIMIT_S:
            complain(f"{self._title}: the launcher died and this process did not leave by itself: ended")
            os._exit(EXIT_PEER_DIED)


def ready_mark(socket: Path) -> Path:
    """The file in which a process leaves its pid once it is ready, so that a death right after is not one at start."""
    return socket.with_suffix(".ready")


def launcher_mark() -> str:
    """Value of LAUNCHER_ENV that names the calling process, safe against reuse of its pid."""
    return f"{os.getpid()}:{own_start()}"


def launcher_of(environment: Mapping[str, str]) -> tuple[int, int]:
    """Read the launcher's pid and start time from an environment; zeros for a process started by hand."""
    pid, _, start = environment.get(LAUNCHER_ENV, "0:0").partition(":")
    return (int(pid), int(start)) if pid.isdigit() and start.isdigit() else (0, 0)


def die_with_parent(number: int) -> None:
    """Ask the kernel to send signal `number` to this process when the thread that started it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(number), 0, 0, 0)


def set_title(title: str) -> None:
    """Show `title` in ps, where setproctitle is installed."""
    try:
        import setproctitle
    except ImportError:
        return
    setproctitle.setproctitle(title)
