"""One of two drafter ranks on GPUs: captured steps with the reduction in the graph, beside one rank on the same packs.

`python -m tests.helpers.gpu_rank_worker OUT` with torchrun's variables; tests/gpu/test_distributed_gpu.py reads
OUT.RANK.pt. The process ends as a drafter does: without NCCL's orderly end.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from configs.drafter_shape import FULL, SLIDING, DrafterShape
from configs.schema import AnchorsConfig, LossConfig, OptimizerConfig, TrainingConfig
from consumer.capture import prepare
from consumer.distributed import Place, Ranks
from consumer.drafter import Drafter
from consumer.flat import MakeZeros
from consumer.frozen_head import FrozenHead
from consumer.staging import PackTensors
from consumer.step import TrainStep

TOKENS, HIDDEN, VOCAB, STEPS = 512, 128, 999, 8
SHARES = (0.3, 1.0)
"""Supervised share of the two packs: their sums of loss weights are far apart."""


def pack_of(number: int, device: torch.device, dtype: torch.dtype) -> PackTensors:
    """Pack 0 or 1, always the same."""
    generator = torch.Generator().manual_seed(number)
    start = torch.zeros(TOKENS, dtype=torch.int32)
    start[200:420], start[420:] = 200, -1
    mask = (torch.rand(TOKENS, generator=generator) < SHARES[number]) & (start >= 0)
    ids = torch.randint(0, VOCAB - 1, (TOKENS,), generator=generator, dtype=torch.int32)
    features = torch.randn(TOKENS, 3 * HIDDEN, generator=generator).to(dtype)
    return PackTensors(*(value.to(device) for value in (ids, mask.to(torch.uint8), start, features)))


def step_of(
    device: torch.device, dtype: torch.dtype, micro_steps: int = 1, make_grads: MakeZeros = torch.zeros
) -> TrainStep:
    """The step of a small drafter, always the same."""
    generator = torch.Generator().manual_seed(3)
    shape = DrafterShape(HIDDEN, 256, 2, 4, 2, 32, 3, 8, (SLIDING, FULL), 64, True, 1e-6, 1e4, VOCAB - 1, VOCAB)
    drafter = Drafter(shape)
    drafter.reset_parameters(generator)
    head = FrozenHead(*((torch.randn(VOCAB, HIDDEN, generator=generator) * 0.1).to(device) for _ in range(2)))
    return TrainStep(
        drafter.to(device), head, pack_of(0, device, dtype), AnchorsConfig(num=32), LossConfig(),
        OptimizerConfig(lr=3e-3, warmup_share=0.0), 100, 7, dtype=dtype, micro_steps=micro_steps,
        make_grads=make_grads,
    )  # fmt: skip


def fill(step: TrainStep, number: int) -> None:
    """Make pack `number` the current one, with anchors of its own."""
    for name, value in vars(pack_of(number, step.lr.device, step.pack.features.dtype)).items():
        if value is not None:
            getattr(step.pack, name).copy_(value)
    step.reseed(100 + number)


def trained(step: TrainStep, one_step: Callable[[], None]) -> dict[str, Any]:
    """Train and return losses, weights and how far they moved."""
    before, losses = step.flat.masters.clone(), []
    for _ in range(STEPS):
        one_step()
        _, loss, weight = step.latest.tolist()
        losses.append(loss / weight)
    return {"losses": losses, "weights": step.flat.masters.cpu(), "moved": float((step.flat.masters - before).norm())}


def two_ranks(
    ranks: Ranks, device: torch.device, dtype: torch.dtype, said: list[str], gradients: str = "nccl"
) -> dict[str, Any]:
    """Each rank one of the packs; the reduction runs in the graph, beside the backward pass."""
    training = TrainingConfig.model_validate({"gradients": gradients})
    make_grads = ranks.grads_maker(training, lambda event, **values: said.append(f"{event} {values}"))
    step = step_of(device, dtype, make_grads=make_grads)
    step.reduction = ranks.reduction_of(step)
    fill(step, ranks.rank)
    captured = device.type == "cuda" and prepare(step, True, True, said.append)
    return trained(step, step.run) | {"captured": captured, "reduction": type(step.reduction).__name__}


def one_rank(device: torch.device, dtype: torch.dtype, said: list[str]) -> dict[str, Any]:
    """Both packs in each step, as micro-steps."""
    step = step_of(device, dtype, micro_steps=2)
    if device.type == "cuda":
        prepare(step, True, True, said.append)

    def both() -> None:
        fill(step, 0)
        step.run_micro()
        fill(step, 1)
        step.run()

    return trained(step, both)


def main() -> None:
    """Do everything."""
    place = Place.read(os.environ)
    device = torch.device("cuda", place.local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.backends.cuda.matmul.allow_tf32 = False
    found: dict[str, Any] = {"said": []}
    with Ranks(place, device, timeout_s=60) as ranks:
        for dtype in (torch.float32, torch.bfloat16):
            found[str(dtype)] = {"alone": one_rank(device, dtype, found["said"])}
            for gradients in ("nccl", "copies"):
                found[str(dtype)][gradients] = two_ranks(ranks, device, dtype, found["said"], gradients)
            torch._dynamo.reset()
        torch.save(found, f"{sys.argv[1]}.{place.rank}.pt")
        ranks.barrier()
        sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
