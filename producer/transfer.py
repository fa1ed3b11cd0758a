"""Move a finished pack into a slot: token fields by the host, features from the device straight into the slot.

On a GPU the copy runs on a side stream into the page-locked slot; the pack is published once its event has passed and
what the device found in its states has been judged. The next forward is queued before, and waits for none of it.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from configs.pack import pack_checksum
from producer.rows import Pack
from producer.states import Findings, StateCheck
from shm_ring import Writer, WriteSlot
from shm_ring.tensors import slot_tensor


class _Copy(NamedTuple):
    slot: WriteSlot
    pack: Pack
    findings: Findings
    done: torch.cuda.Event | None  # of the device where the states lie


class Transfer:
    """Copies packs into slots of one writer and publishes them in order."""

    def __init__(self, writer: Writer, target_layer_ids: tuple[int, ...], check: StateCheck) -> None:
        """`check` judges each pack before it is published."""
        self._writer = writer
        self._stream: torch.cuda.Stream | None = None
        self._layer_ids = target_layer_ids
        self._check = check
        self._under_way: deque[_Copy] = deque()

    @property
    def pack_ids(self) -> set[int]:
        """Packs whose copy is under way."""
        return {copy.pack.pack_id for copy in self._under_way}

    def start(self, slot: WriteSlot, pack: Pack) -> None:
        """Begin to check `pack` and to copy it into `slot`; a later `publish` hands it on."""
        findings = self._check.start(pack)
        slot.array("input_ids")[:] = pack.input_ids
        slot.array("loss_mask")[:] = pack.loss_mask
        slot.array("doc_start")[:] = pack.doc_start
        assert pack.features is not None
        if self._stream is None and pack.features.is_cuda:  # of a target over several GPUs: where its states are
            self._stream = torch.cuda.Stream(pack.features.device)
        sources = {"features": pack.features, "final_hidden": pack.final_hidden}
        done = self._copy([(slot_tensor(slot, name), source) for name, source in sources.items() if source is not None])
        self._under_way.append(_Copy(slot, pack, findings, done))

    def publish(self, leave: int = 0) -> int:
        """Publish the oldest packs until `leave` are under way, waiting for their copies; later ones if complete.

        Returns how many were published. Raises BadStates; the pack it names is not published.
        """
        published = 0
        while self._under_way and (len(self._under_way) > leave or self._is_done(self._under_way[0])):
            copy = self._under_way.popleft()
            if copy.done is not None:
                copy.done.synchronize()
            self._check.judge(copy.findings)
            self._publish(copy.slot, copy.pack)
            published += 1
        return published

    def _copy(self, pairs: list[tuple[Tensor, Tensor]]) -> torch.cuda.Event | None:
        if self._stream is None:
            for destination, source in pairs:
                destination.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            for destination, source in pairs:
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
