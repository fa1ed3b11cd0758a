"""Ways to add up gradients that benchmarks/scaling.py compares, each a name for its `--try`."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from consumer.copy_engines import CopyEngines
from consumer.distributed import AfterBackward, Ranks, WhileBackward, nccl_group
from consumer.step import Reduction, TrainStep


class Setting(NamedTuple):
    """One way. The defaults are what training runs."""

    overlap: bool = True
    """Beside the backward pass; else behind it, in one piece."""
    max_ctas: int = 0
    """Multiprocessors that NCCL may take; 0: its own choice."""
    bucket_mb: int = 0
    """Neighbouring gradients are sent together once they are so large; 0: each product's by itself."""
    high_priority: bool = False
    """NCCL's stream goes before the products'."""
    float32: bool = False
    """Gradients travel and are added up in float32: twice the bytes, one rounding in place of one an addition."""
    copies: bool = False
    """By the copy engines (training.gradients: copies)."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables that NCCL reads once a process."""


SETTINGS = {
    "during": Setting(),
    "after": Setting(overlap=False),
    **{f"ctas{number}": Setting(max_ctas=number) for number in (1, 2, 4, 8, 16)},
    "bucket128": Setting(bucket_mb=128),
    "bucket512": Setting(bucket_mb=512),
    "priority": Setting(high_priority=True),
    "priority_ctas4": Setting(high_priority=True, max_ctas=4),
    "float32": Setting(float32=True),
    "channels2": Setting(environment=(("NCCL_MIN_NCHANNELS", "1"), ("NCCL_MAX_NCHANNELS", "2"))),
    "memcpy": Setting(environment=(("NCCL_P2P_USE_CUDA_MEMCPY", "1"),)),
    "copies": Setting(copies=True),
}
USUAL = ("after", "during")


def reduction_of(setting: Setting, step: TrainStep, ranks: Ranks, limit_s: float) -> Reduction:
    """Make the reduction of a setting. Raises RuntimeError where this machine has no such thing."""
    whole = dist.group.WORLD
    if whole is None or (setting.copies and ranks.device_group is None):
        raise RuntimeError("several ranks, and for copies GPUs, are needed")
    group = ranks.device_group or whole
    if ranks.device_group is not None and (setting.max_ctas or setting.high_priority):
        group = nccl_group(timedelta(seconds=limit_s), setting.max_ctas, setting.high_priority)
    if setting.copies:
        return CopyEngines(step.flat, group, whole)
    if not setting.overlap:
        return AfterBackward(step.flat, group)
    kind = InFloat32 if setting.float32 else WhileBackward
    return kind(step.flat, group, setting.bucket_mb << 20)


class InFloat32(WhileBackward):
    """WhileBackward that sends float32 copies of the gradients."""

    def begin(self) -> None:
        """Listen to the gradients of this backward pass."""
        super().begin()
        self._wide: list[tuple[Tensor, Tensor]] = []

    def finish(self, sums: Tensor) -> None:
        """Add up the rest and write the sums back; the current stream then waits for everything."""
        super().finish(sums)
        for narrow, wide in self._wide:
            narrow.copy_(wide)
        self._wide = []

    def _start(self, tensor: Tensor) -> None:
        wide: Any = tensor.float()
        self._wide.append((tensor, wide))
        super()._start(wide)
