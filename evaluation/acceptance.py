"""Accepted lengths as numbers: mean, by position, histogram; and walking blocks over a known text.

Greedy decoding writes the target's own text whatever is drafted, so on a text that the target wrote, what the loop
would accept at each round follows from the drafts at every position: `walk` (consumer/heldout.py) steps over it as the
loop does, many prompts in one drafter pass. A test holds the two to each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from consumer.heldout import walk

__all__ = ["Acceptance", "leading_run", "walk"]


@dataclass(frozen=True)
class Acceptance:
    """Accepted lengths of many rounds; each counts the token that the target adds, so it lies in 1..B."""

    rounds: tuple[int, ...]
    block_size: int

    @property
    def mean(self) -> float:
        """Mean accepted length; nan without a round."""
        return sum(self.rounds) / len(self.rounds) if self.rounds else float("nan")

    @property
    def by_position(self) -> list[float]:
        """Share of rounds in which slot k = 1..B-1 was accepted."""
        total = max(1, len(self.rounds))
        return [sum(length > slot for length in self.rounds) / total for slot in range(1, self.block_size)]

    @property
    def histogram(self) -> list[int]:
        """Rounds with accepted length 1, 2, ..., B."""
        return [self.rounds.count(length) for length in range(1, self.block_size + 1)]

    def as_dict(self) -> dict[str, Any]:
        """The numbers as plain JSON data."""
        return {
            "accept_len": round(self.mean, 4),
            "rounds": len(self.rounds),
            "accepted_by_position": [round(share, 4) for share in self.by_position],
            "histogram": self.histogram,
        }


def leading_run(drafted: Sequence[int], continuation: Sequence[int]) -> int:
    """How many of the first drafted tokens equal the text's."""
    count = 0
    for mine, theirs in zip(drafted, continuation, strict=False):
        if mine != theirs:
            break
        count += 1
    return count
