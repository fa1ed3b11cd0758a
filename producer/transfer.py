"""Move a finished pack into a slot: token fields by the host, features from the device straight into the slot.

On a GPU the copy runs on a side stream into the page-locked slot and the pack is published from its event, so the
next forward does not wait for it. On a CPU it is a plain copy.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from configs.pack import pack_checksum
from producer.rows import Pack
from shm_ring import Writer, WriteSlot
from shm_ring.tensors import slot_tensor


class _Copy(NamedTuple):
    slot: WriteSlot
    pack: Pack
    done: torch.cuda.Event | None


class Transfer:
    """Copies packs into slots of one writer and publishes them in order."""

    def __init__(self, writer: Writer, device: torch.device, target_layer_ids: tuple[int, ...]) -> None:
        self._writer = writer
        self._stream: torch.cuda.Stream | None = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._layer_ids = target_layer_ids
        self._under_way: deque[_Copy] = deque()

    def start(self, slot: WriteSlot, pack: Pack) -> None:
        """Begin copying `pack` into `slot`; it is published by a later `publish_finished`."""
        slot.array("input_ids")[:] = pack.input_ids
        slot.array("loss_mask")[:] = pack.loss_mask
        slot.array("doc_start")[:] = pack.doc_start
        done = None
        for name, source in (("features", pack.features), ("final_hidden", pack.final_hidden)):
            if source is not None:
                done = self._copy(slot_tensor(slot, name), source)
        self._under_way.append(_Copy(slot, pack, done))

    def publish_finished(self, wait: bool = False) -> int:
        """Publish packs whose copy is complete, oldest first; `wait`: all of them. Returns how many."""
        published = 0
        while self._under_way and (wait or self._is_done(self._under_way[0])):
            copy = self._under_way.popleft()
            if copy.done is not None:
                copy.done.synchronize()
            self._publish(copy.slot, copy.pack)
            published += 1
        return published

    def _copy(self, destination: Tensor, source: Tensor) -> torch.cuda.Event | None:
        if self._stream is None:
            destination.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            destination.copy_(source, non_blocking=True)
            source.record_stream(self._stream)
            done: torch.cuda.Event = self._stream.record_event()
            return done

    @staticmethod
    def _is_done(copy: _Copy) -> bool:
        return copy.done is None or copy.done.query()

    def _publish(self, slot: WriteSlot, pack: Pack) -> None:
        self._writer.publish(
            slot,
            pack_id=pack.pack_id,
            epoch=pack.epoch,
            num_tokens=pack.num_tokens,
            num_documents=len(pack.documents),
            checksum=pack_checksum(pack.input_ids.tobytes(), pack.num_tokens, self._layer_ids),
            cursor=pack.pack_id.to_bytes(8, "little"),
        )
