"""How a dashboard ends: with a picture of the run's end, or by a key, also beside a launcher that does not answer."""

from __future__ import annotations

import io
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from configs.load import config_from
from ops import dashboard, view
from ops.errors import NoAnswer
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


def test_a_key_that_leaves_is_heard_behind_others_and_so_is_the_end_of_the_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An arrow key is three characters, which may come together with the next key."""
    master, slave = os.openpty()
    with os.fdopen(slave) as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        with dashboard._keys() as pressed:
            os.write(master, b"\x1b[Aq")
            heard: set[str] = set()
            for _ in range(100):  # each waits until something has come
                if heard & dashboard.LEAVING:
                    break
                heard |= pressed(3.0)
            assert heard == {*"\x1b[Aq"}
            monkeypatch.setattr("os.read", lambda *_: b"")
            os.write(master, b"x")
            assert pressed(300.0) & dashboard.LEAVING
    os.close(master)


def test_a_launcher_that_does_not_answer_leaves_the_screen_most_of_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Suspended by Ctrl-Z, for example. The clock is the test's."""
    write_config(tmp_path, config_from({"run": {"name": tmp_path.name}}))
    now_s, waited_s = 0.0, []

    def silent(_run_dir: Path, timeout_s: float = 5.0) -> dict[str, Any]:
        nonlocal now_s
        now_s += timeout_s
        waited_s.append(timeout_s)
        raise NoAnswer("launcher did not answer")

    monkeypatch.setattr("ops.view.commands.status", silent)
    monkeypatch.setattr(view, "time", SimpleNamespace(monotonic=lambda: now_s, time=lambda: 1e9 + now_s))
    with view.Viewer(tmp_path) as viewer:
        viewer.look()
        began = now_s
        for _ in range(100):
            assert viewer.look()["state"] == "launcher did not answer"
            now_s += 0.1
    assert 0 < sum(waited_s[1:]) <= (now_s - began) / 2
