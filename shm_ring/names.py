"""Names of segments: what is allowed, how a run's segments are called, and which of them exist."""

from __future__ import annotations

import os
import re

from shm_ring.errors import RingName

SHM_DIR = "/dev/shm"
MAX_RUN_CHARS = 64
MAX_NAME_CHARS = 128
PREFIX = "/dflash."

_RUN = re.compile(rf"[A-Za-z0-9_.-]{{1,{MAX_RUN_CHARS}}}", re.ASCII)
_NAME = re.compile(rf"/[A-Za-z0-9_.-]{{1,{MAX_NAME_CHARS}}}", re.ASCII)
OURS = re.compile(r"/dflash\.[A-Za-z0-9_.-]+\.(r[0-9]+|board|state)", re.ASCII)


def check_run(run: str) -> str:
    """Return `run` if it is a valid run name, else raise RingName that gives the rule and the limit."""
    if not _RUN.fullmatch(run):
        shown = run if len(run) <= 80 else f"{run[:80]}... ({len(run)} characters)"
        raise RingName(f"run name {shown!r} is not allowed: use 1 to {MAX_RUN_CHARS} characters of A-Z a-z 0-9 _ . -")
    return run


def ring_name(run: str, ring_index: int) -> str:
    """Return the segment name of ring `ring_index` of a run."""
    if ring_index < 0:
        raise RingName(f"ring index {ring_index} is negative")
    return f"{PREFIX}{check_run(run)}.r{ring_index}"


def board_name(run: str) -> str:
    """Return the segment name of a run's board."""
    return f"{PREFIX}{check_run(run)}.board"


def state_name(run: str) -> str:
    """Return the name of what a run's drafters leave for their successors; it is no segment (handover.py)."""
    return f"{PREFIX}{check_run(run)}.state"


def check_name(name: str) -> str:
    """Return `name` with its leading slash, or raise RingName."""
    full = name if name.startswith("/") else f"/{name}"
    if not _NAME.fullmatch(full) or full in ("/.", "/.."):
        shown = name if len(name) <= 80 else f"{name[:80]}... ({len(name)} characters)"
        raise RingName(
            f"segment name {shown!r} is not allowed: a slash and 1 to {MAX_NAME_CHARS} characters of A-Z a-z 0-9 _ . -"
        )
    return full


def find_segments(prefix: str = PREFIX) -> list[str]:
    """Return the names in /dev/shm that begin with `prefix`, sorted."""
    start = prefix if prefix.startswith("/") else f"/{prefix}"
    return sorted(f"/{entry}" for entry in os.listdir(SHM_DIR) if f"/{entry}".startswith(start))


def segments_of_run(run: str) -> list[str]:
    """Return the rings and the board of exactly this run (a run called `a` does not own those of `a.b`)."""
    own = re.compile(re.escape(f"{PREFIX}{check_run(run)}") + r"\.(r[0-9]+|board)")
    return [name for name in find_segments(f"{PREFIX}{run}.") if own.fullmatch(name)]
