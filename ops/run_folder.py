"""A run's folder: claimed by one launcher, found by name, and never losing an old file silently.

lock            flock of the living launcher, with its pid
config.yaml     complete, resolved          (a different earlier one is kept as config.yaml.1, .2, ...)
logs/           appended over launches
metrics.jsonl   appended over launches
final.json, heldout.json, summary.json      (those of an earlier launch are kept as NAME.1, .2, ...)
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from configs.load import dump_config
from configs.run_files import write_atomically
from configs.schema import Config
from ops.errors import NoResource, RunMissing, RunTaken
from ops.locks import FileLock, holder_pid

CONFIG_FILE = "config.yaml"
LOCK_FILE = "lock"
FINAL_FILE = "final.json"
RESULTS = (FINAL_FILE, "heldout.json", "summary.json")


def claim(run_dir: Path) -> FileLock:
    """Make the run's folder and take its lock; raises RunTaken with the pid of the launcher that has it."""
    try:
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NoResource(f"cannot make the run folder {run_dir} ({error.strerror}); set run.folder elsewhere") from None
    lock = FileLock(run_dir / LOCK_FILE)
    try:
        pid = lock.take()
    except OSError as error:
        raise NoResource(f"cannot use the run folder {run_dir} ({error.strerror}); set run.folder elsewhere") from None
    if pid:
        raise RunTaken(
            f"run {run_dir.name!r} is already running (launcher pid {pid}); choose another --name, "
            f"or 'python launch.py stop {run_dir.name}' first"
        )
    return lock


def write_config(run_dir: Path, config: Config) -> Path | None:
    """Write config.yaml; a different earlier one is kept under the next number, which is returned."""
    text = dump_config(config)
    path, kept = run_dir / CONFIG_FILE, None
    if path.exists() and (before := path.read_text(encoding="utf-8")) != text:
        kept = unused(path)
        write_atomically(kept, before)  # not renamed: a process that starts at this moment reads config.yaml
    write_atomically(path, text)
    return kept


class Trial:
    """A launch of which nothing has been trained yet: refused or interrupted, it leaves the run as it found it."""

    def __init__(self, run_dir: Path) -> None:
        self.accepted = False
        self.moved: list[tuple[Path, Path]] = []
        """What was kept under a number, and the name that it had."""
        self._run_dir = run_dir

    def set_results_aside(self) -> None:
        """Keep the results of an earlier launch under the next number, so that this one's are its own."""
        for path in (self._run_dir / name for name in RESULTS):
            if path.exists():
                self.moved.append((keep(path), path))

    def accept(self) -> None:
        """The launch's configuration and its results stand from now on."""
        self.accepted = True


@contextmanager
def on_trial(run_dir: Path, config: Config) -> Iterator[Trial]:
    """Write config.yaml for a launch; what it replaced or set aside comes back at the end if it was not accepted."""
    trial = Trial(run_dir)
    if kept := write_config(run_dir, config):
        trial.moved.append((kept, run_dir / CONFIG_FILE))
    try:
        yield trial
    finally:
        for old, path in [] if trial.accepted else trial.moved:
            old.replace(path)


def keep(path: Path) -> Path:
    """Rename a file to its first unused number and return the new path."""
    return path.rename(unused(path))


def unused(path: Path) -> Path:
    """Return the first unused one of NAME.1, NAME.2, ..."""
    number = 1
    while (kept := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return kept


def launcher_pid(run_dir: Path) -> int:
    """Return the pid of the run's living launcher, 0 if there is none; raises NoResource for another user's run."""
    try:
        return holder_pid(run_dir / LOCK_FILE)
    except PermissionError:
        raise NoResource(
            f"run {run_dir.name!r} in {run_dir.parent} is another user's, who alone can see whether it lives and "
            "command it; give one of your own by name or folder"
        ) from None


def find_run(name: str | None, folder: Path) -> Path:
    """Return the folder of a run: by path, by name, or the newest live one (else the newest); raises RunMissing."""
    if name is not None:
        for candidate in (folder / name, Path(name)):
            if (candidate / CONFIG_FILE).exists():
                return candidate
        known = ", ".join(path.name for path in _runs(folder)[:8]) or "none"
        raise RunMissing(f"no run {name!r} in {folder}/ (known: {known}); give its name or its folder")
    runs = _runs(folder)
    if not runs:
        raise RunMissing(f"no run in {folder}/; start one with 'python launch.py CONFIG', or give the run's folder")
    live = [path for path in runs if _lives(path)]
    return (live or runs)[0]


def _lives(run_dir: Path) -> bool:
    try:
        return launcher_pid(run_dir) != 0
    except NoResource:
        return False


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; empty if the file is missing or torn."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def last_lines(path: Path, count: int = 20, offset: int = 0) -> list[str]:
    """Return the last lines of a log file from byte `offset` on; the end of a long line is kept."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, 2)
            file.seek(max(offset, end - 64 * 1024))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line[-2000:] for line in text.splitlines()[-count:]]


def _runs(folder: Path) -> list[Path]:
    """Run folders, newest first."""
    return sorted((path.parent for path in folder.glob(f"*/{CONFIG_FILE}")), key=_started, reverse=True)


def _started(run_dir: Path) -> float:
    lock = run_dir / LOCK_FILE
    return (lock if lock.exists() else run_dir / CONFIG_FILE).stat().st_mtime
