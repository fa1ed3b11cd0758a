"""Head and loss in one: logits are made a chunk of blocks at a time and never kept.

The head is frozen, so the gradient by the hidden state is known as soon as a chunk's logits are; it is kept instead of
the logits. Sums come back, not means: loss = sum(w l) / sum(w), both sums over all ranks and micro-steps.
Passes over the logits are few: on a GPU loss_kernels.py reads them twice and writes them once.

Shapes: A anchors (blocks), S = B - 1 predicted slots, R = A*S rows (of a chunk), H hidden, V rows of the head.
"""

from __future__ import annotations

from itertools import pairwise
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from gpu.products import multiply

Labels = Literal["hard", "soft", "target_argmax"]
Decay = Literal["exponential", "dpace", "none"]


class LossTerms(NamedTuple):
    """Sums over the blocks of one pack, float32; divide after summing over ranks and micro-steps.

    loss: sum of w * l, carries the gradient; weight: sum of w; correct_S and counted_S: right and supervised slots by
    slot; accept: sum over blocks of 1 + leading run of right slots; blocks: how many.
    """

    loss: Tensor
    weight: Tensor
    correct_S: Tensor
    counted_S: Tensor
    accept: Tensor
    blocks: Tensor


class LossRule(NamedTuple):
    """Which labels and weights; see configs LossConfig. `gamma` is a number here."""

    labels: Labels = "hard"
    decay: Decay = "exponential"
    gamma: float = 7.0
    dpace_alpha: float = 0.5
    chunk_rows: int = 2048


def default_gamma(block_size: int) -> float:
    """7, 5, 4 for blocks of 16, 10, 8 (public trainers), linear between and beyond, at least 1."""
    known = [(8, 4.0), (10, 5.0), (16, 7.0)]
    for (low, at_low), (high, at_high) in pairwise(known):
        if block_size <= high:
            return max(1.0, at_low + (at_high - at_low) * (block_size - low) / (high - low))
    return 7.0 + (block_size - 16) / 3


def slot_weights(rule: LossRule, slots: int, device: torch.device) -> Tensor:
    """Weight of slots 1..S before masking: exp(-(k-1)/gamma), or 1. [S] float32."""
    k = torch.arange(slots, device=device, dtype=torch.float32)
    return torch.exp(-k / rule.gamma) if rule.decay == "exponential" else torch.ones_like(k)


def dpace_weights(cross_entropy_AS: Tensor, valid_AS: Tensor, alpha: float) -> Tensor:
    """D-PACE (arXiv 2605.18810): w_j = sum over m >= j of P_m, P_m = prod up to m of s, s = (1-a) q + a, q = exp(-CE).

    s is 1 where a slot is not valid, and P counts only valid slots. Detached. [A, S].
    """
    q = torch.exp(-cross_entropy_AS.detach())
    s = torch.where(valid_AS, (1 - alpha) * q + alpha, 1.0)
    reach = torch.cumprod(s, dim=1) * valid_AS
    return torch.flip(torch.cumsum(torch.flip(reach, [1]), dim=1), [1]) * valid_AS


def head_loss(
    hidden_ASH: Tensor,
    head_VH: Tensor,
    labels_AS: Tensor,
    valid_AS: Tensor,
    keep_A: Tensor,
    rule: LossRule,
    target_hidden_ASH: Tensor | None = None,
) -> LossTerms:
    """Compute loss sums and metrics of all blocks; only `loss` carries a gradient, by `hidden` alone.

    labels: head rows, -1 where the token has no row (no loss, and wrong in the accepted run). valid: the slot is
    supervised. target_hidden: the target's final hidden state at anchor + k - 1, for soft and target_argmax labels.
    Raises ValueError where that is needed and missing.
    """
    if rule.labels != "hard" and target_hidden_ASH is None:
        raise ValueError(f"labels {rule.labels}: the pack has no final_hidden")
    goal = target_hidden_ASH if rule.labels != "hard" else None
    result: tuple[Tensor, ...] = _HeadLoss.apply(  # type: ignore[no-untyped-call]
        hidden_ASH, head_VH, labels_AS, valid_AS, keep_A, rule, goal
    )
    return LossTerms(*result)


class _HeadLoss(torch.autograd.Function):
    """Forward computes the gradient chunk by chunk; backward scales it."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        labels: Tensor,
        valid: Tensor,
        keep: Tensor,
        rule: LossRule,
        goal: Tensor | None,
    ) -> tuple[Tensor, ...]:
        num_blocks, slots = labels.shape
        num_chunks = min(num_blocks, -(-num_blocks * slots // max(rule.chunk_rows, slots)))
        step = -(-num_blocks // num_chunks)
        gradient = torch.empty_like(hidden)
        buffers = [hidden.new_empty(step * slots, head.shape[0]) for _ in range(1 if goal is None else 2)]
        sums = []
        for start in range(0, num_blocks, step):
            part = slice(start, start + step)
            chunk = _Chunk(hidden[part], labels[part], valid[part], keep[part], gradient[part])
            sums.append(_chunk_sums(chunk, head, None if goal is None else goal[part], rule, buffers))
        ctx.save_for_backward(gradient)
        terms = torch.stack(sums).sum(0)
        loss, weight, accept, blocks, correct_S, counted_S = terms.split([1, 1, 1, 1, slots, slots])
        result = (loss[0], weight[0], correct_S, counted_S, accept[0], blocks[0])
        ctx.mark_non_differentiable(*result[1:])
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0].to(gradient.dtype), None, None, None, None, None, None


class _Chunk(NamedTuple):
    """A few whole blocks; `gradient` is where d(sum w l)/d(hidden) goes."""

    hidden: Tensor
    labels: Tensor
    valid: Tensor
    keep: Tensor
    gradient: Tensor


def _chunk_sums(chunk: _Chunk, head: Tensor, goal: Tensor | None, rule: LossRule, buffers: list[Tensor]) -> Tensor:
    """Write the chunk's gradient and return [4 + 2*S] float32: loss, weight, accept, blocks, correct, counted."""
    blocks, slots = chunk.labels.shape
    passes = _passes(head)
    logits = multiply(chunk.hidden.flatten(0, 1), head.t(), buffers[0][: blocks * slots])
    labels = chunk.labels
    goal_logits = goal_norm = None
    if goal is not None:
        goal_logits = multiply(goal.flatten(0, 1), head.t(), buffers[1][: blocks * slots])
        goal_norm, _, goal_best = passes.row_statistics(goal_logits, labels.flatten())
        labels = goal_best.view(blocks, slots)
    norm, label_logit, best = passes.row_statistics(logits, labels.flatten())
    carries = chunk.valid & (labels >= 0)
    cross_entropy = (norm - label_logit).view(blocks, slots)
    if rule.decay == "dpace":
        weights = dpace_weights(cross_entropy, carries, rule.dpace_alpha)
    else:
        weights = slot_weights(rule, slots, head.device) * carries
    if rule.labels == "soft":
        losses = passes.soft_gradient(logits, norm, goal_logits, goal_norm, weights.flatten()).view(blocks, slots)
    else:
        losses = cross_entropy
        passes.hard_gradient(logits, norm, labels.flatten(), weights.flatten())
    multiply(logits, head, chunk.gradient.view(blocks * slots, -1))
    right = (best.view(blocks, slots) == labels) & carries
    run = right.to(torch.float32).cumprod(1).sum(1)
    # where, not a product: a row without a label may hold inf, and 0 * inf is NaN
    loss = torch.where(carries, losses * weights, 0.0).sum()
    singles = [loss, weights.sum(), ((1.0 + run) * chunk.keep).sum(), chunk.keep.sum()]
    by_slot = [right.sum(0), chunk.valid.sum(0)]
    return torch.cat([torch.stack([value.to(norm.dtype) for value in singles]), *(c.to(norm.dtype) for c in by_slot)])


def _passes(head: Tensor) -> Any:
    """Return the functions that go over logits: Triton kernels on a GPU, else the plain ones below."""
    if not head.is_cuda:
        return _Plain
    kernels: ModuleType = _load_kernels()
    return kernels


def _load_kernels() -> ModuleType:
    from consumer import loss_kernels  # Triton is there on a GPU machine only

    return loss_kernels


class _Plain:
    """The passes over logits [R, V] in plain torch; the reference for loss_kernels.py."""

    @staticmethod
    def row_statistics(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return each row's log of the sum of exponentials, its label's logit (0 where none) and its best column."""
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        label_logit = wide.gather(1, labels.clamp(min=0)[:, None])[:, 0]
        return wide.logsumexp(1), torch.where(labels >= 0, label_logit, 0.0), wide.argmax(1)

    @staticmethod
    def hard_gradient(logits: Tensor, norm: Tensor, labels: Tensor, weights: Tensor) -> None:
        """Overwrite logits with weight * (softmax - one at the label)."""
        wide = logits if logits.dtype == norm.dtype else logits.to(norm.dtype)
        wide.sub_(norm[:, None]).exp_().mul_(weights[:, None])
        index = labels.clamp(min=0)[:, None]
        wide.scatter_add_(1, index, torch.where(labels >= 0, -weights, 0.0)[:, None].to(wide.dtype))
        if wide is not logits:
            logits.copy_(wide)

    @staticmethod
    def soft_gradient(logits: Tensor, norm: Tensor, goal_logits: Tensor, goal_norm: Tensor, weights: Tensor) -> Tensor:
        """Overwrite logits with weight * (softmax - target's softmax); return each row's KL(target || drafter)."""
        log_q = logits.to(norm.dtype) - norm[:, None]
        log_p = goal_logits.to(norm.dtype) - goal_norm[:, None]
        p = log_p.exp()
        divergence = (p * (log_p - log_q)).sum(1)
        logits.copy_((log_q.exp_() - p).mul_(weights[:, None]))
        return divergence
