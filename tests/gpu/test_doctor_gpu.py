"""doctor on a machine with GPUs: its driver, peer access and page-locking are asked for real, in a second or two."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ops.doctor_gpu import check_gpus
from ops.findings import FAULT, OK
from ops.gpu import read_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_the_driver_fits_torch_and_a_piece_of_shared_memory_can_be_page_locked() -> None:
    found = {finding.what: finding for finding in check_gpus()}
    print("\n".join(finding.line for finding in found.values()))
    assert found["GPU"].level == OK
    assert found["GPU driver"].level == OK
    assert found["page-locking"].level == OK, found["page-locking"].line
    assert not list(Path("/dev/shm").glob("dflash-doctor-*"))


def test_peer_access_is_what_torch_says() -> None:
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip("needs two GPUs")
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    all_reach = all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
    found = {finding.what: finding for finding in check_gpus()}
    assert (found["GPU peer access"].level == OK) == all_reach


def test_the_command_finds_no_fault_here_and_leaves_torch_alone() -> None:
    done = subprocess.run([sys.executable, "launch.py", "doctor"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert FAULT not in done.stdout.split()
    assert "page-locking" in done.stdout


def test_use_and_memory_of_each_gpu_are_read_where_nvidia_ml_py_is_installed() -> None:
    pytest.importorskip("pynvml")
    held = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    gpus = read_gpus()
    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        assert len(gpus) == torch.cuda.device_count()
    total = torch.cuda.get_device_properties(0).total_memory
    assert all(0 <= gpu["use_pct"] <= 100 for gpu in gpus)
    assert any(gpu["memory_bytes"] >= held.numel() and gpu["memory_total_bytes"] >= total for gpu in gpus)
