"""What the subcommands of launch.py do in another terminal: find the run, ask its launcher, say what came of it."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ops.child import FINISHED
from ops.errors import NoAnswer, NotRunning, Refused
from ops.locks import holder_pid
from ops.messages import ask
from ops.metrics_reader import MetricsReader
from ops.paths import DRAFTER, LAUNCHER, TARGET, runtime_dirs, socket_path
from ops.run_folder import find_run, last_lines, launcher_pid, read_json
from shm_ring import Ring
from shm_ring.names import segments_of_run

_POLL_S = 0.1
_STOP_LIMIT_S = 60.0
_STARTING_S = 15.0


def command(run_dir: Path, name: str, timeout_s: float = 10.0, **args: Any) -> dict[str, Any]:
    """Send a command to the run's launcher, waiting a moment for one that is just starting.

    Raises NotRunning that says what state the run is in, NoAnswer, Refused.
    """
    give_up = time.monotonic() + _STARTING_S
    while True:
        pid = launcher_pid(run_dir)
        if not pid:
            raise NotRunning(
                f"run {run_dir.name!r} is not running ({past_state(run_dir)}); '{name}' needs a running one"
            )
        try:
            return ask(socket_path(run_dir, LAUNCHER), name, timeout_s, **args)
        except NotRunning:
            if time.monotonic() > give_up:
                raise NoAnswer(f"the launcher of run {run_dir.name!r} (pid {pid}) has no socket; see its log") from None
        time.sleep(_POLL_S)


def past_state(run_dir: Path) -> str:
    """Word what became of a run that has no launcher: finished, crashed with left-overs, or ended."""
    if read_json(run_dir / "summary.json"):
        return FINISHED
    if segments_of_run(run_dir.name):
        return "its launcher died; 'python launch.py clean' removes what it left, a new launch continues it"
    return "ended before it was finished"


def status(run_dir: Path, timeout_s: float = 5.0) -> dict[str, Any]:
    """Return the run's status: its launcher's answer, or what the files say if there is none. Raises NoAnswer."""
    try:
        return ask(socket_path(run_dir, LAUNCHER), "status", timeout_s)
    except NotRunning:
        return status_from_files(run_dir)


def status_lines(values: dict[str, Any]) -> list[str]:
    """Word a status for people: one line for the run, one per process, one per ring."""
    lines = [f"run {values['run']}: {values['state']}, launcher pid {values['launcher_pid'] or 'none'}"]
    for process in values["processes"]:
        what = ("packs", "{} packs") if process["role"] == TARGET else ("step", "step {}")
        step = "" if process.get(what[0]) is None else f", {what[1].format(process[what[0]])}"
        again = f", {process['restarts']} restarts" if process.get("restarts") else ""
        lines.append(f"  {process['name']}: {process['state']}, pid {process.get('pid') or 'none'}{step}{again}")
    for ring in values["rings"]:
        lines.append(
            f"  ring {ring['ring_index']}: occupancy {ring['occupancy']}/{ring['num_slots']} "
            f"({ring['ready']} READY, {ring['held']} HELD), {ring['published']} published, {ring['released']} released"
        )
    for host in values.get("hosts", []):
        lost = ", silent" if host["lost"] else ""
        lines.append(f"node {host['node']} ({host['host']}{lost}):")
        lines += [f"  {line}" for line in status_lines(host)] if "processes" in host else []
    return lines


def stop(run_dir: Path) -> str:
    """Stop a run and wait until its launcher has left; a run that is not running is no error."""
    try:
        command(run_dir, "stop")
    except NotRunning:
        return f"run {run_dir.name!r} is not running ({past_state(run_dir)})"
    began = time.monotonic()
    while launcher_pid(run_dir):
        if time.monotonic() - began > _STOP_LIMIT_S:
            raise NoAnswer(f"run {run_dir.name!r} was asked to stop, but its launcher is still there; see its log")
        time.sleep(_POLL_S)
    return f"run {run_dir.name!r} stopped after {time.monotonic() - began:.1f} s"


def restart(run_dir: Path, which: str, overrides: Sequence[str], limit_s: float) -> list[str]:
    """Restart one side and wait until it is ready again; returns a line per process. Raises Refused, NoAnswer.

    Refused too, with the process's exit code, where it did not start with the new settings and came back with the old.
    """
    role, colon, rank = which.partition(":")
    if role not in (TARGET, DRAFTER) or (colon and (role != TARGET or not rank.isdigit())):
        raise Refused(f"restart {which!r}: expected drafter, target or target:K")
    began = time.monotonic()
    reply = command(run_dir, "restart", role=role, rank=int(rank) if colon else None, set=list(overrides))
    waiting = {name: reply["pids"].get(name) for name in reply["accepted"]}
    lines, refusal = [], None
    while waiting:
        if time.monotonic() - began > limit_s:
            raise NoAnswer(f"{', '.join(waiting)} not ready again within {limit_s:g} s; see {run_dir}/logs")
        if not launcher_pid(run_dir):
            raise NoAnswer(f"the run ended while {', '.join(waiting)} restarted ({past_state(run_dir)})")
        time.sleep(_POLL_S)
        try:
            values = status(run_dir)
        except NoAnswer:  # a launcher that is busy for a while; `limit_s` ends the wait
            continue
        now = {process["name"]: process for process in values["processes"]}
        refusal = values.get("refused") or refusal
        for name, old in list(waiting.items()):
            process = now.get(name, {"pid": None})
            if process["pid"] not in (None, old) and process["state"] == "running":
                lines.append(
                    f"{name}: pid {old} -> {process['pid']}, ready again after {time.monotonic() - began:.1f} s"
                )
                del waiting[name]
    if refusal is not None and reply["number"] in refusal["numbers"]:
        refused = Refused(refusal["line"])
        refused.exit_code = refusal["exit_code"]
        raise refused
    return lines


def passed_on(reply: dict[str, Any], name: str) -> list[str]:
    """Word who acknowledged a command; raises NoAnswer if a process did not."""
    if reply["failed"]:
        raise NoAnswer("; ".join(f"{who}: {why}" for who, why in reply["failed"].items()))
    if name == "checkpoint" and reply["done"]:  # it comes after the step, and is written in the background
        return [
            f"checkpoint: asked {', '.join(reply['done'])}; 'checkpoint | step=...' in the log says when it is saved"
        ]
    later = [f"{who} when it is ready" for who in reply["later"]]
    return [f"{name}: {', '.join(reply['done'] + later) or 'no process is there to hear it'}"]


def clean() -> list[str]:
    """Remove rings, states and sockets of which no process lives; living ones are listed and left alone."""
    lines = [f"{name}: {what}" for name, what in Ring.clean()]
    for folder in runtime_dirs():
        holders = {path.stem: pid for path in folder.glob("*.lock") if (pid := holder_pid(path))}
        if holders:
            lines.append(f"{folder}: live, held by " + ", ".join(f"{who} pid {pid}" for who, pid in holders.items()))
        else:
            shutil.rmtree(folder, ignore_errors=True)
            lines.append(f"{folder}: removed")
    return lines or ["nothing to clean"]


def as_json(values: dict[str, Any]) -> str:
    """Print a status as one JSON object."""
    return json.dumps(values)


def status_from_files(run_dir: Path) -> dict[str, Any]:
    """Return what the files say about a run without a launcher: its end, and each process's last metrics."""
    pid = launcher_pid(run_dir)
    metrics = MetricsReader(run_dir)
    metrics.poll()
    state = "starting or ending" if pid else past_state(run_dir)
    end = {"pid": None, "state": state if state == FINISHED else "gone"}
    processes = [
        {"name": f"{role}{rank}", "role": role, "rank": rank} | end | _without_identity(record)
        for (role, rank), record in sorted(metrics.latest.items())
    ]
    return {
        "run": run_dir.name,
        "run_dir": str(run_dir.absolute()),
        "state": state,
        "launcher_pid": pid or None,
        "uptime_s": None,
        "occupancy": 0,
        "processes": processes,
        "rings": [],
        "last_lines": last_lines(run_dir / "logs" / f"{LAUNCHER}.log", 3),
    }


def _without_identity(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in ("time", "role", "rank")}


__all__ = ["as_json", "clean", "command", "find_run", "passed_on", "restart", "status", "status_lines", "stop"]
