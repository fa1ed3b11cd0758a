"""Every document counts exactly once in the final weights, whatever dies; minutes of it with `-m storm`.

COUNTER_STORM_SECONDS (300 by default) says how long the long one disturbs the run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def storm(folder: Path, seconds: float, *more: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.stress.counter_storm", "--folder", str(folder), "--seconds", str(seconds)]
    done = subprocess.run(
        [*command, *more], cwd=ROOT, capture_output=True, text=True, timeout=seconds + 500, check=False
    )
    log = folder / "launcher.out"
    assert done.stdout, f"{done.stderr}\n{log.read_text()[-3000:] if log.exists() else ''}"
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


@pytest.mark.slow
def test_every_document_counts_once_though_each_kind_of_process_is_killed(tmp_path: Path) -> None:
    """Case R-08: the second launch has other numbers of targets; the sum over document ids is the data's."""
    report = storm(
        tmp_path, 0, "--documents", "800", "--step-s", "0.05", "--most", "2", "--every-s", "1",
        "--first", "drafter", "target", "launcher", "drafter",
    )  # fmt: skip
    assert report["faults"] == []
    assert all(report["happened"].get(what, 0) >= 1 for what in ("drafter", "target", "launcher"))
    assert len({targets for targets, _ in report["shapes"]}) > 1
    assert report["packs_begun"] > report["packs"], "nothing was trained again, so nothing was tested"
    assert report["checkpoints_checked"] >= 3


@pytest.mark.storm
def test_every_document_counts_once_in_minutes_of_kill_9(tmp_path: Path) -> None:
    seconds = float(os.environ.get("COUNTER_STORM_SECONDS", "300"))
    documents = str(int(min(19_000, 30 * seconds)))
    report = storm(tmp_path, seconds, "--documents", documents, "--step-s", "0.05", "--seed", str(os.getpid()))
    print(json.dumps(report))
    assert report["faults"] == []
    assert len(report["shapes"]) > 2
    assert sum(report["happened"].values()) > seconds / 30
