"""The command line: what a user can get wrong is one line and an exit code, before anything starts."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import launch
from configs.schema import Config

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
    ("words", "line"),
    [
        (["statsu", "run"], "statsu: neither a command nor a configuration file; did you mean 'status'?"),
        (["xyz"], "xyz: neither a command nor a configuration file; 'python launch.py --help' lists the commands"),
        (["telemetry", "run"], "telemetry: expected --tensorboard, --wandb PROJECT or --prometheus PORT, got none"),
    ],
)
def test_a_command_that_cannot_be_meant_is_one_line(
    capsys: pytest.CaptureFixture[str], words: list[str], line: str
) -> None:
    assert launch.main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith(line)
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "words",
    [
        "c.yaml --set ring.num_slots=3 ring.min_ready=2 --name a",
        "--set ring.num_slots=3 ring.min_ready=2 c.yaml --name a",
        "c.yaml --name a --set ring.num_slots=3 --set ring.min_ready=2",
        "c.yaml --name a --set=ring.num_slots=3 ring.min_ready=2",
    ],
)
def test_one_set_takes_several_values(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c.yaml").write_text("{}\n")
    monkeypatch.chdir(tmp_path)
    found: list[Config] = []
    monkeypatch.setattr("ops.run.run", lambda config, *_: found.append(config) or 0)
    assert launch.main(["run", *words.split()]) == 0
    assert [(each.run.name, each.ring.num_slots, each.ring.min_ready) for each in found] == [("a", 3, 2)]


def test_a_set_without_a_value_and_a_word_too_many_are_refused_by_the_command_that_was_meant(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words, line in (("a.yaml --set", "--set: expected one argument"), ("a.yaml --sett a=1", "arguments: --sett")):
        with pytest.raises(SystemExit, match="2"):
            launch.main(words.split())
        err = capsys.readouterr().err
        assert line in err
        assert err.split()[:4] == ["usage:", "python", "launch.py", "run"]


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (["dashboard", "--svg", "no/such/x.svg"], 5, "no/such/x.svg: cannot be written (No such file or directory)"),
        (["telemetry", "--prometheus", "99999"], 2, "--prometheus: expected a port in 0..65535, got 99999"),
    ],
)
def test_what_cannot_be_written_or_served_is_one_line(
    words: list[str], code: int, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "config.yaml").write_text("{}\n")
    assert launch.main([*words[:1], "a", *words[1:]]) == code
    err = capsys.readouterr().err
    assert err.startswith(line)
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("subject", [[], ["c.yaml"]])
def test_a_comparison_without_a_run_is_refused(subject: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["doctor", *subject, "--against", "before"]) == 2
    got = subject[0] if subject else "nothing"
    line = f"doctor --against: expected a run or its metrics file to compare with, got {got}\n"
    assert tuple(capsys.readouterr()) == ("", line)


def test_one_table_of_exit_codes_holds_in_the_help_and_in_the_docs_and_errors_have_no_others() -> None:
    table = re.findall(r"^\| (\d+) \| (.*?)[;|]", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE)
    said = " ".join((launch.__doc__ or "").partition("Exit codes: ")[2].split())
    in_help = re.findall(r"(\d+) ([a-z ]+)", said)
    assert [(code, words.strip()) for code, words in table] == [(code, words.strip()) for code, words in in_help]
    packages = ("configs", "shm_ring", "ops", "producer", "consumer", "evaluation")
    sources = [path.read_text() for package in packages for path in (ROOT / package).rglob("*.py")]
    used = {code for source in sources for code in re.findall(r"^    exit_code = (\d+)$", source, re.MULTILINE)}
    assert used <= {code for code, _ in table}


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
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_children_import_neither_torch_nor_rich_through_control_and_telemetry() -> None:
    code = (
        "import sys, ops.control, ops.telemetry\n"
        "bad = [m for m in ('torch', 'rich', 'yaml', 'transformers') if m in sys.modules]\n"
        "sys.exit(f'imported: {bad}' if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_doctor_runs_where_the_ring_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "shm_ring.py").write_text("raise ImportError('libatomic.so.1 is not installed')\n")
    doctor = "import sys, launch; sys.exit(launch.main(['doctor']))"
    run = "import sys, launch; sys.exit(launch.main(['status']))"
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    asked = [
        subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
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
    (tmp_path / "s" / "gone-0123456789").mkdir(parents=True)
    monkeypatch.setattr("ops.commands.Ring.clean", lambda: [("/dflash.x.r0", "live, held by producer pid 1")])
    assert launch.main(["clean"]) == 0
    out = capsys.readouterr().out
    assert "/dflash.x.r0: live, held by producer pid 1" in out
    assert not (tmp_path / "s" / "gone-0123456789").exists()


@pytest.mark.parametrize(("number", "shown"), [(errno.ENOSPC, True), (errno.EACCES, True), (errno.ENOTDIR, False)])
def test_what_the_machine_refuses_is_one_line_with_exit_code_5(
    number: int, shown: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(_options: object) -> int:
        raise OSError(number, os.strerror(number), "/disk/file")

    monkeypatch.setitem(launch.COMMANDS, "clean", (refused, *launch.COMMANDS["clean"][1:]))
    if not shown:  # the machine lacks nothing: where it comes from is shown
        with pytest.raises(OSError, match="/disk/file"):
            launch.main(["clean"])
        return
    assert launch.main(["clean"]) == 5
    assert capsys.readouterr().err == f"/disk/file: {os.strerror(number)}\n"
