"""What proposes tokens in the decoding loop: the drafter, the drafter without context, or a bigram table.

Shapes: R rows (prompts), B block slots, K taps, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from consumer.anchors import Anchors
from consumer.attention import dense_attention, document_attention
from consumer.drafter import Drafter
from consumer.frozen_head import FrozenHead
from producer.corpus.documents import Documents


class Proposer(Protocol):
    """Proposes `block_size - 1` tokens after each row's anchor."""

    block_size: int

    def propose(self, texts: Sequence[Sequence[int]], features: Sequence[Tensor]) -> Tensor:
        """texts: token ids up to and including the anchor; features: taps [n, K*H] of all but it. Returns [R, B-1]."""


class DrafterProposer:
    """One drafter pass for all rows: the rows are laid end to end as the documents of one pack, as in training."""

    def __init__(self, drafter: Drafter, head: FrozenHead, zero_context: bool = False) -> None:
        self._drafter, self._head, self._zero = drafter.eval(), head, zero_context
        self.block_size = drafter.shape.block_size

    @torch.inference_mode()
    def propose(self, texts: Sequence[Sequence[int]], features: Sequence[Tensor]) -> Tensor:
        """See Proposer. The anchor's own row of features is a zero row, which no block sees."""
        shape, device = self._drafter.shape, features[0].device
        lengths = torch.tensor([len(text) for text in texts], device=device)
        starts = torch.cumsum(lengths, 0) - lengths
        doc_start = torch.repeat_interleave(starts, lengths).to(torch.int32)
        rows = [torch.cat([known, known.new_zeros(1, known.shape[1])]) for known in features]
        stacked = torch.cat(rows).to(self._drafter.fc.weight.dtype)
        g = self._drafter.context(torch.zeros_like(stacked) if self._zero else stacked)
        anchors = Anchors(starts + lengths - 1, torch.ones_like(starts, dtype=torch.bool))
        ids = torch.full((len(texts), shape.block_size), shape.mask_token_id, device=device)
        ids[:, 0] = torch.tensor([text[-1] for text in texts], device=device)
        positions = (lengths - 1)[:, None] + torch.arange(shape.block_size, device=device)
        context_positions = torch.arange(doc_start.shape[0], device=device) - doc_start
        attend = (document_attention if device.type == "cpu" else dense_attention)(anchors, doc_start, shape)
        block = self._head.embedding[ids.reshape(-1)].to(g.dtype)
        hidden = self._drafter(block, g, positions.reshape(-1), context_positions, attend)
        predicted = hidden.view(len(texts), shape.block_size, -1)[:, 1:]
        return self._head.tokens((predicted @ self._head.head.T).argmax(-1))


class BigramProposer:
    """The most frequent successor of each token in the training text, chained: what any drafter has to beat."""

    def __init__(self, successor_V: NDArray[np.int64], block_size: int) -> None:
        self._successor = torch.from_numpy(successor_V)
        self.block_size = block_size

    def propose(self, texts: Sequence[Sequence[int]], features: Sequence[Tensor]) -> Tensor:
        """See Proposer; the features only tell the device."""
        token = torch.tensor([text[-1] for text in texts])
        drafts = []
        for _ in range(self.block_size - 1):
            token = self._successor[token]
            drafts.append(token)
        return torch.stack(drafts, dim=1).to(features[0].device)


def count_successors(corpus: Documents, vocab_size: int) -> NDArray[np.int64]:
    """Find the most frequent supervised successor of every token, [V]; the token itself where it has none."""
    pairs: list[NDArray[np.int64]] = []
    for number in range(len(corpus)):
        document = corpus[number]
        ids = document.ids.astype(np.int64)
        supervised = document.loss_mask[1:] == 1
        pairs.append(ids[:-1][supervised] * vocab_size + ids[1:][supervised])
    pair, count = np.unique(np.concatenate(pairs), return_counts=True)
    successor = np.arange(vocab_size, dtype=np.int64)
    by_count = np.argsort(count, kind="stable")  # the last write wins, so the most frequent does
    successor[pair[by_count] // vocab_size] = pair[by_count] % vocab_size
    return successor
