"""One line per side for the running console: what the target and the drafter do now, from metrics and the rings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ops.metrics_reader import MetricsReader
from ops.paths import DRAFTER, TARGET


def side_lines(
    metrics: MetricsReader, rings: Sequence[dict[str, Any]], processes: Sequence[dict[str, Any]]
) -> list[str]:
    """Return the live lines: step, loss, accepted length, tokens/s, occupancy, starved or blocked share."""
    occupancy = sum(ring["occupancy"] for ring in rings)
    num_slots = sum(ring["num_slots"] for ring in rings)
    filled = f"occupancy {occupancy}/{num_slots}" if rings else ""
    return [
        _join("target ", _states(processes, TARGET), _packs(rings), _rate(metrics, TARGET), filled,
              _share(metrics, TARGET, "blocked_pct", "blocked")),
        _join("drafter", _states(processes, DRAFTER), _step(metrics), _number(metrics, "loss", "loss", 3),
              _number(metrics, "accept_len", "accepted", 2), _rate(metrics, DRAFTER),
              _share(metrics, DRAFTER, "starved_pct", "starved")),
    ]  # fmt: skip


def _join(*parts: str) -> str:
    return " | ".join(filter(None, parts))


def _states(processes: Sequence[dict[str, Any]], role: str) -> str:
    """Name the states of a side's processes: `running`, or `1 running, 1 restarting`."""
    states = [process["state"] for process in processes if process["role"] == role]
    if len(set(states)) == 1:
        return str(states[0])
    return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))


def _packs(rings: Sequence[dict[str, Any]]) -> str:
    return f"{sum(ring['published'] for ring in rings)} packs" if rings else ""


def _step(metrics: MetricsReader) -> str:
    steps = metrics.now(DRAFTER, "step")
    return f"step {max(steps):.0f}" if steps else ""


def _number(metrics: MetricsReader, name: str, shown: str, digits: int) -> str:
    values = metrics.now(DRAFTER, name)
    return f"{shown} {sum(values) / len(values):.{digits}f}" if values else ""


def _rate(metrics: MetricsReader, role: str) -> str:
    values = metrics.now(role, "tokens_per_s")
    return f"{sum(values):,.0f} tokens/s" if values else ""


def _share(metrics: MetricsReader, role: str, name: str, shown: str) -> str:
    values = metrics.now(role, name)
    return f"{shown} {sum(values) / len(values):.0f} %" if values else ""
