"""The drafter's record of packs: what this generation has begun to train, written before the slot is released.

It decides about packs that come twice (a slot held over a crash, a pack extracted again) and knows which packs are in
the weights, which is what a checkpoint stores. Format of the files: configs/run_files.py.

The file serves producers that look for work while this generation lives, so that they make no pack twice. What is in
it counts for nothing after a crash: the checkpoint decides. So a disk that is full costs extra packs, never the run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from configs.run_files import Trained, journal_path, read_trained, write_trained
from ops.telemetry import complain


class Journal:
    """Append-only journal of one drafter process in one generation."""

    def __init__(self, run_dir: Path, rank: int, generation: int, trained: Iterable[int]) -> None:
        self.generation = generation
        self._trained = set(trained)
        self._begun = set(self._trained)
        self._path = journal_path(run_dir, rank)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(self._path, flags, 0o644)
        self._unwritten = b"\n" if _is_torn(self._path) else b""
        self._warned = False

    def __contains__(self, pack_id: int) -> bool:
        """Whether the pack is in the weights, or on its way into them, and must not be trained again."""
        return pack_id in self._begun

    def begin(self, pack_id: int, step: int, anchors: int = 0) -> None:
        """Append a pack, in one write, before its slot is released; `step` is the step before its first, `anchors` how
        many each of its steps draws.

        Lines that a full disk refuses are kept and written with the next one.
        """
        line = json.dumps({"pack_id": pack_id, "step": step, "generation": self.generation, "anchors": anchors})
        self._unwritten += f"{line}\n".encode()
        try:
            self._unwritten = self._unwritten[os.write(self._file, self._unwritten) :]
        except OSError as error:
            if not self._warned:
                complain(f"{self._path}: {error.strerror}; training goes on, lines are written later")
            self._warned = True
        self._begun.add(pack_id)

    def finish(self, *pack_ids: int) -> None:
        """Count packs as being in the weights, all their steps launched; also those that other ranks have begun."""
        self._trained.update(pack_ids)
        self._begun.update(pack_ids)

    @property
    def trained(self) -> frozenset[int]:
        """Packs in the weights."""
        return frozenset(self._trained)

    def close(self) -> None:
        """Close the file; harmless when repeated."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _is_torn(path: Path) -> bool:
    """Whether a crash has left the last line without its end."""
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def begin_generation(run_dir: Path, trained: Iterable[int], generation: int | None = None) -> int:
    """Start a new generation whose weights contain `trained`; producers then make every other pack again.

    generation: its number, the same on every host; None: one more than this run folder's last.
    """
    if generation is None:
        before = read_trained(run_dir)
        generation = 0 if before is None else before.generation + 1
    write_trained(run_dir, Trained(generation, frozenset(trained)))
    return generation
