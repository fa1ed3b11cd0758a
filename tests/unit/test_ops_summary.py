"""The end table: shown again from summary.json, as text and as a picture, with what was not measured said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import launch
from configs.load import config_from
from ops.summary import ended_by

SUMMARY = {
    "loss_first": 8.5, "loss_last": 4.535, "heldout_accept_len_before": 1.009, "heldout_accept_len_after": 1.467,
    "heldout_accept_len_bigram": 1.39, "heldout_accept_len_zero_context": None, "target_tokens_per_s": 333.6,
    "drafter_tokens_per_s": 1234.5, "steps": 3408, "packs_trained": 426, "packs_planned": 740,
    "ended_by": "training.max_seconds (285 s)", "rows": "712 read = 648 used + 64 held out + 0 skipped",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = tmp_path / "runs" / "demo"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("{}\n")
    checkpoint = str(run / "checkpoints" / "step-3408")
    (run / "summary.json").write_text(json.dumps(SUMMARY | {"checkpoint": checkpoint}))
    return run.parent


def test_the_table_of_an_ended_run_is_shown_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("COLUMNS", "100")
    assert launch.main(["summary", "demo"]) == 0
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    shown = dict(row for row in rows if len(row) == 2)
    assert shown["held-out accepted length, before -> after"] == "1.009 -> 1.467"
    assert shown["same drafter, context zeroed"] == "not measured"
    assert shown["packs trained"] == "426 of 740"
    assert shown["ended by"] == "training.max_seconds (285 s)"
    assert shown["checkpoint"] == "runs/demo/checkpoints/step-3408"


@pytest.mark.parametrize(
    ("packs", "steps", "seconds", "expected"),
    [
        (740, 5920, 300.0, "all packs trained"),
        (218, 1744, 285.1, "training.max_seconds (285 s)"),
        (218, 2000, 200.0, "training.max_steps (2,000)"),
        (218, 1744, 200.0, None),
    ],
)
def test_what_ended_the_training_is_named(packs: int, steps: int, seconds: float, expected: str | None) -> None:
    config = config_from({"training": {"max_seconds": 285, "max_steps": 2000}})
    assert ended_by(config, {"packs_trained": packs, "steps": steps, "train_seconds": seconds}, 740) == expected
    assert ended_by(config_from({}), {}, 740) is None


def test_its_picture_is_an_svg_with_the_same_numbers(folder: Path, tmp_path: Path) -> None:
    svg = tmp_path / "table.svg"
    assert launch.main(["summary", "demo", "--folder", str(folder), "--svg", str(svg)]) == 0
    text = svg.read_text()
    assert text.startswith("<svg")
    assert "1.467" in text
    assert "3,408" in text


def test_a_run_that_has_not_ended_has_no_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "demo" / "summary.json").unlink()
    assert launch.main(["summary", "demo", "--folder", str(folder)]) == 2
    assert "has no summary.json" in capsys.readouterr().err
