"""Where things of a run are: its folder's files, and its sockets in a short private folder.

A unix socket path has at most 107 characters, and a run's folder may be longer or on a file system without sockets,
so sockets live in /tmp/dflash-UID/NAME-DIGEST. The place depends on nothing but the user and the run's folder
(DFLASH_RUNTIME_DIR overrides it): every terminal finds it, whatever TMPDIR it has.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from pathlib import Path

from ops.errors import NoResource

MAX_SOCKET_CHARS = 107
LAUNCHER = "launcher"
TARGET = "target"
DRAFTER = "drafter"
_NAME_CHARS = 24
_FILE_CHARS = len("/launcher.sock")
_DIGEST_CHARS = 10
_RUNTIME_DIR = re.compile(rf"(.{{1,{_NAME_CHARS}}}-)?[0-9a-f]{{{_DIGEST_CHARS}}}", re.DOTALL)
_SUFFIXES = (".sock", ".lock", ".ready")


def runtime_root() -> Path:
    """Name the folder that holds every run's sockets of this user; it may not exist yet."""
    return Path(os.environ.get("DFLASH_RUNTIME_DIR") or f"/tmp/dflash-{os.getuid()}")


def runtime_dir(run_dir: Path, create: bool = False) -> Path:
    """Name (and make, mode 0700) the folder of one run's sockets; raises NoResource if it is not ours alone."""
    full = run_dir.resolve()
    digest = hashlib.sha256(str(full).encode()).hexdigest()[:_DIGEST_CHARS]
    folder = runtime_root() / f"{full.name[:_NAME_CHARS]}-{digest}"
    if len(str(folder)) > MAX_SOCKET_CHARS - _FILE_CHARS:
        folder = runtime_root() / digest
    if create:
        for part in (folder.parent, folder):
            _make_private(part)
    return folder


def runtime_dirs() -> list[Path]:
    """List the folders of runs' sockets: by name and by what is in them, since the root may be the user's for more."""
    root = runtime_root()
    found = [path for path in root.iterdir() if _RUNTIME_DIR.fullmatch(path.name)] if root.is_dir() else []
    return sorted(
        folder
        for folder in found
        if folder.is_dir() and not folder.is_symlink() and all(path.suffix in _SUFFIXES for path in folder.iterdir())
    )


def socket_path(run_dir: Path, role: str, rank: int | None = None) -> Path:
    """Name the control socket of a process of the run; raises NoResource if the path is too long for a socket."""
    path = runtime_dir(run_dir) / f"{label(role, rank)}.sock"
    if len(str(path)) > MAX_SOCKET_CHARS:
        raise NoResource(
            f"socket path {path} has {len(str(path))} characters, the limit is {MAX_SOCKET_CHARS}; "
            "set DFLASH_RUNTIME_DIR to a shorter folder"
        )
    return path


def label(role: str, rank: int | None) -> str:
    """Name a process in logs, sockets and tables: target0, drafter1, launcher."""
    return role if rank is None else f"{role}{rank}"


def log_path(run_dir: Path, name: str) -> Path:
    """The log file of one process."""
    return run_dir / "logs" / f"{name}.log"


def _make_private(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = os.lstat(folder)
    except OSError as error:
        raise NoResource(
            f"cannot make the socket folder {folder} ({error.strerror}); set DFLASH_RUNTIME_DIR to a folder of yours"
        ) from None
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise NoResource(
            f"socket folder {folder} is not a private folder of this user (owner {info.st_uid}, "
            f"mode {stat.S_IMODE(info.st_mode):o}); remove it, or set DFLASH_RUNTIME_DIR to another folder"
        )
