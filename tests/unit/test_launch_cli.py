"""The command line: what a user can get wrong is one line and an exit code, before anything starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import launch

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("text", "overrides", "line"),
    [
        ("optimizer: {learing_rate: 1.0e-4}", [], "optimizer.learing_rate: unknown key"),
        ("drafter: {block_size: true}", [], "drafter.block_size"),
        ("block_size: 4", [], "block_size: unknown key; did you mean drafter.block_size?"),
        ("{}", ["optimizer.lr"], "--set optimizer.lr: expected section.key=value"),
        ("{}", ["ring.num_slots=two"], "ring.num_slots"),
        ("target: {devices: [cuda:99]}", [], "target.devices: cuda:99 asked"),
    ],
)
def test_a_bad_setting_is_one_line_with_exit_code_2_and_nothing_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, overrides: list[str], line: str
) -> None:
    (tmp_path / "c.yaml").write_text(text + "\n")
    sets = [word for override in overrides for word in ("--set", override)]
    code = launch.main([str(tmp_path / "c.yaml"), "--set", f"run.folder={tmp_path / 'runs'}", *sets])
    err = capsys.readouterr().err
    assert code == 2
    assert line in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_a_name_with_other_characters_or_too_long_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.yaml").write_text("{}\n")
    for name in ("a/b", "x" * 200):
        assert launch.main([str(tmp_path / "c.yaml"), "--name", name]) == 2
        assert "run.name" in capsys.readouterr().err


def test_a_missing_config_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["/does/not/exist.yaml"]) == 2
    assert "/does/not/exist.yaml: cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["status", "none"], ["stop", "none"], ["restart", "drafter", "none"], ["dashboard", "none"]]
)
def test_commands_for_a_run_that_is_not_there_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert launch.main([*words, "--folder", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("no run 'none'")


def test_the_launcher_imports_neither_torch_nor_either_side() -> None:
    code = (
        "import sys, launch, ops.run, ops.dashboard, ops.commands, ops.doctor_subject, ops.exporters, ops.detach\n"
        "bad = [m for m in ('torch', 'transformers', 'producer', 'consumer') if m in sys.modules]\n"
        "sys.exit(f'imported: {bad}' if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_children_import_neither_torch_nor_rich_through_control_and_telemetry() -> None:
    code = (
        "import sys, ops.control, ops.telemetry\n"
        "bad = [m for m in ('torch', 'rich', 'yaml', 'transformers') if m in sys.modules]\n"
        "sys.exit(f'imported: {bad}' if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_doctor_runs_where_the_ring_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "shm_ring.py").write_text("raise ImportError('libatomic.so.1 is not installed')\n")
    doctor = "import sys, launch; sys.exit(launch.main(['doctor']))"
    run = "import sys, launch; sys.exit(launch.main(['status']))"
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    asked = [
        subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
        )
        for code in (doctor, run)
    ]
    assert "libatomic: found" in asked[0].stdout
    assert asked[1].returncode == 5
    assert asked[1].stderr == "libatomic.so.1 is not installed\n"


def test_clean_leaves_foreign_segments_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DFLASH_RUNTIME_DIR", str(tmp_path / "s"))
    (tmp_path / "s" / "gone").mkdir(parents=True)
    monkeypatch.setattr("ops.commands.Ring.clean", lambda: [("/dflash.x.r0", "live, held by producer pid 1")])
    assert launch.main(["clean"]) == 0
    out = capsys.readouterr().out
    assert "/dflash.x.r0: live, held by producer pid 1" in out
    assert not (tmp_path / "s" / "gone").exists()
