"""Drafter ranks on two GPUs: NCCL in the captured step, torchrun, the end of ranks, and one that dies in the graph."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from configs.run_files import from_ranges
from ops.hosts import free_port
from tests.helpers.logged import end_all, start
from tests.helpers.tiny_run import Tiny, planned_packs, tiny
from tests.helpers.torchrun import train_all_by_torchrun

__all__ = ["tiny"]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]

REDUCTIONS = {"nccl": "WhileBackward", "copies": "CopyEngines"}
MEETING = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "DFLASH_RENDEZVOUS_S": "60"}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What ranks 0 and 1 wrote down (tests/helpers/gpu_rank_worker.py), both having ended with code 0."""
    out = tmp_path_factory.mktemp("ranks") / "found"
    meeting = MEETING | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1"))}
    command = [sys.executable, "-m", "tests.helpers.gpu_rank_worker", str(out)]
    logs = [out.with_suffix(f".log{rank}") for rank in (0, 1)]
    ranks = [start(command, log, meeting | {"RANK": str(k), "LOCAL_RANK": str(k)}) for k, log in enumerate(logs)]
    end_all(ranks, logs, timeout_s=90)
    return [torch.load(f"{out}.{rank}.pt") for rank in (0, 1)]


@pytest.mark.parametrize("gradients", list(REDUCTIONS))
@pytest.mark.parametrize(("dtype", "loss_error", "weight_error"), [("float32", 1e-4, 1e-2), ("bfloat16", 2e-2, 0.5)])
def test_two_captured_ranks_train_as_one_rank_on_the_same_packs(
    both, dtype, loss_error, weight_error, gradients
) -> None:
    """Weights are compared relative to how far they moved: in bfloat16 Adam's first updates follow rounding errors."""
    for found in both:
        together, alone = found[f"torch.{dtype}"][gradients], found[f"torch.{dtype}"]["alone"]
        assert (together["captured"], together["reduction"]) == (True, REDUCTIONS[gradients]), found["said"]
        assert together["losses"] == pytest.approx(alone["losses"], rel=loss_error)
        strayed = float((together["weights"] - alone["weights"]).norm()) / alone["moved"]
        print(f"{dtype}: losses {together['losses']} and {alone['losses']}, weights strayed {strayed:.1e}")
        assert strayed < weight_error
        assert together["losses"][-1] < together["losses"][0]


@pytest.mark.parametrize("gradients", list(REDUCTIONS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_ranks_hold_the_same_weights_bit_for_bit(both, dtype, gradients) -> None:
    first, second = (found[f"torch.{dtype}"][gradients] for found in both)
    assert torch.equal(first["weights"], second["weights"])
    assert first["losses"] == second["losses"]


def test_nothing_was_said_about_a_capture_that_failed(both) -> None:
    assert [line for found in both for line in found["said"] if "capture" in line] == []


def test_ranks_that_torchrun_starts_on_gpus_train_every_pack_once_and_end(tiny: Tiny) -> None:
    said = train_all_by_torchrun(tiny, {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"})
    assert said.count("captured=true") == 2, said


@pytest.fixture
def on_gpus(tiny: Tiny) -> Tiny:
    """The tiny run with its target on one GPU and a drafter on each."""
    config = yaml.safe_load(tiny.config.read_text())
    config["target"] |= {"devices": ["cuda:0"], "dtype": "bfloat16"}
    config["training"] |= {"devices": ["cuda:0", "cuda:1"], "epochs": 8}
    config["evaluation"] = {"enabled": False}
    tiny.config.write_text(yaml.safe_dump(config))
    return tiny


@pytest.mark.parametrize("gradients", list(REDUCTIONS))
def test_a_rank_killed_in_the_graph_restarts_the_drafters_and_no_pack_is_lost(on_gpus: Tiny, gradients: str) -> None:
    config = yaml.safe_load(on_gpus.config.read_text())
    config["training"]["gradients"] = gradients
    on_gpus.config.write_text(yaml.safe_dump(config))
    on_gpus.launch()
    on_gpus.wait_for(lambda: on_gpus.metrics("drafter"))
    pids = {process["name"]: process["pid"] for process in on_gpus.status()["processes"]}
    on_gpus.wait_for(lambda: any(line["step"] >= 45 for line in on_gpus.metrics("drafter")))
    os.kill(pids["drafter1"], signal.SIGKILL)
    code, out = on_gpus.end()
    logs = "\n".join(f"--- {path}\n{path.read_text()}" for path in sorted((on_gpus.dir / "logs").glob("*.log")))
    assert code == 0, f"{out}\n{logs}"
    log = (on_gpus.dir / "logs" / "drafter0.log").read_text()
    assert log.count("| resumed |") == 1, logs
    assert "capture of the training step failed" not in log, logs
    assert log.count("added up by copies") == (2 if gradients == "copies" else 0), logs
    assert (on_gpus.dir / "logs" / "target0.log").read_text().count("model loaded") == 1, logs
    final = json.loads((on_gpus.dir / "final.json").read_text())
    trained = json.loads((Path(final["checkpoint"]) / "checkpoint.json").read_text())["trained"]
    assert from_ranges(trained) == frozenset(range(planned_packs(on_gpus)))
