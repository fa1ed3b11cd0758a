"""Start, watch and restart the processes of a run.

The main thread calls tick() about ten times a second and alone starts processes (their parent-death signal is tied to
the thread that started them). A second thread asks them for their status, so that a silent one holds nobody up.

    restarting -> starting -> running -> finished (code 0 and its work is done)
         ^            |          |
         '-- back-off-+--crash---'      codes 2, 3, 5, a death in the first start, or too many restarts end the run

Several drafters are one group, since they reduce gradients together: if one is restarted, all are.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.schema import Config
from ops.child import FINISHED, RUNNING, STARTING, STOPPED, STOPPING, WAITING, Child, exit_words
from ops.devices import Map
from ops.errors import ChildFailed, OpsError
from ops.messages import ask
from ops.output import Output
from ops.paths import DRAFTER, TARGET, log_path

FINAL_CODES = (2, 3, 5)
MAX_BACKOFF_S = 30.0
STABLE_S = 300.0
_WATCH_EVERY_S = 0.5
_WATCH_START_S = 0.1


@dataclass(frozen=True)
class Modules:
    """The programs of a run; tests put others in their place."""

    prepare: str = "producer.prepare"
    target: str = "producer"
    drafter: str = "consumer"
    evaluation: str = "evaluation.heldout"


class Supervisor:
    """All processes of one run."""

    def __init__(self, config: Config, run_dir: Path, places: Map, modules: Modules, out: Output) -> None:
        self.config = config
        self.paused = False
        self.failure: ChildFailed | None = None
        self.children = [
            Child(place, modules.target if place.role == TARGET else modules.drafter, run_dir)
            for place in places.placements
        ]
        self._out = out
        self._closing = threading.Event()
        self._wanted_restarts: list[str] = []
        self._wanted_lock = threading.Lock()
        self._watcher = threading.Thread(target=self._watch, name="watcher", daemon=True)

    def start(self) -> None:
        """Start every process and the watcher."""
        for child in self.children:
            child.spawn()
            self._out.say(f"{child.placement.line}, pid {child.pid}")
        self._watcher.start()

    def tick(self) -> None:
        """Look at every process once and do what is due; `failure` is set if the run cannot go on."""
        self._begin_restarts()
        now = time.monotonic()
        for child in self.children:
            code = child.poll()
            if code is not None:
                self._left(child, code)
            elif child.state == WAITING and now >= child.not_before:
                child.spawn()
                self._out.say(f"{child.name} started again, pid {child.pid}")
            elif child.state == STARTING:
                self._look_at_start(child, now)
            elif child.state == STOPPING and now > child.kill_at:
                self._out.warn(f"{child.name} (pid {child.pid}) did not stop in time: killed")
                child.kill()
            elif child.state == RUNNING and child.crashes_in_a_row and now - (child.ready_at or now) > STABLE_S:
                child.crashes_in_a_row = 0

    @property
    def finished(self) -> bool:
        """Whether every drafter has done its work."""
        return all(child.state == FINISHED for child in self.side(DRAFTER))

    @property
    def all_ready(self) -> bool:
        """Whether every process has become ready."""
        return all(child.state in (RUNNING, FINISHED) for child in self.children)

    def side(self, role: str) -> list[Child]:
        """The processes of one role."""
        return [child for child in self.children if child.placement.role == role]

    def want_restart(self, role: str, rank: int | None = None) -> list[Child]:
        """Ask for a restart of one side, or of one target; done by the next tick(). From any thread."""
        children = [c for c in self.side(role) if role == DRAFTER or rank in (None, c.placement.rank)]
        with self._wanted_lock:
            self._wanted_restarts += [child.name for child in children]
        return children

    def stop(self, now: bool = False) -> None:
        """Ask every process to stop, drafters first; with `now`, kill them."""
        for child in [*self.side(DRAFTER), *self.side(TARGET)]:
            child.restart_asked = False
            if now:
                child.kill()
            else:
                child.ask_to_stop(self.config.supervisor.stop_timeout_s)

    @property
    def all_left(self) -> bool:
        """Whether no process is left; call tick() meanwhile."""
        return all(child.pid is None for child in self.children)

    def close(self) -> None:
        """Kill whatever is left and end the watcher."""
        self._closing.set()
        for child in self.children:
            child.kill()
        give_up = time.monotonic() + 10
        while not self.all_left and time.monotonic() < give_up:
            for child in self.children:
                child.poll()
            time.sleep(0.02)
        if self._watcher.is_alive():
            self._watcher.join(5)

    def _watch(self) -> None:
        while not self._closing.is_set():
            for child in self.children:
                child.refresh()
            starting = any(child.state == STARTING for child in self.children)
            self._closing.wait(_WATCH_START_S if starting else _WATCH_EVERY_S)

    def _look_at_start(self, child: Child, now: float) -> None:
        if child.reports_ready:
            child.state = RUNNING
            child.ready_at = now
            child.was_ever_ready = True
            self._out.say(f"{child.name} is ready after {now - child.started_at:.1f} s")
            if self.paused:
                _try(child, "pause")
        elif now - child.started_at > self.config.supervisor.ready_timeout_s:
            limit = self.config.supervisor.ready_timeout_s
            self._fail(child, f"not ready within {limit:g} s (supervisor.ready_timeout_s)", 4)
            child.kill()

    def _left(self, child: Child, code: int) -> None:
        """Decide what becomes of a process that has left."""
        if child.restart_asked:
            child.state = WAITING
        elif child.state == STOPPING or self.failure is not None:
            child.state = STOPPED
        elif code == 0 and child.work_is_done:
            child.state = FINISHED
            self._out.say(f"{child.name} has finished")
        elif code in FINAL_CODES:
            self._fail(child, f"left with {exit_words(code)}", code)
        elif not child.was_ever_ready:
            self._fail(child, f"left with {exit_words(code)} while starting", 4)
        elif child.crashes_in_a_row >= self.config.supervisor.max_restarts:
            limit = self.config.supervisor.max_restarts
            self._fail(child, f"left with {exit_words(code)} after {limit} restarts (supervisor.max_restarts)", 4)
        else:
            self._restart_after_crash(child, code)

    def _restart_after_crash(self, child: Child, code: int) -> None:
        backoff_s = min(self.config.supervisor.backoff_s * 2**child.crashes_in_a_row, MAX_BACKOFF_S)
        child.crashes_in_a_row += 1
        child.restarts += 1
        child.state = WAITING
        child.not_before = time.monotonic() + backoff_s
        limit = self.config.supervisor.max_restarts
        self._out.warn(
            f"{child.name} died ({exit_words(code)}); restart {child.crashes_in_a_row} of {limit} in {backoff_s:g} s"
        )
        self._out.block(child.log_tail(5))
        if child.placement.role == DRAFTER:
            self._bring_along(child)

    def _bring_along(self, crashed: Child) -> None:
        """Restart the other drafters with a crashed one, and targets that had finished: packs are to be made again."""
        for child in self.side(DRAFTER):
            if child is not crashed:
                self._restart(child, crashed.not_before)
        for child in self.side(TARGET):
            if child.state == FINISHED:
                child.state, child.not_before = WAITING, crashed.not_before

    def _restart(self, child: Child, not_before: float) -> None:
        child.not_before = not_before
        if child.pid is None:
            child.state = WAITING
            return
        child.restart_asked = True
        child.ask_to_stop(self.config.supervisor.stop_timeout_s)

    def _begin_restarts(self) -> None:
        with self._wanted_lock:
            names, self._wanted_restarts = self._wanted_restarts, []
        for child in self.children:
            if child.name in names:
                self._out.say(f"{child.name} is being restarted on request")
                self._restart(child, 0.0)
        if any(name.startswith(DRAFTER) for name in names):
            for child in self.side(TARGET):
                if child.state == FINISHED:
                    child.state, child.not_before = WAITING, 0.0

    def _fail(self, child: Child, why: str, code: int) -> None:
        child.state = STOPPED
        if self.failure is not None:
            return
        self._out.say(f"{child.name} {why}; its last lines (all: {log_path(child.run_dir, child.name)}):", "red")
        self._out.block(child.log_tail())
        self.failure = ChildFailed(f"{child.name} {why}", code)

    def describe(self) -> list[dict[str, Any]]:
        """Status of every process."""
        return [child.describe() for child in self.children]


def _try(child: Child, command: str) -> None:
    with contextlib.suppress(OpsError):  # it left or hangs: the next tick sees it
        ask(child.socket, command, 1.0)
