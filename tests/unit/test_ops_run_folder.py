"""A run's folder is claimed once, found by name, and keeps what was in it."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from configs.load import ConfigError, config_from, load_config
from ops.changes import change_live, change_on_restart
from ops.errors import NoResource, RunMissing, RunTaken
from ops.locks import FileLock, holder_pid
from ops.paths import runtime_dir, runtime_dirs
from ops.run import Interrupts
from ops.run_folder import claim, find_run, last_lines, launcher_pid, on_trial, write_config


def test_a_claim_is_exclusive_and_names_its_holder(tmp_path: Path) -> None:
    first = claim(tmp_path / "a")
    with pytest.raises(RunTaken, match=f"'a' is already running \\(launcher pid {os.getpid()}\\)"):
        claim(tmp_path / "a")
    assert holder_pid(tmp_path / "a" / "lock") == os.getpid()
    first.drop()
    assert holder_pid(tmp_path / "a" / "lock") == 0
    claim(tmp_path / "a").drop()


def test_a_lock_dies_with_its_holder_and_not_with_its_forks_parent(tmp_path: Path) -> None:
    code = f"""
import os, sys
from pathlib import Path
from ops.locks import FileLock
lock = FileLock(Path({str(tmp_path / "lock")!r}))
assert lock.take() == 0
up, says_up = os.pipe()
if os.fork() == 0:
    os.write(says_up, b"x")
    sys.stdin.read()
    os._exit(0)
os.read(up, 1)
print("up", flush=True)
os.kill(os.getpid(), 9)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"up\n"
        holder.wait(300)
        assert holder_pid(tmp_path / "lock") == 0, "the forked child still lives but must not hold it"


class Clock:
    """Stands for the module time: sleeping calls `after_sleep` with the seconds that have passed."""

    def __init__(self, after_sleep: Callable[[float], None]) -> None:
        self.now_s, self._after_sleep = 0.0, after_sleep

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self._after_sleep(self.now_s)


@pytest.mark.parametrize("stands_still_s", [0.1, 20.0])
def test_a_reader_that_looks_at_a_lock_is_no_reason_to_refuse(
    stands_still_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = (tmp_path / "lock").open("w")
    fcntl.flock(probe, fcntl.LOCK_SH)
    clock = Clock(lambda now_s: probe.close() if now_s > stands_still_s else None)
    monkeypatch.setattr("ops.locks.time", clock)
    lock = FileLock(tmp_path / "lock")
    assert lock.take() == 0
    assert clock.now_s > stands_still_s
    lock.drop()


def test_a_reader_that_never_ends_its_look_is_given_up_and_nobody_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ops.locks.time", Clock(lambda _now_s: None))
    (tmp_path / "lock").write_text("123\n")  # of a holder that has left long ago
    with (tmp_path / "lock").open() as probe:
        fcntl.flock(probe, fcntl.LOCK_SH)
        assert FileLock(tmp_path / "lock").take() == -1
    lock = FileLock(tmp_path / "lock")
    assert lock.take() == 0
    lock.drop()


def test_a_holder_that_is_leaving_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    assert first.take() == 0
    monkeypatch.setattr("ops.locks.time", Clock(lambda now_s: first.drop() if now_s > 0.2 else None))
    assert second.take() == 0
    second.drop()


def test_a_changed_config_keeps_the_old_one_under_a_number(tmp_path: Path) -> None:
    for rate in (0.1, 0.2, 0.2, 0.3):
        write_config(tmp_path, config_from({"optimizer": {"lr": rate}}))
    rates = [load_config(tmp_path / name).optimizer.lr for name in ("config.yaml.1", "config.yaml.2", "config.yaml")]
    assert rates == [0.1, 0.2, 0.3]
    assert not (tmp_path / "config.yaml.3").exists()


def test_results_of_an_earlier_launch_are_kept(tmp_path: Path) -> None:
    for text in ("one", "two"):
        (tmp_path / "summary.json").write_text(text)
        with on_trial(tmp_path, config_from({})) as trial:
            trial.set_results_aside()
            trial.accept()
    assert (tmp_path / "summary.json.1").read_text() == "one"
    assert (tmp_path / "summary.json.2").read_text() == "two"
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.parametrize("begun", [False, True])
def test_a_launch_that_is_refused_leaves_config_and_results_as_they_were(begun: bool, tmp_path: Path) -> None:
    with on_trial(tmp_path, config_from({"optimizer": {"lr": 0.1}})) as trial:
        trial.accept()
    (tmp_path / "final.json").write_text("done")
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    with on_trial(tmp_path, config_from({"optimizer": {"lr": 0.2}})) as trial:
        assert load_config(tmp_path / "config.yaml").optimizer.lr == 0.2
        if begun:
            trial.set_results_aside()
            assert not (tmp_path / "final.json").exists()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before


def test_the_newest_living_run_is_found_before_newer_dead_ones(tmp_path: Path) -> None:
    locks = {}
    for number, name in enumerate(("old", "living", "new")):
        locks[name] = claim(tmp_path / name)
        write_config(tmp_path / name, config_from({}))
        os.utime(tmp_path / name / "lock", (number, number))
    for name in ("old", "new"):
        locks[name].drop()
    assert find_run(None, tmp_path).name == "living"
    locks["living"].drop()
    assert find_run(None, tmp_path).name == "new"
    assert find_run("old", tmp_path) == tmp_path / "old"
    assert find_run(str(tmp_path / "old"), tmp_path / "elsewhere") == tmp_path / "old"
    with pytest.raises(RunMissing, match=r"no run 'nwe' .*known: new, living, old"):
        find_run("nwe", tmp_path)
    with pytest.raises(RunMissing, match="start one with"):
        find_run(None, tmp_path / "elsewhere")


def test_last_lines_begin_where_the_present_life_began(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("old\n")
    start = log.stat().st_size
    with log.open("a") as file:
        file.write("".join(f"line {number}\n" for number in range(5)))
    assert last_lines(log, 2, start) == ["line 3", "line 4"]
    assert last_lines(log, 20, start)[0] == "line 0"
    assert last_lines(tmp_path / "none") == []


def test_a_restart_may_change_only_what_leaves_packs_as_they_are(tmp_path: Path) -> None:
    config = config_from({})
    changed = change_on_restart(tmp_path, config, ["optimizer.lr=0.5", "ring.pick=random"], "drafter")
    assert load_config(tmp_path / "config.yaml") == changed
    assert changed.optimizer.lr == 0.5
    for override in ("drafter.num_layers=3", "training.devices=[cpu, cpu]", "run.name=b", "ring.num_slots=3"):
        with pytest.raises(ConfigError, match="cannot change it"):
            change_on_restart(tmp_path, config, [override], "drafter")
    with pytest.raises(ConfigError, match="cannot change it"):
        change_on_restart(tmp_path, config, ["optimizer.lr=0.5"], "target")
    with pytest.raises(ConfigError, match="greater than 0"):
        change_on_restart(tmp_path, config, ["optimizer.lr=-1"], "drafter")


def test_live_settings_come_out_typed(tmp_path: Path) -> None:
    _, values = change_live(tmp_path, config_from({}), ["ring.min_ready=2", "ring.pick=random"])
    assert values == {"ring.min_ready": 2, "ring.pick": "random"}
    with pytest.raises(ConfigError, match=r"ring\.min_ready"):
        change_live(tmp_path, config_from({}), ["ring.min_ready=two"])


def test_a_socket_folder_of_someone_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = tmp_path / "s"
    shared.mkdir(mode=0o777)
    shared.chmod(0o777)
    monkeypatch.setenv("DFLASH_RUNTIME_DIR", str(shared))
    with pytest.raises(NoResource, match=r"is not a private folder of this user .*mode 777"):
        runtime_dir(tmp_path / "run", create=True)
    monkeypatch.setenv("DFLASH_RUNTIME_DIR", str(tmp_path / "link"))
    (tmp_path / "link").symlink_to(shared)
    with pytest.raises(NoResource, match="is not a private folder"):
        runtime_dir(tmp_path / "run", create=True)


def test_what_is_cleaned_of_a_socket_folder_is_nothing_but_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Someone's home, or $XDG_RUNTIME_DIR, is private and short: a natural DFLASH_RUNTIME_DIR, with more in it."""
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    monkeypatch.setenv("DFLASH_RUNTIME_DIR", str(home))
    ours = [runtime_dir(tmp_path / name, create=True) for name in ("a", "b" * 60)]
    for folder in ours:
        for name in ("launcher.lock", "target0.ready", "launcher.sock"):
            (folder / name).touch()
    for name in ("Documents/thesis.txt", ".ssh/known_hosts", "0123456789/photo.jpg", "bus-0123456789/user/bus.sock"):
        (home / name).parent.mkdir(parents=True)
        (home / name).touch()
    (home / "link-0123456789").symlink_to(ours[0])
    (home / "0123456789abcdef.lock").touch()
    assert runtime_dirs() == sorted(ours)


def test_config_yaml_is_there_at_every_moment_of_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is started again while `set` or `restart --set` writes it reads the old one or the new one."""
    write_config(tmp_path, config_from({"optimizer": {"lr": 0.1}}))
    seen = []

    def write(path: Path, text: str) -> None:
        seen.append(load_config(tmp_path / "config.yaml").optimizer.lr)
        path.write_text(text)

    monkeypatch.setattr("ops.run_folder.write_atomically", write)
    write_config(tmp_path, config_from({"optimizer": {"lr": 0.2}}))
    assert seen == [0.1, 0.1]
    assert load_config(tmp_path / "config.yaml").optimizer.lr == 0.2


def test_a_run_folder_whose_lock_cannot_be_opened_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "a" / "lock").mkdir(parents=True)
    with pytest.raises(NoResource, match=r"cannot use the run folder .*/a \(Is a directory\); set"):
        claim(tmp_path / "a")


def test_a_run_of_another_user_is_passed_over_and_named_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = claim(tmp_path / "mine")
    for number, name in enumerate(("mine", "theirs")):
        (tmp_path / name).mkdir(exist_ok=True)
        write_config(tmp_path / name, config_from({}))
        os.utime(tmp_path / name / "config.yaml", (number, number))

    def probe(path: Path) -> int:
        if path.parent.name == "theirs":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return holder_pid(path)

    monkeypatch.setattr("ops.run_folder.holder_pid", probe)
    assert find_run(None, tmp_path).name == "mine"
    with pytest.raises(NoResource, match=r"run 'theirs' in .* is another user's"):
        launcher_pid(find_run("theirs", tmp_path))
    held.drop()


def test_a_lock_is_taken_on_a_full_disk_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("ops.locks.os.pwrite", no_space)
    lock, other = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    assert lock.take() == 0
    assert other.take() == holder_pid(tmp_path / "lock") == -1
    lock.drop()


@pytest.mark.parametrize(("before", "asked"), [(signal.SIG_IGN, False), (signal.SIG_DFL, True)])
def test_a_lost_terminal_asks_for_the_end_but_not_under_nohup(before: signal.Handlers, asked: bool) -> None:
    old = signal.signal(signal.SIGHUP, before)
    try:
        interrupts = Interrupts()
        with interrupts.installed():
            for _ in range(2):  # by the shell and by the kernel: no second request, which would be to end at once
                signal.raise_signal(signal.SIGHUP)
        assert interrupts.count == int(asked)
        assert signal.getsignal(signal.SIGHUP) == before
    finally:
        signal.signal(signal.SIGHUP, old)


def test_the_exit_of_a_child_is_seen_by_a_launcher_that_was_started_with_sigchld_ignored() -> None:
    old = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with Interrupts().installed(), subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"]) as child:
            found = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
            assert found is not None
            assert found.si_status == 7
        assert signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGCHLD, old)
