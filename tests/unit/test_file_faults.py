"""A file that cannot be written or read: one line that names it and says what to do, no restart that cannot help."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import consumer.__main__
import consumer.loop
from configs.run_files import Trained, read_trained, write_trained
from ops.telemetry import Log

ROOT = Path(__file__).resolve().parents[2]
LIMITED = """
import resource, sys
from pathlib import Path
from configs.run_files import Trained, write_trained
resource.setrlimit(resource.RLIMIT_FSIZE, (3, 3))
try:
    write_trained(Path(sys.argv[1]), Trained(2, frozenset({0, 1})))
except OSError as error:
    print(error.errno, error.filename)
"""


def test_a_file_that_does_not_fit_is_named_and_the_old_one_stays_whole(tmp_path: Path) -> None:
    before = Trained(1, frozenset({0}))
    write_trained(tmp_path, before)
    words = [sys.executable, "-c", LIMITED, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.split() == [str(errno.EFBIG), str(tmp_path / "trained.json")]
    assert read_trained(tmp_path) == before
    assert os.listdir(tmp_path) == ["trained.json"], "half a file would fill the disk further with each try"


@pytest.fixture
def drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The drafter's program around a loop that fails as asked for."""
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({}))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("DFLASH_DEVICE", "cpu")

    def run(error: OSError) -> int:
        def fail(*_: object) -> None:
            raise error

        monkeypatch.setattr(consumer.loop, "run", fail)
        return consumer.__main__._run(tmp_path, 0, SimpleNamespace(stop_reason=""), Log("drafter", 0))  # type: ignore[arg-type]

    return run


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "free space there"),
        (errno.EROFS, "make it writable"),
        (errno.EACCES, "make it readable and writable"),
        (errno.EMFILE, "raise the limit of open files (ulimit -n)"),
    ],
)
def test_a_drafter_without_a_file_leaves_with_5_and_one_line(
    drafter: Any, number: int, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert drafter(OSError(number, os.strerror(number), "run/trained.json")) == 5
    assert capsys.readouterr().err == (
        f"drafter 0: run/trained.json: cannot be used ({os.strerror(number)}); {remedy} and launch again: "
        "the run goes on from what is saved\n"
    )


def test_what_a_restart_may_mend_is_left_to_a_restart(drafter: Any) -> None:
    with pytest.raises(OSError, match="Stale file handle"):
        drafter(OSError(errno.ESTALE, os.strerror(errno.ESTALE), "run/trained.json"))
