"""doctor on GPUs, with a driver and an nvidia-smi of the test's own: versions, links, peer access, page-locking."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ops.doctor_gpu import check_driver, check_gpus, versions
from ops.findings import FAULT, OK, WARNING, Finding

SMI = """#!/bin/sh
case "$1" in
  topo) printf '\tGPU0\tGPU1\nGPU0\t X \t%s\nGPU1\t%s\t X \n' "$LINK" "$LINK" ;;
  *) printf '0, NVIDIA H200, 143000 MiB, 143771 MiB, 580.1\n1, NVIDIA H200, 143000 MiB, 143771 MiB, 580.1\n' ;;
esac
"""


HELD = {
    "cuDevicePrimaryCtxRetain": ("context", "add"),
    "cuDevicePrimaryCtxRelease_v2": ("context", "discard"),
    "cuMemHostRegister_v2": ("pages", "add"),
    "cuMemHostUnregister": ("pages", "discard"),
}


class FakeDriver:
    """libcuda with `count` GPUs; `cut` pairs do not reach each other; calls in `codes` fail. Counts what is held."""

    def __init__(self, count: int = 2, version: int = 13000, cut: tuple[tuple[int, int], ...] = (), **codes: int):
        self._numbers: dict[str, Callable[..., int]] = {
            "cuDriverGetVersion": lambda: version,
            "cuDeviceGetCount": lambda: count,
            "cuDeviceCanAccessPeer": lambda a, b: int((a, b) not in cut and (b, a) not in cut),
        }
        self._codes = codes
        self.held: set[str] = set()

    def __getattr__(self, name: str) -> Callable[..., int]:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            if self._codes.get(name):
                return self._codes[name]
            if name == "cuDevicePrimaryCtxRetain":
                arguments[0]._obj.value = 4711
            if name in self._numbers:
                arguments[0]._obj.value = self._numbers[name](*arguments[1:])
            held, change = HELD.get(name, ("", ""))
            if held:
                getattr(self.held, change)(held)
            return 0

        return call


def _by_what(driver: FakeDriver) -> dict[str, Finding]:
    return {finding.what: finding for finding in check_driver(driver)}


def test_a_driver_older_than_torchs_cuda_is_a_fault_and_a_cpu_build_beside_gpus_a_warning() -> None:
    assert versions((13, 0), "2.11.0+cu130").level == OK
    assert versions((13, 1), "2.11.0+cu128").level == OK
    assert versions((12, 8), "2.11.0+cu129").level == OK  # minor versions of one CUDA run on each other's drivers
    old = versions((12, 8), "2.11.0+cu130")
    assert old.level == FAULT
    assert "supports CUDA 12.8" in old.text
    assert versions((13, 0), "2.13.0+cpu").level == WARNING


def test_peer_access_names_the_pairs_without() -> None:
    assert _by_what(FakeDriver(count=4))["GPU peer access"].level == OK
    cut = _by_what(FakeDriver(count=4, cut=((0, 3), (1, 2))))["GPU peer access"]
    assert cut.level == WARNING
    assert "0-3, 1-2" in cut.text
    assert "GPU peer access" not in _by_what(FakeDriver(count=1))


def test_page_locking_is_tried_and_leaves_nothing() -> None:
    driver = FakeDriver()
    assert _by_what(driver)["page-locking"].level == OK
    assert driver.held == set()
    assert not list(Path("/dev/shm").glob(f"dflash-doctor-{os.getpid()}*"))


def test_a_refused_page_lock_is_a_warning_with_its_code_and_the_context_is_given_back() -> None:
    driver = FakeDriver(cuMemHostRegister_v2=304)
    finding = _by_what(driver)["page-locking"]
    assert finding.level == WARNING
    assert "cuMemHostRegister_v2 failed with code 304" in finding.text
    assert driver.held == set()


def test_a_gpu_that_is_full_says_nothing_about_page_locking() -> None:
    finding = _by_what(FakeDriver(cuDevicePrimaryCtxRetain=2))["page-locking"]
    assert finding.level == OK
    assert "not tried, cuDevicePrimaryCtxRetain failed with code 2" in finding.text


def test_a_driver_that_does_not_start_is_a_fault() -> None:
    (finding,) = check_driver(FakeDriver(cuInit=803))
    assert finding.level == FAULT
    assert "cuInit failed with code 803" in finding.text


@pytest.mark.parametrize(("link", "kind"), [("NV18", "NVLink"), ("PHB", "PCIe only")])
def test_gpus_and_their_links_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: str, kind: str) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(SMI)
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("LINK", link)
    monkeypatch.setattr("ops.doctor_gpu.check_driver", lambda: iter(()))
    lines = [finding.line for finding in check_gpus()]
    assert lines[0].startswith("ok       GPU: 0, NVIDIA H200")
    assert lines[-1] == f"ok       GPU links: {kind}"


def test_an_nvidia_smi_that_fails_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nexit 9\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (finding,) = check_gpus()
    assert finding.level == FAULT
