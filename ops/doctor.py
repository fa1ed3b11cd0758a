"""Where does the time of a run go? Read from its metrics, alone or against another run's.

Each line of metrics has spent_s: the seconds of each phase of its process since the line before. Their sums say where
each second of a side went, and divided by the tokens what a token costs in each phase, which is what two runs are
compared by: a share of time grows already when another one shrinks. Files without spent_s are read by their medians of
PHASE_pct.
"""

from __future__ import annotations

import contextlib
import json
from array import array
from dataclasses import dataclass, field
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
_WAITS = {TARGET: "blocked", DRAFTER: "starved"}
_PHASES = {
    TARGET: ("forward", "copy", "data", "other", "blocked"),
    DRAFTER: ("step", "staging", "checkpoint", "evaluation", "peers", "other", "starved"),
}
_SHOWN_PCT = 0.5


@dataclass(frozen=True)
class Side:
    """One side over its lines: rate summed over processes, other numbers averaged over them, seconds of all."""

    role: str
    num_processes: int
    num_lines: int
    tokens_per_s: float | None
    values: dict[str, float]
    spent_s: dict[str, float] = field(default_factory=dict)

    @property
    def pct(self) -> dict[str, float]:
        """Share of the time in each phase that is known, in percent."""
        phases = {phase: self.values.get(f"{phase}_pct") for phase in _PHASES[self.role]}
        return {phase: value for phase, value in phases.items() if value is not None}

    @property
    def cost_s(self) -> dict[str, float]:
        """Seconds of one device per million tokens in each phase; empty without a rate."""
        rate = self.tokens_per_s
        return {p: share / 100 * self.num_processes / rate * 1e6 for p, share in self.pct.items()} if rate else {}


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
        """A number of one side."""
        side = self.sides.get(role)
        return side.values.get(name) if side else None


def read_report(path: Path) -> Report:
    """Read a run's folder or a metrics file; raises RunMissing if there are no metrics."""
    file = path / METRICS_FILE if path.is_dir() else path
    processes: dict[str, dict[int, _Numbers]] = {}
    try:
        with file.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                    record = json.loads(line)
                    processes.setdefault(record["role"], {}).setdefault(record["rank"], _Numbers()).add(record)
    except OSError as error:
        raise RunMissing(f"{file}: no metrics ({error.strerror}); give a run's folder or its metrics.jsonl") from None
    sides = {role: _side(role, list(ranks.values())) for role, ranks in processes.items() if role in _PHASES}
    if not sides:
        raise RunMissing(f"{file}: holds no lines of metrics; the run has not trained yet")
    return Report(str(path), sides)


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
    """Word what became slower than in another run: the cause in one line, then each side by phase."""
    lines = [text for role in _by_importance(now) for text in _compare_side(role, now, before)]
    if not lines:
        return [f"no change of more than {NOTABLE:.0%} against {before.name}"]
    return [*_cause(now, before), *lines]


def _by_importance(report: Report) -> tuple[str, str]:
    return (TARGET, DRAFTER) if report.verdict.kind == "target-bound" else (DRAFTER, TARGET)


def _cause(now: Report, before: Report) -> list[str]:
    """Name the phase that costs most more than before, on the side that holds the run up; nothing if nothing was lost.

    What comes out of a run is what its drafters train on.
    """
    new, old = now.sides.get(DRAFTER), before.sides.get(DRAFTER)
    if new is None or old is None or not new.tokens_per_s or not old.tokens_per_s:
        return []
    lost = 1 - new.tokens_per_s / old.tokens_per_s
    if lost < NOTABLE:
        return []
    role = _by_importance(now)[0]
    side, other = now.sides.get(role), before.sides.get(role)
    text = f"the run lost {lost:.0%}: {old.tokens_per_s:,.0f} -> {new.tokens_per_s:,.0f} tokens/s"
    if side is None or other is None:
        return [text]
    if side.num_processes < other.num_processes:
        return [f"{text}, and it has {side.num_processes} {role} process(es) where it had {other.num_processes}"]
    grown = {phase: side.cost_s[phase] - cost for phase, cost in other.cost_s.items() if phase in side.cost_s}
    own = [phase for phase in grown if phase != _WAITS[role]]
    worst = max(own, key=lambda phase: grown[phase], default=None)
    if worst is None or grown[worst] <= 0.02 * sum(other.cost_s.values()):
        return [text]
    was, is_now = other.cost_s[worst], side.cost_s[worst]
    return [f"{text}, because of the {role}'s {worst}: {was:,.3g} -> {is_now:,.3g} s per million tokens"]


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
    wait = f"{_WAITS[role]}_pct"
    waited = (new.values.get(wait, 0.0), old.values.get(wait, 0.0))
    if change < 0 and waited[0] - waited[1] >= 5:
        other = DRAFTER if role == TARGET else TARGET
        head += f"; it waits for the {other} {waited[1]:.0f} % -> {waited[0]:.0f} % of its time, so look there first"
    elif change < 0:
        head += "; it does not wait more than before, so its own work became slower"
    return [head, *(f"  {text}" for text in _changed_phases(new, old))]


def _changed_phases(new: Side, old: Side) -> list[str]:
    """Word the phases whose cost changed, the largest change first."""
    moved = []
    whole = sum(old.cost_s.values())
    for phase in new.cost_s.keys() & old.cost_s.keys():
        by = new.cost_s[phase] - old.cost_s[phase]
        if abs(by) >= 0.02 * whole:
            cost = f"{old.cost_s[phase]:,.3g} -> {new.cost_s[phase]:,.3g} s per million tokens"
            share = f"{old.pct[phase]:.0f} % -> {new.pct[phase]:.0f} % of the time"
            moved.append((abs(by), f"{phase}: {cost} ({share})"))
    return [text for _, text in sorted(moved, reverse=True)]


class _Numbers:
    """The numbers in the lines of one process: of a file of gigabytes nothing else is kept. Warm-up counts for nothing.

    Where there are no lines but those of the warm-up, they are all there is.
    """

    def __init__(self) -> None:
        self.num_lines = 0
        self.numbers: dict[str, array[float]] = {}
        self.spent_s: dict[str, float] = {}

    def add(self, record: dict[str, Any]) -> None:
        """Take in one line."""
        if self.num_lines == WARM_UP_LINES:
            self.numbers, self.spent_s = {}, {}
        self.num_lines += 1
        for name, value in record.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool) and name not in ("time", "rank", "step"):
                self.numbers.setdefault(name, array("d")).append(value)
        spent = record.get("spent_s")
        for phase, seconds in spent.items() if isinstance(spent, dict) else ():
            self.spent_s[phase] = self.spent_s.get(phase, 0.0) + float(seconds or 0.0)


def _side(role: str, processes: list[_Numbers]) -> Side:
    medians: dict[str, list[float]] = {}
    spent_s: dict[str, float] = {}
    for process in processes:
        for name, numbers in process.numbers.items():
            medians.setdefault(name, []).append(median(numbers))
        for phase, seconds in process.spent_s.items():
            spent_s[phase] = spent_s.get(phase, 0.0) + seconds
    rates = medians.get("tokens_per_s")
    values = {name: sum(numbers) / len(numbers) for name, numbers in medians.items()}
    whole_s = sum(spent_s.values())
    if whole_s > 0:
        values |= {f"{phase}_pct": 100 * spent_s.get(phase, 0.0) / whole_s for phase in _PHASES[role]}
    num_lines = sum(process.num_lines for process in processes)
    return Side(role, len(processes), num_lines, sum(rates) if rates else None, values, spent_s)


def _shares(side: Side) -> list[str]:
    wait = _WAITS[side.role]
    shown = [phase for phase, share in side.pct.items() if share >= _SHOWN_PCT or phase == wait]
    texts = []
    for phase in sorted(shown, key=lambda each: -side.pct[each]):
        seconds = f" ({side.spent_s.get(phase, 0.0):,.1f} s)" if side.spent_s else ""
        texts.append(f"{phase}: {side.pct[phase]:.0f} % of the time{seconds}")
    rest = 100 - sum(side.pct[phase] for phase in shown)
    return texts + ([f"everything else: {rest:.0f} % of the time"] if shown and rest >= _SHOWN_PCT else [])
