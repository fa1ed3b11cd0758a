"""Which side holds the run up, by the two shares of time spent waiting, and what to change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

WAIT_PCT = 10.0
"""Below this share of waiting a side counts as busy."""
WINDOW_S = 30.0


@dataclass(frozen=True)
class Verdict:
    """`kind` is target-bound, drafter-bound, balanced or unknown; `advice` says what to change."""

    kind: str
    starved_pct: float | None
    blocked_pct: float | None
    reason: str
    advice: str

    @property
    def line(self) -> str:
        """One line for people."""
        return f"{self.kind}: {self.reason}{'. ' if self.advice else ''}{self.advice}"

    def as_dict(self) -> dict[str, Any]:
        """The fields and the line, for JSON."""
        return asdict(self) | {"line": self.line}


def judge(starved_pct: float | None, blocked_pct: float | None, is_over: bool = False) -> Verdict:
    """Judge by the drafters' mean starved share and the targets' mean blocked share, in percent of time.

    A run that is over gets no advice.
    """
    if starved_pct is None or blocked_pct is None:
        return Verdict("unknown", starved_pct, blocked_pct, "no metrics of both sides yet", "")
    when = "the drafter was" if is_over else "the drafter is"
    both = f"{when} starved {starved_pct:.0f} % of its time, the target blocked {blocked_pct:.0f} %"
    kind, advice = _kind(starved_pct, blocked_pct)
    return Verdict(kind, starved_pct, blocked_pct, both, "" if is_over else advice)


def _kind(starved_pct: float, blocked_pct: float) -> tuple[str, str]:
    """Kind and advice."""
    if starved_pct < WAIT_PCT and blocked_pct < WAIT_PCT:
        return "balanced", ""
    if starved_pct >= WAIT_PCT and blocked_pct >= WAIT_PCT:
        return "balanced", "Both wait by turns: more slots (ring.num_slots) even that out"
    if starved_pct > blocked_pct:
        return "target-bound", (
            "Add target GPUs (target.devices), or learn more from each pack (anchors.num, training.steps_per_pack)"
        )
    return "drafter-bound", "Add drafter GPUs (training.devices), or lower anchors.num or training.steps_per_pack"


def recent_mean(records: Iterable[Mapping[str, Any]], name: str, since: float) -> float | None:
    """Mean of a number over the lines written after `since`; the newest line alone if there is none."""
    known = [(record["time"], float(record[name])) for record in records if isinstance(record.get(name), (int, float))]
    recent = [value for time, value in known if time >= since] or [value for _, value in known[-1:]]
    return sum(recent) / len(recent) if recent else None


def mean(values: Sequence[float | None]) -> float | None:
    """Mean of the known values."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
