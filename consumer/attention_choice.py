"""Which attention a GPU trains with: the interval kernels where they work here, else FlexAttention.

"Work" is tried at start: one layer of each kind, forward and backward, on a small made-up pack with the run's own head
sizes and block size, against the dense reference. Kernels that do not compile on a chip, or stray, cost a line in the
log and some speed, not the run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from consumer.anchors import Anchors
from consumer.attention import dense_attention, flex_attention_of, flex_rows
from consumer.step import MakeAttention, TrainStep

Name = Literal["flex", "intervals"]
RECOMPILE_LIMIT = 8  # torch's own, for one number of anchors
_TOKENS, _ANCHORS = 608, 48  # multiples of 16, as a run's own sizes are: Triton compiles other numbers apart


class Choice(NamedTuple):
    """What to train with."""

    name: Name
    make: MakeAttention


def choose(step: TrainStep, wanted: Literal["auto", "flex", "intervals"], say: Callable[[str], None]) -> Choice:
    """Return the attention to train with; "auto" tries the interval kernels first."""
    if wanted == "flex":
        return _flex(step)
    intervals = _intervals(step)
    if intervals is None:
        say(f"attention: heads of {step.shape.head_dim} are no power of two from 16 on; FlexAttention is taken")
        return _flex(step)
    if wanted == "auto":
        try:
            strays = _strays(step, intervals.make)
        except Exception as error:  # whatever a compiler raises: FlexAttention remains
            strays = (str(error) or repr(error)).splitlines()[0]
        if strays:
            say(f"attention: the interval kernels do not work here, FlexAttention is taken: {strays}")
            return _flex(step)
    return intervals


def _intervals(step: TrainStep) -> Choice | None:
    size = step.shape.head_dim
    if size < 16 or size & (size - 1):
        return None
    from consumer.attention_kernels import interval_attention, tiles_of  # Triton is there on a GPU machine only

    return Choice("intervals", partial(interval_attention, tiles=tiles_of(step.flat.weights.dtype, size)))


def _flex(step: TrainStep) -> Choice:
    options = _flex_options(step)

    def flex(q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask) -> Tensor:
        return flex_rows(q, k, v, block_mask, options)

    return Choice("flex", partial(flex_attention_of, flex=compiled(flex, len(step.anchor_sizes))))


def compiled(function: Callable[..., Any], num_sizes: int, fullgraph: bool = False) -> Callable[..., Any]:
    """Return torch.compile of a function that is called with so many numbers of anchors.

    Only where it is needed: the compiler takes seconds to import, which a restart that compiles nothing does without.
    """
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, RECOMPILE_LIMIT * num_sizes)
    return torch.compile(function, dynamic=False, fullgraph=fullgraph)


def _flex_options(step: TrainStep) -> dict[str, int] | None:
    """Tile sizes of FlexAttention where its defaults were measured to be slower (H200, heads of 128, bfloat16)."""
    hopper = torch.cuda.get_device_capability() == (9, 0)
    if not hopper or step.shape.head_dim != 128 or step.flat.weights.dtype != torch.bfloat16:
        return None
    forward = {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 64, "fwd_num_warps": 4, "fwd_num_stages": 3}
    backward = {"bwd_BLOCK_M1": 64, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 64}
    return forward | backward | {"bwd_num_warps": 4, "bwd_num_stages": 2}


def _strays(step: TrainStep, make: MakeAttention) -> str:
    """Compare output and gradients with dense attention in float32; returns what differs, "" where nothing does."""
    shape, device, dtype = step.shape, step.lr.device, step.flat.weights.dtype
    generator = torch.Generator(device).manual_seed(0)
    document = torch.arange(_TOKENS, device=device, dtype=torch.int32) // 250 * 250
    place = torch.randperm(_TOKENS - 1, device=device, generator=generator)[:_ANCHORS].sort().values
    keep = torch.ones_like(place, dtype=torch.bool)
    place[-3:], keep[-3:] = _TOKENS - 1, False
    anchors, rows = Anchors(place, keep), _ANCHORS * shape.block_size
    sizes = ((rows, shape.num_heads), (_TOKENS + rows, shape.num_kv_heads), (_TOKENS + rows, shape.num_kv_heads))
    made = [torch.randn(length, heads, shape.head_dim, device=device, generator=generator) for length, heads in sizes]
    for kind in sorted(set(shape.layer_types)):
        results = []
        for attention, kind_of_number in ((dense_attention, torch.float32), (make, dtype)):
            inputs = [value.to(kind_of_number).requires_grad_() for value in made]
            out = attention(anchors, document, shape)(inputs[0], inputs[1], inputs[2], kind)
            results.append([out, *torch.autograd.grad(out, inputs, made[0].flatten(1).to(kind_of_number))])
        for name, wanted, found in zip(("output", "gradient by q", "by k", "by v"), *results, strict=True):
            error = float((found.detach().float() - wanted.detach()).norm() / wanted.detach().norm())
            if not error <= (2e-2 if dtype == torch.bfloat16 else 2e-3):
                return f"{name} in a {kind} layer is {error:.1e} off"
    return ""
