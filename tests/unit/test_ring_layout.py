"""The bytes of the segment are a contract between programs: pinned here, number by number."""

from __future__ import annotations

import ctypes
import os
import struct
import uuid
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from shm_ring import Field, Reader, Ring, SlotSpec, atomics, errors, layout, ring_name, segment

SPEC = SlotSpec((Field("ids", "int32", (16,)), Field("features", "bfloat16", (64, 128))), {"hidden": 128})


@pytest.fixture
def new_ring() -> Iterator[Callable[[int], Ring]]:
    made: list[Ring] = []
    run = f"layout.{uuid.uuid4().hex}"

    def make(num_slots: int) -> Ring:
        made.append(Ring.create(ring_name(run, len(made)), SPEC, num_slots, ring_index=5))
        return made[-1]

    yield make
    for ring in made:
        with suppress(errors.RingError):
            ring.unlink()
        ring.close()


def test_the_header_bytes_stand_where_the_design_puts_them(new_ring: Callable[[int], Ring]) -> None:
    ring = new_ring(3)
    raw = bytes(ring.segment.buffer[:128])
    assert raw[:8] == b"SHMRING\x01"
    assert struct.unpack_from("<II", raw, 8) == (1, 2 << 20)
    assert struct.unpack_from("<Q", raw, 16) == ((2 << 20) * 4,)
    assert struct.unpack_from("<II", raw, 24) == (3, 48)
    assert struct.unpack_from("<QQ", raw, 32) == (2 << 20, SPEC.slot_bytes)
    assert raw[48:80] == SPEC.digest
    assert raw[80:96] == ring.run_id
    assert struct.unpack_from("<II", raw, 104) == (os.getpid(), 5)
    assert struct.unpack_from("<I", raw, 112) == (zlib.crc32(raw[8:112]),)
    assert raw[116:] == bytes(12)


def test_words_headers_and_cursors_stand_where_the_design_puts_them(new_ring: Callable[[int], Ring]) -> None:
    ring = new_ring(2)
    with ring.writer() as writer, Reader([ring], consumer_id=9) as reader:
        slot = writer.acquire()
        writer.publish(slot, pack_id=77, epoch=2, num_tokens=3, num_documents=4, checksum=5, cursor=b"abc")
        assert struct.unpack_from("<Q", ring.segment.buffer, 4096) == (1 << 16 | 1,)
        assert struct.unpack_from("<QQIIII", ring.segment.buffer, 8192) == (1, 77, 2, 3, 4, 5)
        cell = bytes(ring.segment.buffer[256:320])
        assert cell == struct.pack("<QII48s", 1, 3, zlib.crc32(b"abc"), b"abc")
        taken = reader.take()
        assert taken is not None
        assert struct.unpack_from("<Q", ring.segment.buffer, 4096) == (1 << 16 | 9 << 2 | 2,)
        reader.release(taken)
        assert struct.unpack_from("<Q", ring.segment.buffer, 4096) == (1 << 16,)


def test_regions_of_the_control_page_do_not_overlap() -> None:
    regions = [
        (0, layout.HEADER_BYTES), (layout.OFFSET_PRODUCER, 64), (layout.OFFSET_CURSORS, 128),
        (layout.OFFSET_READY_BELL, 4), (layout.OFFSET_FREE_BELL, 4), (layout.OFFSET_CONSUMERS, 64 * 48),
        (layout.OFFSET_SCHEMA_HEAD, 512), (layout.OFFSET_WORDS, 8 * 256), (layout.OFFSET_SLOT_HEADERS, 128 * 256),
        (layout.OFFSET_SCHEMA, 4 + layout.MAX_SCHEMA_BYTES),
    ]  # fmt: skip
    ends = [start + size for start, size in regions]
    assert all(end <= start for end, (start, _) in zip(ends, regions[1:], strict=False))
    assert ends[-1] == layout.DATA_OFFSET


@pytest.mark.parametrize("last_seq", [(1 << 32) - 10, (1 << 47) - 10])
def test_sequence_numbers_pass_every_power_of_two(new_ring: Callable[[int], Ring], last_seq: int) -> None:
    ring = new_ring(3)
    atomics.store_u64(ring.segment.words_address, layout.word(last_seq, 0, layout.FREE))
    layout.pack_cursor(ring.segment.buffer, last_seq, b"c")
    with ring.writer() as writer, Reader([ring]) as reader:
        assert (writer.last_seq, writer.cursor) == (last_seq, b"c")
        for step in range(1, 41):
            writer.publish(writer.acquire(), pack_id=step)
            taken = reader.take()
            assert taken is not None
            assert (taken.header.seq, taken.header.pack_id) == (last_seq + step, step)
            reader.release(taken)


def test_the_last_sequence_number_is_an_error_and_not_a_wrap(new_ring: Callable[[int], Ring]) -> None:
    ring = new_ring(3)
    atomics.store_u64(ring.segment.words_address, layout.word(layout.MAX_SEQ, 0, layout.FREE))
    layout.pack_cursor(ring.segment.buffer, layout.MAX_SEQ, b"")
    with ring.writer() as writer:
        slot = writer.acquire()
        with pytest.raises(errors.RingOversize, match="seq"):
            writer.publish(slot, pack_id=1)


def test_bells_pass_two_to_the_32(new_ring: Callable[[int], Ring]) -> None:
    bell = new_ring(1).segment.address + layout.OFFSET_READY_BELL
    atomics.store_u32(bell, 0xFFFFFFFF)
    atomics.ring_bell(bell)
    assert atomics.load_u32(bell) == 0


def test_compare_and_swap_changes_the_word_only_if_it_matches() -> None:
    cell = ctypes.c_uint64(7)
    at = ctypes.addressof(cell)
    assert not atomics.swap_u64(at, 6, 9)
    assert cell.value == 7
    assert atomics.swap_u64(at, 7, 9)
    assert cell.value == 9


def test_a_missing_libatomic_names_the_install_command() -> None:
    with pytest.raises(errors.MissingLibrary, match=r"apt-get install libatomic1.*dnf install libatomic") as caught:
        atomics.load_libatomic("libatomic-that-is-not-there.so.1")
    assert isinstance(caught.value, ImportError)
    assert caught.value.exit_code == 5


def test_fields_are_aligned_and_large_ones_to_pages() -> None:
    spec = SlotSpec((Field("a", "uint8", (3,)), Field("b", "int32", (5,)), Field("c", "bfloat16", (8, 512))))
    assert spec.offsets == {"a": 0, "b": 64, "c": 4096}
    assert spec.slot_bytes == 4096 + 8192


def test_a_spec_survives_its_json_whatever_the_order_of_its_names() -> None:
    spec = SlotSpec((Field("z", "int8", (2,)), Field("a", "float8_e4m3fn", (2, 3))), {"b": [1, 2], "a": {"x": None}})
    again = SlotSpec.from_json(spec.to_json())
    assert again == spec
    assert [f.name for f in again.fields] == ["z", "a"]
    assert again.digest == spec.digest


@pytest.mark.parametrize("text", ["", "{}", "[]", "nonsense", '{"fields":{},"meta":{}}', '{"fields":1,"meta":{}}'])
def test_a_damaged_schema_text_is_refused(text: str) -> None:
    with pytest.raises(errors.RingError):
        SlotSpec.from_json(text)


def test_a_long_schema_reaches_the_other_side_whole(new_ring: Callable[[int], Ring]) -> None:
    del new_ring
    spec = SlotSpec((Field("a", "int8", (2,)),), {f"key{i}": "x" * 50 for i in range(100)})
    ring = Ring.create(ring_name(f"layout.{uuid.uuid4().hex}", 99), spec, 1)
    try:
        with Ring.open(ring.name, spec) as other:
            assert other.spec.meta == spec.meta
    finally:
        ring.unlink()
        ring.close()


def test_every_single_flipped_header_byte_is_refused(new_ring: Callable[[int], Ring]) -> None:
    ring = new_ring(2)
    buffer = ring.segment.buffer
    for offset in range(layout.HEADER_BYTES):
        for mask in (0x01, 0x80, 0xFF):
            buffer[offset] ^= mask
            with pytest.raises(errors.RingError):
                Ring.open(ring.name, wait_s=0.0)
            buffer[offset] ^= mask
    with Ring.open(ring.name, SPEC) as again:
        assert again.num_slots == 2


@pytest.mark.parametrize(
    ("words", "claim"),
    [
        ((layout.word(1, 0, 3),), "state 3"),
        ((layout.word(0, 0, layout.READY),), "seq of 0"),
        ((layout.word(1, 48, layout.HELD),), "consumer 48"),
        ((layout.word(1, 2, layout.FREE),), "not HELD"),
        ((layout.word(7, 0, layout.FREE), layout.word(7, 0, layout.FREE)), "also in slot 0"),
        ((layout.word(7, 0, layout.READY),), "header of seq 0"),
    ],
)
def test_words_the_protocol_cannot_make_are_refused(
    new_ring: Callable[[int], Ring], words: tuple[int, ...], claim: str
) -> None:
    ring = new_ring(3)
    for index, value in enumerate(words):
        atomics.store_u64(ring.segment.words_address + 8 * index, value)
    for attach in (lambda: Ring.open(ring.name), ring.writer, lambda: Reader([ring])):
        with pytest.raises(errors.RingCorrupt, match=claim):
            attach()
    assert not segment.lock_holders(ring.segment.fd).count("producer"), "the refused writer must not keep its role"


def test_a_torn_cursor_cell_is_refused_by_the_next_writer(new_ring: Callable[[int], Ring]) -> None:
    ring = new_ring(2)
    with ring.writer() as writer:
        writer.publish(writer.acquire(), pack_id=1, cursor=b"abc")
    ring.segment.buffer[layout.OFFSET_CURSORS + 64 + 16] ^= 1
    with pytest.raises(errors.RingCorrupt, match="no cursor of seq 1"):
        ring.writer()
