"""Where does the time of a run go? Read from its metrics, alone or against another run's.

Shares of time come from the metrics: starved_pct and blocked_pct always, and PHASE_pct or PHASE_s (seconds a step) of
every other phase that a side reports: forward, copy, staging, step, checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ops.errors import RunMissing
from ops.paths import DRAFTER, TARGET
from ops.telemetry import METRICS_FILE
from ops.verdict import Verdict, judge

WARM_UP_LINES = 2
NOTABLE = 0.1
"""Changes below a tenth are noise on a shared machine and are not called a regression."""
_PHASES = ("forward", "copy", "blocked", "starved", "staging", "step", "checkpoint")


@dataclass(frozen=True)
class Side:
    """The medians of one side over its lines: rate summed over processes, shares and durations averaged."""

    role: str
    num_processes: int
    num_lines: int
    tokens_per_s: float | None
    values: dict[str, float]


@dataclass(frozen=True)
class Report:
    """One run's measured sides and the verdict."""

    name: str
    sides: dict[str, Side]

    @property
    def verdict(self) -> Verdict:
        """Which side holds the run up."""
        return judge(self.value(DRAFTER, "starved_pct"), self.value(TARGET, "blocked_pct"))

    def value(self, role: str, name: str) -> float | None:
        """A median of one side."""
        side = self.sides.get(role)
        return side.values.get(name) if side else None


def read_report(path: Path) -> Report:
    """Read a run's folder or a metrics file; raises RunMissing if there are no metrics."""
    file = path / METRICS_FILE if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise RunMissing(f"{file}: no metrics ({error.strerror}); give a run's folder or its metrics.jsonl") from None
    lines: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for line in text.splitlines():
        try:
            record = json.loads(line)
            lines.setdefault(record["role"], {}).setdefault(record["rank"], []).append(record)
        except (ValueError, KeyError, TypeError):
            continue
    if not lines:
        raise RunMissing(f"{file}: holds no lines of metrics; the run has not trained yet")
    return Report(str(path), {role: _side(role, ranks) for role, ranks in lines.items()})


def describe(report: Report) -> list[str]:
    """Word one run: the verdict, then where each second of each side went."""
    lines = [report.verdict.line]
    for role in (TARGET, DRAFTER):
        side = report.sides.get(role)
        if side is None:
            lines.append(f"{role}: no metrics")
            continue
        rate = "rate unknown" if side.tokens_per_s is None else f"{side.tokens_per_s:,.0f} tokens/s"
        lines.append(f"{role}: {rate}, {side.num_processes} process(es), {side.num_lines} lines of metrics")
        lines += [f"  {text}" for text in _shares(side)]
    return lines


def compare(now: Report, before: Report) -> list[str]:
    """Word what became slower than in another run, the side that holds the run up first."""
    lines = []
    for role in _by_importance(now):
        lines += _compare_side(role, now, before)
    return lines or [f"no change of more than {NOTABLE:.0%} against {before.name}"]


def _by_importance(report: Report) -> Sequence[str]:
    return (TARGET, DRAFTER) if report.verdict.kind == "target-bound" else (DRAFTER, TARGET)


def _compare_side(role: str, now: Report, before: Report) -> list[str]:
    new, old = now.sides.get(role), before.sides.get(role)
    if new is None or old is None or not new.tokens_per_s or not old.tokens_per_s:
        return []
    change = new.tokens_per_s / old.tokens_per_s - 1
    if abs(change) < NOTABLE:
        return []
    verb = "lost" if change < 0 else "gained"
    rates = f"{old.tokens_per_s:,.0f} -> {new.tokens_per_s:,.0f} tokens/s"
    head = f"the {role} {verb} {abs(change):.0%} of its throughput: {rates}"
    wait = "blocked_pct" if role == TARGET else "starved_pct"
    waited = (new.values.get(wait, 0.0), old.values.get(wait, 0.0))
    grown = max(0.0, waited[0] - waited[1])
    if change < 0 and grown >= 5:
        other = DRAFTER if role == TARGET else TARGET
        head += f"; it waits for the {other} {waited[1]:.0f} % -> {waited[0]:.0f} % of its time, so look there first"
    elif change < 0:
        head += "; it does not wait more than before, so its own work became slower"
    return [head, *(f"  {text}" for text in _changed_phases(new, old))]


def _changed_phases(new: Side, old: Side) -> list[str]:
    """Name the phases whose share or duration moved most."""
    moved = []
    for name in sorted(new.values.keys() & old.values.keys()):
        if not _is_phase(name):
            continue
        a, b = old.values[name], new.values[name]
        by = abs(b - a) if name.endswith("_pct") else 100 * abs(b - a) / max(abs(a), 1e-9)
        if by >= 5:
            unit = " %" if name.endswith("_pct") else " s"
            moved.append((by, f"{_phase(name)}: {a:.3g}{unit} -> {b:.3g}{unit}"))
    return [text for _, text in sorted(moved, reverse=True)]


def _side(role: str, ranks: dict[int, list[dict[str, Any]]]) -> Side:
    medians: dict[str, list[float]] = {}
    for records in ranks.values():
        kept = records[WARM_UP_LINES:] or records
        for name in {key for record in kept for key in record}:
            numbers = [r[name] for r in kept if isinstance(r.get(name), (int, float)) and not isinstance(r[name], bool)]
            if numbers and name not in ("time", "rank", "step"):
                medians.setdefault(name, []).append(median(numbers))
    rates = medians.get("tokens_per_s")
    values = {name: sum(numbers) / len(numbers) for name, numbers in medians.items()}
    return Side(role, len(ranks), sum(map(len, ranks.values())), sum(rates) if rates else None, values)


def _shares(side: Side) -> list[str]:
    names = [f"{phase}_pct" for phase in _PHASES if f"{phase}_pct" in side.values]
    texts = [f"{_phase(name)}: {side.values[name]:.0f} % of the time" for name in names]
    known = sum(side.values[name] for name in names)
    if names and known < 99.5:
        texts.append(f"everything else: {100 - known:.0f} % of the time")
    durations = [name for name in side.values if name.endswith("_s") and _is_phase(name)]
    return texts + [f"{_phase(name)}: {side.values[name]:.4g} s" for name in sorted(durations)]


def _is_phase(name: str) -> bool:
    return _phase(name) in _PHASES and name.endswith(("_pct", "_s"))


def _phase(name: str) -> str:
    return name.removesuffix("_pct").removesuffix("_s").replace("_", " ")
