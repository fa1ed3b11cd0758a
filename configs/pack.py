"""The fields of a pack: what one slot of the ring holds, by name, type and shape.

T is the pack size in tokens, K the number of taps, H the target's hidden size.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple


class PackField(NamedTuple):
    """One field of a pack: its name, its element type (numpy's names, and bfloat16) and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def longest_document(asked: int | None, pack_tokens: int, context: int | None = None) -> int:
    """Tokens of the longest document: as asked for, at most a pack and, where given, at most the target's context."""
    longest = min(asked or pack_tokens, pack_tokens)
    return longest if context is None else min(longest, context)


def pack_fields(tokens: int, num_taps: int, hidden: int, dtype: str, final_hidden: bool) -> tuple[PackField, ...]:
    """List the fields of a pack of `tokens` tokens.

    input_ids [T]; loss_mask [T] 1 where supervised; doc_start [T] index of the first token of this token's document,
    -1 in padding; features [T, K*H] taps in list order; final_hidden [T, H] after the target's own final norm.
    """
    fields = [
        PackField("input_ids", "int32", (tokens,)),
        PackField("loss_mask", "uint8", (tokens,)),
        PackField("doc_start", "int32", (tokens,)),
        PackField("features", dtype, (tokens, num_taps * hidden)),
    ]
    if final_hidden:
        fields.append(PackField("final_hidden", dtype, (tokens, hidden)))
    return tuple(fields)


def pack_checksum(input_ids: bytes, num_tokens: int, target_layer_ids: Sequence[int]) -> int:
    """CRC-32 over the token ids (int32, little-endian), their count and the tap list; travels in the slot header."""
    tail = ",".join(str(number) for number in (num_tokens, *target_layer_ids)).encode()
    return zlib.crc32(tail, zlib.crc32(input_ids)) & 0xFFFFFFFF
