"""Two hosts on one machine: network namespaces joined by a cable, each with a /dev/shm and a run folder of its own.

Needs root (or CAP_SYS_ADMIN and CAP_NET_ADMIN) and `ip`; `available` says whether the machine can.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.helpers.tiny_run import LIMIT_S, REPOSITORY, Tiny, log_in, metrics_in

PORT = 29400


class Host:
    """One of the two: its namespace, its address, its run folder."""

    def __init__(self, node: int, namespace: str, tiny: Tiny) -> None:
        self.node, self.namespace, self.address = node, namespace, f"10.77.0.{node + 1}"
        self.folder = tiny.folder / f"host{node}"
        self.dir = self.folder / tiny.name
        self.config = tiny.config
        self.environment = {"HF_HUB_OFFLINE": "1", "HOLD_FILE": str(tiny.folder / "hold")}
        self.process: subprocess.Popen[str] | None = None

    def run(self, *command: str) -> list[str]:
        """A command line that runs inside this host."""
        inside = f"mount -t tmpfs -o size=512m tmpfs /dev/shm && exec {shlex.join(command)}"
        return ["ip", "netns", "exec", self.namespace, "unshare", "-m", "sh", "-c", inside]

    def launch(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """Start this host's launcher; its drafter is held if Tiny.hold says so (held_launch.py)."""
        options = ["--nnodes", "2", "--node-rank", str(self.node), "--rdzv", f"10.77.0.1:{PORT}", *arguments]
        folder = ["--set", f"run.folder={self.folder}"]
        self.process = subprocess.Popen(
            self.run(sys.executable, "-m", "tests.helpers.held_launch", str(self.config), *options, *folder),
            cwd=REPOSITORY, env={**os.environ, **self.environment, **environment}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        return self.process

    def end(self, limit_s: float = LIMIT_S) -> tuple[int, str]:
        """Wait for the launcher; returns its exit code and what it printed."""
        assert self.process is not None
        try:
            out, _ = self.process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"host {self.node} did not end within {limit_s} s\n{self.logs()}") from None
        return self.process.returncode, out

    def logs(self) -> str:
        """The end of every log of this host."""
        logs = sorted((self.dir / "logs").glob("*.log"))
        return "\n".join(f"--- {path.name} of host {self.node}\n{self.log(path.stem)[-2000:]}" for path in logs)

    def metrics(self, role: str) -> list[dict[str, Any]]:
        """Lines of metrics of one side."""
        return metrics_in(self.dir, role)

    def ask(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a subcommand of launch.py on this host's run; its sockets are found by the folder."""
        command = [sys.executable, "launch.py", *words, str(self.dir)]
        return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)

    def log(self, name: str) -> str:
        """The whole lines of a log; empty before it is there."""
        return log_in(self.dir, name)

    def processes(self) -> list[int]:
        """Pids of everything of this host that lives."""
        inside = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True)
        return [int(pid) for pid in inside.stdout.split()]

    def kill(self) -> None:
        """Pull the plug: kill -9 of every process at once, and of what was being started in that moment."""
        give_up = time.monotonic() + LIMIT_S
        while (pids := self.processes()) and time.monotonic() < give_up:
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
            if self.process is not None:
                self.process.poll()
            time.sleep(0.02)
        if self.process is not None:
            self.process.communicate(timeout=LIMIT_S)
            self.process = None


class TwoHosts:
    """Both, and what is true of them together."""

    def __init__(self, tiny: Tiny) -> None:
        self.tiny = tiny
        self.mark = uuid.uuid4().hex[:8]
        self.hosts = [Host(node, f"dflash{self.mark}-{node}", tiny) for node in (0, 1)]

    def launch(self, *arguments: str) -> None:
        """Start both with the same command."""
        for host in self.hosts:
            host.launch(*arguments)

    def wait_for(self, what: Callable[[], object]) -> None:
        """Wait until something is true; fails if a launcher ends before."""
        give_up = time.monotonic() + LIMIT_S
        while not what():
            for host in self.hosts:
                running = host.process is None or host.process.poll() is None
                assert running, f"host {host.node} ended:\n{host.end()[1]}\n{host.logs()}"
            assert time.monotonic() < give_up, "\n".join(["no progress", *(host.logs() for host in self.hosts)])
            time.sleep(0.05)


def available() -> bool:
    """Whether namespaces can be made here."""
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return False
    probe = f"dflashprobe{uuid.uuid4().hex[:8]}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True).returncode == 0
    inside = ["ip", "netns", "exec", probe, "unshare", "-m", "sh", "-c", "mount -t tmpfs tmpfs /dev/shm"]
    works = made and subprocess.run(inside, capture_output=True).returncode == 0
    subprocess.run(["ip", "netns", "del", probe], capture_output=True)
    return works


@pytest.fixture
def two_hosts(tiny: Tiny) -> Iterator[TwoHosts]:
    if not available():
        pytest.skip("network namespaces cannot be made here")
    made = TwoHosts(tiny)
    first, second = made.hosts
    cable = [f"dfl{made.mark}a", f"dfl{made.mark}b"]
    with ExitStack() as undo:
        for host in made.hosts:
            _ip("netns", "add", host.namespace)
            undo.callback(_ip, "netns", "del", host.namespace)
            undo.callback(host.kill)
        _ip("link", "add", cable[0], "netns", first.namespace, "type", "veth", "peer", "name", cable[1],
            "netns", second.namespace)  # fmt: skip
        for host, end in zip(made.hosts, cable, strict=True):
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", end)
            _ip("-n", host.namespace, "link", "set", end, "up")
            _ip("-n", host.namespace, "link", "set", "lo", "up")
        yield made


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
