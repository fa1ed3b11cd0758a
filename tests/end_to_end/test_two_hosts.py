"""Two hosts, one target and one drafter each: the same weights as one host with two of each; a host that dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from configs.run_files import from_ranges
from producer.corpus.documents import Documents
from tests.helpers.tiny_run import REPOSITORY, Tiny, planned_packs, tiny
from tests.helpers.two_hosts import Host, TwoHosts, two_hosts

__all__ = ["tiny", "two_hosts"]

QUIET = ("--set", "evaluation.enabled=false")
ALL_IN_THE_RING = (
    "--set", "data.max_documents=42", "--set", "training.epochs=1", "--set", "ring.num_slots=32",
    "--set", "ring.min_ready=32", "--set", "training.collective_timeout_s=12", "--set", "training.micro_steps=2",
)  # fmt: skip
"""So few packs that all are made before the first step, and an even number: then each step has the oldest pack of each
target, whoever takes it."""


def weights_of(run_dir: Path) -> dict[str, torch.Tensor]:
    final = json.loads((run_dir / "final.json").read_text())
    return load_file(Path(final["checkpoint"]) / "drafter.safetensors")


def _processes_of_others(host: Host) -> dict[int, set[str]]:
    """Names of the processes on the other hosts, by node, as one host's dashboard shows them."""
    hosts = json.loads(host.ask("dashboard", "--json").stdout)["hosts"]
    return {other["node"]: {process["name"] for process in other["processes"]} for other in hosts}


def test_two_hosts_train_what_one_host_with_two_of_each_trains(tiny: Tiny, two_hosts: TwoHosts) -> None:
    first, second = two_hosts.hosts
    os.environ["SLOW_PREPARE_S"] = "14"  # M-03: longer than the ranks would wait for each other
    try:
        first.launch(*QUIET, *ALL_IN_THE_RING)
        second.launch(*QUIET, *ALL_IN_THE_RING, module="tests.helpers.slow_launch")
    finally:
        del os.environ["SLOW_PREPARE_S"]
    two_hosts.wait_for(lambda: (second.dir / "logs" / "drafter1.log").exists())
    two_hosts.wait_for(lambda: _processes_of_others(second) == {0: {"target0", "drafter0"}})  # a beat a second
    two_hosts.wait_for(lambda: "drafter1" in first.ask("status").stdout)
    for host in two_hosts.hosts:
        code, out = host.end()
        assert code == 0, out + host.logs()
    made = [{line["pack_id"] for line in host.metrics("target")} for host in two_hosts.hosts]
    assert made[0].isdisjoint(made[1])  # M-04
    plan = json.loads((first.dir / "plan.json").read_text())
    assert made[0] | made[1] == set(range(plan["num_packs"]))
    devices = ("--set", "target.devices=[cpu, cpu]", "--set", "training.devices=[cpu, cpu]")
    tiny.launch(*QUIET, *ALL_IN_THE_RING, *devices)
    code, out = tiny.end()
    assert code == 0, out
    assert planned_packs(tiny) == plan["num_packs"] > 10
    assert plan["num_packs"] % 2 == 0
    one, both = weights_of(tiny.dir), weights_of(first.dir)
    assert one.keys() == both.keys()
    for name, weight in one.items():
        torch.testing.assert_close(both[name], weight, rtol=0, atol=1e-6, msg=name)


def resumed(two_hosts: TwoHosts) -> int:
    """How often the drafters of both have gone on from a checkpoint."""
    return (two_hosts.hosts[0].dir / "logs" / "drafter0.log").read_text().count("| resumed |")


def target_lives(host: Host) -> int:
    """How often the target of a host has been started; read from its log, since the run does not wait for `status`."""
    return (host.dir / "logs" / f"target{host.node}.log").read_text().count("model loaded")


def reached(two_hosts: TwoHosts, step: int) -> bool:
    return any(line["step"] >= step for line in two_hosts.hosts[0].metrics("drafter"))


def test_hosts_that_are_killed_come_back_and_no_document_is_lost(two_hosts: TwoHosts) -> None:
    first, second = two_hosts.hosts
    settings = (*QUIET, "--set", "training.epochs=3")
    two_hosts.launch(*settings)
    two_hosts.wait_for(lambda: reached(two_hosts, 25))
    second.kill()
    two_hosts.wait_for(lambda: "drafter0 died" in first.launcher_log() or "silent for" in first.launcher_log())
    second.launch(*settings)
    two_hosts.wait_for(lambda: resumed(two_hosts) == 1)
    assert target_lives(first) == 1
    two_hosts.wait_for(lambda: reached(two_hosts, 65))
    first.kill()  # node 0: it held the meeting point and the checkpoints
    two_hosts.wait_for(lambda: "node 0: silent for" in second.launcher_log())
    assert "node 0 (" in second.ask("status").stdout
    assert "silent" in second.ask("status").stdout
    first.launch(*settings)
    two_hosts.wait_for(lambda: resumed(two_hosts) == 2)
    assert target_lives(second) == 2
    for host in two_hosts.hosts:
        code, out = host.end()
        assert code == 0, out + host.logs()
    plan = json.loads((first.dir / "plan.json").read_text())
    final = json.loads((first.dir / "final.json").read_text())
    described = json.loads((Path(final["checkpoint"]) / "checkpoint.json").read_text())
    assert from_ranges(described["trained"]) == frozenset(range(plan["num_packs"]))
    assert len(Documents(first.dir / "data")) == plan["num_documents"]
    assert {line["pack_id"] % 2 for line in first.metrics("target")} == {0}
    assert {line["pack_id"] % 2 for line in second.metrics("target")} == {1}


REFUSALS = {
    "another configuration": ("optimizer.lr=5e-4", 2, "its configuration differs from node 0"),
    "no producer": ("target.devices=[]", 2, "expected at least one entry"),
    "other data": ("data.max_documents=30", 2, "its configuration differs"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_host_that_does_not_fit_is_refused_on_both_hosts_by_name(tmp_path: Path, name: str) -> None:
    override, code, words = REFUSALS[name]
    launched = []
    for node in (0, 1):
        (tmp_path / f"{node}.yaml").write_text(
            "target: {devices: [cpu]}\ntraining: {devices: [cpu]}\ndata: {sources: [{path: read-by-none.jsonl}]}\n"
        )
        options = ["--nnodes", "2", "--node-rank", str(node), "--rdzv", f"127.0.0.1:{29500 + os.getpid() % 500}"]
        options += ["--set", f"run.folder={tmp_path / str(node)}", "--name", f"refused{os.getpid()}"]
        options += ["--set", override] if node == 1 else []
        command = [sys.executable, "-m", "tests.helpers.fake_launch", str(tmp_path / f"{node}.yaml"), *options]
        launched.append(
            subprocess.Popen(command, cwd=REPOSITORY, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        )
    began = time.monotonic()
    printed = [process.communicate(timeout=100)[0] for process in launched]
    assert time.monotonic() - began < 40
    assert [process.returncode for process in launched] == [code, code], printed
    for out in printed:
        assert words in out
        assert "node 1" in out or name == "no producer"
        assert "Traceback" not in out
