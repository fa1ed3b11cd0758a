"""Held-out accepted length while training: blocks walked over documents that are never trained on.

The same rule as the decoding loop's: draft after an accepted token, step on by the leading run of right tokens plus
one. On texts that the target wrote greedily both give the same number (a test holds them to each other); on other
texts this one is the lower, since the data strays from what the target would write. Costs one drafter pass a document.

Shapes: N tokens of all held-out documents, A anchors, B block slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from configs.run_files import HELDOUT_PACK
from consumer.anchors import Anchors, lay_out_blocks, positions_in_document
from consumer.attention import dense_attention
from consumer.drafter import Drafter, Pieces
from consumer.frozen_head import FrozenHead


def walk(run_at: Callable[[int], int], length: int) -> list[int]:
    """Accepted length of each round over a text of `length` new tokens, of which the first comes with the prompt.

    run_at(i): how many of the tokens after new token i are drafted right. The last round ends with the text.
    """
    rounds, at = [], 0
    while at + 1 < length:
        kept = min(run_at(at) + 1, length - 1 - at)
        rounds.append(kept)
        at += kept
    return rounds


class HeldoutWatch:
    """Measures a drafter on the run's held-out pack, if the target has written one."""

    def __init__(self, run_dir: Path, drafter: Drafter, head: FrozenHead) -> None:
        """Look for the file at each measurement: the target writes it while the drafter starts."""
        self._path, self._drafter, self._head = run_dir / HELDOUT_PACK, drafter, head
        self._documents: list[dict[str, Tensor]] = []

    @torch.no_grad()
    def measure(self) -> float | None:
        """Mean accepted length over all rounds; None while there is no file."""
        if not self._documents and self._path.exists():
            pack = load_file(self._path, device=str(self._drafter.fc.weight.device))
            sizes = torch.unique_consecutive(pack["doc_start"], return_counts=True)[1].tolist()
            parts = {name: value.split(sizes) for name, value in pack.items()}
            self._documents = [{name: parts[name][number] for name in parts} for number in range(len(sizes))]
        if not self._documents:
            return None
        compiled, self._drafter.pieces = self._drafter.pieces, Pieces()  # every document has a shape of its own
        try:
            rounds = [length for document in self._documents for length in self._rounds(document)]
        finally:
            self._drafter.pieces = compiled
        return sum(rounds) / max(1, len(rounds))

    def _rounds(self, document: dict[str, Tensor]) -> Sequence[int]:
        """Draft at every supervised token of one document, and walk over them."""
        drafter, shape = self._drafter, self._drafter.shape
        ids, mask = document["input_ids"], document["loss_mask"]
        start = torch.zeros_like(document["doc_start"])
        position = torch.nonzero(mask).flatten()
        anchors = Anchors(position, torch.ones_like(position, dtype=torch.bool))
        blocks = lay_out_blocks(anchors, ids, mask, start, shape.block_size, shape.mask_token_id)
        hidden = drafter(
            self._head.embedding[blocks.input_ids.flatten()],
            drafter.context(document["features"].to(drafter.fc.weight.dtype)),
            blocks.positions.flatten(),
            positions_in_document(start),
            dense_attention(anchors, start, shape),
            predicted_only=True,
        )
        tokens = self._head.tokens((hidden @ self._head.head.T).argmax(-1)).view(len(position), -1)
        right = (tokens == blocks.labels[:, 1:]) & blocks.valid[:, 1:]
        runs = torch.cumprod(right.long(), dim=1).sum(1).tolist()
        return walk(lambda at: int(runs[at]), len(position))
