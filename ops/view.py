"""Everything the dashboard knows at one moment, gathered read-only: rings, metrics, the launcher's status.

Rings are mapped here and looked into directly, so the picture stays true while either side, or the launcher, is gone.
A ring that was removed and made anew is noticed by its missing name and opened again.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from configs.load import ConfigError, load_config
from configs.schema import Config
from ops import commands
from ops.commander import ring_values
from ops.errors import OpsError
from ops.feed import Listener
from ops.gpu import read_gpus
from ops.metrics_reader import MetricsReader
from ops.paths import DRAFTER, TARGET
from ops.rates import Rates
from ops.run_folder import CONFIG_FILE, read_json
from ops.verdict import WINDOW_S, Verdict, judge, mean, recent_mean
from shm_ring import Ring
from shm_ring.errors import RingError
from shm_ring.names import segments_of_run

STATUS_EVERY_S = 1.0
BUSY_S = 1.0
"""Longest wait for the launcher while there is a word of it: a screen goes on, and hears its keys."""
HISTORY = 240


@dataclass
class RingView:
    """One ring with what can only be seen over time."""

    ring: Ring
    inode: int
    rates: Rates
    occupancies: deque[int] = field(default_factory=lambda: deque(maxlen=HISTORY))

    def look(self, now: float) -> dict[str, Any]:
        """Take a snapshot; add rates per second over the last half minute, and to the occupancy's history."""
        values = ring_values(self.ring.snapshot())
        self.occupancies.append(values["occupancy"])
        return values | self.rates.see(now, values)


class Viewer:
    """Looks at one run again and again. A context manager."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._rings: dict[str, RingView] = {}
        self._listener = Listener(run_dir)
        self._metrics = MetricsReader(run_dir, listener=self._listener)
        self._status: dict[str, Any] = {}
        self._status_at = float("-inf")
        self._verdict = judge(None, None)
        self._remaining_s: float | None = None
        self._paces: dict[tuple[str, int], float | None] = {}
        self._gpus: list[dict[str, Any]] = []
        self._config: Config | None = None
        self._config_of: tuple[int, int] | None = None
        self._plan = read_json(run_dir / "plan.json")
        self._read_config()

    def __enter__(self) -> Viewer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for view in self._rings.values():
            view.ring.close()
        self._rings.clear()
        self._listener.close()

    def look(self, anew: bool = False) -> dict[str, Any]:
        """Return the present picture as plain values; `--json` prints it.

        The launcher's word is asked for once a second; `anew`: now, whenever that was last.
        """
        now = time.monotonic()
        if anew or now - self._status_at >= STATUS_EVERY_S:
            self._refresh_status()
            self._status_at = max(now, time.monotonic())  # a silent launcher is not asked without a pause
            self._open_rings()
            self._metrics.poll()
            self._verdict, self._remaining_s = self.verdict(), self._eta_s()
            self._paces = {key: _pace_s(series) for key, series in self._metrics.series.items()}
        self._metrics.poll()
        status = self._status
        rings = [view.look(now) for view in self._rings.values()]
        return {
            "run": status["run"],
            "run_dir": status["run_dir"],
            "state": status["state"],
            "launcher_pid": status["launcher_pid"],
            "uptime_s": status["uptime_s"],
            "time": round(time.time(), 3),
            "verdict": self._verdict.as_dict(),
            "eta_s": self._remaining_s,
            "occupancy": sum(ring["occupancy"] for ring in rings),
            "rings": rings,
            "processes": [self._process(process) for process in status["processes"]],
            "gpus": self._gpus,
            "hosts": status.get("hosts", []),
        }

    def occupancies(self, name: str) -> list[int]:
        """History of a ring's occupancy, one value per look."""
        return list(self._rings[name].occupancies)

    def verdict(self) -> Verdict:
        """Judge by the last half minute of metrics; of a run that is over, by its last."""
        is_over = not self._status.get("launcher_pid")
        last = max((record["time"] for record in self._metrics.latest.values()), default=0.0)
        since = (last if is_over else time.time()) - WINDOW_S
        starved = [
            recent_mean(s, "starved_pct", since) for (role, _), s in self._metrics.series.items() if role == DRAFTER
        ]
        blocked = [
            recent_mean(s, "blocked_pct", since) for (role, _), s in self._metrics.series.items() if role == TARGET
        ]
        return judge(mean(starved), mean(blocked), is_over)

    def _refresh_status(self) -> None:
        try:
            limit = (BUSY_S,) if self._status else ()
            self._status = commands.status(self.run_dir, *limit)
        except OpsError as error:  # the launcher is stopped or busy; its last word stands
            self._status = self._status or commands.status_from_files(self.run_dir)
            self._status["state"] = str(error)
        self._gpus = read_gpus()
        self._read_config()
        if not self._plan:
            self._plan = read_json(self.run_dir / "plan.json")

    def _read_config(self) -> None:
        """Read config.yaml, anew where a restart or `set` has changed it."""
        path = self.run_dir / CONFIG_FILE
        if (found := _identity(path)) != self._config_of:
            self._config_of = found
            try:
                self._config = load_config(path)
            except ConfigError:
                self._config = None

    def _open_rings(self) -> None:
        names = [name for name in segments_of_run(self.run_dir.name) if not name.endswith(".board")]
        for name, view in list(self._rings.items()):
            if name not in names or _inode(name) != view.inode:
                view.ring.close()
                del self._rings[name]
        seen = {ring["name"]: ring.get("earliest") for ring in self._status.get("rings", [])}
        for name in sorted(names, key=lambda each: (len(each), each)):
            if name not in self._rings:
                try:
                    inode = _inode(name)
                    ring = Ring.open(name, readonly=True, wait_s=0.2)
                    self._rings[name] = RingView(ring, inode, Rates(seen.get(name)))
                except RingError:
                    continue  # being made or removed; the next look finds out

    def _process(self, process: dict[str, Any]) -> dict[str, Any]:
        key = (process["role"], process["rank"])
        record = self._metrics.latest.get(key, {})
        last = {name: value for name, value in record.items() if name not in ("role", "rank", "time")}
        return process | last | {"step_s": self._paces.get(key), "metrics_age_s": _age_s(record)}

    def _eta_s(self) -> float | None:
        """Seconds until all packs are trained or max_steps is reached at the present pace, or until max_seconds.

        None if unknown. Packs, not steps, are counted down: how many a step takes depends on the number of drafters.
        """
        lead = self._metrics.lead(DRAFTER)
        series = self._metrics.series.get(lead)
        if not series or self._config is None or not self._status.get("launcher_pid"):
            return None
        training, last, limits = self._config.training, series[-1], []
        for name, goal in (("step", training.max_steps), ("packs_trained", self._plan.get("num_packs"))):
            pace_s = _pace_s(series, name)
            if goal and pace_s is not None:
                limits.append((goal - last[name]) * pace_s)
        if training.max_seconds and isinstance(last.get("train_seconds"), (int, float)):
            limits.append(training.max_seconds - last["train_seconds"])
        return round(max(0.0, min(limits)), 1) if limits else None


def _pace_s(series: Sequence[dict[str, Any]], name: str = "step") -> float | None:
    """Seconds a step (or another count) over the last half minute of metrics; None while nothing moves."""
    known = [record for record in series if isinstance(record.get(name), (int, float))]
    recent = [record for record in known if record["time"] >= known[-1]["time"] - WINDOW_S]
    if not recent or recent[-1][name] <= recent[0][name]:
        return None
    return round(float(recent[-1]["time"] - recent[0]["time"]) / float(recent[-1][name] - recent[0][name]), 4)


def _inode(name: str) -> int:
    try:
        return os.stat(f"/dev/shm{name}").st_ino
    except FileNotFoundError:
        return 0


def _age_s(record: dict[str, Any]) -> float | None:
    return round(max(0.0, time.time() - record["time"]), 1) if record else None


def _identity(path: Path) -> tuple[int, int] | None:
    """What tells a file from the one that replaced it."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns
