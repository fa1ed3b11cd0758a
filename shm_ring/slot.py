"""What a caller holds while it writes or reads a slot."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from shm_ring.errors import RingOversize, RingUsage
from shm_ring.layout import SlotHeader
from shm_ring.segment import Segment


class Slot:
    """One slot's payload as arrays. The arrays are views of shared memory: valid until the slot is given back."""

    __slots__ = ("_offset", "index", "ring_index", "segment")

    def __init__(self, segment: Segment, index: int) -> None:
        """Describe slot `index`; touches nothing."""
        self.segment, self.index = segment, index
        self.ring_index = segment.header.ring_index
        self._offset = segment.payload_offset(index)

    def array(self, name: str) -> npt.NDArray[Any]:
        """Return field `name` as a numpy view; bfloat16 and float8 as raw uint16 and uint8. No copy."""
        base = self.segment.base
        if base is None:
            raise RingUsage(f"ring {self.segment.name!r} is closed in this process; slot {self.index} is out of reach")
        return self.segment.spec.view(name, base, self._offset)


class WriteSlot(Slot):
    """A slot that the producer acquired and has not published."""

    __slots__ = ()

    def write(self, name: str, values: npt.ArrayLike) -> None:
        """Copy `values` to the start of field `name`, along its first dimension; the rest of the field stays as it is.

        Raises RingOversize, before a byte is written, if the values are larger than the field; RingUsage for a dtype
        that would not go in bit for bit.
        """
        target, source = self.array(name), np.asarray(values)
        if source.dtype != target.dtype:
            raise RingUsage(f"field {name!r} is {target.dtype} in numpy, the values are {source.dtype}")
        if source.shape[1:] != target.shape[1:] or source.shape[0] > target.shape[0]:
            raise RingOversize(
                f"a record of shape {source.shape} ({source.nbytes} bytes) does not fit field {name!r} of shape "
                f"{target.shape} ({target.nbytes} bytes) in ring {self.segment.name!r}; raise the tokens of a slot"
            )
        target[: source.shape[0]] = source


class ReadSlot(Slot):
    """A slot that a consumer holds. `redelivered`: it was held when this consumer's previous life ended."""

    __slots__ = ("header", "redelivered", "word")

    def __init__(self, segment: Segment, index: int, word: int, header: SlotHeader, redelivered: bool) -> None:
        """Describe a HELD slot."""
        super().__init__(segment, index)
        self.word, self.header, self.redelivered = word, header, redelivered

    def array(self, name: str) -> npt.NDArray[Any]:
        """Return field `name` as a read-only numpy view; see Slot.array."""
        view = super().array(name)
        view.flags.writeable = False
        return view

    def __repr__(self) -> str:
        """Show where the slot is and what it holds."""
        return f"ReadSlot(ring={self.segment.name!r}, index={self.index}, header={self.header})"
