"""Telemetry is published and nothing of it is lost: not the first message, not what a slow or late listener missed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from ops.exporters import export
from ops.feed import LINGER_MS, Feed, Listener, Message, Pusher
from ops.metrics_reader import MetricsReader
from ops.paths import MAX_SOCKET_CHARS, socket_path
from ops.telemetry import METRICS_FILE, Metrics

LIMIT_S = 300.0


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


@pytest.fixture
def feed(run_dir: Path) -> Iterator[Feed]:
    made = Feed(run_dir)
    yield made
    made.close()


def _hear(listener: Listener, count: int = 1) -> list[Message]:
    """The next messages."""
    found: list[Message] = []
    give_up = time.monotonic() + LIMIT_S
    while len(found) < count:
        assert time.monotonic() < give_up, f"{len(found)} of {count} messages came"
        listener.wait(0.5)
        found += listener.receive()
    return found


def _only_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let readers not look into the file again unless a message makes them."""
    monkeypatch.setattr("ops.metrics_reader.LOOK_EVERY_S", 1e9)


def _steps(reader: MetricsReader, listener: Listener, count: int) -> list[int]:
    steps: list[int] = []
    give_up = time.monotonic() + LIMIT_S
    while len(steps) < count and time.monotonic() < give_up:
        listener.wait(0.2)
        steps += [record["step"] for record in reader.read()]
    return steps


@pytest.mark.usefixtures("feed")
def test_fifty_fresh_listeners_each_hear_the_first_line_after_their_greeting(run_dir: Path) -> None:
    with Metrics(run_dir, "target", 0) as metrics:
        for number in range(50):
            with Listener(run_dir) as listener:
                (greeting,) = _hear(listener)
                assert greeting.is_greeting
                metrics.write(step=number)
                (message,) = _hear(listener)
                assert json.loads(message.line)["step"] == number
    text = (run_dir / METRICS_FILE).read_bytes()
    assert text[message.start :] == message.line, "a message says where its line is in the record"


@pytest.mark.usefixtures("feed")
def test_a_fresh_processs_first_line_is_heard(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _only_messages(monkeypatch)
    with Listener(run_dir) as listener:
        _hear(listener)
        reader = MetricsReader(run_dir, listener=listener)
        assert reader.poll() == 0
        code = (
            "import ops.feed; from ops.telemetry import Metrics\n"
            "ops.feed.LINGER_MS = -1\n"  # it waits for the feed, which may stand still for longer than it would wait
            f"with Metrics({str(run_dir)!r}, 'drafter', 0) as m: m.write(step=7)"
        )
        for _ in range(3):  # as after each restart of a side
            subprocess.run([sys.executable, "-c", code], check=True, timeout=LIMIT_S)
            assert _steps(reader, listener, 1) == [7]


@pytest.mark.usefixtures("feed")
def test_lines_written_before_come_from_the_file_and_each_line_comes_once(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _only_messages(monkeypatch)
    with Metrics(run_dir, "target", 0) as metrics, Listener(run_dir) as listener:
        reader = MetricsReader(run_dir, start=0, listener=listener)
        for step in range(200):  # some before the subscription is known, some after
            metrics.write(step=step)
        assert _steps(reader, listener, 200) == list(range(200))
        metrics.write(step=200)  # messages come in order: whatever came twice would come before this one
        assert _steps(reader, listener, 1) == [200]


@pytest.mark.usefixtures("feed")
def test_a_line_that_was_dropped_or_overtaken_is_read_from_the_file(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _only_messages(monkeypatch)
    with Listener(run_dir) as listener:
        _hear(listener)
        reader = MetricsReader(run_dir, listener=listener)
        reader.poll()
        lines = [f'{{"time": 1, "role": "target", "rank": 0, "step": {step}}}\n'.encode() for step in range(3)]
        (run_dir / METRICS_FILE).write_bytes(b"".join(lines))
        pusher = Pusher(run_dir)
        pusher.send(len(lines[0]) + len(lines[1]), lines[2])  # the first is never sent, the second too late
        pusher.send(len(lines[0]), lines[1])
        assert _steps(reader, listener, 3) == [0, 1, 2]
        pusher.close()


def test_listeners_outlive_the_launcher_and_hear_the_next_one(run_dir: Path) -> None:
    with Listener(run_dir) as listener:  # there before any run is
        reader = MetricsReader(run_dir, start=0, listener=listener)
        for life in range(2):
            feed = Feed(run_dir)
            with Metrics(run_dir, "target", 0) as metrics:
                metrics.write(step=10 * life)
                assert _steps(reader, listener, 1) == [10 * life]
            feed.close()
        with Metrics(run_dir, "target", 0) as metrics:  # its launcher is gone; the file is looked at anyway
            metrics.write(step=99)
        assert _steps(reader, listener, 1) == [99]


def test_what_a_run_writes_in_its_last_moment_is_exported(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _only_messages(monkeypatch)
    answers = iter([1, 0])

    def alive_once(_run_dir: Path) -> int:
        with Metrics(run_dir, "target", 0) as metrics:  # nobody publishes it any more
            metrics.write(step=1)
        return next(answers)

    monkeypatch.setattr("ops.exporters.launcher_pid", alive_once)
    monkeypatch.setattr("ops.exporters.POLL_S", 0.01)
    assert export(run_dir, []) == 2


def test_without_a_launcher_a_process_writes_its_record_and_leaves(run_dir: Path) -> None:
    with Metrics(run_dir, "target", 0) as metrics:
        metrics.write(step=1)
    assert (run_dir / METRICS_FILE).read_text().count("\n") == 1


def test_a_dead_launcher_neither_stops_a_process_nor_keeps_it_from_leaving(run_dir: Path) -> None:
    feed = Feed(run_dir)
    with Metrics(run_dir, "target", 0) as metrics:
        feed.close()
        for step in range(3000):  # more than anyone keeps
            metrics.write(step=step)
        socket: Any = metrics._pusher._socket
        assert socket.getsockopt(zmq.LINGER) == LINGER_MS
    assert len((run_dir / METRICS_FILE).read_text().splitlines()) == 3000


@pytest.mark.usefixtures("run_dir")
def test_the_sockets_are_in_the_runs_private_folder(feed: Feed, runtime_root: Path) -> None:
    (folder,) = runtime_root.iterdir()
    assert {path.name for path in folder.iterdir()} == {"lines.sock", "feed.sock"}
    assert os.stat(folder).st_mode & 0o777 == 0o700
    feed.close()


def test_its_socket_paths_fit_wherever_the_launchers_fits(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = MAX_SOCKET_CHARS - len("/run-0123456789/launcher.sock")
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        monkeypatch.setenv("DFLASH_RUNTIME_DIR", f"{short}/".ljust(longest, "x"))
        assert len(str(socket_path(run_dir, "launcher"))) == MAX_SOCKET_CHARS
        Feed(run_dir).close()
