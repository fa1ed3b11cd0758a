"""One pass through the whole public surface in one process."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from shm_ring import Field, Reader, Ring, SlotSpec, ring_name


@pytest.fixture
def ring() -> Iterator[Ring]:
    spec = SlotSpec(
        (Field("ids", "int32", (16,)), Field("features", "bfloat16", (16, 8))), {"target_layer_ids": [1, 2]}
    )
    made = Ring.create(ring_name(f"smoke.{uuid.uuid4().hex}", 0), spec, num_slots=4)
    yield made
    made.unlink()
    made.close()


def test_packs_arrive_once_in_order_with_their_headers_and_bytes(ring: Ring) -> None:
    other = Ring.open(ring.name, ring.spec)
    with ring.writer() as writer, Reader([other]) as reader:
        for number in range(10):
            slot = writer.acquire(timeout_s=1)
            slot.array("ids")[:] = number
            writer.publish(slot, pack_id=number, num_tokens=16, checksum=number, cursor=bytes([number]))
            taken = reader.take(timeout_s=1)
            assert taken is not None
            assert (taken.header.pack_id, taken.header.seq, taken.header.checksum) == (number, number + 1, number)
            assert taken.array("ids").tolist() == [number] * 16
            reader.release(taken)
        assert writer.cursor == bytes([9])
        writer.finish()
        assert reader.take(timeout_s=1) is None
        del taken, slot
    snapshot = ring.snapshot()
    assert (snapshot.free, snapshot.published, snapshot.released, snapshot.end_of_data) == (4, 10, 10, True)
    other.close()
