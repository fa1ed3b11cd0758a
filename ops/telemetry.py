"""What a process says about itself: one line of metrics per interval, one line of log per event.

metrics.jsonl is shared by every process of a run: each line is one O_APPEND write, so lines never mix, and a reader may
follow the file at any time. The file is the record; each line is also sent to those who listen (ops/feed.py).
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from ops.feed import Pusher
from ops.paths import label

METRICS_FILE = "metrics.jsonl"
LIBRARY_LOGGERS = ("shm_ring", "producer")
"""Of packages and functions that are handed no Log."""


class Metrics:
    """The metrics of one process: appends to the run's metrics.jsonl, then tells the listeners. For one thread."""

    def __init__(self, run_dir: Path | str, role: str, rank: int) -> None:
        self._role = role
        self._rank = rank
        path = Path(run_dir) / METRICS_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._torn = False
        self._failed = False
        self._pusher = Pusher(Path(run_dir))

    def write(self, step: int, **values: Any) -> None:
        """Append one line: time, role, rank, step, then `values` in order; a number that is not finite is null."""
        record = {"time": round(time.time(), 3), "role": self._role, "rank": self._rank, "step": step}
        record |= {key: plain(value) for key, value in values.items()}
        line = (("\n" if self._torn else "") + json.dumps(record, allow_nan=False) + "\n").encode()
        try:
            self._torn = os.write(self._fd, line) < len(line)
            if not self._torn:  # after an O_APPEND write the position is the end of what was written
                self._pusher.send(os.lseek(self._fd, 0, os.SEEK_CUR) - len(line), line)
        except OSError as error:  # a full disk is no reason to lose the run
            if not self._failed:
                complain(f"metrics are lost from step {step} on: {error.strerror}")
            self._failed = True

    def close(self) -> None:
        """Close the file and stop sending; may be called twice."""
        self._pusher.close()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def complain(text: str) -> None:
    """Write a line to standard error, a log too; one that a full disk does not take is lost, and nothing else."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def end_last_line(run_dir: Path | str) -> None:
    """End a line that a crash or a full disk tore, so that it does not swallow the next; while nobody writes."""
    path = Path(run_dir) / METRICS_FILE
    if path.exists():
        with path.open("r+b") as file:
            if file.seek(0, os.SEEK_END) and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n":
                file.write(b"\n")


class Mark(Protocol):
    """A moment that may lie ahead: a CUDA event with timing, or a Moment."""

    def query(self) -> bool:
        """Whether it has passed."""

    def elapsed_time(self, later: Any, /) -> float:
        """Milliseconds from here to a later mark; both must have passed."""


class Moment:
    """Now, by the host's clock."""

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def query(self) -> bool:
        """It has passed."""
        return True

    def elapsed_time(self, later: Moment, /) -> float:
        """Milliseconds from here to `later`."""
        return 1e3 * (later._at - self._at)


class Phases:
    """Where the seconds of a process go: each belongs to the phase begun last, so together they are all there are.

    `mark` makes a mark where the work is done; None: by the host's clock. For a GPU it is an event in its stream: then
    a phase begins when the device has done what was queued before, and ends when it reaches the next mark. So waiting
    counts only as far as the device ran dry meanwhile, however far ahead the host was. Nothing here waits for a mark:
    seconds are counted once both their ends have passed. Costs two marks a phase, a few microseconds.
    """

    def __init__(self, first: str = "other", mark: Callable[[], Mark] | None = None) -> None:
        self._mark: Callable[[], Mark] = mark or Moment
        self._phase = first
        self._marks: deque[tuple[str, Mark]] = deque([(first, self._mark())])
        self._spent: dict[str, float] = {}
        self._total: dict[str, float] = {}

    def begin(self, phase: str) -> None:
        """End the present phase and begin another one; nothing happens if it is the same."""
        if phase != self._phase:
            self._phase = phase
            self._cut()

    def take(self) -> dict[str, float]:
        """Return the seconds of each phase that were not taken yet; what a device has not reached comes next time."""
        self._cut()
        spent, self._spent = self._spent, {}
        return spent

    def total_s(self, phase: str) -> float:
        """Seconds of a phase from the beginning on, taken or not."""
        return self._total.get(phase, 0.0)

    def _cut(self) -> None:
        marks = self._marks
        marks.append((self._phase, self._mark()))
        while len(marks) > 1 and marks[1][1].query():
            phase, began = marks.popleft()
            seconds = began.elapsed_time(marks[0][1]) / 1e3
            for sums in (self._spent, self._total):
                sums[phase] = sums.get(phase, 0.0) + seconds


def shares(spent: dict[str, float], phases: tuple[str, ...]) -> dict[str, float]:
    """Turn seconds into `PHASE_pct`, one for each of `phases`, in percent of all; empty if nothing was spent."""
    whole_s = sum(spent.values())
    return {f"{phase}_pct": round(100 * spent.get(phase, 0.0) / whole_s, 2) for phase in phases if whole_s > 0}


class Log:
    """Event lines of one process on its standard output: `time role | event | key=value ...`, whole and at once.

    What the ring reports, `ring | waiting | ...`, becomes lines of this log too, and so do other warnings of libraries.
    """

    def __init__(self, role: str, rank: int | None = None) -> None:
        self._name = label(role, rank)
        for logger in map(logging.getLogger, LIBRARY_LOGGERS):
            for handler in [each for each in logger.handlers if isinstance(each, _LibraryLines)]:
                logger.removeHandler(handler)
            logger.addHandler(_LibraryLines(self.line))

    def __call__(self, event: str, **values: Any) -> None:
        """Write one line; values keep their order, units belong in the keys."""
        fields = " ".join(f"{key}={_shown(value)}" for key, value in values.items())
        self.line(f"{event}{' | ' if fields else ''}{fields}")

    def line(self, text: str) -> None:
        """Write one line as it is, after time and role."""
        with contextlib.suppress(OSError):  # the disk of the log is full: no reason to lose the run
            sys.stdout.write(f"{time.strftime('%H:%M:%S')} {self._name} | {text}\n")
            sys.stdout.flush()


class _LibraryLines(logging.Handler):
    """Hands what a library says to a log."""

    def __init__(self, write: Callable[[str], None]) -> None:
        super().__init__()
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        """Write the message."""
        self._write(record.getMessage())


def plain(value: Any) -> Any:
    """Turn a value into JSON's types: numbers of numpy and torch by item(), six digits, null where not finite."""
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if not isinstance(value, (bool, int, float, str, type(None))):
        if not hasattr(value, "item"):
            return str(value)
        value = value.item()
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def _shown(value: Any) -> str:
    value = plain(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False) if any(c.isspace() or c in '"=' for c in value) else value
    return json.dumps(value, ensure_ascii=False)
