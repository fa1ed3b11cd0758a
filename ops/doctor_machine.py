"""Is this machine fit? Checks that need nothing of ours but the standard library, so they run where things are missing.

Each check is one line: ok, warning or fault, what was found, and for the last two what to do.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from configs.cores import usable_cores
from ops.doctor_gpu import check_gpus
from ops.findings import FAULT, OK, WARNING, Finding

PYTHON = ((3, 11), (3, 13))
PACKAGES = ("torch", "transformers", "numpy", "posix_ipc", "pyzmq", "pydantic", "rich", "PyYAML", "safetensors")
SMALL_SHM_BYTES = 1 << 30
FEW_THREADS = 2000
"""A process of either side has up to 40 threads of ours, and its libraries' at start."""
HYBRID_KERNELS = "fla-core"
"""The part of flash-linear-attention that is used."""
_FUTEX = {"x86_64": 202, "aarch64": 98}


def check_machine(shm_bytes: int = 0) -> list[Finding]:
    """Check everything; `shm_bytes` is what a run's rings need, 0 if unknown."""
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        _python, _packages, _hybrid_kernels, _libatomic, _futex, lambda: _shared_memory(shm_bytes), _memory_limit,
        _memlock, _cores, _threads, _sockets, check_gpus,
    )  # fmt: skip
    return [finding for check in checks for finding in check()]


def _python() -> Iterator[Finding]:
    lowest, beyond = PYTHON
    text = f"{platform.python_version()} on {platform.machine()}, Linux {platform.release()}"
    good = lowest <= sys.version_info[:2] < beyond and sys.platform == "linux"
    yield Finding(OK if good else WARNING, "python", text if good else f"{text}; tested with Linux and 3.11 and 3.12")


def _packages() -> Iterator[Finding]:
    found, missing, other = [], [], []
    ranges = _required_versions()
    for name in PACKAGES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
            continue
        found.append(f"{name} {version}")
        if name in ranges and not ranges[name].contains(version, prereleases=True):
            other.append(f"{name} {version} (wanted {ranges[name]})")
    if missing:
        yield Finding(FAULT, "packages", f"missing: {', '.join(missing)}; pip install -e .")
    if other:
        yield Finding(WARNING, "packages", f"untested: {', '.join(other)}; pip install -e .")
    yield Finding(OK, "packages", ", ".join(found))


def _required_versions() -> dict[str, Any]:
    """Ranges that this project asks for, by package; empty where it was not installed by pip."""
    try:
        from packaging.requirements import Requirement

        wanted = [Requirement(line) for line in importlib.metadata.requires("dflash-ring") or ()]
    except (ImportError, importlib.metadata.PackageNotFoundError):
        return {}
    return {each.name: each.specifier for each in wanted if each.marker is None}


def _hybrid_kernels() -> Iterator[Finding]:
    version = hybrid_kernels()
    if version or shutil.which("nvidia-smi"):
        lacking = 'not installed; only hybrid targets on a GPU need it: pip install -e ".[hybrid]"'
        yield Finding(OK, "flash-linear-attention", version or lacking)


def hybrid_kernels() -> str:
    """Version of flash-linear-attention's kernels; empty where they are not installed."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(HYBRID_KERNELS)
    return ""


def is_hybrid(model: str, revision: str | None = None) -> bool:
    """Whether a target has recurrent (Gated DeltaNet) layers, as far as a config.json here says so.

    `model`: a local folder, or a hub id, of which the hub's cache is looked at; nothing is fetched.
    """
    file = Path(model).expanduser() / "config.json"
    with suppress(ImportError, OSError, ValueError, AttributeError):  # not here, not readable, or no object in it
        if not file.is_file():
            from huggingface_hub import try_to_load_from_cache

            file = Path(str(try_to_load_from_cache(model, "config.json", revision=revision)))
        described = json.loads(file.read_text(encoding="utf-8"))
        text = described.get("text_config", described)
        return "linear_attention" in text.get("layer_types", ()) or "linear_num_value_heads" in text
    return False


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
    yield Finding(OK, "locked memory", f"{text} (ulimit -l; a GPU's driver locks beyond it, see page-locking)")


def _cores() -> Iterator[Finding]:
    usable, there = usable_cores(), os.cpu_count() or 1
    load = os.getloadavg()[0]
    text = f"{usable} usable of {there}, load {load:.1f}"
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads:
        text += f"; OMP_NUM_THREADS={threads} here, the launcher sets its own"
    busy = load > usable * 1.5
    advice = f"{text}; others use them too, rates will be low"
    yield Finding(WARNING if busy else OK, "cores", advice if busy else text)


def _threads() -> Iterator[Finding]:
    """How many threads may be started: by this user, and in this container."""
    user = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    limits = {} if user == resource.RLIM_INFINITY else {"of this user (ulimit -u)": user}
    try:
        text = Path("/sys/fs/cgroup/pids.max").read_text().strip()
    except OSError:
        text = ""
    if text.isdigit():
        limits["of this container (pids.max)"] = int(text)
    if not limits:
        yield Finding(OK, "threads", "as many as wanted")
        return
    whose, most = min(limits.items(), key=lambda each: each[1])
    few = most < FEW_THREADS
    advice = "; raise it, each process needs some dozens" if few else ""
    yield Finding(WARNING if few else OK, "threads", f"at most {most:,} {whose}{advice}")


def _sockets() -> Iterator[Finding]:
    root = Path(os.environ.get("DFLASH_RUNTIME_DIR") or f"/tmp/dflash-{os.getuid()}")
    there = root if root.exists() else root.parent
    if os.access(there, os.W_OK) and len(str(root)) <= 60:
        yield Finding(OK, "sockets", f"in {root}")
    else:
        yield Finding(FAULT, "sockets", f"{root} is not writable or too long; set DFLASH_RUNTIME_DIR")
