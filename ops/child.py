"""One process of a run, over all its lives: how it is started, asked to stop, killed, and what its log says.

It runs in a session of its own, so the terminal's Ctrl-C reaches the launcher alone, and writes to its log file by
itself, so nothing breaks if the launcher dies. Knows nothing of when to restart; that is the supervisor's.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ops.changes import NewSettings
from ops.control import LAUNCHER_ENV, READY_STATES, launcher_mark, ready_mark
from ops.devices import Placement
from ops.errors import OpsError
from ops.messages import ask
from ops.paths import TARGET, log_path, socket_path
from ops.run_folder import FINAL_FILE, last_lines
from shm_ring.liveness import process_state

WAITING, STARTING, RUNNING, STOPPING, STOPPED, FINISHED = (
    "restarting",
    "starting",
    "running",
    "stopping",
    "stopped",
    "finished",
)
_STOP_ACK_S = 1.0
_WARNING = " | warning | detail="


class Child:
    """A placement, the module that runs there, and its present life."""

    def __init__(self, placement: Placement, module: str, run_dir: Path) -> None:
        self.placement = placement
        self.module = module
        self.run_dir = run_dir
        self.state = WAITING
        self.restarts = 0
        self.crashes_in_a_row = 0
        self.exit_code: int | None = None
        self.not_before = 0.0
        self.started_at = 0.0
        self.ready_at: float | None = None
        self.got_ready = False
        """In the present life, or the last one if it has left; a life that left at once may have told by its mark."""
        self.was_ever_ready = False
        self.new_settings: NewSettings | None = None
        """Those that this life was started with, until all who were restarted for them are ready."""
        self.kill_at = 0.0
        self.killed = False
        self.restart_asked = False
        self.extra_environment: dict[str, str] = {}
        """Beside the placement's, for the next life: where the ranks meet, how many targets there are."""
        self.reply: dict[str, Any] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0
        self._heard_to: int | None = None
        self._heard: set[str] = set()

    @property
    def name(self) -> str:
        """target0, drafter1, ..."""
        return self.placement.name

    @property
    def pid(self) -> int | None:
        """Pid of the present life."""
        return self._process.pid if self._process else None

    @property
    def socket(self) -> Path:
        """Its control socket."""
        return socket_path(self.run_dir, self.placement.role, self.placement.rank)

    def spawn(self) -> None:
        """Start a life; its output is appended to its log."""
        path = log_path(self.run_dir, self.name)
        command = [
            sys.executable,
            "-m",
            self.module,
            "--run-dir",
            str(self.run_dir),
            "--rank",
            str(self.placement.rank),
        ]
        with path.open("ab") as log:
            self._log_start = log.seek(0, os.SEEK_END)
            if self._heard_to is None:
                self._heard_to = self._log_start  # what an earlier launch's processes said is not said again
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=child_environment(self.run_dir) | self.placement.environment | self.extra_environment,
                start_new_session=True,
            )
        self.reply = {}
        self.exit_code = None
        self.ready_at = None
        self.got_ready = self.restart_asked = self.killed = False
        self.started_at = time.monotonic()
        self.state = STARTING

    def poll(self) -> int | None:
        """Return the exit code if the process has left, after ending whatever it left behind in its session."""
        process = self._process
        if process is None:
            return None
        if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        kill_session(process.pid)  # before it is reaped, so that the number cannot belong to anyone else
        self.exit_code = process.wait()
        self.got_ready |= self._left_ready_mark(process.pid)
        self.was_ever_ready |= self.got_ready
        self._process = None
        return self.exit_code

    def refresh(self) -> None:
        """Ask the process for its status; runs in the watcher's thread."""
        process = self._process
        if process is None:
            return
        try:
            reply = ask(self.socket, "status", _STOP_ACK_S)
        except OpsError:
            return  # still importing, busy, or just gone; poll() knows which
        if reply.get("pid") == process.pid:
            self.reply = reply

    def _left_ready_mark(self, pid: int) -> bool:
        try:
            return ready_mark(self.socket).read_text() == str(pid)
        except FileNotFoundError:
            return False

    @property
    def reports_ready(self) -> bool:
        """Whether this life has said that it is ready."""
        return self.reply.get("pid") == self.pid and self.reply.get("state") in READY_STATES

    @property
    def is_saving(self) -> bool:
        """Whether this life has said that it is writing its last checkpoint."""
        return self.reply.get("pid") == self.pid and bool(self.reply.get("saving"))

    @property
    def work_is_done(self) -> bool:
        """Whether an exit with code 0 means what it should: final.json is written, or the target had no packs left."""
        if self.placement.role == TARGET:
            return self.reply.get("state") == "finished"
        return (self.run_dir / FINAL_FILE).exists()

    def ask_to_stop(self, limit_s: float, restart: bool = False) -> None:
        """Ask for a graceful stop by control, else by SIGTERM; to be killed after `limit_s`.

        `restart`: it is started again at once, so its state may stay in memory.
        """
        if self._process is None:
            if self.state not in (FINISHED, STOPPED):
                self.state = STOPPED
            return
        if self.state != STOPPING:
            self.kill_at = time.monotonic() + limit_s
        self.state = STOPPING
        try:
            ask(self.socket, "stop", _STOP_ACK_S, restart=restart)
        except OpsError:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGTERM)  # Popen's own would reap a process that has just left

    def kill(self) -> None:
        """End the process and its session at once; also ends a stopped (SIGSTOP) one."""
        if self._process is not None and self._process.returncode is None:
            self.killed = True
            kill_session(self._process.pid)

    def log_tail(self, count: int = 20) -> list[str]:
        """Return the last log lines of this life."""
        return last_lines(log_path(self.run_dir, self.name), count, self._log_start)

    def new_warnings(self) -> list[str]:
        """Return what its log has newly said as a warning, each text once however often it is started again."""
        path = log_path(self.run_dir, self.name)
        if self._heard_to is None or path.stat().st_size <= self._heard_to:
            return []
        with path.open("rb") as log:
            log.seek(self._heard_to)
            whole, newline, _ = log.read().rpartition(b"\n")
        self._heard_to += len(whole) + len(newline)
        lines = whole.decode(errors="replace").splitlines()
        texts = [_plain(line.split(_WARNING, 1)[1]) for line in lines if _WARNING in line]
        new = [text for text in dict.fromkeys(texts) if text not in self._heard]
        self._heard.update(new)
        return new

    def describe(self) -> dict[str, Any]:
        """Everything `status` says about this process."""
        pid = self.pid
        seen = process_state(pid) if pid else None
        said = {
            key: value for key, value in self.reply.items() if key not in ("role", "rank", "pid", "state", "started")
        }
        return {
            "name": self.name,
            "role": self.placement.role,
            "rank": self.placement.rank,
            "pid": pid,
            "state": "suspended" if seen and seen[0] in "Tt" else self.state,
            "says": self.reply.get("state"),
            "step": None,
            "device": "cpu" if self.placement.gpu is None else f"GPU {self.placement.gpu}",
            "threads": self.placement.threads,
            "restarts": self.restarts,
            "exit_code": self.exit_code,
        } | said


def child_environment(run_dir: Path) -> dict[str, str]:
    """Environment of every process of the run: unbuffered output, our packages importable, the launcher to watch.

    What torch.compile and Triton make is kept in the run's folder, so that a restart finds it; a user's own settings
    of TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR stand.
    """
    root = str(Path(__file__).resolve().parent.parent)
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    caches = compile_caches(run_dir)
    return (
        caches
        | os.environ
        | {
            "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
            "PYTHONUNBUFFERED": "1",
            LAUNCHER_ENV: launcher_mark(),
        }
    )


def _plain(shown: str) -> str:
    """Undo telemetry's quoting of a value; what is not quoted stays as it is."""
    try:
        return str(json.loads(shown)) if shown.startswith('"') else shown
    except ValueError:
        return shown


def compile_caches(run_dir: Path) -> dict[str, str]:
    """Where the processes of a run keep compiled kernels."""
    folder = run_dir.resolve() / "compile_cache"
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}


def kill_session(pid: int) -> None:
    """Kill the process group of a session leader that has not been reaped yet."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def exit_words(code: int) -> str:
    """Word an exit status: `code 3`, or the signal that ended it."""
    if code >= 0:
        return f"code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
