"""Write and find checkpoints: RUN/checkpoints/step-N, complete or not there at all.

    drafter.safetensors    the drafter's weights by their public names (docs/drafter.md)
    state.safetensors      everything else that training needs: masters, moments, step, generator
    checkpoint.json        step, trained packs (ranges: a watermark and the gaps), what it is bound to, configuration
    complete.json          size and SHA-256 of each file above; written last, inside the folder, before the rename

A folder is written under a temporary name, fsynced and renamed. Resume takes the newest complete one and says which
it rejected and why. Knows nothing of how training works: it stores named tensors.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from configs.run_files import from_ranges, to_ranges, write_atomically

FILES = ("drafter.safetensors", "state.safetensors", "checkpoint.json")
Say = Callable[[str], None]


class CheckpointError(Exception):
    """A checkpoint cannot be written or used. Exit code 5."""

    exit_code = 5


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds: the drafter's weights by their public names, and the rest of the training state."""

    step: int
    drafter: Mapping[str, Tensor]
    state: Mapping[str, Tensor]
    trained: frozenset[int]
    meta: dict[str, Any]


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    step: int
    trained: frozenset[int]
    meta: dict[str, Any]

    def drafter(self) -> dict[str, Tensor]:
        """Load the drafter's weights by their public names."""
        return load_file(self.path / "drafter.safetensors")

    def state(self) -> dict[str, Tensor]:
        """Load the rest of the training state."""
        return load_file(self.path / "state.safetensors")

    def load(self) -> Contents:
        """Load all of it."""
        return Contents(self.step, self.drafter(), self.state(), self.trained, self.meta)


def save_checkpoint(folder: Path, contents: Contents, given_up: Callable[[], bool] = lambda: False) -> Path:
    """Write folder/step-N and return its path; older ones stay.

    Twice the size must be free. Raises CheckpointError, with the older checkpoints as they were, for a disk that is
    full or fails, for weights that are not finite, and if it is given up meanwhile: then its tensors may have changed
    while they were written.
    """
    step = contents.step
    for name, tensor in contents.drafter.items():
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"checkpoint step {step}: {name} is not finite; not written")
    size = sum(tensor.nbytes for tensor in (*contents.drafter.values(), *contents.state.values()))
    temporary = folder / f".step-{step}.{os.getpid()}"
    final = folder / f"step-{step}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _clear_left_overs(folder)
        free = shutil.disk_usage(folder).free
        if free < 2 * size:
            raise CheckpointError(
                f"checkpoint step {step}: {folder} has {free:,} bytes free, {2 * size:,} wanted; "
                "not written, older ones are kept; free some space"
            )
        shutil.rmtree(temporary, ignore_errors=True)
        _write(temporary, contents)
        if given_up():
            shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(f"checkpoint step {step}: given up for a newer state; older ones are kept")
        _put_in_place(temporary, final)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        reason = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(
            f"checkpoint step {step}: {folder}: {reason} ({size:,} bytes to write, {_free(folder)} free); not "
            "written, older ones are kept"
        ) from error
    return final


def _clear_left_overs(folder: Path) -> None:
    """Remove what processes that were killed left half written; it would count against the free space.

    A set-aside checkpoint whose successor did not get its name stays until there is a newer one.
    """
    for path in folder.glob(".step-*"):
        step, _, owner = path.name.removeprefix(".").partition(".")
        if owner != f"{os.getpid()}" and (not owner.endswith(".old") or (folder / step).exists()):
            shutil.rmtree(path, ignore_errors=True)


def _put_in_place(temporary: Path, final: Path) -> None:
    """Rename a complete folder to its name; one that stands there is set aside first and deleted last."""
    old = temporary.with_name(f"{temporary.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    temporary.rename(final)
    _fsync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def _free(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free:,}"
    except OSError:
        return "unknown"


def _write(temporary: Path, contents: Contents) -> None:
    temporary.mkdir()
    for file, tensors in zip(FILES, (contents.drafter, contents.state), strict=False):
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, temporary / file)
    facts = {"step": contents.step, "trained": to_ranges(contents.trained), **contents.meta}
    write_atomically(temporary / FILES[2], json.dumps(facts, indent=1))
    _sync([temporary / name for name in FILES])
    marker = {name: _describe(temporary / name) for name in FILES}
    write_atomically(temporary / "complete.json", json.dumps(marker, indent=1))
    _fsync(temporary)


def newest_checkpoint(folder: Path, say: Say) -> Checkpoint | None:
    """Return the newest complete checkpoint; each newer one that is rejected is named with its reason."""
    for path in sorted(folder.glob("step-*"), key=_step_of, reverse=True):
        reason = _fault(path)
        if reason is None:
            return _read(path)
        say(f"checkpoint {path} rejected: {reason}")
    return None


def read_checkpoint(path: Path) -> Checkpoint:
    """Read the description of one checkpoint folder; raises CheckpointError if it is not complete."""
    reason = _fault(path)
    if reason is not None:
        raise CheckpointError(f"checkpoint {path}: {reason}")
    return _read(path)


def _read(path: Path) -> Checkpoint:
    """Read the description of a folder that has been found complete: its files are hashed once, not again."""
    meta = json.loads((path / "checkpoint.json").read_text())
    return Checkpoint(path, int(meta["step"]), from_ranges(meta["trained"]), meta)


def keep_newest(folder: Path, keep: int) -> None:
    """Delete all but the `keep` newest checkpoints; step-0, the initial weights, always stays. Clears left-overs."""
    saved = sorted((path for path in folder.glob("step-*") if _step_of(path) > 0), key=_step_of)
    for path in saved[:-keep]:  # renamed first: half of a checkpoint is never taken for one
        shutil.rmtree(path.rename(path.with_name(f".{path.name}.old")))
    for path in folder.glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)


def _step_of(path: Path) -> int:
    number = path.name.removeprefix("step-")
    return int(number) if number.isdigit() else -1


def _fault(path: Path) -> str | None:
    try:
        marker = json.loads((path / "complete.json").read_text())
    except (OSError, ValueError):
        return "no completion marker"
    for name in FILES:
        if not (path / name).is_file():
            return f"{name} is missing"
        if _describe(path / name) != marker.get(name):
            return f"{name} differs from its recorded size or hash"
    return None


def _describe(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _sync(paths: list[Path]) -> None:
    """As _fsync, in a process of its own: one that ends, or is killed, waits for its threads in fsync, up to 30 s."""
    try:
        done = subprocess.run(["sync", *map(str, paths)], stderr=subprocess.PIPE, text=True, check=False)
    except FileNotFoundError:
        for path in paths:
            _fsync(path)
        return
    if done.returncode:
        raise OSError(errno.EIO, done.stderr.strip() or "sync failed", str(paths[0].parent))


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
