"""Logits of the training-side forward on made-up input: a fingerprint of the arithmetic that the weights learnt with.

Served with another rotation, window, causality, mask token or norm, the same weights give other logits; nothing else
reports that. The input is a function of integers alone, so it is the same on every machine, and it reaches past the
sliding window. `python launch.py verify` computes the same logits from config.json with code of its own.

Shapes: T context tokens, A anchors, B block slots, P probed head rows, H hidden, K taps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from configs.drafter_shape import SLIDING, DrafterShape
from consumer.anchors import Anchors
from consumer.attention import dense_attention
from consumer.drafter import Drafter
from consumer.export.facts import DrafterFacts

NUM_HEAD_ROWS = 16
MAX_CONTEXT = 4096


class ProbeInput(NamedTuple):
    """Made-up input: anchors [A] ascending, their tokens [A], features [T, K*H] float32, head rows [P]."""

    anchors: list[int]
    tokens: list[int]
    features: Tensor
    head_rows: list[int]


def probe_input(shape: DrafterShape) -> ProbeInput:
    """Make the input for a drafter of `shape`: three anchors, at the start, at the window's edge and beyond it."""
    window = min(shape.sliding_window, MAX_CONTEXT) if SLIDING in shape.layer_types else 32
    anchors = [2, window, window + shape.block_size + 3]
    row = torch.arange(anchors[-1], dtype=torch.int64)[:, None]
    column = torch.arange(shape.num_taps * shape.hidden, dtype=torch.int64)[None, :]
    mixed = ((row * 7919 + 13) * (column * 104729 + 101)) % 65521
    tokens = [(31 * number + 7) % shape.vocab_size for number in range(len(anchors))]
    rows = shape.draft_vocab_size or shape.vocab_size
    head_rows = [number * rows // NUM_HEAD_ROWS for number in range(NUM_HEAD_ROWS)]
    return ProbeInput(anchors, tokens, mixed.float() / 32760.5 - 1.0, head_rows)


@torch.no_grad()
def training_logits(drafter: Drafter, given: ProbeInput, embedding_V: Tensor, head_P: Tensor) -> Tensor:
    """Logits [A, B-1, P] of the forward that training uses, in float32, by the dense reference attention.

    embedding_V: the target's whole embedding [V, H]; head_P: the probed rows of its head [P, H].
    """
    shape = drafter.shape
    position = torch.tensor(given.anchors)
    anchors = Anchors(position, torch.ones_like(position, dtype=torch.bool))
    doc_start = torch.zeros(len(given.features) + 1, dtype=torch.int32)
    features = torch.cat([given.features, torch.zeros(1, given.features.shape[1])])
    ids = torch.full((len(position), shape.block_size), shape.mask_token_id)
    ids[:, 0] = torch.tensor(given.tokens)
    positions = position[:, None] + torch.arange(shape.block_size)
    hidden = drafter(
        embedding_V[ids.flatten()].float(),
        drafter.context(features),
        positions.flatten(),
        torch.arange(len(features)),
        dense_attention(anchors, doc_start, shape),
        predicted_only=True,
    )
    logits: Tensor = hidden @ head_P.float().T
    return logits.view(len(position), shape.block_size - 1, -1)


def as_trained(facts: DrafterFacts) -> dict[str, Any]:
    """What the logits cannot show: which layers of the target are read, and windows that the input does not reach."""
    kinds = facts.shape.layer_types
    return {
        "taps": list(facts.target_layer_ids),
        "windows": [facts.shape.window_of(kind) for kind in kinds],
        "in-block causality": [facts.shape.causal_of(kind) for kind in kinds],
    }


def as_json(given: ProbeInput, logits: Tensor) -> dict[str, Any]:
    """The probe as plain JSON data; logits keep 7 digits."""
    plain = [[[float(f"{value:.7g}") for value in slot] for slot in block] for block in logits.tolist()]
    return {"anchors": given.anchors, "tokens": given.tokens, "head_rows": given.head_rows, "logits": plain}
