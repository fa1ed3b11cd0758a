"""A whole tiny run that measures held-out accepted length while training, and exports what it learnt."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import yaml

from configs.run_files import HELDOUT_PACK
from tests.helpers.tiny_target import save_target, write_chats

REPOSITORY = Path(__file__).parents[2]


def test_a_run_measures_while_training_and_its_export_verifies_and_decodes(tmp_path: Path) -> None:
    name = f"watch-{os.getpid()}"
    target = save_target(tmp_path / "target")
    config = {
        "run": {"name": name, "folder": str(tmp_path / "runs")},
        "target": {"model": str(target), "num_taps": 3, "devices": ["cpu"]},
        "data": {"sources": [{"path": str(write_chats(tmp_path / "chats.jsonl", 60))}], "heldout_documents": 6},
        "pack": {"tokens": 256},
        "drafter": {"num_layers": 1, "block_size": 4, "layout": "full"},
        "anchors": {"num": 16},
        "training": {"devices": ["cpu"], "epochs": 4, "steps_per_pack": 2, "log_every_steps": 4},
        "evaluation": {"every_steps": 8},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    launched("run", str(tmp_path / "run.yaml"))
    run_dir = tmp_path / "runs" / name
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    found = [line["heldout_accept_len"] for line in lines if "heldout_accept_len" in line]
    assert (run_dir / HELDOUT_PACK).is_file()
    assert len(found) >= 2
    assert all(1.0 <= length <= 4.0 for length in found)
    export = tmp_path / "export"
    launched("export", str(run_dir), "--out", str(export))
    shown = launched("verify", str(export), "--target", str(target))
    assert "WRONG" not in shown
    words = ["--prompts", "heldout", "--max-new-tokens", "12", "--tree", "16", "--device", "cpu"]
    shown = launched("eval", str(run_dir), *words, "--out", str(tmp_path / "eval"))
    result = json.loads((tmp_path / "eval" / "eval.json").read_text())
    methods = {method["method"]: method for method in result["sets"]["heldout"]["methods"]}
    assert methods["dflash"]["same_text_share"] == methods["ddtree 16"]["same_text_share"] == 1.0
    assert methods["ddtree 16"]["accept_len"] >= methods["dflash"]["accept_len"]
    assert "ddtree 16" in shown


def launched(*words: str) -> str:
    """Run launch.py to its end and return its output."""
    command = [sys.executable, "launch.py", *words]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout
