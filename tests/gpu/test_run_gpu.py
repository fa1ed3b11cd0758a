"""A whole run through launch.py with both sides on one GPU: captured step, page-locked ring, bf16 features."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from shm_ring.names import segments_of_run
from tests.helpers.tiny_target import save_target, write_chats

REPOSITORY = Path(__file__).parents[2]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("layout", ["full", "mixed"])
def test_both_sides_on_one_gpu_train_every_pack_once(tmp_path: Path, layout: str) -> None:
    name = f"gpu-{os.getpid()}-{layout}"
    config = {
        "run": {"name": name, "folder": str(tmp_path / "runs")},
        "target": {
            "model": str(save_target(tmp_path / "target", hidden=256)),
            "num_taps": 3,
            "devices": ["cuda:0"],
            "dtype": "bfloat16",
        },
        "data": {"sources": [{"path": str(write_chats(tmp_path / "chats.jsonl", 400))}], "heldout_documents": 6},
        "pack": {"tokens": 512, "window_packs": 4},
        "ring": {"num_slots": 8},
        "drafter": {"num_layers": 2, "block_size": 8, "layout": layout, "sliding_window": 64},
        "anchors": {"num": 64},
        "optimizer": {"lr": 1e-3},
        "training": {"devices": ["cuda:0"], "epochs": 4, "log_every_steps": 5},
        "evaluation": {"enabled": True, "max_new_tokens": 8},
    }
    path = tmp_path / "gpu.yaml"
    path.write_text(yaml.safe_dump(config))
    command = [sys.executable, "launch.py", str(path)]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=280)
    logs = "\n".join(log.read_text()[-3000:] for log in sorted((tmp_path / "runs" / name / "logs").glob("*.log")))
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}\n{logs}"
    summary = json.loads((tmp_path / "runs" / name / "summary.json").read_text())
    plan = json.loads((tmp_path / "runs" / name / "plan.json").read_text())
    assert summary["packs_trained"] == summary["steps"] == plan["num_packs"]
    assert summary["loss_last"] < summary["loss_first"]
    lines = [json.loads(line) for line in (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    for role in ("target", "drafter"):  # the device's seconds, which events of its stream marked, are all there are
        mine = [line for line in lines if line["role"] == role]
        spent_s = sum(sum(line["spent_s"].values()) for line in mine[1:])
        assert spent_s == pytest.approx(mine[-1]["time"] - mine[0]["time"], rel=0.15), role
    assert "capture of the training step failed" not in logs
    assert "not_page_locked" not in logs
    assert segments_of_run(name) == []
