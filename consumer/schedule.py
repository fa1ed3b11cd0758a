"""The learning rate as a function of the step number, in tensor arithmetic, so that a captured graph follows it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

WSD_DECAY_SHARE = 0.2


@dataclass(frozen=True)
class Schedule:
    """Shape of the learning rate: linear warm-up over `warmup_share` of all steps, then `kind` down to the floor."""

    kind: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    warmup_share: float = 0.04
    min_share: float = 0.0

    def share(self, step: Tensor, total_steps: Tensor) -> Tensor:
        """Return the share of the peak, float32, for step number `step` (1 is the first) of `total_steps`.

        With w warm-up steps: step/w below w; then cosine 0.5*(1 + cos(pi*x)), linear 1 - x, or wsd 1 until the last
        fifth and linear from there, x = (step - w)/(total - w). Past the end it keeps its last value.
        """
        s, total = step.to(torch.float32), total_steps.to(torch.float32)
        warmup = torch.round(total * self.warmup_share)
        x = ((s - warmup) / (total - warmup).clamp(min=1.0)).clamp(0.0, 1.0)
        if self.kind == "cosine":
            falling = 0.5 * (1.0 + torch.cos(math.pi * x))
        elif self.kind == "linear":
            falling = 1.0 - x
        elif self.kind == "wsd":
            falling = ((1.0 - x) / WSD_DECAY_SHARE).clamp(max=1.0)
        else:
            falling = torch.ones_like(x)
        falling = self.min_share + (1.0 - self.min_share) * falling
        return torch.where(s < warmup, s / warmup.clamp(min=1.0), falling)
