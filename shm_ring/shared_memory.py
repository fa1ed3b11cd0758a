"""POSIX shared memory with every refusal spelt out: room, names, owners, left-overs.

posix_ipc rather than multiprocessing.shared_memory: the latter's resource tracker unlinks a segment when any attached
process of 3.11 exits. Room is taken with posix_fallocate, because ftruncate on a full tmpfs succeeds and the first
write then dies of SIGBUS.
"""

from __future__ import annotations

import os
import pwd
import stat
from pathlib import Path

import posix_ipc

from shm_ring import liveness
from shm_ring.errors import NoSharedMemory, RingMissing, RingPermission
from shm_ring.names import SHM_DIR, find_segments

_CHUNK_BYTES = 1 << 30  # a signal makes tmpfs undo and restart a whole call; smaller calls always get on
_CGROUP = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


class Existing(Exception):
    """Internal: the name is taken; the caller finds out by whom."""


def create_exclusive(name: str) -> int:
    """Create an empty segment of mode 0600 and return its descriptor; raises Existing or a refusal."""
    try:
        made = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600, size=0)
    except posix_ipc.ExistentialError:
        raise Existing from None
    except posix_ipc.PermissionsError:
        raise RingPermission(_permission_message(name)) from None
    except OSError as why:
        raise NoSharedMemory(f"cannot create {name!r} in {SHM_DIR}: {why.strerror}") from None
    return int(made.fd)


def open_existing(name: str, readonly: bool) -> int:
    """Open a segment and return its descriptor; raises RingMissing, RingPermission."""
    try:
        opened = posix_ipc.SharedMemory(name, 0, read_only=readonly)
    except posix_ipc.ExistentialError:
        seen = ", ".join(find_segments()) or "none"
        raise RingMissing(
            f"no segment {name!r} is visible here (segments of ours here: {seen}); "
            f"was the run started, and do both sides share one {SHM_DIR} (same container, or --ipc=host)?"
        ) from None
    except posix_ipc.PermissionsError:
        raise RingPermission(_permission_message(name)) from None
    return int(opened.fd)


def unlink(name: str) -> None:
    """Remove the name; the memory goes when the last process unmaps it. Silent if it is gone already."""
    try:
        posix_ipc.unlink_shared_memory(name)
    except posix_ipc.ExistentialError:
        pass
    except posix_ipc.PermissionsError:
        raise RingPermission(_permission_message(name)) from None


def _permission_message(name: str) -> str:
    try:
        info = os.stat(SHM_DIR + name)
    except OSError:
        return f"permission denied for {name!r} in {SHM_DIR} as uid {os.geteuid()}; check the mode of {SHM_DIR}"
    try:
        owner = pwd.getpwuid(info.st_uid).pw_name
    except KeyError:
        owner = "unknown"
    mode = stat.S_IMODE(info.st_mode)
    return (
        f"permission denied for {name!r}: it belongs to uid {info.st_uid} ({owner}) with mode {mode:04o}, "
        f"this process is uid {os.geteuid()}; run both sides as one user"
    )


def allocate(fd: int, name: str, num_bytes: int) -> None:
    """Give the segment its size and real pages for all of it; raises NoSharedMemory before anything is touched."""
    _check_room(name, num_bytes)
    try:
        for at in range(0, num_bytes, _CHUNK_BYTES):
            os.posix_fallocate(fd, at, min(_CHUNK_BYTES, num_bytes - at))
    except OSError as why:
        raise NoSharedMemory(_room_message(name, num_bytes, f"{why.strerror}; {_gb(shm_free_bytes())} free")) from None


def _check_room(name: str, num_bytes: int) -> None:
    free = shm_free_bytes()
    if num_bytes > free:
        raise NoSharedMemory(_room_message(name, num_bytes, f"{_gb(free)} free"))
    left = container_free_bytes()
    if left is not None and num_bytes > left:
        raise NoSharedMemory(
            f"ring {name!r} needs {_gb(num_bytes)} and the container's memory limit leaves {_gb(left)} "
            "(pages of /dev/shm count against it; beyond it the kernel kills). Raise the limit or use fewer slots"
        )
    available = memory_available_bytes()
    if available is not None and num_bytes > available:
        raise NoSharedMemory(
            f"ring {name!r} needs {_gb(num_bytes)} of memory, {_gb(available)} is available; lower the number of slots"
        )


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"


def _room_message(name: str, num_bytes: int, found: str) -> str:
    wanted = f"{max(1, round(num_bytes * 1.25 / 1e9))}g"
    return (
        f"ring {name!r} needs {_gb(num_bytes)} in {SHM_DIR}, {found} (64 MB is Docker's default). "
        f"Use --shm-size={wanted} or --ipc=host; Kubernetes: emptyDir {{medium: Memory}} on {SHM_DIR}; "
        "or lower the number of slots or the tokens of a slot"
    )


def shm_free_bytes() -> int:
    """Bytes free in /dev/shm for this user."""
    info = os.statvfs(SHM_DIR)
    return info.f_bavail * info.f_frsize


def memory_available_bytes(path: Path = Path("/proc/meminfo")) -> int | None:
    """MemAvailable of the machine, or None where it is not told."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def container_free_bytes(root: Path = _CGROUP) -> int | None:
    """Bytes left under the memory limits of the container, or of the scheduler's job, without file cache.

    The least of this process's control group (version 2, else 1) and of those above it; None without a limit.
    """
    by_version = (
        (root, "", "memory.max", ("anon", "shmem")),
        (root / "memory", "memory", "memory.limit_in_bytes", ("total_rss", "total_shmem")),
    )
    found = [
        _left_in(folder, limit, used)
        for top, controller, limit, used in by_version
        for folder in _own_groups(top, controller)
    ]
    return min((left for left in found if left is not None), default=None)


def _own_groups(top: Path, controller: str) -> list[Path]:
    """This process's control group of a controller ("" for version 2) below `top`, and all above it; `top` alone in a
    container, which does not see its own path."""
    try:
        lines = [line.split(":", 2) for line in _OWN_GROUPS.read_text().splitlines()]
    except OSError:
        lines = []
    own = next((path for _, names, path in lines if controller in names.split(",")), "/")
    lowest = top / own.strip("/")
    return [lowest, *(folder for folder in lowest.parents if folder.is_relative_to(top))]


def _left_in(group: Path, limit_name: str, used_keys: tuple[str, ...]) -> int | None:
    """Bytes left under a control group's limit; None without one."""
    try:
        limit = (group / limit_name).read_text().strip()
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if limit == "max" or int(limit) >= 1 << 60:
        return None
    return max(0, int(limit) - sum(int(counts.get(key, 0)) for key in used_keys))


def take_all_and_unlink(fd: int, name: str) -> bool:
    """Lock every role at once, which proves that no process lives in the segment, and remove the name; else False."""
    lock = liveness.RoleLock(fd)
    try:
        if not lock.take(0, 256):
            return False
        if os.fstat(fd).st_nlink:  # the name may be another's by now
            unlink(name)
        return True
    finally:
        lock.close()
