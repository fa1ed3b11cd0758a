"""What doctor says about GPUs: from nvidia-smi what there is, from the driver itself what works. Needs no torch.

Asked of the driver (libcuda, by ctypes): its version against the one that torch was built for, which GPUs reach each
other's memory, and whether a piece of /dev/shm can be page-locked, as the rings are.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import mmap
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from ops.findings import FAULT, OK, WARNING, Finding

SMI_TIMEOUT_S = 20
PIECE_BYTES = 64 << 20
_PORTABLE = 1


def check_gpus() -> Iterator[Finding]:
    """Everything about GPUs, one line where there are none."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        yield Finding(OK, "GPUs", "none (no nvidia-smi): everything runs on the CPU")
        return
    query = "--query-gpu=index,name,memory.free,memory.total,driver_version"
    try:
        command = [smi, query, "--format=csv,noheader"]
        lines = subprocess.run(command, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=True).stdout
        topology = subprocess.run([smi, "topo", "-m"], capture_output=True, text=True, timeout=SMI_TIMEOUT_S).stdout
    except (OSError, subprocess.SubprocessError) as error:
        yield Finding(FAULT, "GPUs", f"nvidia-smi does not answer: {error}")
        return
    rows = [line for line in lines.splitlines() if line.strip()]
    for line in rows:
        yield Finding(OK, "GPU", line)
    if len(rows) > 1:
        links = [word for line in topology.splitlines() if line.startswith("GPU") for word in line.split()]
        kind = "NVLink" if any(word.startswith("NV") and word[2:].isdigit() for word in links) else "PCIe only"
        yield Finding(OK, "GPU links", kind)
    yield from check_driver()


def check_driver(library: Any = None) -> Iterator[Finding]:
    """What the driver says; `library` stands for libcuda.so.1."""
    try:
        driver = Driver(library or ctypes.CDLL("libcuda.so.1"))
    except OSError:
        yield Finding(FAULT, "GPU driver", "libcuda.so.1 is missing; in a container: --gpus all, with its toolkit")
        return
    except DriverError as error:
        yield Finding(FAULT, "GPU driver", f"{error}; see dmesg, and that the driver and its library fit")
        return
    yield versions(driver.version, _torch_version())
    if driver.count > 1:
        yield driver.peers()
    if driver.count:
        yield driver.page_lock()


def versions(driver: tuple[int, int], torch: str) -> Finding:
    """Compare the CUDA version that the driver supports with the one that torch was built for (2.11.0+cu130)."""
    text = f"supports CUDA {driver[0]}.{driver[1]}, torch {torch or 'is not installed'}"
    built = re.search(r"\+cu(\d+)(\d)$", torch)
    if torch.endswith("+cpu"):
        return Finding(WARNING, "GPU driver", f"{text}: a build for CPUs, so no GPU is used; install one for CUDA")
    if built and int(built[1]) > driver[0]:
        return Finding(FAULT, "GPU driver", f"{text}: update the driver, or install torch for CUDA {driver[0]}")
    return Finding(OK, "GPU driver", text)


class DriverError(Exception):
    """A call of the driver failed."""


class Driver:
    """The few calls of CUDA's driver interface that are needed here. Raises DriverError."""

    def __init__(self, library: Any) -> None:
        """Initialise the driver; no context, no memory of a GPU."""
        self._library = library
        self._call("cuInit", 0)
        number = self._number("cuDriverGetVersion")
        self.version = (number // 1000, number % 1000 // 10)
        self.count = self._number("cuDeviceGetCount")

    def peers(self) -> Finding:
        """Which GPUs reach each other's memory."""
        numbers = range(self.count)
        cut = [(a, b) for a in numbers for b in numbers if a < b and not (self._reaches(a, b) and self._reaches(b, a))]
        if not cut:
            return Finding(OK, "GPU peer access", f"each of {self.count} GPUs reaches the others' memory")
        pairs = ", ".join(f"{a}-{b}" for a, b in cut[:8]) + (", ..." if len(cut) > 8 else "")
        return Finding(
            WARNING, "GPU peer access", f"not between {pairs}: drafters there add up gradients by way of the host"
        )

    def page_lock(self) -> Finding:
        """Page-lock a piece of /dev/shm for the first GPU, as the rings are, and let it go again."""
        piece, size = f"{PIECE_BYTES >> 20} MB of /dev/shm", ctypes.c_size_t(PIECE_BYTES)
        try:
            memory = _shared_piece(PIECE_BYTES)
        except OSError as error:
            return Finding(WARNING, "page-locking", f"no {piece} to try it on ({error.strerror})")
        at = ctypes.c_char.from_buffer(memory)
        address = ctypes.c_void_p(ctypes.addressof(at))
        device, context = ctypes.c_int(), ctypes.c_void_p()
        try:
            self._call("cuDeviceGet", ctypes.byref(device), 0)
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            try:
                self._call("cuCtxPushCurrent_v2", context)
                self._call("cuMemHostRegister_v2", address, size, _PORTABLE)
                self._call("cuMemHostUnregister", address)
            finally:
                with suppress(DriverError):
                    self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
                    self._call("cuDevicePrimaryCtxRelease_v2", device)
        except DriverError as error:
            if not context:
                return Finding(OK, "page-locking", f"not tried, {error}: the first GPU is full, or somebody's alone")
            return Finding(WARNING, "page-locking", f"{piece}: {error}; copies to and from the ring will be slow")
        finally:
            del at
            memory.close()
        return Finding(OK, "page-locking", f"{piece} locked and let go")

    def _reaches(self, a: int, b: int) -> bool:
        return bool(self._number("cuDeviceCanAccessPeer", a, b))

    def _number(self, name: str, *arguments: Any) -> int:
        found = ctypes.c_int()
        self._call(name, ctypes.byref(found), *arguments)
        return found.value

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            raise DriverError(f"{name} failed with code {code}")


def _shared_piece(size: int) -> mmap.mmap:
    """Map fresh shared memory that has no name any more."""
    path = f"/dev/shm/dflash-doctor-{os.getpid()}"
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.unlink(path)
        os.posix_fallocate(file, 0, size)
        return mmap.mmap(file, size)
    finally:
        os.close(file)


def _torch_version() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""
