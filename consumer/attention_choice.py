"""Which attention a GPU trains with: FlexAttention or the interval kernels, measured at start on the run's own sizes.

Both compute the same; which is faster depends on the chip, the head size, the window and the compiler. One layer,
forward and backward, on made-up data: milliseconds, besides compiling both. One that does not compile, or whose results
stray from the other's, is left out with a line that says so.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from consumer.anchors import Anchors
from consumer.attention import flex_attention_of, flex_rows
from consumer.step import MakeAttention, TrainStep

Name = Literal["flex", "intervals"]
_RUNS = 7


class Choice(NamedTuple):
    """What was chosen, and what was measured: milliseconds of one layer, forward and backward, by name."""

    name: Name
    make: MakeAttention
    measured_ms: dict[str, float]


def choose(step: TrainStep, wanted: Literal["auto", "flex", "intervals"], say: Callable[[str], None]) -> Choice:
    """Return the attention to train with; "auto" measures. Raises RuntimeError where none works."""
    candidates = _candidates(step)
    if wanted != "auto":
        return Choice(wanted, candidates[wanted], {})
    measured: dict[str, float] = {}
    reference: list[Tensor] | None = None
    for name, make in candidates.items():
        try:
            took_ms, results = _measure(step, make)
        except Exception as error:  # whatever a compiler raises: the other one remains
            say(f"attention {name} does not work here and is left out: {(str(error) or repr(error)).splitlines()[0]}")
            continue
        if reference is not None and not _agree(results, reference):
            say(f"attention {name} strays from the other one's results and is left out; please report this")
            continue
        reference, measured[name] = results, took_ms
    if not measured:
        raise RuntimeError("no attention works on this GPU; set training.compile: false for the dense one")
    best: Name = "flex" if min(measured, key=lambda name: measured[name]) == "flex" else "intervals"
    return Choice(best, candidates[best], measured)


def _candidates(step: TrainStep) -> dict[str, MakeAttention]:
    options = _flex_options(step)

    def flex(q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask) -> Tensor:
        return flex_rows(q, k, v, block_mask, options)

    found: dict[str, MakeAttention] = {"flex": partial(flex_attention_of, flex=torch.compile(flex, dynamic=False))}
    size = step.shape.head_dim
    if size >= 16 and size & (size - 1) == 0:
        from consumer.attention_kernels import interval_attention  # Triton is there on a GPU machine only

        found["intervals"] = interval_attention
    return found


def _flex_options(step: TrainStep) -> dict[str, int] | None:
    """Tile sizes of FlexAttention where its defaults were measured to be slower (H200, heads of 128, bfloat16)."""
    hopper = torch.cuda.get_device_capability() == (9, 0)
    if not hopper or step.shape.head_dim != 128 or step.flat.weights.dtype != torch.bfloat16:
        return None
    forward = {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 64, "fwd_num_warps": 4, "fwd_num_stages": 3}
    backward = {"bwd_BLOCK_M1": 64, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 64}
    return forward | backward | {"bwd_num_warps": 4, "bwd_num_stages": 2}


def _measure(step: TrainStep, make: MakeAttention) -> tuple[float, list[Tensor]]:
    """Return the median time of one layer and its results: output and three gradients."""
    shape, tokens, device = step.shape, step.pack.input_ids.shape[0], step.lr.device
    num_anchors = step.num_anchors
    generator = torch.Generator(device).manual_seed(0)
    place = torch.arange(tokens, device=device, dtype=torch.int32)
    document = max(1, tokens // 4)
    spacing = torch.linspace(1, tokens - 2, num_anchors, device=device).long()
    anchors = Anchors(spacing, torch.ones_like(spacing, dtype=torch.bool))
    attend = make(anchors, place // document * document, shape)
    rows = num_anchors * shape.block_size
    sizes = ((rows, shape.num_heads), (tokens + rows, shape.num_kv_heads), (tokens + rows, shape.num_kv_heads))
    q, k, v = (
        torch.randn(length, heads, shape.head_dim, device=device, generator=generator)
        .to(step.flat.weights.dtype)
        .requires_grad_()
        for length, heads in sizes
    )
    times, results = [], []
    for _ in range(_RUNS + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        out = attend(q, k, v, shape.layer_types[0])
        results = [out.detach(), *torch.autograd.grad(out, (q, k, v), out.detach())]
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return median(times[2:]), results


def _agree(found: list[Tensor], wanted: list[Tensor]) -> bool:
    tolerance = 2e-2 if found[0].dtype == torch.bfloat16 else 2e-3
    return all(
        float((a.float() - b.float()).norm()) <= tolerance * float(b.float().norm())
        for a, b in zip(found, wanted, strict=True)
    )
