"""The step as the pipeline before this one did it, for comparison. Same mathematics, same optimizer.

Two create_block_mask calls a step, nothing compiled but the attention, launched line by line, eight values read by the
host after each step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from configs.drafter_shape import FULL, SLIDING, DrafterShape
from consumer.anchors import Anchors
from consumer.attention import flex_rows
from consumer.block_mask import intervals
from consumer.drafter import Attend
from consumer.step import TrainStep

READS = 8


def as_before(step: TrainStep) -> Callable[[], Any]:
    """Turn `step` into the old way and return the function that does one step."""
    compiled = torch.compile(flex_rows, dynamic=False)

    def attention(anchors: Anchors, doc_start_T: Tensor, shape: DrafterShape) -> Attend:
        num_keys = doc_start_T.shape[0] + anchors.position.shape[0] * shape.block_size
        masks = {kind: _mask(anchors, doc_start_T, shape, kind, num_keys) for kind in (SLIDING, FULL)}

        def attend(q: Tensor, k: Tensor, v: Tensor, layer_type: str) -> Tensor:
            out: Tensor = compiled(q, k, v, masks[layer_type])
            return out

        return attend

    def run() -> None:
        step.step += 1
        step.on_device()
        for value in step._sums[:READS]:
            value.item()

    step.attention = attention
    return run


def _mask(anchors: Anchors, doc_start_T: Tensor, shape: DrafterShape, layer_type: str, num_keys: int) -> Any:
    low, high, own_low, own_high = intervals(anchors, doc_start_T, shape, layer_type)

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
        context = (key >= low[query]) & (key < high[query])
        return context | ((key >= own_low[query]) & (key < own_high[query]))

    return create_block_mask(visible, None, None, low.shape[0], num_keys, device=low.device)
