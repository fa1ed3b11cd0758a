"""Save in the background: training stops for the copy from the device to the host, and for nothing else.

The copy goes into host memory of its own, kept from one checkpoint to the next and page-locked beside a GPU. A thread
then checks, writes, hashes and renames, and clears old checkpoints away. One checkpoint is under way at a time.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from consumer.checkpoint import CheckpointError, keep_newest, save_checkpoint

Say = Callable[..., None]
"""Called with an event and its values: a log."""


class Saver:
    """Writes checkpoints into `folder` and keeps the newest `keep`."""

    def __init__(self, folder: Path, keep: int, say: Say) -> None:
        self._folder, self._keep, self._say = folder, keep, say
        self._buffers: dict[str, Tensor] = {}
        self._memory: Tensor | None = None
        self._thread: threading.Thread | None = None
        self._saved: Path | None = None

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    def start(
        self,
        step: int,
        drafter: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
        trained: frozenset[int],
        meta: dict[str, Any],
    ) -> None:
        """Copy the tensors to the host and begin to write them; waits for a checkpoint that is still being written."""
        self.wait()
        began = time.monotonic()
        copies = self._to_host({f"d.{name}": tensor for name, tensor in drafter.items()}
                               | {f"s.{name}": tensor for name, tensor in state.items()})  # fmt: skip
        parts = [{name[2:]: copy for name, copy in copies.items() if name.startswith(kind)} for kind in ("d.", "s.")]
        stopped_s = time.monotonic() - began
        self._saved = None
        self._thread = threading.Thread(
            target=self._write, args=(step, *parts, trained, meta, stopped_s), name="checkpoint"
        )
        self._thread.start()

    def wait(self) -> Path | None:
        """Wait for the checkpoint under way; returns the path of the latest one, None if it could not be written."""
        if self._thread is not None:
            self._thread.join()
        return self._saved

    def _write(
        self,
        step: int,
        drafter: dict[str, Tensor],
        state: dict[str, Tensor],
        trained: frozenset[int],
        meta: dict[str, Any],
        stopped_s: float,
    ) -> None:
        began = time.monotonic()
        try:
            path = save_checkpoint(self._folder, step, drafter, state, trained, meta)
        except CheckpointError as error:
            self._say("checkpoint failed", detail=str(error))
            return
        self._saved = path
        write_s = round(time.monotonic() - began, 3)
        self._say(
            "checkpoint", step=step, path=str(path), packs=len(trained), stopped_s=round(stopped_s, 3), write_s=write_s
        )
        try:
            keep_newest(self._folder, self._keep)
        except OSError as error:
            self._say("checkpoint", detail=f"old ones in {self._folder} could not be removed: {error.strerror}")

    @torch.no_grad()
    def _to_host(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if not self._buffers:
            self._buffers = self._allocate(tensors)
        devices = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
        for name, tensor in tensors.items():
            self._buffers[name].copy_(tensor.detach(), non_blocking=True)
        for device in devices:
            torch.cuda.synchronize(device)
        return self._buffers

    def _allocate(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """One piece of host memory, page-locked beside a GPU, with a view for each tensor."""
        places, size = {}, 0
        for name, tensor in tensors.items():
            places[name] = size
            size += -(-tensor.numel() * tensor.element_size() // 64) * 64
        self._memory = torch.empty(max(size, 1), dtype=torch.uint8)
        if any(tensor.is_cuda for tensor in tensors.values()):
            began = time.monotonic()
            code = int(torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), size, 0))
            if code:
                with contextlib.suppress(RuntimeError):  # takes back the error that would meet the next CUDA call
                    torch.zeros(1, device="cuda")
            seconds = round(time.monotonic() - began, 2)
            self._say("checkpoint", host_bytes=size, page_locked=code == 0, seconds=seconds)
        return {
            name: self._memory[at : at + tensors[name].numel() * tensors[name].element_size()]
            .view(tensors[name].dtype)
            .view(tensors[name].shape)
            for name, at in places.items()
        }
