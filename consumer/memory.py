"""Estimate the GPU memory of a training step before anything is allocated. No torch: the launcher's plan uses it too.

Counts what lives at the peak, which is in the backward pass of the last layer or in the loss, whichever is larger.
Measured peaks it is held against: benchmarks/results/drafter_step_*.json.

Shapes: T context tokens, A anchors, B block slots, Q = A*B block rows, H hidden, K taps, V head rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from configs.schema import Config


class TooLarge(Exception):
    """The training step cannot fit on its GPU. Exit code 5."""

    exit_code = 5


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by purpose."""

    weights_bytes: int
    optimizer_bytes: int
    frozen_bytes: int
    pack_bytes: int
    activations_bytes: int
    logits_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it, at the peak."""
        return sum(vars(self).values())

    def __str__(self) -> str:
        """One line with gigabytes (1e9 bytes)."""
        parts = (f"{name.removesuffix('_bytes')} {value / 1e9:.1f}" for name, value in vars(self).items())
        return f"drafter step: {self.total_bytes / 1e9:.1f} GB ({', '.join(parts)})"


def estimate_of(config: Config, target: Mapping[str, Any], draft_vocab_size: int | None = None) -> MemoryEstimate:
    """Estimate one drafter process on a GPU. target: the plan's description of the target.

    draft_vocab_size: rows of a reduced head; None takes drafter.draft_vocab_size, or the whole vocabulary.
    """
    drafter, hidden, num_taps = config.drafter, int(target["hidden"]), len(target["target_layer_ids"])
    heads = drafter.num_attention_heads or target["num_heads"]
    kv_heads = drafter.num_key_value_heads or target["num_kv_heads"]
    head_dim = drafter.head_dim or target["head_dim"]
    intermediate = drafter.intermediate_size or target["intermediate"]
    layer = hidden * (2 * heads * head_dim + 2 * kv_heads * head_dim + 3 * intermediate + 2) + 2 * head_dim
    rows = draft_vocab_size or drafter.draft_vocab_size
    return estimate(
        parameters=drafter.num_layers * layer + num_taps * hidden**2 + 2 * hidden,
        hidden=hidden,
        intermediate=intermediate,
        num_layers=drafter.num_layers,
        heads_width=heads * head_dim,
        kv_width=kv_heads * head_dim,
        num_taps=num_taps,
        block_rows=config.anchors.choices[-1] * drafter.block_size,
        pack_tokens=config.pack.tokens,
        embedding_rows=target["vocab_size"],
        head_rows=rows or target["vocab_size"],
        tied=bool(target["tie_word_embeddings"]) and rows is None,
        chunk_rows=config.loss.chunk_rows,
        value_bytes=4 if config.training.precision == "float32" else 2,
        final_hidden=config.loss.labels != "hard",
        carried=config.training.micro_steps > 1,
    )


def checkpoint_bytes(num_parameters: int, muon: bool) -> int:
    """Bytes of a checkpoint, which are those of the state that a drafter hands over in memory (consumer/saver.py).

    Float32 masters, which bfloat16 weights are halves of, and AdamW's two moments; of Muon, which takes nearly all
    weights, one.
    """
    return num_parameters * (4 + (4 if muon else 8))


def require(found: MemoryEstimate, free_bytes: int, what: str) -> None:
    """Refuse a step that is larger than what is free. Raises TooLarge."""
    if found.total_bytes > free_bytes:
        raise TooLarge(
            f"{what}: {found}; free are {free_bytes / 1e9:.1f} GB: lower anchors.num (auto: anchors.sizes), "
            "pack.tokens or loss.chunk_rows, or give the drafter a GPU of its own"
        )


def estimate(
    *,
    parameters: int,
    hidden: int,
    intermediate: int,
    num_layers: int,
    heads_width: int,
    kv_width: int,
    num_taps: int,
    block_rows: int,
    pack_tokens: int,
    embedding_rows: int,
    head_rows: int,
    tied: bool,
    chunk_rows: int,
    value_bytes: int,
    final_hidden: bool = False,
    landing: bool = True,
    carried: bool = False,
) -> MemoryEstimate:
    """Estimate from plain numbers. heads_width, kv_width: heads times head size; value_bytes: 2 for bfloat16, else 4.

    landing: a second copy of the pack, which the next one is copied into meanwhile. carried: micro-steps add up in one
    more float32 gradient.
    """
    lower_halves = 2 * parameters if value_bytes < 4 else 0  # of the masters
    token = num_taps * hidden + (hidden if final_hidden else 0)
    pack = pack_tokens * (token * value_bytes + 9) * (2 if landing else 1)
    keys = block_rows + pack_tokens
    layer = block_rows * (4 * hidden + heads_width + 2 * kv_width) + pack_tokens * 2 * kv_width  # streams and products
    layer += block_rows * 2 * heads_width + keys * 2 * kv_width  # what attention keeps: q, k, v and its result
    layer += block_rows * 3 * intermediate
    backward = block_rows * (5 * intermediate + 2 * hidden)
    context = pack_tokens * 3 * hidden
    chunk = min(chunk_rows, block_rows) * head_rows * (2 if final_hidden else 1)
    late = max(chunk + 2 * block_rows * hidden, backward)
    return MemoryEstimate(
        weights_bytes=parameters * 2 * value_bytes,
        optimizer_bytes=lower_halves + (12 if carried else 8) * parameters,
        frozen_bytes=(embedding_rows + (0 if tied else head_rows)) * hidden * value_bytes,
        pack_bytes=pack,
        activations_bytes=(num_layers * layer + context) * value_bytes,
        logits_bytes=late * value_bytes,
    )
