"""Tensor views and page-locking, as far as a machine without CUDA can say."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from shm_ring import Field, Reader, Ring, SlotSpec, errors, layout, ring_name, tensors  # noqa: E402

SPEC = SlotSpec(
    (
        Field("ids", "int32", (8,)), Field("mask", "bool", (8,)), Field("half", "float16", (8,)),
        Field("features", "bfloat16", (256, 256)), Field("eights", "float8_e4m3fn", (256,)),
        Field("fives", "float8_e5m2", (256,)), Field("counts", "uint16", (4,)),
    )
)  # fmt: skip


@pytest.fixture
def ring() -> Iterator[Ring]:
    made = Ring.create(ring_name(f"tensors.{os.getpid()}.{uuid.uuid4().hex[:6]}", 0), SPEC, 3)
    yield made
    with suppress(errors.RingError):
        made.unlink()
    made.close()


def test_every_bit_pattern_of_bfloat16_and_float8_passes_unchanged(ring: Ring) -> None:
    with ring.writer() as writer, Reader([ring]) as reader:
        slot = writer.acquire()
        every = np.arange(65536, dtype=np.uint16).reshape(256, 256)
        source = torch.from_numpy(every.view(np.int16)).view(torch.bfloat16)
        tensors.slot_tensor(slot, "features").copy_(source)
        for name in ("eights", "fives"):
            slot.array(name)[:] = np.arange(256, dtype=np.uint8)
        writer.publish(slot, pack_id=1)
        taken = reader.take(timeout_s=1)
        assert taken is not None
        features = tensors.slot_tensor(taken, "features")
        assert (features.dtype, features.shape) == (torch.bfloat16, (256, 256))
        assert torch.equal(features.view(torch.int16), source.view(torch.int16))
        assert (taken.array("features") == every).all()
        for name, dtype in (("eights", torch.float8_e4m3fn), ("fives", torch.float8_e5m2)):
            view = tensors.slot_tensor(taken, name)
            assert view.dtype == dtype
            assert view.view(torch.uint8).tolist() == list(range(256))


def test_tensors_are_views_and_keep_the_mapping(ring: Ring) -> None:
    with ring.writer() as writer:
        slot = writer.acquire()
        for name in ("ids", "mask", "half", "counts"):
            tensor = tensors.slot_tensor(slot, name)
            assert str(tensor.dtype) == f"torch.{SPEC.field_named(name).dtype}"
        ids = tensors.slot_tensor(slot, "ids")
        slot.array("ids")[:] = 5
        assert ids.tolist() == [5] * 8
    ring.unlink()
    ring.close()
    assert ids.tolist() == [5] * 8


def test_the_package_itself_never_imports_torch() -> None:
    code = "import sys, shm_ring; print(sorted({'torch', 'zmq', 'pydantic', 'rich'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"


@pytest.mark.parametrize(("slots", "stride"), [(1, 2 << 20), (16, 420 << 20), (256, 2 << 30), (200, 70 << 30)])
def test_registrations_cover_the_segment_and_end_on_slots(slots: int, stride: int) -> None:
    found = list(tensors.chunks(slots, stride))
    assert found[0][0] == 0
    assert sum(size for _, size in found) == layout.DATA_OFFSET + slots * stride
    for (start, size), following in zip(found, [*found[1:], None], strict=True):
        assert size > 0
        assert size <= max(tensors.MAX_CHUNK_BYTES, stride + layout.DATA_OFFSET)
        assert (start + size - layout.DATA_OFFSET) % stride == 0
        assert following is None or following[0] == start + size


def test_without_cuda_page_locking_is_silent_and_the_ring_works(
    ring: Ring, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors, "_runtime", lambda: None)
    with tensors.PageLock(ring) as lock, ring.writer() as writer, Reader([ring]) as reader:
        writer.publish(writer.acquire(), pack_id=1)
        assert reader.take(timeout_s=1) is not None
        assert not lock.locked
    assert caplog.records == []


class FakeRuntime:
    """Counts registrations; the n-th fails with the given code."""

    def __init__(self, fail_at: int = 0, code: int = 0) -> None:
        self.fail_at, self.code, self.calls = fail_at, code, 0
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, at: int, num_bytes: int, flags: int) -> int:
        assert flags == 1
        assert num_bytes > 0
        self.calls += 1
        if self.calls == self.fail_at:
            return self.code
        self.registered[at] = num_bytes
        return 0

    def cudaHostUnregister(self, at: int) -> int:
        del self.registered[at]
        return 0


def test_a_refused_registration_falls_back_with_one_warning_and_a_cleared_error(
    ring: Ring, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, cleared = FakeRuntime(fail_at=2, code=712), []
    monkeypatch.setattr(tensors, "_runtime", lambda: runtime)
    monkeypatch.setattr(tensors, "_clear_error", lambda: cleared.append(1))
    real = tensors.chunks
    monkeypatch.setattr(tensors, "chunks", lambda n, stride: real(n, stride, 4 << 20))
    with caplog.at_level(logging.WARNING), tensors.PageLock(ring) as lock:
        assert not lock.locked
        assert runtime.registered == {}
    assert cleared == [1]
    assert [record.getMessage().count("cuda_error=712") for record in caplog.records] == [1]


def test_the_mapping_outlives_the_ring_until_it_is_unregistered(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime()
    monkeypatch.setattr(tensors, "_runtime", lambda: runtime)
    with tensors.PageLock(ring) as lock:
        assert lock.locked
        assert sum(runtime.registered.values()) == ring.nbytes
        ring.unlink()
        ring.close()
        assert not ring._mapped.mapping.closed, "unmapped while registered"
        assert runtime.registered
    assert runtime.registered == {}
