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


def copy_pack(slot: ReadSlot, pack: PackTensors) -> None:
    """Copy the slot's fields into `pack`."""
    for name in ("input_ids", "loss_mask", "doc_start", "features", "final_hidden"):
        destination = getattr(pack, name)
        if destination is not None:
            destination.copy_(slot_tensor(slot, name))


def check_pack(slot: ReadSlot, target_layer_ids: tuple[int, ...]) -> None:
    """Compare the slot's token ids with the checksum in its header; raises BadPack."""
    found = pack_checksum(slot.array("input_ids").tobytes(), slot.header.num_tokens, target_layer_ids)
    if found != slot.header.checksum:
        raise BadPack(
            f"pack {slot.header.pack_id} (ring {slot.ring_index}, slot seq {slot.header.seq}): checksum "
            f"{slot.header.checksum:#010x} expected, {found:#010x} found; its tokens are damaged or of another tap list"
        )
