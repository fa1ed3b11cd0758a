"""The launcher's control socket: what other terminals may ask of a run.

Runs in its own thread. What concerns living processes is passed on to them and their acknowledgements make the reply;
restarts and the stop are left to the main thread, which alone starts processes, and acknowledged as accepted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from configs.cores import usable_cores
from configs.load import ConfigError
from configs.schema import Config
from ops.changes import NewSettings, change_live, change_on_restart, put_back, values_of
from ops.child import STARTING, WAITING, Child
from ops.devices import threads_of
from ops.errors import NoAnswer, NoResource, NotRunning, OpsError, Refused, file_fault
from ops.hosts import Hosts
from ops.messages import Request, Server, ask
from ops.paths import DRAFTER, LAUNCHER, TARGET, runtime_dir, socket_path
from ops.rates import Rates
from ops.supervisor import Supervisor
from shm_ring import Ring, Snapshot

_CHILD_ACK_S = 3.0


class Commander:
    """Answers status and commands for one run, from before preparation until the end."""

    def __init__(
        self, config: Config, run_dir: Path, launcher_pid: int, on_stop: Callable[[], None], hosts: Hosts
    ) -> None:
        self.config = config
        self.run_dir = run_dir
        self.state = "preparing"
        self._pid = launcher_pid
        self._on_stop = on_stop
        self._hosts = hosts
        self._began = time.time()
        self._supervisor: Supervisor | None = None
        self._rings: Sequence[Ring] = ()
        self._rates: dict[str, Rates] = {}
        self._rings_lock = threading.Lock()
        self._config_lock = threading.Lock()
        self._num_restarts = 0
        runtime_dir(run_dir, create=True)
        self._server = Server(socket_path(run_dir, LAUNCHER), self._handle)

    def start(self) -> None:
        """Serve."""
        self._server.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.close()

    def watch(self, supervisor: Supervisor | None, rings: Sequence[Ring]) -> None:
        """Take the processes and rings to speak of; with () the rings are no longer touched after the return."""
        with self._rings_lock:
            self._supervisor = supervisor
            self._rings = rings

    def _ring_values(self) -> list[dict[str, Any]]:
        """Look into every ring, and back at what was seen of it before."""
        found = []
        with self._rings_lock:
            for values in [ring_values(ring.snapshot()) for ring in self._rings]:
                rates = self._rates.setdefault(values["name"], Rates())
                found.append(values | rates.see(time.monotonic(), values) | {"earliest": rates.earliest})
        return found

    def snapshots(self) -> list[Snapshot]:
        """Look into every ring."""
        with self._rings_lock:
            return [ring.snapshot() for ring in self._rings]

    def status(self) -> dict[str, Any]:
        """Everything there is to say about the run."""
        supervisor = self._supervisor
        rings = self._ring_values()
        return {
            "run": self.run_dir.name,
            "run_dir": str(self.run_dir),
            "state": "paused" if self.state == "running" and supervisor and supervisor.paused else self.state,
            "launcher_pid": self._pid,
            "uptime_s": round(time.time() - self._began, 1),
            "occupancy": sum(ring["occupancy"] for ring in rings),
            "processes": [each | _packs(each, rings) for each in supervisor.describe()] if supervisor else [],
            "rings": rings,
            "hosts": self._hosts.others(),
            "refused": vars(supervisor.refusal) if supervisor and supervisor.refusal else None,
        }

    def _handle(self, request: Request) -> dict[str, Any]:
        if request.command == "status":
            return self.status()
        if request.command == "stop":
            self._on_stop()
            return {"accepted": True}
        supervisor = self._supervisor
        if supervisor is None or self.state not in ("starting", "running"):
            raise Refused(f"run {self.run_dir.name!r} is {self.state}: '{request.command}' needs its processes running")
        try:
            return self._command(supervisor, request)
        except ConfigError as error:
            raise Refused("\n".join(error.problems)) from None
        except OSError as error:  # config.yaml cannot be written: nothing is changed
            raise NoResource(file_fault(error) or str(error)) from None

    def _command(self, supervisor: Supervisor, request: Request) -> dict[str, Any]:
        overrides = [str(each) for each in request.args.get("set", [])]
        if request.command == "restart":
            return self._restart(supervisor, request.args, overrides)
        if request.command in ("pause", "resume"):
            supervisor.paused = request.command == "pause"
            return _pass_on(supervisor.children, request.command)
        if request.command == "checkpoint":
            return _pass_on(supervisor.side(DRAFTER), "checkpoint")
        if request.command == "set":
            with self._config_lock:
                self.config, values = change_live(self.run_dir, self.config, overrides)
            return _pass_on(supervisor.children, "set", **values) | {"settings": values}
        raise Refused(f"the launcher does not know the command {request.command!r}")

    def _restart(self, supervisor: Supervisor, args: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
        role, rank = str(args.get("role")), args.get("rank")
        if role not in (TARGET, DRAFTER):
            raise Refused(f"restart {role!r}: expected target, target:K or drafter")
        if role == TARGET and rank is not None and rank not in [c.placement.rank for c in supervisor.side(TARGET)]:
            here = ", ".join(str(child.placement.rank) for child in supervisor.side(TARGET))
            raise Refused(f"restart target:{rank}: the targets of this host are {here}")
        if overrides and self._hosts.others():
            raise Refused(
                "restart with --set: the hosts' configurations would differ; stop the run, start all hosts anew"
            )
        self._num_restarts += 1
        before = {child.name: child.pid for child in supervisor.side(role)}
        with self._config_lock:
            settings = self._new_settings(supervisor, role, rank, overrides) if overrides else None
            accepted = supervisor.want_restart(role, rank, settings)
        return {"accepted": [child.name for child in accepted], "pids": before, "number": self._num_restarts}

    def _new_settings(self, supervisor: Supervisor, role: str, rank: int | None, overrides: list[str]) -> NewSettings:
        """Change config.yaml for a restart, and say how that is undone."""
        old = self.config
        self.config = change_on_restart(self.run_dir, old, overrides, role)
        self._set_threads(supervisor, role)

        def undo(values: dict[str, Any]) -> None:
            with self._config_lock:
                self.config = put_back(self.run_dir, self.config, values)
                self._set_threads(supervisor, role)

        names = frozenset(child.name for child in supervisor.of_restart(role, rank))
        before, now = values_of(old, overrides), values_of(self.config, overrides)
        return NewSettings((self._num_restarts,), names, before, now, undo)

    def _set_threads(self, supervisor: Supervisor, role: str) -> None:
        """Give a side its number of threads: not read from config.yaml, but from the environment of the next life."""
        for child in supervisor.side(role):
            child.placement = replace(child.placement, threads=threads_of(self.config, role, usable_cores()))


def _packs(process: dict[str, Any], rings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Packs of a target over all its lives in this launch (its `step` counts the present one): those of its ring."""
    mine = [ring["published"] for ring in rings if ring["ring_index"] == process["rank"]]
    return {"packs": mine[0]} if mine and process["role"] == TARGET else {}


def for_others(status: dict[str, Any]) -> dict[str, Any]:
    """What other hosts' dashboards need of a status: no slot maps, no hosts."""
    rings = [
        {key: ring[key] for key in ring if key not in ("slots", "attached", "earliest")} for ring in status["rings"]
    ]
    return {key: value for key, value in status.items() if key != "hosts"} | {"rings": rings}


def _pass_on(children: Sequence[Child], command: str, **args: Any) -> dict[str, Any]:
    """Send a command to the processes; returns who acknowledged, who follows later, and who did not, with the reason.

    One that is just starting, or about to, cannot hear it: it reads settings from config.yaml after that, and is paused
    or resumed by the supervisor when it is ready. A checkpoint is not asked for later.
    """

    def tell(child: Child) -> str | None:
        try:
            if child.pid is None:
                raise NotRunning(f"{child.name} is {child.state}")
            ask(child.socket, command, _CHILD_ACK_S, **args)
        except NotRunning as error:
            return f"{error}; ask again when it is ready" if command == "checkpoint" else None
        except NoAnswer as error:
            is_loading = child.state == STARTING and command in ("pause", "resume")
            return None if is_loading else str(error)
        except OpsError as error:
            return str(error)
        return ""

    concerned = [child for child in children if child.pid is not None or child.state == WAITING]
    with ThreadPoolExecutor(max(1, len(concerned))) as pool:  # at once: meanwhile nobody is answered here
        faults = dict(zip((child.name for child in concerned), pool.map(tell, concerned), strict=True))
    return {
        "done": [name for name, fault in faults.items() if fault == ""],
        "later": [name for name, fault in faults.items() if fault is None],
        "failed": {name: fault for name, fault in faults.items() if fault},
    }


def ring_values(snapshot: Snapshot) -> dict[str, Any]:
    """Turn a snapshot into what `status` and `dashboard --json` show of a ring."""
    ends = [snapshot.producer, *snapshot.consumers]
    return {
        "name": snapshot.name,
        "ring_index": snapshot.ring_index,
        "num_slots": snapshot.num_slots,
        "occupancy": snapshot.occupancy,
        "free": snapshot.free,
        "ready": snapshot.ready,
        "held": snapshot.held,
        "slots": [{"state": slot.state, "consumer": slot.consumer, "seq": slot.seq} for slot in snapshot.slots],
        "published": snapshot.published,
        "released": snapshot.released,
        "rejected": snapshot.rejected,
        "published_bytes": snapshot.published_bytes,
        "end_of_data": snapshot.end_of_data,
        "blocked_s": round(snapshot.blocked_s, 3),
        "starved_s": round(snapshot.starved_s, 3),
        "attached": [
            {
                "role": end.role if end.consumer_id is None else f"consumer {end.consumer_id}",
                "pid": end.pid,
                "state": "stopped" if end.stopped else "running" if end.alive else "gone",
                "heartbeat_age_s": None if end.heartbeat_age_s is None else round(end.heartbeat_age_s, 3),
                "attaches": end.attaches,
            }
            for end in ends
            if end.attaches
        ],
    }
