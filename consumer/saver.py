"""Save in the background: training stops for the copy from the device to the host, and for nothing else.

The copy goes into host memory of its own (host_copy.py), kept from one checkpoint to the next. A thread then checks,
writes, hashes and renames, and clears old checkpoints away. One checkpoint is under way at a time.

That memory lies in /dev/shm where there is room (shm_ring/handover.py): a drafter that leaves to be started again
copies its state there, marks it complete, and its successor goes on from it and writes it to disk in the background.
It is overwritten only when the disk has taken what it holds, or has refused it, or by a drafter that leaves with more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs.run_files import from_ranges, to_ranges
from consumer.checkpoint import CheckpointError, Contents, keep_newest, save_checkpoint
from consumer.host_copy import copy_all
from shm_ring.errors import NoSharedMemory
from shm_ring.handover import OFFSET_DATA, Handover

Say = Callable[..., None]
"""Called with an event and its values: a log."""
ALIGN_BYTES = 64


@dataclass(frozen=True)
class Handed(Contents):
    """What the life before left in memory. The tensors are views of that memory."""

    path: Path

    def load(self) -> Contents:
        """Return all of it: it is there already."""
        return self


def read_handed(shared: Handover) -> Handed | None:
    """Return what was left in memory and is complete; None where there is nothing."""
    found = shared.read()
    if found is None:
        return None
    step, meta = found
    trained, places = from_ranges(meta.pop("trained")), meta.pop("tensors")
    memory = _bytes_of(shared, meta.pop("data_bytes"))
    tensors = {
        name: _view(memory, at, getattr(torch, dtype), shape) for name, (at, dtype, shape) in places.items()
    }  # fmt: skip
    return Handed(step, _part(tensors, "d."), _part(tensors, "s."), trained, meta, Path(shared.path))


class Saver:
    """Writes checkpoints into `folder` and keeps the newest `keep`; `shared`: where a state can be handed over."""

    def __init__(self, folder: Path, keep: int, say: Say, shared: Handover | None = None) -> None:
        self._folder, self._keep, self._say, self._shared = folder, keep, say, shared
        self._buffers: dict[str, Tensor] = {}
        self._memory: Tensor | None = None
        self._handed: Handed | None = None
        self._superseded = threading.Event()
        self._thread: threading.Thread | None = None
        self._saved: Path | None = None

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, contents: Contents) -> None:
        """Copy the tensors to the host and begin to write them; waits for a checkpoint that is still being written."""
        self.wait()
        began = time.monotonic()
        tensors = _joined(contents)
        self._memory_for(tensors)
        self._fill(tensors)
        self._begin(self._copied(contents), time.monotonic() - began)

    def adopt(self, handed: Handed) -> None:
        """Take over what the life before has left: `write_adopted`, or `wait`, begins to write it to disk."""
        self._handed = handed

    def write_adopted(self) -> None:
        """Begin to write what was adopted, if anything still is to be."""
        handed, self._handed = self._handed, None
        if handed is not None:
            self._begin(handed, 0.0)

    def wait(self) -> Path | None:
        """Wait for the checkpoint under way; returns the path of the latest one, None if it could not be written."""
        self.write_adopted()
        if self._thread is not None:
            self._thread.join()
        return self._saved

    def hand_over(self, contents: Contents, run_dir: Path) -> bool:
        """Leave the state in memory for the next life, which writes it to disk; False: a checkpoint has to be written.

        A checkpoint that is still being written is given up; leave the process without waiting for its thread.
        """
        began, adopted = time.monotonic(), self._handed
        step, trained = contents.step, contents.trained
        if self._shared is not None and adopted is not None and adopted.step == step:  # still there, untouched
            self._say("handed over", step=step, packs=len(trained), path=self._shared.path, num_bytes=0, seconds=0.0)
            return True
        tensors = _joined(contents)
        memory = self._memory_for(tensors)
        if self._shared is None or not all(bool(torch.isfinite(tensor).all()) for tensor in contents.drafter.values()):
            return False
        self._handed = None
        self._superseded.set()  # before the first byte: half of both is never called complete
        self._fill(tensors)
        try:
            facts = {"run_dir": str(run_dir.resolve()), "trained": to_ranges(trained), **self._places(memory)}
            self._shared.finish(step, {**contents.meta, **facts})
        except NoSharedMemory as error:
            self._say("hand-over", detail=f"{error}; a checkpoint is written to disk instead")
            self.wait()
            self._superseded.clear()
            return False
        self._say(
            "handed over", step=step, packs=len(trained), path=self._shared.path, num_bytes=memory.numel(),
            seconds=round(time.monotonic() - began, 3),
        )  # fmt: skip
        return True

    def _copied(self, contents: Contents) -> Contents:
        """The same, with the host's copies for tensors."""
        return replace(contents, drafter=_part(self._buffers, "d."), state=_part(self._buffers, "s."))

    def _begin(self, contents: Contents, stopped_s: float) -> None:
        self._saved = None
        self._thread = threading.Thread(target=self._write, args=(contents, stopped_s), name="checkpoint")
        self._thread.start()

    def _write(self, contents: Contents, stopped_s: float) -> None:
        began = time.monotonic()
        try:
            path = save_checkpoint(self._folder, contents, self._superseded.is_set)
        except CheckpointError as error:
            self._say("checkpoint failed", detail=str(error))
            return
        self._saved = path
        self._say(
            "checkpoint", step=contents.step, path=str(path), packs=len(contents.trained),
            stopped_s=round(stopped_s, 3), write_s=round(time.monotonic() - began, 3),
        )  # fmt: skip
        try:
            keep_newest(self._folder, self._keep)
        except OSError as error:
            self._say("checkpoint", detail=f"old ones in {self._folder} could not be removed: {error.strerror}")

    @torch.no_grad()
    def _fill(self, tensors: dict[str, Tensor]) -> None:
        """Copy to the host."""
        if self._shared is not None:
            self._shared.begin()
        copy_all([(self._buffers[name], tensor) for name, tensor in tensors.items()])

    def _memory_for(self, tensors: dict[str, Tensor]) -> Tensor:
        """One piece of host memory, in /dev/shm if there is room, with a view for each tensor."""
        if self._memory is not None:
            return self._memory
        places, size = {}, 0
        for name, tensor in tensors.items():
            places[name] = size
            size += -(-tensor.numel() * tensor.element_size() // ALIGN_BYTES) * ALIGN_BYTES
        try:
            memory = _bytes_of(self._shared, size) if self._shared is not None else None
        except NoSharedMemory as error:
            self._say("hand-over", detail=f"{error}; a restart of the drafter will go through the disk")
            self._shared = memory = None
        self._memory = torch.empty(max(size, 1), dtype=torch.uint8) if memory is None else memory
        self._buffers = {
            name: _view(self._memory, at, tensors[name].dtype, tensors[name].shape) for name, at in places.items()
        }
        return self._memory

    def _places(self, memory: Tensor) -> dict[str, Any]:
        """Where in the memory each tensor lies, for the next life."""
        return {
            "data_bytes": memory.numel(),
            "tensors": {
                name: (view.data_ptr() - memory.data_ptr(), str(view.dtype).removeprefix("torch."), list(view.shape))
                for name, view in self._buffers.items()
            },
        }


def _joined(contents: Contents) -> dict[str, Tensor]:
    named = {f"d.{name}": tensor for name, tensor in contents.drafter.items()}
    return named | {f"s.{name}": tensor for name, tensor in contents.state.items()}


def _part(tensors: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
    return {name[2:]: tensor for name, tensor in tensors.items() if name.startswith(kind)}


def _bytes_of(shared: Handover, num_bytes: int) -> Tensor:
    """Map the shared memory; raises NoSharedMemory."""
    return torch.frombuffer(shared.map(num_bytes), dtype=torch.uint8, offset=OFFSET_DATA, count=max(num_bytes, 1))


def _view(memory: Tensor, at: int, dtype: torch.dtype, shape: Any) -> Tensor:
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return memory[at : at + num_bytes].view(dtype).view(shape)
