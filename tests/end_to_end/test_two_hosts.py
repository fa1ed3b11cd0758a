"""Two hosts, one target and one drafter each: the same weights as one host with two of each; a host that dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from configs.run_files import from_ranges, newest_step
from producer.corpus.documents import Documents
from tests.helpers.ports import kept_port
from tests.helpers.tiny_run import LIMIT_S, REPOSITORY, Tiny, log_in, planned_packs, tiny
from tests.helpers.two_hosts import Host, TwoHosts, two_hosts

__all__ = ["tiny", "two_hosts"]

QUIET = ("--set", "evaluation.enabled=false")
ALL_IN_THE_RING = (
    "--set", "data.max_documents=42", "--set", "training.epochs=1", "--set", "ring.num_slots=32",
    "--set", "ring.min_ready=32", "--set", "training.micro_steps=2",
)  # fmt: skip
"""So few packs that all are made before the first step, and an even number: then each step has the oldest pack of each
target, whoever takes it."""


def weights_of(run_dir: Path) -> dict[str, torch.Tensor]:
    final = json.loads((run_dir / "final.json").read_text())
    return load_file(Path(final["checkpoint"]) / "drafter.safetensors")


def _processes_of_others(host: Host) -> dict[int, set[str]]:
    """Names of the processes on the other hosts, by node, as one host's dashboard shows them."""
    hosts = json.loads(host.ask("dashboard", "--json").stdout or '{"hosts": []}')["hosts"]
    return {other["node"]: {process["name"] for process in other["processes"]} for other in hosts}


def test_two_hosts_train_what_one_host_with_two_of_each_trains(tiny: Tiny, two_hosts: TwoHosts) -> None:
    first, second = two_hosts.hosts
    tiny.hold(0)
    preparation = tiny.folder / "hold.preparation"
    preparation.touch()
    patient = {"SILENT_S": "600"}  # a machine that stands still for a while ends no life here
    first.launch(*QUIET, *ALL_IN_THE_RING, **patient)
    second.launch(*QUIET, *ALL_IN_THE_RING, **patient, HOLD_PREPARATION=str(preparation))
    two_hosts.wait_for(lambda: "waiting: preparing: node 1" in first.log("launcher"))
    assert not (first.dir / "logs" / "drafter0.log").exists(), "M-03: no rank waits for another's preparation"
    preparation.unlink()
    two_hosts.wait_for(lambda: (second.dir / "logs" / "drafter1.log").exists())
    two_hosts.wait_for(lambda: _processes_of_others(second) == {0: {"target0", "drafter0"}})  # a beat a second
    two_hosts.wait_for(lambda: "drafter1" in first.ask("status").stdout)
    tiny.let_go()
    for host in two_hosts.hosts:
        code, out = host.end()
        assert code == 0, out + host.logs()
    made = [{line["pack_id"] for line in host.metrics("target")} for host in two_hosts.hosts]
    assert made[0].isdisjoint(made[1])  # M-04
    plan = plan_of(first)
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
    return two_hosts.hosts[0].log("drafter0").count("| resumed |")


def target_lives(host: Host) -> int:
    """How often the target of a host has been started; read from its log, since the run does not wait for `status`."""
    return host.log(f"target{host.node}").count("model loaded")


def reached(two_hosts: TwoHosts, step: int) -> bool:
    return any(line["step"] >= step for line in two_hosts.hosts[0].metrics("drafter"))


def test_hosts_that_are_killed_come_back_and_no_document_is_lost(tiny: Tiny, two_hosts: TwoHosts) -> None:
    first, second = two_hosts.hosts
    settings = (*QUIET, "--set", "training.epochs=3")
    tiny.hold(40)
    two_hosts.launch(*settings)
    two_hosts.wait_for(lambda: reached(two_hosts, 25))
    two_hosts.wait_for(lambda: newest_step(first.dir) >= 0)
    second.kill()
    two_hosts.wait_for(lambda: "drafter0 died" in first.log("launcher") or "silent for" in first.log("launcher"))
    second.launch(*settings)
    two_hosts.wait_for(lambda: resumed(two_hosts) >= 1)
    assert target_lives(first) == 1
    tiny.hold(70)
    two_hosts.wait_for(lambda: reached(two_hosts, 65))
    before = resumed(two_hosts)
    first.kill()  # node 0: it held the meeting point and the checkpoints
    two_hosts.wait_for(lambda: "node 0: silent for" in second.log("launcher"))
    two_hosts.wait_for(lambda: is_shown_as_silent(second.ask("status").stdout))
    first.launch(*settings)
    two_hosts.wait_for(lambda: resumed(two_hosts) > before)
    assert target_lives(second) == 2
    assert plan_of(first)["num_packs"] > 2 * 70, "the run could have ended before the second death"
    tiny.let_go()
    for host in two_hosts.hosts:
        code, out = host.end()
        assert code == 0, out + host.logs()
    plan = plan_of(first)
    final = json.loads((first.dir / "final.json").read_text())
    described = json.loads((Path(final["checkpoint"]) / "checkpoint.json").read_text())
    assert from_ranges(described["trained"]) == frozenset(range(plan["num_packs"]))
    assert len(Documents(first.dir / "data")) == plan["num_documents"]
    assert {line["pack_id"] % 2 for line in first.metrics("target")} == {0}
    assert {line["pack_id"] % 2 for line in second.metrics("target")} == {1}


def is_shown_as_silent(status: str) -> bool:
    """Whether a host's `status` says so of node 0."""
    return any(line.startswith("node 0 (") and "silent" in line for line in status.splitlines())


def plan_of(host: Host) -> dict[str, Any]:
    plan: dict[str, Any] = json.loads((host.dir / "plan.json").read_text())
    return plan


REFUSALS = {
    "another configuration": ("optimizer.lr=5e-4", 2, "its configuration differs from node 0"),
    "no producer": ("target.devices=[]", 2, "expected at least one entry"),
    "other data": ("data.max_documents=30", 2, "its configuration differs"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_host_that_does_not_fit_is_refused_on_both_hosts_by_name(tmp_path: Path, name: str) -> None:
    override, code, words = REFUSALS[name]
    run = f"refused{os.getpid()}"
    launched: list[subprocess.Popen[str]] = []
    with kept_port() as port:
        for node in (0, 1):
            (tmp_path / f"{node}.yaml").write_text(
                "target: {devices: [cpu]}\ntraining: {devices: [cpu]}\ndata: {sources: [{path: read-by-none.jsonl}]}\n"
            )
            options = ["--nnodes", "2", "--node-rank", str(node), "--rdzv", f"127.0.0.1:{port}"]
            options += ["--set", f"run.folder={tmp_path / str(node)}", "--name", run]
            options += ["--set", override] if node == 1 else []
            command = [sys.executable, "-m", "tests.helpers.fake_launch", str(tmp_path / f"{node}.yaml"), *options]
            launched.append(
                subprocess.Popen(command, cwd=REPOSITORY, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            )
            while node == 0 and "node 0 of 2" not in log_in(tmp_path / "0" / run, "launcher"):
                assert launched[0].poll() is None, launched[0].communicate()[0]
                time.sleep(0.05)  # a host that is refused for itself leaves, whether node 0 has come or not
        printed = [process.communicate(timeout=LIMIT_S)[0] for process in launched]
    assert [process.returncode for process in launched] == [code, code], printed
    for out in printed:
        assert words in out
        assert "node 1" in out or name == "no producer"
        assert "Traceback" not in out
