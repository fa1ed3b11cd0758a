"""The last picture of a dashboard is that of the end, however soon it follows the one before."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from configs.load import config_from
from ops import dashboard
from ops.run_folder import claim, write_config


def test_a_run_that_ends_right_after_a_picture_is_shown_as_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    lock = claim(folder)
    write_config(folder, config_from({"run": {"name": folder.name}}))

    def the_run_ends(_seconds: float) -> None:
        (folder / "summary.json").write_text('{"steps": 1}')
        lock.drop()

    monkeypatch.setattr("time.sleep", the_run_ends)
    screen = io.StringIO()
    dashboard.dashboard(folder, once=False, as_json=False, svg=None, console=Console(file=screen, width=100))
    first, last = (part.splitlines()[0] for part in screen.getvalue().split("run run ")[1:])
    assert "starting or ending" in first
    assert "finished" in last
