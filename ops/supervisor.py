"""Start, watch and restart the processes of a run.

The main thread calls tick() about ten times a second and alone starts processes (their parent-death signal is tied to
the thread that started them). A second thread asks them for their status, so that a silent one holds nobody up.

    restarting -> starting -> running -> finished (code 0 and its work is done)
         ^            |          |
         '-- back-off-+--crash---'      codes 2, 3, 5, a death in the first start, or too many restarts end the run

A side that leaves so while starting with settings that are new to it gets those of before back, and starts with them.

All drafters, of all hosts, live and end together, since they reduce gradients together: one common time is a life
(ops/hosts.py). If one dies the others here are killed at once (they wait for it and cannot save), the life is over for
every host, and the next begins when all drafters are gone everywhere.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.schema import Config
from configs.targets import TARGETS_ENV, Targets
from ops.changes import NewSettings, Refusal, in_words
from ops.child import FINISHED, RUNNING, STARTING, STOPPED, STOPPING, WAITING, Child, exit_words
from ops.devices import Map
from ops.errors import ChildFailed, OpsError
from ops.hosts import Hosts, Life
from ops.messages import ask
from ops.output import Output
from ops.paths import DRAFTER, TARGET, log_path

FINAL_CODES = (2, 3, 5)
MAX_BACKOFF_S = 30.0
STABLE_S = 300.0
RENDEZVOUS_S = 300.0
"""Longest wait of a drafter for the others to have started; that their hosts live is known here."""
PEER_LOST = 4
_WATCH_EVERY_S = 0.5
_WATCH_START_S = 0.1


@dataclass(frozen=True)
class Modules:
    """The programs of a run; tests put others in their place."""

    regenerate: str = "producer.corpus.regenerate"
    prepare: str = "producer.prepare"
    target: str = "producer"
    drafter: str = "consumer"
    evaluation: str = "evaluation.heldout"


class Supervisor:
    """All processes of one run."""

    def __init__(self, config: Config, run_dir: Path, places: Map, modules: Modules, out: Output, hosts: Hosts) -> None:
        self.config = config
        self.paused = False
        self.failure: ChildFailed | None = None
        self.refusal: Refusal | None = None
        """The latest one."""
        self.new_settings: dict[str, NewSettings] = {}
        """By role: those that not all who were restarted for them have become ready with."""
        self.children = [
            Child(place, modules.target if place.role == TARGET else modules.drafter, run_dir)
            for place in places.placements
        ]
        self._out = out
        self._hosts = hosts
        self._life: Life | None = None
        self._life_over = True
        self._stopping = False
        self._closing = threading.Event()
        self._wanted_restarts: list[str] = []
        self._wanted_lock = threading.Lock()
        self._watcher = threading.Thread(target=self._watch, name="watcher", daemon=True)

    def start(self) -> None:
        """Start every process and the watcher."""
        self._follow_life(time.monotonic())
        for child in self.children:
            if self._may_start(child):
                self._spawn(child)
        self._watcher.start()

    def tick(self) -> None:
        """Look at every process once and do what is due; `failure` is set if the run cannot go on."""
        self._begin_restarts()
        now = time.monotonic()
        left = [(child, code) for child in self.children if (code := child.poll()) is not None]
        for child, code in sorted(left, key=lambda each: each[1] == PEER_LOST):  # first who did not leave for another
            self._left(child, code)
        self._follow_life(now)
        for child in self.children:
            if child.state == WAITING and now >= child.not_before and self._may_start(child):
                self._spawn(child)
            elif child.state == STARTING:
                self._look_at_start(child, now)
            elif child.state == STOPPING and not child.killed and now > child.kill_at + self._grace_s(child):
                self._out.warn(f"{child.name} (pid {child.pid}) did not stop in time: killed")
                child.kill()
            elif child.state == RUNNING and child.crashes_in_a_row and now - (child.ready_at or now) > STABLE_S:
                child.crashes_in_a_row = 0
        self._say_warnings()

    def _say_warnings(self) -> None:
        """Say what the processes warn of in their logs, where nobody may look."""
        for child in self.children:
            with contextlib.suppress(OSError):  # a log that somebody moved away
                for text in child.new_warnings():
                    self._out.warn(f"{child.name}: {text}")

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

    def of_restart(self, role: str, rank: int | None = None) -> list[Child]:
        """The processes that a restart of one side, or of one target, concerns."""
        return [child for child in self.side(role) if role == DRAFTER or rank in (None, child.placement.rank)]

    def want_restart(self, role: str, rank: int | None = None, settings: NewSettings | None = None) -> list[Child]:
        """Ask for a restart of one side, or of one target; done by the next tick(). From any thread.

        `settings`: what config.yaml has newly, put back if a process leaves before it is ready with them.
        """
        children = self.of_restart(role, rank)
        with self._wanted_lock:
            if settings is not None:
                self.new_settings[role] = settings.after(self.new_settings.get(role))
            self._wanted_restarts += [child.name for child in children]
        return children

    def stop(self, now: bool = False) -> None:
        """Ask every process to stop, drafters first; with `now`, kill them. None is started from then on."""
        self._stopping = True
        for child in [*self.side(DRAFTER), *self.side(TARGET)]:
            child.restart_asked = False
            if now:
                child.kill()
            else:
                child.ask_to_stop(self.config.supervisor.stop_timeout_s)

    def _grace_s(self, child: Child) -> float:
        """More time to stop for a process that is writing its last checkpoint."""
        return self.config.supervisor.save_timeout_s if child.is_saving else 0.0

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

    def _may_start(self, child: Child) -> bool:
        return not self._stopping and (child.placement.role == TARGET or not self._life_over)

    def _spawn(self, child: Child) -> None:
        again = child.started_at > 0
        child.extra_environment = self._environment(child)
        child.new_settings = self.new_settings.get(child.placement.role)
        try:
            child.spawn()
        except OSError as error:  # no more processes, no log file: what runs is stopped in order
            self._fail(child, f"cannot be started ({error.strerror}: {error.filename or sys.executable})", 5)
            return
        self._out.say(
            f"{child.name} started again, pid {child.pid}" if again else f"{child.placement.line}, pid {child.pid}"
        )

    def _environment(self, child: Child) -> dict[str, str]:
        """What a process must know of the others; for drafters the variables that torchrun would set."""
        fleet = self._hosts.fleet
        values = {TARGETS_ENV: Targets(fleet.first_target, len(self.side(TARGET)), fleet.num_targets).text}
        if child.placement.role == TARGET or self._life is None:
            return values
        here = self.side(DRAFTER)
        values |= {
            "RANK": str(child.placement.rank),
            "WORLD_SIZE": str(fleet.num_drafters),
            "LOCAL_RANK": str(here.index(child)),
            "LOCAL_WORLD_SIZE": str(len(here)),
            "MASTER_ADDR": self._life.address,
            "MASTER_PORT": str(self._life.port),
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "DFLASH_RENDEZVOUS_S": str(RENDEZVOUS_S),
        }
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            if name not in os.environ and self._life.interface:
                values[name] = self._life.interface
        return values

    def _follow_life(self, now: float) -> None:
        """End the drafters' life here when it is over elsewhere; begin the next when all are gone everywhere."""
        drafters = self.side(DRAFTER)
        number = self._life.number if self._life else 0
        if not self._life_over and self._hosts.is_over(number) and not self.finished:
            self._out.warn("another host ended the drafters' life: they are restarted here too")
            self._end_life(now)
        idle = all(child.pid is None and now >= child.not_before for child in drafters)
        if not self._life_over or not idle or not any(child.state == WAITING for child in drafters):
            return
        self._hosts.report(number, over=True, down=True)
        life = self._hosts.life()
        if life is not None and life.number > number:
            self._life, self._life_over = life, False
            self._hosts.report(life.number, over=False, down=False)

    def _end_life(self, not_before: float, but: Child | None = None) -> None:
        """Kill the drafters here (but one that is gone), to be started again in the next life."""
        self._life_over = True
        for child in self.side(DRAFTER):
            if child is but:
                continue
            child.not_before = not_before
            if child.pid is None:
                child.state = WAITING
            else:
                child.restart_asked = True
                child.kill()

    def _watch(self) -> None:
        while not self._closing.is_set():
            for child in self.children:
                child.refresh()
                self._settle(child)
            starting = any(child.state == STARTING for child in self.children)
            self._closing.wait(_WATCH_START_S if starting else _WATCH_EVERY_S)

    def _settle(self, child: Child) -> None:
        """Pause or resume a process that was too busy to hear of it; `paused` is what was asked for last."""
        said = child.reply
        if child.state == RUNNING and said.get("pid") == child.pid and said.get("paused", self.paused) != self.paused:
            _try(child, "pause" if self.paused else "resume")

    def _look_at_start(self, child: Child, now: float) -> None:
        if child.reports_ready:
            child.state = RUNNING
            child.ready_at = now
            child.got_ready = child.was_ever_ready = True
            self._keep_settings(child.placement.role)
            self._out.say(f"{child.name} is ready after {now - child.started_at:.1f} s")
            if was_paused := self.paused:
                _try(child, "pause")
            if was_paused and not self.paused:  # all were resumed meanwhile, this one perhaps before it was paused
                _try(child, "resume")
        elif now - child.started_at > self.config.supervisor.ready_timeout_s:
            limit = self.config.supervisor.ready_timeout_s
            self._fail(child, f"not ready within {limit:g} s (supervisor.ready_timeout_s)", 4)
            child.kill()

    def _left(self, child: Child, code: int) -> None:
        """Decide what becomes of a process that has left."""
        together = child.placement.role == DRAFTER and self._hosts.fleet.num_drafters > 1
        if child.restart_asked and code not in FINAL_CODES:
            child.state = WAITING
        elif (child.state == STOPPING and not child.restart_asked) or self.failure is not None:
            child.state = STOPPED
        elif child.new_settings and not child.got_ready and code > 0 and code != PEER_LOST:
            self._put_back(child, child.new_settings, code)
        elif code == 0 and child.work_is_done:
            child.state = FINISHED
            self._out.say(f"{child.name} has finished")
        elif code in FINAL_CODES:
            self._fail(child, f"left with {exit_words(code)}", code)
        elif code == 0 and together:  # one of them was asked to stop, on some host: all have saved and left
            child.state, child.not_before = WAITING, time.monotonic() + self.config.supervisor.backoff_s
            self._life_over = True
        elif not (child.was_ever_ready or self._killed_beside_a_ready_peer(child, code)):
            self._fail(child, f"left with {exit_words(code)} while starting", 4)
        elif child.crashes_in_a_row >= self.config.supervisor.max_restarts:
            limit = self.config.supervisor.max_restarts
            self._fail(child, f"left with {exit_words(code)} after {limit} restarts (supervisor.max_restarts)", 4)
        else:
            self._restart_after_crash(child, code)

    def _keep_settings(self, role: str) -> None:
        """Once all who were restarted for new settings are ready with them, these are settings like others."""
        with self._wanted_lock:
            new = self.new_settings.get(role)
            if new and all(c.new_settings is new and c.got_ready for c in self.side(role) if c.name in new.names):
                del self.new_settings[role]
                for child in self.side(role):
                    child.new_settings = None

    def _put_back(self, child: Child, refused: NewSettings, code: int) -> None:
        """Start it again, with the settings of before where nobody has put them back or changed them again already."""
        child.state, child.not_before = WAITING, time.monotonic()
        role = child.placement.role
        with self._wanted_lock:
            if self.new_settings.get(role) is not refused:
                return
            del self.new_settings[role]
        why = (child.log_tail(1) or ["its log does not say why"])[0].strip()
        line = f"{child.name} refused {in_words(refused.now)} ({exit_words(code)}): {why}"
        try:
            refused.undo(refused.before)
        except OSError as error:
            self._fail(child, f"left with {exit_words(code)}, and config.yaml cannot be put back ({error})", code)
            return
        line += f"; the run goes on with {in_words(refused.before)}"
        self.refusal = Refusal(refused.numbers, line, code if code in FINAL_CODES else 4)
        self._out.warn(line)
        if role == DRAFTER:
            self._bring_along(child)
            return
        for other in self.side(role):
            if other is not child and other.new_settings is refused:
                self._restart(other, 0.0)

    def _killed_beside_a_ready_peer(self, child: Child, code: int) -> bool:
        """Whether a signal ended it while others show that the same program does start: no reason to end the run."""
        return code < 0 and any(peer.was_ever_ready for peer in self.side(child.placement.role))

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
        self._end_life(crashed.not_before, crashed)
        if self._life is not None:
            self._hosts.report(self._life.number, over=True, down=False)
        for child in self.side(TARGET):
            if child.state == FINISHED:
                child.state, child.not_before = WAITING, crashed.not_before

    def _restart(self, child: Child, not_before: float) -> None:
        child.not_before = not_before
        if child.placement.role == DRAFTER:
            self._life_over = True
        if child.pid is None:
            child.state = WAITING
            return
        child.restart_asked = True
        child.ask_to_stop(self.config.supervisor.stop_timeout_s, restart=True)

    def _begin_restarts(self) -> None:
        with self._wanted_lock:
            names, self._wanted_restarts = self._wanted_restarts, []
        if self._stopping:  # a restart that was asked for in the moment of the stop
            return
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
        self._out.block(child.log_tail() or [_no_words(child)])
        self.failure = ChildFailed(f"{child.name} {why}", code)

    def describe(self) -> list[dict[str, Any]]:
        """Status of every process."""
        return [child.describe() for child in self.children]


def _no_words(child: Child) -> str:
    """Say that a life has left no line, and why that may be: what a full disk does not take is lost."""
    try:
        return f"none; {shutil.disk_usage(child.run_dir).free / 1e6:,.1f} MB are free on the disk of {child.run_dir}"
    except OSError as error:
        return f"none; {child.run_dir} cannot be looked into ({error.strerror})"


def _try(child: Child, command: str) -> None:
    with contextlib.suppress(OpsError):  # it left or hangs: the next tick sees it
        ask(child.socket, command, 1.0)
