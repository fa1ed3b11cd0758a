"""Every byte of a ring segment and of the board page. No other file has a numeric offset.

    ring segment                                                        written by
    0        8     magic                                                creator, LAST, release      (sync point C)
    8        104   header: see _HEADER                                  creator
    112      4     crc32 of bytes 8..111                                creator
    116      12    zero
    128      64    producer record: see PRODUCER_*                      the producer only
    192      64    cursor cell 0: seq u64, length u32, crc32 u32, 48 bytes of cursor    the producer only
    256      64    cursor cell 1: used for odd seqs                     the producer only
    320      4     ready bell                                           the producer, FUTEX_WAKE_OP
    384      4     free bell                                            consumers, FUTEX_WAKE_OP
    512      64*48 consumer records: see CONSUMER_*                     consumer c only
    3584     512   first bytes of the schema JSON, for people           creator
    4096     8*256 slot words, contiguous: one scan is 2 KiB            see word states
    8192     128*256 slot headers                                       the producer, while the word is FREE
    40960    4     length of the schema JSON, then its bytes            creator
    2 MiB    S*stride  payloads                                         the producer, while the word is FREE

    word = seq << 16 | consumer << 2 | state         state: FREE 0 | READY 1 | HELD 2

Everything is little-endian. Lock bytes (OFD record locks, not stored in the segment): 0 the producer, 1+c consumer c,
255 the creator.
"""

from __future__ import annotations

import struct
import sys
import zlib
from dataclasses import dataclass

assert sys.byteorder == "little", "the ring's layout is little-endian and so must the machine be"

MAGIC_RING = int.from_bytes(b"SHMRING\x01", "little")
MAGIC_BOARD = int.from_bytes(b"SHMBORD\x01", "little")
MAGIC_STATE = int.from_bytes(b"SHMSTAT\x01", "little")  # of a file of its own: handover.py
LAYOUT_VERSION = 1
MAX_SLOTS = 256
MAX_CONSUMERS = 48
MAX_CURSOR_BYTES = 48
MAX_SEQ = (1 << 48) - 1
ALIGN_SLOT_BYTES = 2 << 20

OFFSET_CRC = 112
HEADER_BYTES = 128
OFFSET_PRODUCER = 128
OFFSET_CURSORS = 192
OFFSET_READY_BELL = 320
OFFSET_FREE_BELL = 384
OFFSET_CONSUMERS = 512
OFFSET_SCHEMA_HEAD = 3584
SCHEMA_HEAD_BYTES = 512
OFFSET_WORDS = 4096
OFFSET_SLOT_HEADERS = 8192
OFFSET_SCHEMA = 40960
DATA_OFFSET = 2 << 20
MAX_SCHEMA_BYTES = DATA_OFFSET - OFFSET_SCHEMA - 4
RECORD_BYTES = 64
SLOT_HEADER_BYTES = 128

# Record fields, in bytes from the start of the record. u32: pid, flags, of consumers attaches and rejected; u64: rest.
RECORD_PID, RECORD_FLAGS, RECORD_START, RECORD_HEARTBEAT = 0, 4, 8, 16
PRODUCER_ATTACHES, PRODUCER_BLOCKED_NS, PRODUCER_BYTES, PRODUCER_PUBLISHED = 24, 32, 40, 48
CONSUMER_ATTACHES, CONSUMER_REJECTED, CONSUMER_TAKEN, CONSUMER_RELEASED = 24, 28, 32, 40
CONSUMER_STARVED_NS, CONSUMER_LAST_SEQ = 48, 56
FLAG_END_OF_DATA = 1

# The board page: the same header (its number of slots is the number of rings), then
BOARD_STOP, BOARD_PAUSE, BOARD_BELL = 128, 192, 320
BOARD_BYTES = DATA_OFFSET

LOCK_PRODUCER, LOCK_CONSUMER_0, LOCK_CREATOR, NUM_LOCKS = 0, 1, 255, 256

FREE, READY, HELD = 0, 1, 2
STATE_NAMES = ("FREE", "READY", "HELD")

_HEADER = struct.Struct("<8sIIQIIQQ32s16sQIII")
_SLOT_HEADER = struct.Struct("<QQIIIIQQ")
_CURSOR = struct.Struct("<QII48s")


@dataclass(frozen=True)
class SegmentHeader:
    """The creator's description of a segment; bytes 0..115."""

    magic: int
    version: int
    data_offset: int
    segment_bytes: int
    num_slots: int
    max_consumers: int
    stride_bytes: int
    capacity_bytes: int
    digest: bytes
    run_id: bytes
    created_ns: int
    creator_pid: int
    ring_index: int
    crc: int = 0

    def pack(self) -> bytes:
        """Return the 128 header bytes with a fresh crc and a ZERO magic; the magic is stored last, by itself."""
        body = _HEADER.pack(
            bytes(8), self.version, self.data_offset, self.segment_bytes, self.num_slots, self.max_consumers,
            self.stride_bytes, self.capacity_bytes, self.digest, self.run_id, self.created_ns, self.creator_pid,
            self.ring_index, 0,
        )  # fmt: skip
        crc = zlib.crc32(body[8:OFFSET_CRC])
        return (body[:OFFSET_CRC] + struct.pack("<I", crc)).ljust(HEADER_BYTES, b"\0")

    @classmethod
    def unpack(cls, raw: bytes) -> SegmentHeader:
        """Read the header without judging it."""
        magic, *rest = _HEADER.unpack(raw[: _HEADER.size])
        return cls(int.from_bytes(magic, "little"), *rest)


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """What the producer says about the pack in a slot. `published_ns` is CLOCK_BOOTTIME."""

    seq: int
    pack_id: int
    epoch: int
    num_tokens: int
    num_documents: int
    checksum: int
    published_ns: int
    producer_attach: int


def word(seq: int, consumer: int, state: int) -> int:
    """Compose a slot word."""
    return seq << 16 | consumer << 2 | state


def word_state(value: int) -> int:
    """State of a word: FREE, READY or HELD (3 is corrupt)."""
    return value & 3


def word_consumer(value: int) -> int:
    """Consumer id of a word; zero unless HELD."""
    return value >> 2 & 0x3FFF


def word_seq(value: int) -> int:
    """Sequence number of a word; zero means never published."""
    return value >> 16


def consumer_record(consumer_id: int) -> int:
    """Offset of the record of a consumer."""
    return OFFSET_CONSUMERS + RECORD_BYTES * consumer_id


def slot_stride(slot_bytes: int) -> int:
    """Bytes from one slot's payload to the next: a multiple of 2 MiB, so that huge pages fit."""
    return -(-max(slot_bytes, 1) // ALIGN_SLOT_BYTES) * ALIGN_SLOT_BYTES


def ring_bytes(num_slots: int, slot_bytes: int) -> int:
    """Bytes of a ring's whole segment."""
    return DATA_OFFSET + num_slots * slot_stride(slot_bytes)


def pack_slot_header(buffer: memoryview, slot_index: int, header: tuple[int, ...]) -> None:
    """Write the fields of a SlotHeader; plain stores, made visible by the word's release store."""
    _SLOT_HEADER.pack_into(buffer, OFFSET_SLOT_HEADERS + SLOT_HEADER_BYTES * slot_index, *header)


def unpack_slot_header(buffer: memoryview, slot_index: int) -> SlotHeader:
    """Read a SlotHeader; valid after an acquire load or CAS of the slot's word."""
    return SlotHeader(*_SLOT_HEADER.unpack_from(buffer, OFFSET_SLOT_HEADERS + SLOT_HEADER_BYTES * slot_index))


def pack_cursor(buffer: memoryview, seq: int, cursor: bytes) -> None:
    """Write the cursor of `seq` into cell seq & 1; the other cell, of the last published seq, stays whole."""
    raw = _CURSOR.pack(seq, len(cursor), zlib.crc32(cursor), cursor)
    at = OFFSET_CURSORS + RECORD_BYTES * (seq & 1)
    buffer[at : at + RECORD_BYTES] = raw


def unpack_cursor(buffer: memoryview, seq: int) -> bytes | None:
    """Return the cursor of `seq`, or None if cell seq & 1 does not hold it whole."""
    seen, length, crc, raw = _CURSOR.unpack_from(buffer, OFFSET_CURSORS + RECORD_BYTES * (seq & 1))
    cursor: bytes = raw[: min(length, MAX_CURSOR_BYTES)]
    return cursor if (seen, crc) == (seq, zlib.crc32(cursor)) and length <= MAX_CURSOR_BYTES else None
