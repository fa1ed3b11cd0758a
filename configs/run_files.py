"""Files of a run's folder that both sides read: the plan, the journal and the record of trained packs.

    plan.json           what preparation found: target, ring schema, documents, packs        (written once by prepare)
    trained.json        generation, and the packs in the weights at its start                (drafter rank 0, at start)
    journal.RANK.jsonl  one line {"pack_id", "step", "generation", "anchors"} per trained pack (drafter, before release)

A generation is one life of the drafter side. What is trained in the current weights is: `trained` of the newest
generation, and the journal's lines of that generation. Lines of older generations that the checkpoint did not keep
are not trained, so their packs are extracted again. Nothing else has to be remembered over a crash.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

RANDOM_WEIGHTS = "random weights"
"""plan.json's target_origin where target.random_weights is set."""


HELDOUT_PACK = "heldout.safetensors"
"""Held-out documents with their features: written by the first target, read by the first drafter."""


class Trained(NamedTuple):
    """Packs in the weights when a generation began."""

    generation: int
    packs: frozenset[int]


def plan_path(run_dir: Path) -> Path:
    """Where preparation writes what it found."""
    return run_dir / "plan.json"


def read_plan(run_dir: Path) -> dict[str, Any]:
    """Read plan.json; raises FileNotFoundError if preparation has not run."""
    plan: dict[str, Any] = json.loads(plan_path(run_dir).read_text())
    return plan


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` by `text` so that a reader, or a crash, sees the old or the new file, never half of one.

    Raises OSError that names `path`, and leaves nothing beside it then.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from None


def to_ranges(numbers: Iterable[int]) -> list[list[int]]:
    """Compress integers into inclusive ranges: {0, 1, 2, 5} -> [[0, 2], [5, 5]]."""
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ranges


def from_ranges(ranges: Iterable[Iterable[int]]) -> frozenset[int]:
    """Undo to_ranges."""
    return frozenset(number for first, last in ranges for number in range(first, last + 1))


def write_trained(run_dir: Path, trained: Trained) -> None:
    """Record the start of a generation."""
    text = json.dumps({"generation": trained.generation, "trained": to_ranges(trained.packs)})
    write_atomically(run_dir / "trained.json", text)


def read_trained(run_dir: Path) -> Trained | None:
    """Read the newest generation's record; None before the first drafter has started."""
    try:
        raw = json.loads((run_dir / "trained.json").read_text())
    except FileNotFoundError:
        return None
    return Trained(int(raw["generation"]), from_ranges(raw["trained"]))


def newest_step(run_dir: Path) -> int:
    """Return the step of the newest checkpoint that has its completion marker; -1 if there is none. Nothing is read."""
    found = (run_dir / "checkpoints").glob("step-*/complete.json")
    numbers = (path.parent.name.removeprefix("step-") for path in found)
    return max((int(number) for number in numbers if number.isdigit()), default=-1)


def journal_path(run_dir: Path, rank: int) -> Path:
    """The journal of one drafter process."""
    return run_dir / f"journal.{rank}.jsonl"


def read_journals(run_dir: Path, generation: int) -> frozenset[int]:
    """Collect the packs that all drafter processes trained in `generation`; a line torn by a crash is ignored."""
    packs: set[int] = set()
    for path in run_dir.glob("journal.*.jsonl"):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if entry.get("generation") == generation:
                packs.add(int(entry["pack_id"]))
    return frozenset(packs)
