"""Speculative sampling: accept drafted tokens so that the text has exactly the target's distribution.

Token k, drawn from q_k, is accepted with probability min(1, p_k / q_k); the first one refused is replaced by a draw
from max(p - q, 0), normalised. Source: Leviathan et al., arXiv 2211.17192; the drafter's slots are independent given
the context, so each q_k is its slot's marginal. Shapes: S = B - 1 drafted tokens, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def probabilities(logits: Tensor, temperature: float) -> Tensor:
    """Softmax of logits [.., V] at a temperature, in float32."""
    return torch.softmax(logits.float() / temperature, dim=-1)


def draw(p: Tensor, generator: torch.Generator) -> Tensor:
    """Draw one token from each row of [n, V]: [n]."""
    return torch.multinomial(p, 1, generator=generator)[:, 0]


def widened(q: Tensor, token_ids: Tensor | None, vocab_size: int) -> Tensor:
    """Spread a reduced vocabulary's probabilities [S, V'] over the whole one, [S, V]."""
    if token_ids is None:
        return q
    wide = q.new_zeros(q.shape[0], vocab_size)
    wide[:, token_ids] = q
    return wide


def accept(drafted: Tensor, q: Tensor, p: Tensor, generator: torch.Generator) -> tuple[int, int]:
    """Accept a leading run of `drafted` [S], drawn from q [S, V]; p [S + 1, V]: the target's, one row further.

    Returns how many were accepted, and the token that follows them.
    """
    count = drafted.shape[0]
    row = torch.arange(count, device=drafted.device)
    ratio = p[row, drafted] / q[row, drafted]
    chance = torch.rand(count, generator=generator, device=drafted.device)
    run = int(torch.cumprod((chance < ratio).long(), dim=0).sum())
    if run == count:
        return run, int(draw(p[-1:], generator))
    left = (p[run] - q[run]).clamp(min=0)
    if float(left.sum()) <= 0:  # p equals q up to rounding: nothing is left to correct
        left = p[run]
    return run, int(draw(left[None], generator))
