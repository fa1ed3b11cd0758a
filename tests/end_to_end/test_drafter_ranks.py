"""Several targets and drafters on one host, through launch.py: a death, another N:M, a restart on request."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from configs.run_files import from_ranges
from tests.helpers.tiny_run import LIMIT_S, REPOSITORY, Tiny, planned_packs, tiny

__all__ = ["tiny"]

TWO_BY_TWO = ("--set", "target.devices=[cpu, cpu]", "--set", "training.devices=[cpu, cpu]")
QUIET = ("--set", "evaluation.enabled=false")


def pids(tiny: Tiny) -> dict[str, int]:
    return {process["name"]: process["pid"] for process in tiny.status()["processes"]}


def in_the_weights(checkpoint: str) -> frozenset[int]:
    return from_ranges(json.loads((Path(checkpoint) / "checkpoint.json").read_text())["trained"])


def assert_complete(tiny: Tiny) -> None:
    summary = json.loads((tiny.dir / "summary.json").read_text())
    assert in_the_weights(summary["checkpoint"]) == frozenset(range(planned_packs(tiny)))
    tiny.assert_nothing_left()


def test_the_death_of_one_rank_restarts_the_drafters_alone_and_all_stop_at_the_same_step(tiny: Tiny) -> None:
    with socket.socket() as other:
        with contextlib.suppress(OSError):  # L-07: torch's usual port is somebody else's, or already was
            other.bind(("127.0.0.1", 29500))
            other.listen()
        tiny.launch(*QUIET, *TWO_BY_TWO, hold_at=50)
        tiny.wait_for_step(25)
        tiny.wait_for_checkpoint(0)
    before = pids(tiny)
    threads = {name: len(os.listdir(f"/proc/{pid}/task")) for name, pid in before.items()}
    assert all(number < 40 for number in threads.values()), threads  # M-07
    os.kill(before["drafter1"], signal.SIGKILL)
    tiny.wait_for(lambda: tiny.log("drafter0").count("| resumed |") == 1)
    after = pids(tiny)
    assert {name for name in before if after[name] != before[name]} == {"drafter0", "drafter1"}
    tiny.let_go()
    code, out = tiny.end()
    assert code == 0, out
    # whose end the launcher sees first is the kernel's choice: a peer may hear of a death that is not complete yet
    assert "drafter1 died (signal SIGKILL)" in out or "drafter0 died (code 4)" in out
    last = {line["rank"]: line["step"] for line in tiny.metrics("drafter")}
    assert planned_packs(tiny) % 2 == 1  # M-02: one rank has no pack in the last step
    assert last[0] == last[1]
    for rank in (0, 1):
        assert tiny.log(f"target{rank}").count("model loaded") == 1
    assert_complete(tiny)


def test_a_run_goes_on_with_other_numbers_of_targets_and_drafters(tiny: Tiny) -> None:
    process = tiny.launch(*QUIET, *TWO_BY_TWO, "--set", "supervisor.stop_timeout_s=60", hold_at=50)
    tiny.wait_for_step(15)
    command = [sys.executable, "launch.py", "restart", "drafter", str(tiny.dir)]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, timeout=LIMIT_S)
    os.killpg(process.pid, signal.SIGINT)
    code, out = tiny.end()
    assert code == 130, out
    devices = ("--set", "target.devices=[cpu, cpu, cpu]", "--set", "training.devices=[cpu]")
    tiny.launch(*QUIET, *devices)
    code, out = tiny.end()
    assert code == 0, out
    begun = [
        json.loads(line)["pack_id"]
        for path in tiny.dir.glob("journal.*.jsonl")
        for line in path.read_text().splitlines()
    ]
    assert sorted(begun) == list(range(planned_packs(tiny)))  # each pack once, over all three lives: each saved
    assert_complete(tiny)
