"""Clock, power and temperature of all GPUs while something runs, by nvidia-smi; nothing where there is none."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import time
from pathlib import Path
from types import TracebackType

FIELDS = {"clock_mhz": "clocks.sm", "power_w": "power.draw", "celsius": "temperature.gpu"}
EVERY_MS = 200


class Clocks:
    """Samples into a file until it is left. A context manager."""

    def __init__(self, path: Path) -> None:
        """`path`: where the samples go."""
        self._path = path
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Clocks:
        query = ",".join(["timestamp", "index", *FIELDS.values()])
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", f"--loop-ms={EVERY_MS}"]
        with self._path.open("wb") as file, contextlib.suppress(OSError):
            self._process = subprocess.Popen(command, stdout=file, stderr=subprocess.DEVNULL)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def means(self, began: float, ended: float) -> dict[str, dict[str, float]]:
        """Mean of each number by GPU between two times (time.time())."""
        return means_of(self._path.read_text(errors="replace"), began, ended)


def means_of(text: str, began: float, ended: float) -> dict[str, dict[str, float]]:
    """Average the lines of nvidia-smi that fall between two times (seconds since 1970), by GPU."""
    rows: dict[str, list[list[float]]] = {}
    for line in text.splitlines():
        stamp, *values = (word.strip() for word in line.split(","))
        try:
            whole, _, part = stamp.partition(".")
            at = time.mktime(time.strptime(whole, "%Y/%m/%d %H:%M:%S")) + float(f"0.{part or 0}")
            numbers = [float(value) for value in values[1:]]
        except ValueError:
            continue  # a line cut off at the end, or a number that the GPU does not tell
        if began <= at <= ended and len(numbers) == len(FIELDS):
            rows.setdefault(values[0], []).append(numbers)
    return {
        gpu: {
            name: round(statistics.mean(column), 1)
            for name, column in zip(FIELDS, zip(*found, strict=True), strict=True)
        }
        for gpu, found in rows.items()
    }
