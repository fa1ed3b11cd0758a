"""Drafter ranks on two GPUs: NCCL inside the captured step, and a rank that dies while the others wait in it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from configs.run_files import from_ranges
from tests.helpers.tiny_run import REPOSITORY, Tiny, planned_packs, tiny

__all__ = ["tiny"]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]


@pytest.fixture
def on_gpus(tiny: Tiny) -> Tiny:
    """The tiny run with its target on one GPU and a drafter on each."""
    config = yaml.safe_load(tiny.config.read_text())
    config["target"] |= {"devices": ["cuda:0"], "dtype": "bfloat16"}
    config["training"] |= {"devices": ["cuda:0", "cuda:1"], "epochs": 6}
    config["evaluation"] = {"enabled": False}
    tiny.config.write_text(yaml.safe_dump(config))
    return tiny


def test_two_captured_ranks_add_up_their_gradients_and_stay_equal(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.scaling", "--shapes", "0.6b", "--out", str(tmp_path)]
    subprocess.run(command, cwd=REPOSITORY, check=True, timeout=280)
    (result,) = json.loads((tmp_path / "scaling.json").read_text())
    assert result["replays"]
    assert result["said"] == []
    for variant in ("after", "during"):
        assert result[variant]["gradient_error"] < 1e-2  # sums in bfloat16 against float32
    assert result["weights_differ_by"] == 0.0
    assert result["skipped_steps"] == 0


def test_a_rank_killed_in_the_graph_restarts_the_drafters_and_no_pack_is_lost(on_gpus: Tiny) -> None:
    on_gpus.launch()
    on_gpus.wait_for(lambda: any(line["step"] >= 45 for line in on_gpus.metrics("drafter")))
    pids = {process["name"]: process["pid"] for process in on_gpus.status()["processes"]}
    os.kill(pids["drafter1"], signal.SIGKILL)
    code, out = on_gpus.end()
    assert code == 0, out
    log = (on_gpus.dir / "logs" / "drafter0.log").read_text()
    assert log.count("resumed") == 1
    assert "capture of the training step failed" not in log
    assert (on_gpus.dir / "logs" / "target0.log").read_text().count("model loaded") == 1
    final = json.loads((on_gpus.dir / "final.json").read_text())
    trained = json.loads((Path(final["checkpoint"]) / "checkpoint.json").read_text())["trained"]
    assert from_ranges(trained) == frozenset(range(planned_packs(on_gpus)))
