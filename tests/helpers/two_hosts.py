"""Two hosts on one machine: network namespaces joined by a cable, each with a /dev/shm and a run folder of its own.

Needs root (or CAP_SYS_ADMIN and CAP_NET_ADMIN) and `ip`; `available` says whether the machine can.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.helpers.tiny_run import LIMIT_S, REPOSITORY, Tiny

PORT = 29400


class Host:
    """One of the two: its namespace, its address, its run folder."""

    def __init__(self, node: int, namespace: str, tiny: Tiny) -> None:
        self.node, self.namespace, self.address = node, namespace, f"10.77.0.{node + 1}"
        self.folder = tiny.folder / f"host{node}"
        self.dir = self.folder / tiny.name
        self.config = tiny.config
        self.process: subprocess.Popen[str] | None = None

    def run(self, *command: str) -> list[str]:
        """A command line that runs inside this host."""
        inside = f"mount -t tmpfs -o size=512m tmpfs /dev/shm && exec {shlex.join(command)}"
        return ["ip", "netns", "exec", self.namespace, "unshare", "-m", "sh", "-c", inside]

    def launch(self, *arguments: str, module: str = "launch") -> subprocess.Popen[str]:
        """Start this host's launcher."""
        options = ["--nnodes", "2", "--node-rank", str(self.node), "--rdzv", f"10.77.0.1:{PORT}", *arguments]
        folder = ["--set", f"run.folder={self.folder}"]
        self.process = subprocess.Popen(
            self.run(sys.executable, "-m", module, str(self.config), *options, *folder),
            cwd=REPOSITORY, env={**os.environ, "HF_HUB_OFFLINE": "1"}, stdin=subprocess.DEVNULL,
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
        return "\n".join(f"--- {path.name} of host {self.node}\n{path.read_text()[-2000:]}" for path in logs)

    def metrics(self, role: str) -> list[dict[str, Any]]:
        """Lines of metrics of one side."""
        with contextlib.suppress(FileNotFoundError):
            lines = (self.dir / "metrics.jsonl").read_text().splitlines()
            return [line for line in map(json.loads, lines) if line["role"] == role]
        return []

    def ask(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a subcommand of launch.py on this host's run; its sockets are found by the folder."""
        command = [sys.executable, "launch.py", *words, str(self.dir)]
        return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)

    def launcher_log(self) -> str:
        """What its launcher has said."""
        return (self.dir / "logs" / "launcher.log").read_text()

    def processes(self) -> list[int]:
        """Pids of everything of this host that lives."""
        inside = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True)
        return [int(pid) for pid in inside.stdout.split()]

    def kill(self) -> None:
        """Pull the plug: kill -9 of every process at once."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process is not None:
            self.process.communicate(timeout=30)
            self.process = None


class TwoHosts:
    """Both, and what is true of them together."""

    def __init__(self, tiny: Tiny) -> None:
        self.tiny = tiny
        names = [f"dflash{os.getpid()}-{node}" for node in (0, 1)]
        self.hosts = [Host(node, name, tiny) for node, name in enumerate(names)]

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
    probe = f"dflashprobe{os.getpid()}"
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
    first, second = (host.namespace for host in made.hosts)
    cable = [f"dfl{os.getpid()}a"[-15:], f"dfl{os.getpid()}b"[-15:]]
    for name in (first, second):
        _ip("netns", "add", name)
    _ip("link", "add", cable[0], "netns", first, "type", "veth", "peer", "name", cable[1], "netns", second)
    for host, end in zip(made.hosts, cable, strict=True):
        _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", end)
        _ip("-n", host.namespace, "link", "set", end, "up")
        _ip("-n", host.namespace, "link", "set", "lo", "up")
    yield made
    for host in made.hosts:
        host.kill()
        _ip("netns", "del", host.namespace)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
