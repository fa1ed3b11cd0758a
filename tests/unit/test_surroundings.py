"""What a user's shell, a scheduler or another program has left in the environment is taken as it is meant."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from configs.cores import usable_cores
from configs.load import ConfigError, config_from
from ops.devices import find_gpus, place
from ops.errors import RunTaken
from ops.hosts import host_place
from ops.rings import clean_left_overs
from shm_ring import shared_memory
from shm_ring.handover import Handover


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        ("2,3", ["2", "3"]),
        (" GPU-8a1b , MIG-77/1/0", ["GPU-8a1b", "MIG-77/1/0"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("3,-1,4", ["3"]),
        ("0,,1", ["0"]),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(
    visible: str, gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert find_gpus() == gpus


def test_devices_are_numbered_within_what_the_user_left_visible() -> None:
    config = config_from({"target": {"devices": ["cuda:1"]}, "training": {"devices": ["cuda:0"]}})
    target, drafter = place(config, ["GPU-8a1b", "5"], 2).placements
    assert target.environment["CUDA_VISIBLE_DEVICES"] == "5"
    assert drafter.environment["CUDA_VISIBLE_DEVICES"] == "GPU-8a1b"


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"SLURM_NNODES": "2", "SLURM_NODEID": "0"}, r"--nnodes 2 \(by the environment; give --nnodes 1 .*--rdzv"),
        ({"SLURM_NNODES": "2", "SLURM_NODEID": "a"}, "SLURM_NODEID: expected a number, got a; give --nnodes 1"),
        ({"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "1"}, "WORLD_SIZE: expected a number, got nothing"),
    ],
)
def test_half_of_a_schedulers_variables_is_one_line_that_says_how_to_do_without(
    environment: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        host_place(None, None, None, environment)
    assert host_place(1, None, None, environment) is None


@pytest.mark.parametrize("name", [".", "..", "-x", ".hidden", "", "a b", "a/b", "x" * 65])
def test_a_run_name_is_neither_an_option_nor_another_folder(name: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.name"):
        config_from({"run": {"name": name}})


def test_a_run_name_that_another_user_has_taken_on_this_machine_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / f"theirs{os.getpid()}"
    state = Handover.create(run_dir.name)
    try:
        owner = os.geteuid()
        monkeypatch.setattr("ops.rings.os.geteuid", lambda: owner + 1)
        with pytest.raises(RunTaken, match=rf"{state.path} belongs to uid {owner}\); choose another --name"):
            clean_left_overs(run_dir, lambda _line: None)
    finally:
        state.remove()
        state.close()


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "250000 100000\n"}, 3),
        ({"cpu.max": "5000 100000\n"}, 1),
        ({"cpu.max": "9900000 100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
    ],
)
def test_a_containers_quota_of_processor_time_counts_as_so_many_cores(
    files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("configs.cores.os.sched_getaffinity", lambda _pid: set(range(8)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usable_cores(tmp_path) == cores


@pytest.mark.parametrize(
    ("own", "left"),
    [
        ("0::/job_7/step_0\n", 60),
        ("0::/job_7\n", 60),
        ("0::/\n", 900),
        ("0::/not/seen/in/a/container\n", 900),
        ("5:cpu,memory:/slurm/job_8\n", 40),
        ("5:cpu:/slurm/job_8\n4:memory:/\n", 900),
    ],
)
def test_the_memory_limit_of_a_schedulers_job_counts_like_a_containers(
    own: str, left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "memory.max": "1000", "memory.stat": "anon 60\nshmem 40\nfile 500",
        "job_7/memory.max": "100", "job_7/memory.stat": "anon 30\nshmem 10",
        "job_7/step_0/memory.max": "max", "job_7/step_0/memory.stat": "anon 30\nshmem 10",
        "memory/slurm/job_8/memory.limit_in_bytes": "50", "memory/slurm/job_8/memory.stat": "total_rss 10",
        "memory/memory.limit_in_bytes": str(1 << 62), "memory/memory.stat": "total_rss 10",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    (tmp_path / "own").write_text(own)
    monkeypatch.setattr(shared_memory, "_OWN_GROUPS", tmp_path / "own")
    assert shared_memory.container_free_bytes(tmp_path) == left
