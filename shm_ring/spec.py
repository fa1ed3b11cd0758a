"""What one slot holds: named fields of fixed dtype and shape, and any JSON metadata both sides must agree on.

The ring knows nothing of tokens or layers. Both sides build a SlotSpec; its digest is compared when they attach.
Fields start on 64-byte boundaries, those of a page or more on 4096 (one DMA descriptor less, and torch is content).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from shm_ring.errors import RingCorrupt, RingMismatch, RingUsage

ALIGN_FIELD_BYTES = 64
PAGE_BYTES = 4096

_PLAIN = (
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64",
)  # fmt: skip
_RAW = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}  # numpy has no such types: raw bits


@dataclass(frozen=True)
class Field:
    """One array of a slot: `name`, dtype name as torch spells it, and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise RingUsage(f"field name {self.name!r} is not an identifier")
        if self.dtype not in _PLAIN and self.dtype not in _RAW:
            raise RingUsage(f"field {self.name!r} has dtype {self.dtype!r}; known: {', '.join((*_PLAIN, *_RAW))}")
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        if any(n < 1 for n in self.shape):
            raise RingUsage(f"field {self.name!r} has shape {self.shape}; every dimension must be at least 1")

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype of the numpy view: raw uint16 or uint8 bits where numpy lacks the type."""
        return np.dtype(_RAW.get(self.dtype, self.dtype))

    @property
    def num_bytes(self) -> int:
        """Bytes of the array without padding."""
        return prod(self.shape) * self.numpy_dtype.itemsize


@dataclass(frozen=True)
class SlotSpec:
    """The fields of a slot in order, and `meta`: any JSON dict that is part of the agreement."""

    fields: tuple[Field, ...]
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", tuple(self.fields))
        names = [f.name for f in self.fields]
        if not names or len(set(names)) != len(names):
            raise RingUsage(f"a slot needs fields with distinct names, got {names}")
        try:
            meta = json.loads(json.dumps(dict(self.meta), sort_keys=True, allow_nan=False))
        except (TypeError, ValueError) as why:
            raise RingUsage(f"meta of the slot is not JSON: {why}") from None
        object.__setattr__(self, "meta", meta)

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Byte offset of each field within the slot."""
        return self._places[0]

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes of one slot's payload, padding between fields included."""
        return self._places[1]

    @cached_property
    def _places(self) -> tuple[dict[str, int], int]:
        at, offsets = 0, {}
        for f in self.fields:
            align = PAGE_BYTES if f.num_bytes >= PAGE_BYTES else ALIGN_FIELD_BYTES
            at = -(-at // align) * align
            offsets[f.name] = at
            at += f.num_bytes
        return offsets, -(-at // ALIGN_FIELD_BYTES) * ALIGN_FIELD_BYTES

    @cached_property
    def _by_name(self) -> dict[str, Field]:
        return {f.name: f for f in self.fields}

    def field_named(self, name: str) -> Field:
        """Return the field called `name`; raises RingUsage that lists the known ones."""
        try:
            return self._by_name[name]
        except KeyError:
            raise RingUsage(f"the slot has no field {name!r}; it has {', '.join(self._by_name)}") from None

    def view(self, name: str, base: npt.NDArray[np.uint8], slot_offset: int) -> npt.NDArray[Any]:
        """Return the numpy view of field `name` in the slot that starts at `slot_offset` of `base`; no copy."""
        f = self.field_named(name)
        at = slot_offset + self.offsets[name]
        return base[at : at + f.num_bytes].view(f.numpy_dtype).reshape(f.shape)

    def to_json(self) -> str:
        """Return the canonical JSON text: sorted keys, no spaces. Its sha256 is the schema digest."""
        fields = {
            f.name: {"dtype": f.dtype, "shape": list(f.shape), "offset": self.offsets[f.name]} for f in self.fields
        }
        return json.dumps({"fields": fields, "meta": self.meta}, sort_keys=True, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> SlotSpec:
        """Build the spec from `to_json` text; raises RingCorrupt if it is not such text."""
        try:
            raw = json.loads(text)
            by_offset = sorted(raw["fields"].items(), key=lambda item: item[1]["offset"])
            spec = cls(tuple(Field(name, f["dtype"], tuple(f["shape"])) for name, f in by_offset), raw["meta"])
        except (ValueError, KeyError, TypeError, AttributeError) as why:
            raise RingCorrupt(f"the schema text of the segment does not parse: {why!r}") from None
        if spec.to_json() != text:
            raise RingCorrupt("the schema text of the segment is not in canonical form, or its offsets are wrong")
        return spec

    @cached_property
    def digest(self) -> bytes:
        """sha256 of the canonical JSON."""
        return hashlib.sha256(self.to_json().encode()).digest()


def _flatten(value: Any, at: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {at: value}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat.update(_flatten(inner, f"{at}.{key}" if at else key))
    return flat


def differing_keys(ours: SlotSpec, theirs: SlotSpec) -> list[str]:
    """Name each differing key of two specs with both values."""
    left, right = _flatten(json.loads(ours.to_json())), _flatten(json.loads(theirs.to_json()))
    lines = []
    for key in sorted(left.keys() | right.keys()):
        if left.get(key) != right.get(key):
            here = json.dumps(left[key]) if key in left else "absent"
            there = json.dumps(right[key]) if key in right else "absent"
            lines.append(f"{key}: here {here}, in the ring {there}")
    return lines


def check_equal(name: str, ours: SlotSpec, theirs: SlotSpec) -> None:
    """Raise RingMismatch that lists both sides of each differing key."""
    if ours.digest != theirs.digest:
        differences = "; ".join(differing_keys(ours, theirs))
        raise RingMismatch(
            f"ring {name!r} holds other slots than this program's configuration: {differences}; "
            "use the configuration the ring was made with, or remove the ring and start anew"
        )
