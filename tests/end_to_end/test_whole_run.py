"""benchmarks/whole_run.py around a run that fails, and when it is told to end itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import yaml

from tests.helpers.tiny_run import REPOSITORY, Tiny, tiny

__all__ = ["tiny"]


def begin(tiny: Tiny, *settings: str) -> subprocess.Popen[str]:
    """Start the benchmark of the tiny run, with documents of its own making."""
    config = yaml.safe_load(tiny.config.read_text())
    config["data"]["sources"][0]["path"] = str(tiny.folder / "random.jsonl")
    config["training"]["epochs"] = 1000
    tiny.config.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "benchmarks.whole_run", str(tiny.config), "--out", str(tiny.folder / "out")]
    tiny.process = subprocess.Popen(
        [*command, "--documents", "60", "--median", "60", *(["--set", *settings] if settings else [])],
        cwd=REPOSITORY, env={**os.environ, "HF_HUB_OFFLINE": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip
    return tiny.process


def test_a_run_that_fails_is_named_with_its_last_lines_and_its_code(tiny: Tiny) -> None:
    begin(tiny, "target.model=/does/not/exist", "ring.num_slots=5")
    code, out = tiny.end()
    assert code == 2, out
    assert "Traceback" not in out
    first, *lines = out.splitlines()
    assert first == f"the run ended with code 2; the last lines of {tiny.folder}/out/launch.log:"
    assert any("/does/not/exist" in line for line in lines)
    assert json.loads((tiny.folder / "out" / f"{tiny.name}.json").read_text())["failed"] == "the run ended with code 2"


def test_sigterm_stops_the_run_and_what_is_known_is_written(tiny: Tiny) -> None:
    process = begin(tiny)
    tiny.wait_for(lambda: tiny.metrics("drafter"))
    process.send_signal(signal.SIGTERM)
    code, out = tiny.end()
    assert code == 130, out
    assert "Traceback" not in out
    assert json.loads((tiny.folder / "out" / f"{tiny.name}.json").read_text())["failed"] == "interrupted"
    assert "interrupted at step" in (tiny.folder / "out" / "launch.log").read_text(), "the drafter has saved"
    tiny.assert_nothing_left()
