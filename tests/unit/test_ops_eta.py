"""How long a run still takes, by what its drafters have trained and the limits of its configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from configs.load import config_from
from ops.commands import status_from_files
from ops.run_folder import write_config
from ops.view import Viewer


def write_run(run_dir: Path, training: dict[str, Any]) -> None:
    """A run of 300 packs with 3 drafters that makes a step a second, after 20 steps."""
    write_config(run_dir, config_from({"training": {"devices": ["cpu"] * 3, "steps_per_pack": 1, **training}}))
    (run_dir / "plan.json").write_text(json.dumps({"num_packs": 300}))
    lines = [
        {"time": 1e9 + step, "role": "drafter", "rank": 0, "step": step, "packs_trained": 3 * step,
         "train_seconds": 500.0 + step}
        for step in range(21)
    ]  # fmt: skip
    (run_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def eta_s(run_dir: Path, training: dict[str, Any]) -> float | None:
    write_run(run_dir, training)
    with Viewer(run_dir) as viewer:
        viewer._metrics.poll()
        viewer._status = {"launcher_pid": 1}
        return viewer._eta_s()


@pytest.mark.parametrize(
    ("training", "seconds"),
    [
        ({}, 80.0),  # 240 packs, three a step
        ({"max_steps": 50}, 30.0),
        ({"max_steps": 20}, 0.0),
        ({"max_seconds": 560.0}, 40.0),  # 520 s have been trained, most of them in former lives
        ({"max_steps": 1000, "max_seconds": 9000.0}, 80.0),
    ],
)
def test_the_first_limit_that_is_reached_counts(
    training: dict[str, Any], seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_RUNTIME_DIR", str(tmp_path / "s"))
    assert eta_s(tmp_path, training) == pytest.approx(seconds, abs=0.11)


def test_a_limit_that_a_restart_has_changed_counts_in_an_open_dashboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_RUNTIME_DIR", str(tmp_path / "s"))
    write_run(tmp_path, {"max_steps": 50})
    told = status_from_files(tmp_path) | {"launcher_pid": 1}
    monkeypatch.setattr("ops.view.commands.status", lambda *_, **__: told)
    with Viewer(tmp_path) as viewer:
        assert viewer.look()["eta_s"] == pytest.approx(30, abs=0.11)
        write_config(tmp_path, config_from({"training": {"max_steps": 40}}))
        assert viewer.look(anew=True)["eta_s"] == pytest.approx(20, abs=0.11)
