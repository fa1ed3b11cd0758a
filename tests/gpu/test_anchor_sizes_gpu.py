"""Several numbers of anchors, each a graph of its own over the same tensors and the same memory."""

from __future__ import annotations

import gc

import pytest
import torch

from configs.drafter_shape import FULL, SLIDING, DrafterShape
from configs.schema import AnchorsConfig, LossConfig, OptimizerConfig
from consumer.capture import each_size, prepare
from consumer.drafter import Drafter
from consumer.frozen_head import FrozenHead
from consumer.selfcheck import make_up, self_check
from consumer.staging import PackTensors
from consumer.step import TrainStep

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

TOKENS, HIDDEN, VOCAB = 2048, 256, 4000
SIZES = (128, 192, 256)
SEQUENCE = (128, 256, 192, 128, 256, 256, 128, 192)


def step_of(anchors: AnchorsConfig) -> TrainStep:
    """A step of a small drafter in float32, always the same."""
    torch.manual_seed(0)
    shape = DrafterShape(
        HIDDEN, 1024, 2, 4, 2, 64, 3, 16, (SLIDING, FULL), 512, True, 1e-6, 1e4, VOCAB - 1, VOCAB
    )  # fmt: skip
    with torch.device("cuda"):
        drafter = Drafter(shape)
        head = FrozenHead(*(torch.randn(VOCAB, HIDDEN) * 0.1 for _ in range(2)))
        pack = PackTensors(
            torch.zeros(TOKENS, dtype=torch.int32),
            torch.ones(TOKENS, dtype=torch.uint8),
            torch.zeros(TOKENS, dtype=torch.int32),
            torch.randn(TOKENS, 3 * HIDDEN),
        )
    step = TrainStep(drafter, head, pack, anchors, LossConfig(), OptimizerConfig(warmup_share=0.0), 100, 7)
    make_up(step)
    return step


def curve(step: TrainStep, sizes: tuple[int, ...]) -> list[float]:
    """Losses of steps with these numbers of anchors."""
    losses = []
    for step.num_anchors in sizes:
        step.run()
        _, loss, weight = step.latest.tolist()
        losses.append(loss / weight)
    return losses


def test_graphs_of_all_sizes_in_any_order_train_as_the_eager_lines() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    said: list[str] = []
    eager, fast = (step_of(AnchorsConfig(num="auto", sizes=SIZES)) for _ in range(2))
    assert prepare(fast, True, True, said.append), said
    assert (said, fast.num_anchors) == ([], SIZES[0])
    assert each_size(fast, lambda: self_check(fast, 1e-3)) == {size: [] for size in SIZES}
    assert curve(fast, SEQUENCE) == pytest.approx(curve(eager, SEQUENCE), rel=1e-3)


def test_the_graphs_share_the_memory_of_the_largest() -> None:
    def reserved_by(anchors: AnchorsConfig) -> int:
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        step = step_of(anchors)
        assert prepare(step, True, True, lambda _line: None)
        step.run()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved() - before

    reserved_by(AnchorsConfig(num=SIZES[-1]))  # what libraries take once and keep
    largest = reserved_by(AnchorsConfig(num=SIZES[-1]))
    every = reserved_by(AnchorsConfig(num="auto", sizes=SIZES))
    print(f"reserved: {largest / 1e6:.0f} MB with {SIZES[-1]} anchors, {every / 1e6:.0f} MB with {SIZES}")
    assert largest > 1e8  # or the allocator's granularity is all that is measured
    assert every < 1.35 * largest
