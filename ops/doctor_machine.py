"""Is this machine fit? Checks that need nothing of ours but the standard library, so they run where things are missing.

Each check is one line: ok, warning or fault, what was found, and for the last two what to do.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

OK, WARNING, FAULT = "ok", "warning", "fault"
PYTHON = ((3, 11), (3, 13))
PACKAGES = ("torch", "transformers", "numpy", "posix_ipc", "pyzmq", "pydantic", "rich", "PyYAML", "safetensors")
SMALL_SHM_BYTES = 1 << 30
SMI_TIMEOUT_S = 20
_F_OFD_GETLK = 36
_FUTEX = {"x86_64": 202, "aarch64": 98}


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    level: str
    what: str
    text: str

    @property
    def line(self) -> str:
        """The line for people."""
        return f"{self.level:7}  {self.what}: {self.text}"


def check_machine(shm_bytes: int = 0) -> list[Finding]:
    """Check everything; `shm_bytes` is what a run's rings need, 0 if unknown."""
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        _python, _packages, _libatomic, _futex, lambda: _shared_memory(shm_bytes), _memory_limit, _memlock, _cores,
        _sockets, _gpus,
    )  # fmt: skip
    return [finding for check in checks for finding in check()]


def _python() -> Iterator[Finding]:
    lowest, beyond = PYTHON
    text = f"{platform.python_version()} on {platform.machine()}, Linux {platform.release()}"
    good = lowest <= sys.version_info[:2] < beyond and sys.platform == "linux"
    yield Finding(OK if good else WARNING, "python", text if good else f"{text}; tested with Linux and 3.11 and 3.12")


def _packages() -> Iterator[Finding]:
    found, missing = [], []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        yield Finding(FAULT, "packages", f"missing: {', '.join(missing)}; pip install -e .")
    yield Finding(OK, "packages", ", ".join(found))


def _libatomic() -> Iterator[Finding]:
    try:
        ctypes.CDLL("libatomic.so.1")
    except OSError:
        advice = "not found; apt-get install libatomic1, or dnf install libatomic"
        yield Finding(FAULT, "libatomic", advice)
    else:
        yield Finding(OK, "libatomic", "found")


def _futex() -> Iterator[Finding]:
    number = _FUTEX.get(platform.machine())
    if number is None:
        yield Finding(FAULT, "machine", f"{platform.machine()}: the ring knows x86_64 and aarch64")
        return
    word = ctypes.c_uint32(0)
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.syscall(ctypes.c_long(number), ctypes.byref(word), 1, 1, None, None, 0)  # FUTEX_WAKE, nobody waits
    if result == 0:
        yield Finding(OK, "futex", "works")
    else:
        yield Finding(FAULT, "futex", f"refused ({os.strerror(ctypes.get_errno())}); a seccomp filter forbids it here")


def _shared_memory(needed: int) -> Iterator[Finding]:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError as error:
        yield Finding(FAULT, "/dev/shm", f"not there ({error.strerror}); mount a tmpfs on it")
        return
    text = f"{usage.free / 1e9:.2f} GB free of {usage.total / 1e9:.2f} GB"
    advice = "containers: --shm-size=32g or --ipc=host; else lower ring.num_slots or pack.tokens"
    if needed > usage.free:
        yield Finding(FAULT, "/dev/shm", f"{text}, the run's rings need {needed / 1e9:.2f} GB; {advice}")
    elif usage.total < SMALL_SHM_BYTES:
        yield Finding(WARNING, "/dev/shm", f"{text}; {advice}")
    else:
        yield Finding(OK, "/dev/shm", text + (f", the run's rings need {needed / 1e9:.2f} GB" if needed else ""))
    left = sorted(path.name for path in Path("/dev/shm").glob("dflash.*"))
    if left:
        shown = ", ".join(left[:4]) + (", ..." if len(left) > 4 else "")
        yield Finding(OK, "rings", f"{len(left)} segments there ({shown}); 'python launch.py clean' removes dead ones")


def _memory_limit() -> Iterator[Finding]:
    """Shared memory counts against the container's limit."""
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return
    if text.isdigit():
        yield Finding(OK, "memory limit", f"{int(text) / 1e9:.1f} GB for this container, its rings included")


def _memlock() -> Iterator[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / 1e6:.0f} MB"
    yield Finding(OK, "locked memory", f"{text} (page-locking for a GPU goes through its driver; ring.page_lock)")


def _cores() -> Iterator[Finding]:
    usable, there = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    load = os.getloadavg()[0]
    text = f"{usable} usable of {there}, load {load:.1f}"
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads:
        text += f"; OMP_NUM_THREADS={threads} here, the launcher sets its own"
    busy = load > usable * 1.5
    advice = f"{text}; others use them too, rates will be low"
    yield Finding(WARNING if busy else OK, "cores", advice if busy else text)


def _sockets() -> Iterator[Finding]:
    root = Path(os.environ.get("DFLASH_RUNTIME_DIR") or f"/tmp/dflash-{os.getuid()}")
    there = root if root.exists() else root.parent
    if os.access(there, os.W_OK) and len(str(root)) <= 60:
        yield Finding(OK, "sockets", f"in {root}")
    else:
        yield Finding(FAULT, "sockets", f"{root} is not writable or too long; set DFLASH_RUNTIME_DIR")


def _gpus() -> Iterator[Finding]:
    smi = shutil.which("nvidia-smi")
    if smi is None:
        yield Finding(OK, "GPUs", "none (no nvidia-smi): everything runs on the CPU")
        return
    query = "--query-gpu=index,name,memory.free,memory.total,driver_version"
    try:
        command = [smi, query, "--format=csv,noheader"]
        lines = subprocess.run(command, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=True).stdout
        peers = subprocess.run([smi, "topo", "-m"], capture_output=True, text=True, timeout=SMI_TIMEOUT_S).stdout
    except (OSError, subprocess.SubprocessError) as error:
        yield Finding(FAULT, "GPUs", f"nvidia-smi does not answer: {error}")
        return
    rows = [line for line in lines.splitlines() if line.strip()]
    for line in rows:
        yield Finding(OK, "GPU", line)
    if len(rows) > 1:
        links = [word for line in peers.splitlines() if line.startswith("GPU") for word in line.split()]
        kind = "NVLink" if any(word.startswith("NV") and word[2:].isdigit() for word in links) else "PCIe only"
        yield Finding(OK, "GPU links", kind)
