"""The demo, shortened, on the real target: it ends with its table, learns something, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shm_ring.names import segments_of_run

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_short_demo_runs_from_text_to_table(tmp_path: Path) -> None:
    name = f"demo-test-{os.getpid()}"
    settings = [
        f"run.folder={tmp_path}",
        "data.heldout_documents=8",
        "training.max_steps=48",
        "training.log_every_steps=2",  # from the random start, not from the first pack learnt by heart
        "training.max_seconds=300",  # a limit that only a machine at a standstill reaches
        "evaluation.max_new_tokens=12",
    ]
    command = [sys.executable, "launch.py", "configs/demo.yaml", "--name", name]
    command += [word for setting in settings for word in ("--set", setting)]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=560)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "held-out accepted length" in ended.stdout
    summary = json.loads((tmp_path / name / "summary.json").read_text())
    assert summary["loss_last"] < summary["loss_first"]
    assert summary["packs_trained"] >= 1
    assert (Path(summary["checkpoint"]) / "complete.json").is_file()
    assert json.loads((tmp_path / name / "heldout.json").read_text())["same_text_share"] == 1.0
    assert segments_of_run(name) == []
