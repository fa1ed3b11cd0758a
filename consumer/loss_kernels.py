"""The passes over logits as Triton kernels: one program per row, two reads and one write of the logits in all.

Same functions and meaning as loss._Plain, which is their reference. At 7680 rows of 248320 in bfloat16 the logits are
3.8 GB, so these three passes move 11.4 GB: about 2.7 ms at an H200's copy rate.

Shapes: R rows, V columns (rows of the head).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_WIDTH = 4096
_WARPS = 16
_STATISTICS = {"WIDTH": 8192, "num_warps": 8}
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit  # type: ignore[untyped-decorator]
def _statistics_kernel(logits, labels, norm, label_logit, best, num_columns, stride, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * stride
    # A lane goes over 8 neighbours at a time and keeps one maximum, its place and one sum: about one exponential an
    # element, and nothing crosses lanes until the row is through.
    place = tl.arange(0, WIDTH // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    top = tl.full([WIDTH // 8], -1e30, tl.float32)
    total = tl.zeros([WIDTH // 8], tl.float32)
    at = tl.zeros([WIDTH // 8], tl.int32)
    for start in range(0, num_columns, WIDTH):
        column = start + place
        x = tl.load(base + column, mask=column < num_columns, other=-float("inf")).to(tl.float32)
        most = tl.max(x, 1)
        higher = tl.maximum(top, most)
        total = total * tl.exp2((top - higher) * _LOG2_E) + tl.sum(tl.exp2((x - higher[:, None]) * _LOG2_E), 1)
        at = tl.where(most > top, start, at)
        top = higher
    row_top = tl.max(top, 0)
    row_total = tl.sum(total * tl.exp2((top - row_top) * _LOG2_E), 0)
    column = at[:, None] + place  # of each lane's maximum; read once more to find the first of the row
    x = tl.load(base + column, mask=(top == row_top)[:, None] & (column < num_columns), other=-float("inf"))
    first = tl.min(tl.min(tl.where(x.to(tl.float32) == row_top, column, num_columns), 1), 0)
    label = tl.load(labels + row)
    value = tl.load(base + label, mask=label >= 0, other=0.0).to(tl.float32)
    tl.store(norm + row, row_top + tl.log(row_total))
    tl.store(label_logit + row, value)
    tl.store(best + row, first)


@triton.jit  # type: ignore[untyped-decorator]
def _hard_kernel(logits, norm, labels, weights, num_columns, stride, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * stride
    weight, row_norm, label = tl.load(weights + row), tl.load(norm + row), tl.load(labels + row)
    for start in range(0, num_columns, WIDTH):
        column = start + tl.arange(0, WIDTH)
        inside = column < num_columns
        x = tl.load(base + column, mask=inside, other=0.0).to(tl.float32)
        grad = (tl.exp(x - row_norm) - tl.where(column == label, 1.0, 0.0)) * weight
        # a row without weight must not pass on what its logits hold
        grad = tl.where(weight == 0.0, 0.0, grad)
        tl.store(base + column, grad.to(logits.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _soft_kernel(  # type: ignore[no-untyped-def]
    logits, norm, goal, goal_norm, weights, divergence, num_columns, stride, WIDTH: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    base, goal_base = logits + row * stride, goal + row * stride
    weight, row_norm, row_goal_norm = tl.load(weights + row), tl.load(norm + row), tl.load(goal_norm + row)
    total = 0.0
    for start in range(0, num_columns, WIDTH):
        column = start + tl.arange(0, WIDTH)
        inside = column < num_columns
        log_q = tl.load(base + column, mask=inside, other=0.0).to(tl.float32) - row_norm
        log_p = tl.load(goal_base + column, mask=inside, other=-float("inf")).to(tl.float32) - row_goal_norm
        p = tl.exp(log_p)
        total += tl.sum(tl.where(inside & (p > 0.0), p * (log_p - log_q), 0.0), 0)
        grad = tl.where(weight == 0.0, 0.0, (tl.exp(log_q) - p) * weight)
        tl.store(base + column, grad.to(logits.dtype.element_ty), mask=inside)
    tl.store(divergence + row, total)


def row_statistics(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return each row's log of the sum of exponentials, its label's logit (0 where none) and its best column."""
    rows, columns = logits.shape
    norm = torch.empty(rows, dtype=torch.float32, device=logits.device)
    label_logit, best = torch.empty_like(norm), torch.empty(rows, dtype=torch.int64, device=logits.device)
    _statistics_kernel[(rows,)](logits, labels, norm, label_logit, best, columns, logits.stride(0), **_STATISTICS)
    return norm, label_logit, best


def hard_gradient(logits: Tensor, norm: Tensor, labels: Tensor, weights: Tensor) -> None:
    """Overwrite logits with weight * (softmax - one at the label)."""
    rows, columns = logits.shape
    _hard_kernel[(rows,)](logits, norm, labels, weights, columns, logits.stride(0), WIDTH=_WIDTH, num_warps=_WARPS)


def soft_gradient(logits: Tensor, norm: Tensor, goal_logits: Tensor, goal_norm: Tensor, weights: Tensor) -> Tensor:
    """Overwrite logits with weight * (softmax - target's softmax); return each row's KL(target || drafter)."""
    rows, columns = logits.shape
    divergence = torch.empty_like(norm)
    _soft_kernel[(rows,)](
        logits, norm, goal_logits, goal_norm, weights, divergence, columns, logits.stride(0),
        WIDTH=_WIDTH, num_warps=_WARPS,
    )  # fmt: skip
    return divergence
