"""Use and memory of GPUs come from nvidia-ml-py where it is, and their absence or failure harms nothing."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from ops import gpu
from ops.draw import frame
from ops.verdict import judge


class NVMLError(Exception):
    """As nvidia-ml-py calls it."""


class FakeNvml:
    """nvidia-ml-py with two GPUs, under the names that it has."""

    NVMLError = NVMLError

    def __init__(self) -> None:
        self.inits = 0
        self.failing = ""

    def _check(self, name: str) -> None:
        if self.failing == name:
            raise NVMLError(name)

    def nvmlInit(self) -> None:
        self._check("nvmlInit")
        self.inits += 1

    def nvmlDeviceGetCount(self) -> int:
        self._check("nvmlDeviceGetCount")
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=(handle + 1) << 30, total=141 << 30)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        self._check("nvmlDeviceGetUtilizationRates")
        return SimpleNamespace(gpu=97 - handle, memory=40)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(gpu, "_ready", None)
    return fake


def test_each_gpu_is_read_and_the_library_started_once(nvml: FakeNvml) -> None:
    assert gpu.read_gpus() == gpu.read_gpus()
    first, second = gpu.read_gpus()
    assert first == {"index": 0, "use_pct": 97, "memory_bytes": 1 << 30, "memory_total_bytes": 141 << 30}
    assert (second["use_pct"], second["memory_bytes"]) == (96, 2 << 30)
    assert nvml.inits == 1


def test_a_use_that_the_driver_does_not_know_hides_no_memory(nvml: FakeNvml) -> None:
    nvml.failing = "nvmlDeviceGetUtilizationRates"
    assert [(each["use_pct"], each["memory_bytes"]) for each in gpu.read_gpus()] == [(None, 1 << 30), (None, 2 << 30)]


@pytest.mark.parametrize("what", ["nvmlInit", "nvmlDeviceGetCount"])
def test_a_library_without_a_driver_is_asked_once_and_shows_nothing(nvml: FakeNvml, what: str) -> None:
    nvml.failing = what
    assert gpu.read_gpus() == []
    nvml.failing = ""
    assert gpu.read_gpus() == []


def test_without_the_library_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(gpu, "_ready", None)
    assert gpu.read_gpus() == []


@pytest.mark.usefixtures("nvml")
def test_the_dashboard_shows_use_memory_and_who_is_there() -> None:
    processes = [{"name": name, "role": name[:-1], "state": "running", "pid": 1, "device": device}
                 for name, device in (("target0", "GPU 0"), ("drafter0", "GPU 1"), ("drafter1", "cpu"))]  # fmt: skip
    picture = {"run": "r", "state": "running", "uptime_s": 3, "eta_s": None, "launcher_pid": 1, "rings": [],
               "processes": processes, "gpus": gpu.read_gpus(), "verdict": judge(50, 1).as_dict()}  # fmt: skip
    text = frame(picture, lambda _name: [], 100).plain
    assert "GPU 0     use 97 %  memory 1.0 of 141.0 GiB  target0\n" in text
    assert text.endswith("GPU 1     use 96 %  memory 2.0 of 141.0 GiB  drafter0")
    picture["gpus"] = [{"index": 3, "use_pct": None, "memory_bytes": 0, "memory_total_bytes": 1 << 30}]
    assert "GPU 3     use unknown  memory 0.0 of 1.0 GiB" in frame(picture, lambda _name: [], 100).plain
