"""Bring a pack from its slot into the drafter's own tensors, so that the slot can be released.

The tensors never move: every pack is copied into the same ones (a captured graph depends on it).
Suffixes of shapes: T tokens of a pack, K taps, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from configs.pack import pack_checksum
from shm_ring import ReadSlot, SlotSpec
from shm_ring.tensors import slot_tensor

TORCH_TYPES = {
    "int32": torch.int32,
    "uint8": torch.uint8,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class BadPack(Exception):
    """A pack is not what its producer wrote. Exit code 3."""

    exit_code = 3


@dataclass
class PackTensors:
    """One pack on the drafter's device."""

    input_ids: Tensor  # [T] int32
    loss_mask: Tensor  # [T] uint8
    doc_start: Tensor  # [T] int32
    features: Tensor  # [T, K*H] the target's type
    final_hidden: Tensor | None = None  # [T, H]


def allocate_pack(spec: SlotSpec, device: torch.device) -> PackTensors:
    """Make the tensors that every pack of this ring is copied into."""
    made = {
        field.name: torch.zeros(field.shape, dtype=TORCH_TYPES[field.dtype], device=device) for field in spec.fields
    }
    return PackTensors(**made)


def copy_pack(slot: ReadSlot, pack: PackTensors, non_blocking: bool = False) -> None:
    """Copy the slot's fields into `pack`; non_blocking: behind the host's back, if the slot is page-locked."""
    for name in ("input_ids", "loss_mask", "doc_start", "features", "final_hidden"):
        destination = getattr(pack, name)
        if destination is not None:
            destination.copy_(slot_tensor(slot, name), non_blocking=non_blocking)


def empty_pack(pack: PackTensors) -> None:
    """Make the current pack one without a supervised token: its step adds no gradient and no weight."""
    pack.loss_mask.zero_()


class Staging:
    """Brings the next pack over while the current one is trained on.

    On a GPU a copy stream fills a landing copy of the pack; `finish` moves it on into the pack that the step reads (a
    device copy, 0.2 ms for 420 MB). So the slot is free again as soon as its bytes have crossed, at most one step after
    it was taken. On a CPU there is nothing to overlap: `finish` copies from the slot.
    """

    def __init__(self, pack: PackTensors) -> None:
        """Stage into `pack`, which never moves."""
        self._pack = pack
        self._slot: ReadSlot | None = None
        self._on_gpu = pack.input_ids.is_cuda
        if self._on_gpu:
            self._landing = PackTensors(
                **{name: torch.empty_like(value) for name, value in vars(pack).items() if value is not None}
            )
            self._stream = torch.cuda.Stream(pack.input_ids.device)
            self._crossed, self._landing_free = torch.cuda.Event(), torch.cuda.Event()

    def start(self, slot: ReadSlot) -> None:
        """Begin to copy `slot`; it must stay held until `wait_copied` has returned."""
        self._slot = slot
        if not self._on_gpu:
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._landing_free)
            copy_pack(slot, self._landing, non_blocking=True)
            self._crossed.record(self._stream)

    def finish(self) -> None:
        """Make the started pack the current one, in the order of the training stream. No host wait on a GPU."""
        if self._slot is None:
            raise RuntimeError("finish without start: no pack is on its way")
        if not self._on_gpu:
            copy_pack(self._slot, self._pack)
        else:
            current = torch.cuda.current_stream()
            current.wait_event(self._crossed)
            for name, value in vars(self._landing).items():
                if value is not None:
                    getattr(self._pack, name).copy_(value)
            self._landing_free.record(current)

    def wait_copied(self) -> None:
        """Wait until the slot's bytes are out of it, so that it may be released. On a CPU: call `finish` first."""
        if self._on_gpu:
            self._crossed.synchronize()
        self._slot = None


def check_pack(slot: ReadSlot, target_layer_ids: tuple[int, ...]) -> None:
    """Compare the slot's token ids with the checksum in its header; raises BadPack."""
    found = pack_checksum(slot.array("input_ids").tobytes(), slot.header.num_tokens, target_layer_ids)
    if found != slot.header.checksum:
        raise BadPack(
            f"pack {slot.header.pack_id} (ring {slot.ring_index}, slot seq {slot.header.seq}): checksum "
            f"{slot.header.checksum:#010x} expected, {found:#010x} found; its tokens are damaged or of another tap list"
        )
