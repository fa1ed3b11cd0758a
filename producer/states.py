"""Are the target's states fit to be trained on? One batched computation per pack on its device, read when the copy is.

For each document and tap: rows that are not finite, rows that are all zero, and the RMS of its rows (their geometric
mean, which a few tokens with massive activations do not move) against a running one. Also the target agreement: the
share of supervised tokens that are the target's own greedy choice, on a sample of each pack.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from producer.rows import Pack

SETTLED = 16  # documents after which the running RMS is trusted
MEMORY = 256  # documents that the running RMS remembers
AGREEMENT_SAMPLE = 256  # supervised tokens per pack whose argmax is looked at
AGREEMENT_SETTLED = 2048

Head = Callable[[Tensor], Tensor]
"""Final hidden states [n, H] -> logits [n, V]."""


class BadStates(Exception):
    """The target produced states that cannot be trained on; the message names document and tap. Exit code 3."""

    exit_code = 3


class Findings:
    """What the device found in one pack; complete when the pack's copy is."""

    def __init__(self, values: Tensor, documents: Sequence[int]) -> None:
        """`values` [D, K, 4] on the host: rows, bad rows, zero rows, sum of log RMS; the last row is the agreement."""
        self.values = values
        self.documents = documents


class StateCheck:
    """Looks at packs in the order they are made, remembers the usual RMS of each tap."""

    def __init__(self, target_layer_ids: Sequence[int], band: float | None, head: Head | None = None) -> None:
        """`band`: largest factor between a document's RMS and the usual one; None: any. `head`: for the agreement."""
        self._ids = tuple(target_layer_ids)
        self._log_band = None if band is None else math.log(band)
        self._head = head
        self._seen = 0
        self._usual: list[float] = [0.0] * len(self._ids)
        self._agreed = self._asked = 0.0

    @property
    def agreement(self) -> float | None:
        """Share of the looked-at supervised tokens that equal the target's argmax; None before there are any."""
        return self._agreed / self._asked if self._asked else None

    @property
    def agreement_settled(self) -> bool:
        """Whether enough tokens were looked at to judge."""
        return self._asked >= AGREEMENT_SETTLED

    @torch.inference_mode()
    def start(self, pack: Pack) -> Findings:
        """Queue the computation for a finished pack and the copy of its result; waits for nothing on a GPU."""
        assert pack.features is not None
        features = pack.features[: pack.num_tokens].unflatten(1, (len(self._ids), -1))
        norm_TK = torch.linalg.vector_norm(features, dim=-1, dtype=torch.float32)
        bad_TK, zero_TK = ~torch.isfinite(norm_TK), norm_TK == 0
        log_TK = torch.where(bad_TK | zero_TK, 0.0, torch.log(norm_TK / math.sqrt(features.shape[-1])))
        ones_TK = torch.ones_like(norm_TK)
        # T last: a GPU scans rows in parallel, and a column of 8192 in one thread, which takes 1.9 ms
        values_K4T = torch.stack([ones_TK, bad_TK.float(), zero_TK.float(), log_TK], dim=-1).permute(1, 2, 0)
        ends = torch.tensor([pack.starts[number] for number in pack.documents[1:]] + [pack.num_tokens])
        until_K4T = values_K4T.double().contiguous().cumsum(-1)
        sums = until_K4T[..., ends.to(norm_TK.device, non_blocking=True) - 1].permute(2, 0, 1)
        sums = torch.cat([sums, self._agreement_of(pack, sums)])
        if not sums.is_cuda:
            return Findings(sums, pack.documents)
        host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
        host.copy_(sums, non_blocking=True)
        return Findings(host, pack.documents)

    def _agreement_of(self, pack: Pack, like: Tensor) -> Tensor:
        """Return one row [1, K, 4] whose first two numbers are tokens looked at and tokens that agree."""
        row = like.new_zeros(1, *like.shape[1:])
        if self._head is None or pack.final_hidden is None:
            return row
        mask = torch.from_numpy(pack.loss_mask).bool()
        mask &= torch.from_numpy(pack.doc_start) != torch.arange(len(mask), dtype=torch.int32)
        places = mask.nonzero()[:, 0]
        if len(places) == 0:
            return row
        places = places[:: max(1, len(places) // AGREEMENT_SAMPLE)][:AGREEMENT_SAMPLE]
        ids = torch.from_numpy(pack.input_ids)[places].to(like.device, non_blocking=True)
        greedy = self._head(pack.final_hidden[(places - 1).to(like.device, non_blocking=True)]).argmax(-1)
        row[0, 0, 0] = len(places)
        row[0, 0, 1] = (greedy == ids).sum()
        return row

    def judge(self, findings: Findings) -> None:
        """Read what `start` found; its copy must be complete. Raises BadStates for the first bad document and tap."""
        values = findings.values
        documents = values[:-1].diff(dim=0, prepend=torch.zeros_like(values[:1]))
        for number, taps in zip(findings.documents, documents.tolist(), strict=True):
            for place, (rows, bad, zero, log_sum) in enumerate(taps):
                if bad or zero:
                    self._refuse(number, place, f"{bad:.0f} rows with NaN or Inf and {zero:.0f} all-zero rows", rows)
                self._compare(number, place, rows, log_sum / rows)
            self._seen += 1
        self._asked += float(values[-1, 0, 0])
        self._agreed += float(values[-1, 0, 1])

    def _compare(self, number: int, place: int, rows: float, log_rms: float) -> None:
        usual = self._usual[place]
        if self._log_band is not None and self._seen >= SETTLED and abs(log_rms - usual) > self._log_band:
            found, common, band = math.exp(log_rms), math.exp(usual), math.exp(self._log_band)
            what = f"an RMS of {found:.3g} where {common:.3g} is usual (target.state_band: at most {band:.3g} times)"
            self._refuse(number, place, what, rows)
        self._usual[place] = usual + (log_rms - usual) / min(self._seen + 1, MEMORY)

    def _refuse(self, number: int, place: int, what: str, rows: float) -> None:
        raise BadStates(
            f"target states of document {number}, tap {place} (output of layer {self._ids[place]}): expected finite, "
            f"non-zero rows of the usual size, got {what} of {rows:.0f}; the target or its attention is broken"
        )
