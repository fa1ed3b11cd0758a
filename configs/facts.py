"""What is known of a run's models before they are loaded: found by evaluation/facts.py, judged by ops/plan.py."""

from __future__ import annotations

from typing import NamedTuple


class Facts(NamedTuple):
    """Lines for people, and the sizes that the machine must hold."""

    target_lines: list[str]
    drafter_lines: list[str]
    warnings: list[str]
    slot_bytes: int
    target_bytes: int  # largest on its GPU, from loading to reading
    step_bytes: int  # the drafter's step at its peak
    step_line: str
    checkpoint_bytes: int  # of one, on disk or in memory
