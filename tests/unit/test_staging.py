"""Bringing packs from slots into the tensors that the step reads."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
import torch

from configs.pack import pack_checksum, pack_fields
from consumer.staging import BadPack, Staging, allocate_pack, check_pack
from shm_ring import Field, Reader, Ring, SlotSpec, ring_name
from shm_ring.tensors import slot_tensor

TOKENS, TAPS, HIDDEN = 32, 2, 8
LAYERS = (1, 4)


@pytest.fixture
def ring() -> Iterator[Ring]:
    spec = SlotSpec(tuple(Field(*field) for field in pack_fields(TOKENS, TAPS, HIDDEN, "bfloat16", True)), {})
    made = Ring.create(ring_name(f"staging.{uuid.uuid4().hex}", 0), spec, num_slots=3)
    yield made
    made.unlink()
    made.close()


def values_of(number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return {
        "input_ids": torch.randint(0, 99, (TOKENS,), generator=generator, dtype=torch.int32),
        "loss_mask": torch.ones(TOKENS, dtype=torch.uint8),
        "doc_start": torch.full((TOKENS,), number, dtype=torch.int32),
        "features": torch.randn(TOKENS, TAPS * HIDDEN, generator=generator).to(torch.bfloat16) * 1e30,
        "final_hidden": torch.randn(TOKENS, HIDDEN, generator=generator).to(torch.bfloat16),
    }


def put(writer, number: int, checksum: int | None = None) -> dict[str, torch.Tensor]:
    slot, values = writer.acquire(timeout_s=1), values_of(number)
    for name, value in values.items():
        slot_tensor(slot, name).copy_(value)
    right = pack_checksum(values["input_ids"].numpy().tobytes(), TOKENS, LAYERS)
    writer.publish(slot, pack_id=number, num_tokens=TOKENS, checksum=right if checksum is None else checksum)
    return values


def test_packs_arrive_bit_for_bit_in_tensors_that_never_move(ring):
    pack = allocate_pack(ring.spec, torch.device("cpu"))
    assert pack.features.dtype == torch.bfloat16
    staging, places = Staging(pack), [value.data_ptr() for value in vars(pack).values()]
    with ring.writer() as writer, Reader([ring]) as reader:
        for number in range(4):
            sent = put(writer, number)
            slot = reader.take(timeout_s=1)
            staging.start(slot)
            staging.finish()
            staging.wait_copied()
            reader.release(slot)
            for name, value in sent.items():
                assert torch.equal(getattr(pack, name), value), name
            del slot
    assert [value.data_ptr() for value in vars(pack).values()] == places


def test_finish_without_start_is_an_error(ring):
    staging = Staging(allocate_pack(ring.spec, torch.device("cpu")))
    with pytest.raises(RuntimeError, match="no pack is on its way"):
        staging.finish()


def test_a_wrong_checksum_is_refused_with_both_numbers(ring):
    with ring.writer() as writer, Reader([ring]) as reader:
        put(writer, 1)
        put(writer, 2, checksum=123)
        good = reader.take(timeout_s=1)
        check_pack(good, LAYERS)
        with pytest.raises(BadPack, match="pack 1"):
            check_pack(good, (1, 5))
        bad = reader.take(timeout_s=1)
        with pytest.raises(BadPack, match=r"pack 2 .*0x0000007b expected"):
            check_pack(bad, LAYERS)
        for slot in (good, bad):
            reader.release(slot)
        del good, bad, slot
