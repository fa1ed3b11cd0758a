"""benchmarks/pipeline.py, tiny: what it replaces in both programs is still what they call."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.helpers.tiny_run import REPOSITORY


def test_both_sides_run_under_measurement_and_the_summary_holds_what_was_asked_for(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.pipeline", "--quick", "--only", "8b", "--out", str(tmp_path)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr + "".join(path.read_text()[-2000:] for path in tmp_path.glob("*/*.log"))
    assert done.returncode == 0, said
    found = json.loads((tmp_path / "pipeline_raw.json").read_text())
    assert "failed" not in found["8b"], said
    assert found["8b"]["tokens_per_s"] > 0
    assert found["8b"]["efficiency"] > 0
