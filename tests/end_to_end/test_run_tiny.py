"""A whole run through launch.py with a tiny random target: kill -9 of the drafter, Ctrl-C, resume, wrong input."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.helpers.tiny_run import LIMIT_S, REPOSITORY, Tiny, planned_packs, tiny

__all__ = ["tiny"]

QUIET = ("--set", "evaluation.enabled=false")


def test_kill_9_of_the_drafter_loses_no_pack_and_reloads_no_target(tiny: Tiny) -> None:
    tiny.launch(hold_at=100)
    tiny.wait_for_step(45)
    tiny.wait_for_checkpoint(20)
    target_pid = tiny.pid_of("target")
    os.kill(tiny.pid_of("drafter"), signal.SIGKILL)
    tiny.wait_for(lambda: tiny.log("drafter0").count("| resumed |") == 1)
    assert tiny.pid_of("target") == target_pid
    tiny.let_go()
    code, out = tiny.end()
    assert code == 0, out
    assert tiny.log("target0").count("model loaded") == 1
    summary = json.loads((tiny.dir / "summary.json").read_text())
    assert summary["packs_trained"] == summary["steps"] == planned_packs(tiny)
    assert summary["loss_last"] < summary["loss_first"]
    for key in ("before", "after", "bigram", "zero_context"):
        assert 1.0 <= summary[f"heldout_accept_len_{key}"] <= 4.0
    assert (Path(summary["checkpoint"]) / "complete.json").is_file()
    heldout = json.loads((tiny.dir / "heldout.json").read_text())
    assert heldout["same_text_share"] == 1.0  # lossless: the text does not depend on what proposes
    tiny.assert_nothing_left()
    shutil.rmtree(tiny.dir / "checkpoints" / "step-0")  # as where a restart came before it was written
    again = [sys.executable, "-m", "evaluation.heldout", "--run-dir", str(tiny.dir)]
    done = subprocess.run(again, cwd=REPOSITORY, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert "before: not measured" in done.stdout
    del heldout["heldout_accept_len_before"], heldout["heldout_rounds_before"]
    assert json.loads((tiny.dir / "heldout.json").read_text()) == heldout


def test_the_metrics_have_what_others_rely_on(tiny: Tiny) -> None:
    tiny.launch(*QUIET, "--set", "training.epochs=1")
    code, out = tiny.end()
    assert code == 0, out
    drafter, target = tiny.metrics("drafter"), tiny.metrics("target")
    wanted = {"time", "role", "rank", "step", "loss", "accept_len", "tokens_per_s", "starved_pct", "occupancy"}
    assert all(wanted <= line.keys() for line in drafter)
    assert all({"pack_id", "tokens_per_s", "blocked_pct", "occupancy"} <= line.keys() for line in target)
    assert sorted(line["pack_id"] for line in target) == list(range(planned_packs(tiny)))
    for lines in (drafter, target):  # in spent_s each second of each side is in one phase, and none is missing
        assert drift_s(lines) == pytest.approx(0, abs=0.03 * (lines[-1]["time"] - lines[0]["time"]) + 0.02)
        shares = [value for name, value in lines[-1].items() if name.endswith("_pct") and name != "padding_pct"]
        assert sum(shares) == pytest.approx(100, abs=0.1)
    assert {"config.yaml", "logs", "metrics.jsonl", "checkpoints", "summary.json"} <= {
        p.name for p in tiny.dir.iterdir()
    }


def drift_s(lines: list[dict[str, Any]]) -> float:
    """How far the clock has moved ahead of the seconds in spent_s, from the first lines to the last.

    A line's time is taken a moment after its spent_s; medians forget the lines where that moment was a long one.
    """
    spent_s = list(accumulate(sum(line["spent_s"].values()) for line in lines))
    ahead_s = [line["time"] - passed_s for line, passed_s in zip(lines, spent_s, strict=True)]
    some = max(1, len(lines) // 3)
    return median(ahead_s[-some:]) - median(ahead_s[:some])


def test_ctrl_c_saves_and_a_second_launch_goes_on_where_it_stopped(tiny: Tiny) -> None:
    process = tiny.launch(*QUIET, "--set", "supervisor.stop_timeout_s=60", hold_at=100)
    tiny.wait_for_step(10)
    os.killpg(process.pid, signal.SIGINT)
    code, out = tiny.end()
    assert code == 130, out
    assert "did not stop in time" not in out
    tiny.assert_nothing_left()
    stopped_at = max(int(path.name.removeprefix("step-")) for path in (tiny.dir / "checkpoints").glob("step-*"))
    assert stopped_at >= 10
    tiny.launch(*QUIET)
    code, out = tiny.end()
    assert code == 0, out
    assert f"resumed | step={stopped_at}" in tiny.log("drafter0")
    summary = json.loads((tiny.dir / "summary.json").read_text())
    assert summary["packs_trained"] == summary["steps"] == planned_packs(tiny)


def test_restart_of_the_drafter_alone_repeats_nothing_and_takes_other_hyperparameters(tiny: Tiny) -> None:
    tiny.launch(*QUIET, "--set", "checkpoint.every_steps=1000", "--set", "supervisor.stop_timeout_s=60", hold_at=100)
    tiny.wait_for_step(10)
    settings = ["optimizer.lr=5e-4", "loss.gamma=2", "loss.decay=none", "anchors.num=8"]
    command = [sys.executable, "launch.py", "restart", "drafter", str(tiny.dir)]
    command += [word for setting in settings for word in ("--set", setting)]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, timeout=LIMIT_S)
    tiny.let_go()
    code, out = tiny.end()
    assert code == 0, out
    final = json.loads((tiny.dir / "summary.json").read_text())["checkpoint"]
    config = json.loads((Path(final) / "checkpoint.json").read_text())["config"]
    assert (config["optimizer"]["lr"], config["loss"]["decay"], config["anchors"]["num"]) == (5e-4, "none", 8)
    begun = [json.loads(line)["pack_id"] for line in (tiny.dir / "journal.0.jsonl").read_text().splitlines()]
    assert sorted(begun) == list(range(planned_packs(tiny)))  # each pack once, over both lives
    assert tiny.log("target0").count("model loaded") == 1


def test_two_targets_share_the_packs_also_when_one_is_killed(tiny: Tiny) -> None:
    tiny.launch(*QUIET, "--set", "target.devices=[cpu, cpu]", hold_at=100)
    tiny.wait_for_step(10)
    os.kill(tiny.pid_of("target"), signal.SIGKILL)
    tiny.wait_for(lambda: "target0 died (signal SIGKILL)" in tiny.log("launcher"))
    tiny.let_go()
    code, out = tiny.end()
    assert code == 0, out
    begun = [json.loads(line)["pack_id"] for line in (tiny.dir / "journal.0.jsonl").read_text().splitlines()]
    assert sorted(begun) == list(range(planned_packs(tiny)))  # each pack once
    makers = {(line["rank"], line["pack_id"] % 2) for line in tiny.metrics("target")}
    assert makers == {(0, 0), (1, 1)}
    tiny.assert_nothing_left()


@pytest.mark.parametrize(
    ("override", "code", "words"),
    [
        ("target.model=/nowhere/at/all", 2, "no folder /nowhere/at/all"),
        ("target.target_layer_ids=[1,99]", 2, "distinct ids in 0..5"),
        ("data.sources=[]", 3, "data.sources: expected at least one source, got none"),
        ("drafter.init_from=/nowhere", 2, "drafter.init_from: /nowhere: expected an exported drafter's folder"),
        ("data.sources=[{path: /nowhere.jsonl}]", 3, "data.sources.0.path"),
        ("drafter.blok_size=8", 2, "did you mean drafter.block_size?"),
    ],
)
def test_wrong_input_is_one_clear_line_and_an_exit_code(tiny: Tiny, override: str, code: int, words: str) -> None:
    tiny.launch("--set", override)
    found, out = tiny.end()
    assert found == code, out
    assert words in out
    assert "Traceback" not in out
    tiny.assert_nothing_left()


def test_t08_a_last_checkpoint_that_cannot_be_written_ends_with_5_and_another_shape_is_refused(tiny: Tiny) -> None:
    """T-08: training goes on without checkpoints; the last one must be there. Then the run goes on, as it was."""
    tiny.dir.mkdir(parents=True)
    in_the_way = tiny.dir / "checkpoints"
    in_the_way.write_text("a file where a folder is wanted")
    tiny.launch("--set", "training.max_steps=12", *QUIET)
    code, out = tiny.end()
    assert code == 5, out
    assert "the last checkpoint could not be written" in tiny.log("drafter0")
    assert in_the_way.read_text() == "a file where a folder is wanted"
    assert not (tiny.dir / "final.json").exists()
    assert any(line["step"] >= 10 for line in tiny.metrics("drafter")), "training stopped"
    in_the_way.unlink()
    tiny.launch("--set", "training.max_steps=12", *QUIET)  # all of it is done, and in memory
    code, out = tiny.end()
    assert code == 0, out
    tiny.launch("--set", "training.max_steps=14", "--set", "drafter.num_layers=2", *QUIET)
    code, out = tiny.end()
    assert code == 2, out
    assert "drafter: num_layers: " in out
    assert "drafter0" not in out, "refused before a process was started"
    assert (tiny.dir / "checkpoints" / "step-12").is_dir()
    tiny.assert_nothing_left()
