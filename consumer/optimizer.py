"""AdamW and Muon over flat buffers, and gradient clipping: all decided on the device, without a host sync.

What may change from step to step (learning rate, clip factor, whether the step counts) sits in `Control`, tensors that
never move: a captured graph reads their current values. A step with a non-finite gradient changes nothing. On a GPU
one kernel reads the gradient and updates both halves of the master and the moments: 26 bytes a parameter.

Sources: AdamW, Loshchilov and Hutter 2019; Muon, Jordan 2024 (Newton-Schulz coefficients of that text).
Shapes: N all parameters in a row, matrices first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from consumer.flat import FlatWeights, joined, split

_CPU_SLICE = 1 << 18
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_NEWTON_SCHULZ_ROUNDS = 5
_MUON_MOMENTUM = 0.95


@dataclass(frozen=True)
class AdamWRule:
    """AdamW's constants."""

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0


class Control:
    """Values of the step at hand, float32 on the device. `scale` multiplies gradients, `applied` is 1 or 0."""

    def __init__(self, device: torch.device) -> None:
        """Start with learning rates of 0 and nothing applied."""
        self.values = torch.zeros(6, dtype=torch.float32, device=device)
        self.lr, self.muon_lr, self.scale, self.applied, self.correction1, self.correction2 = self.values.unbind()

    def count_update(self, updates: Tensor, betas: tuple[float, float]) -> None:
        """Add `applied` to the number of updates (0-dim int64) and set Adam's bias corrections 1 - beta^updates."""
        updates.add_(self.applied.to(updates.dtype))
        number = updates.to(torch.float64).clamp(min=1)
        for beta, correction in zip(betas, (self.correction1, self.correction2), strict=True):
            correction.copy_(1.0 - torch.pow(torch.full_like(number, beta), number))


def set_clip(control: Control, norm_of_sums: Tensor, weight: Tensor, clip_norm: float | None, armed: Tensor) -> Tensor:
    """Set `scale` and `applied` for gradients of the loss sum, and return the gradient norm of the mean loss.

    weight: sum of the loss weights over all ranks; 0 (no block in the packs) applies nothing. scale turns gradients of
    the sum into clipped ones of the mean; where the norm is not finite it is 0 and nothing is applied.
    armed: 1, or 0 for a trial run that must leave no trace.
    """
    norm = norm_of_sums / weight.clamp(min=1e-20)
    finite = torch.isfinite(norm)
    factor = 1.0 / weight.clamp(min=1e-20)
    if clip_norm is not None:
        factor = factor * (clip_norm / (norm + 1e-6)).clamp(max=1.0)
    control.scale.copy_(torch.where(finite, factor, 0.0))
    control.applied.copy_(torch.where(finite & (weight > 0), armed, 0.0))
    return norm


class AdamW:
    """AdamW over a slice of flat buffers: first moment, second moment and master in float32."""

    def __init__(self, flat: FlatWeights, part: slice, rule: AdamWRule, decay_until: int) -> None:
        """Update elements `part` of `flat`; weight decay for those before `decay_until` (matrices, not norms)."""
        self.rule, self.part, self._flat, self._decay_until = rule, part, flat, decay_until
        self.exp_avg = torch.zeros(part.stop - part.start, dtype=flat.wide, device=flat.weights.device)
        self.exp_avg_sq = torch.zeros_like(self.exp_avg)

    def step(self, control: Control) -> None:
        """Update in place as `control` says."""
        if self._flat.weights.is_cuda:
            kernels = _load_kernels()
            moments = self.exp_avg, self.exp_avg_sq
            kernels.adamw(self._flat, self.part, *moments, self.rule, self._decay_until, control)
        elif float(control.applied):
            self._step_on_cpu(control)

    def _step_on_cpu(self, control: Control) -> None:
        """Go through the buffers in slices that stay in the cache."""
        lr, _, scale, _, correction1, correction2 = control.values.tolist()
        (beta1, beta2), start, flat = self.rule.betas, self.part.start, self._flat
        for at in range(start, self.part.stop, _CPU_SLICE):
            end = min(at + _CPU_SLICE, self.part.stop)
            master = flat.weights[at:end] if flat.low is None else joined(flat.weights[at:end], flat.low[at:end])
            first, second = self.exp_avg[at - start : end - start], self.exp_avg_sq[at - start : end - start]
            grad = flat.grads[at:end].to(master.dtype) * scale
            first.lerp_(grad, 1.0 - beta1)
            second.mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
            if self.rule.weight_decay:
                decayed = master[: max(0, self._decay_until - at)]
                decayed.mul_(1.0 - lr * self.rule.weight_decay)
            denominator = second.sqrt().div_(math.sqrt(correction2)).add_(self.rule.eps)
            master.addcdiv_(first, denominator, value=-lr / correction1)
            if flat.low is not None:
                for half, value in zip((flat.weights, flat.low), split(master), strict=True):
                    half[at:end] = value


class Muon:
    """Muon for the matrices: momentum, then the nearest semi-orthogonal matrix by Newton-Schulz rounds."""

    def __init__(self, flat: FlatWeights, weight_decay: float) -> None:
        """Update every matrix of `flat`."""
        self._flat, self._weight_decay = flat, weight_decay
        self.momentum = torch.zeros(flat.num_matrix_elements, dtype=flat.wide, device=flat.weights.device)

    def step(self, control: Control) -> None:
        """Update in place as `control` says."""
        keep = 1.0 - control.muon_lr * self._weight_decay * control.applied
        for name, momentum in self._flat.named_views(self.momentum, stop=self._flat.num_matrix_elements).items():
            master = self._flat.master(name)
            grad = self._flat.view(self._flat.grads, name).to(master.dtype) * control.scale
            grad = torch.where(control.applied > 0, grad, 0.0)
            momentum.lerp_(grad, (1.0 - _MUON_MOMENTUM) * control.applied)
            direction = orthogonal(grad.lerp(momentum, _MUON_MOMENTUM))
            stretch = math.sqrt(max(1.0, master.shape[0] / master.shape[1]))
            master.mul_(keep).sub_(direction.to(master.dtype) * (control.muon_lr * control.applied * stretch))
            if self._flat.low is not None:
                self._flat.set_master(name, master)


def orthogonal(matrix: Tensor) -> Tensor:
    """Bring the singular values of a matrix near 1 by Newton-Schulz rounds, in bfloat16 on a GPU."""
    work = matrix.to(torch.bfloat16) if matrix.is_cuda else matrix
    flip = work.shape[0] > work.shape[1]
    work = work.t() if flip else work
    work = work / (work.norm() + 1e-7)
    a, b, c = _NEWTON_SCHULZ
    for _ in range(_NEWTON_SCHULZ_ROUNDS):
        square = work @ work.t()
        work = torch.addmm(work, torch.addmm(square, square, square, beta=b, alpha=c), work, beta=a)
    return work.t() if flip else work


def _load_kernels() -> ModuleType:
    from consumer import optimizer_kernels  # Triton is there on a GPU machine only

    return optimizer_kernels
