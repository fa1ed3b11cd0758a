"""Matrix products of the drafter, with the weight gradient written straight to where the optimizer reads it.

Several linear layers with one input (q, k, v; gate, up) are one product here. A Projection that is attached to flat
buffers (optimizer.FlatWeights) works on views of them and writes its weight gradient with one product, into the flat
gradient: no accumulation pass, no copy, no zeroing. Detached, it is ordinary differentiable torch.

Shapes: R rows (tokens or block slots), I input width, O output width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from consumer import float8
from gpu.products import multiply


class Sink(NamedTuple):
    """Where a weight gradient is written, and who is told that it is there (a rank sums it up with the others')."""

    buffer: Tensor  # [O, I]
    written: Callable[[], None]


class Projection:
    """One product for linear layers that read the same input; not a module, it owns no weights."""

    def __init__(self, *linears: nn.Linear) -> None:
        """Join `linears`, whose outputs come out side by side in this order."""
        self.linears = linears
        self.weight: Tensor | None = None
        self.sink: Sink | None = None
        self.in_float8 = False
        """Compute the result and the gradient by the input in 8 bits (float8.py), where the sizes allow it."""

    def parameters(self) -> list[Tensor]:
        """Return the joined layers' weights in order."""
        return [linear.weight for linear in self.linears]

    def attach(self, weight: Tensor, sink: Sink) -> None:
        """Use `weight` [O, I], a view of the layers' weights, and write its gradient to `sink` (same shape)."""
        self.weight, self.sink = weight, sink

    def __call__(self, x: Tensor) -> Tensor:
        """Map [R, I] to [R, O]."""
        weight = _joined(self)
        out: Tensor = _Product.apply(  # type: ignore[no-untyped-call]
            x, weight, self.sink, self.in_float8, *self.parameters()
        )
        return out


class ContextGradient:
    """The gradient of the context, [S, I], which every layer adds to: by its product, so no pass over it is needed.

    One for each forward pass. Layers come back in any order; the last one hands the sum to autograd.
    """

    def __init__(self) -> None:
        """Start without a user and without a sum."""
        self.users = 0
        self.total: Tensor | None = None

    def add(self, d_out: Tensor, weight: Tensor, row_scale: Tensor | None) -> Tensor | None:
        """Add d_out [S, O] @ weight [O, I]; return the sum when all users have added theirs. See _mapped_back."""
        self.users -= 1
        if self.total is None:
            self.total = _mapped_back(d_out, weight, row_scale)
        elif row_scale is None:
            multiply(d_out, weight, self.total, add=True)
        else:
            self.total += _mapped_back(d_out, weight, row_scale)
        if self.users > 0:
            return None
        total, self.total = self.total, None
        return total


class ContextProjection:
    """The attention layer's two products: q, k, v of the block rows and k, v of the context rows, one weight."""

    def __init__(self, block: Projection, first_context_layer: int = 1) -> None:
        """Project the context with `block`'s layers from `first_context_layer` on (the same weights)."""
        self.block = block
        self.skip_layers = first_context_layer

    def __call__(self, y: Tensor, g: Tensor, gradient: ContextGradient) -> tuple[Tensor, Tensor]:
        """Map block rows [R, I] and context rows [S, I] to [R, O] and [S, O'], O' without the skipped layers.

        `gradient`: where that of g is added up; the same for all that read this g.
        """
        weight = _joined(self.block)
        skip = sum(linear.out_features for linear in self.block.linears[: self.skip_layers])
        out: tuple[Tensor, Tensor] = _TwoProducts.apply(  # type: ignore[no-untyped-call]
            y, g, weight, skip, self.block.sink, self.block.in_float8, gradient, *self.block.parameters()
        )
        return out


def _joined(projection: Projection) -> Tensor:
    if projection.weight is not None:
        return projection.weight
    weights = projection.parameters()
    return torch.cat(weights) if len(weights) > 1 else weights[0]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sink: Sink | None, in_float8: bool, *anchors: Tensor) -> Tensor:
        # The parameters themselves are passed so that the result requires a gradient even where x does not.
        out, ctx.row_scale = _mapped(x, weight, in_float8)
        ctx.save_for_backward(x, weight)
        ctx.sink, ctx.num_anchors = sink, len(anchors)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        d_out = grads[0]
        d_x = _mapped_back(d_out, weight, ctx.row_scale) if ctx.needs_input_grad[0] else None
        d_weight = _weight_gradient(d_out, x, ctx.sink)
        return (d_x, d_weight, None, None, *[None] * ctx.num_anchors)


class _TwoProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        g: Tensor,
        weight: Tensor,
        skip: int,
        sink: Sink | None,
        in_float8: bool,
        gradient: ContextGradient,
        *anchors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        block, ctx.block_scale = _mapped(y, weight, in_float8)
        context, ctx.context_scale = _mapped(g, weight[skip:], in_float8)
        ctx.save_for_backward(y, g, weight)
        ctx.skip, ctx.sink, ctx.gradient, ctx.num_anchors = skip, sink, gradient, len(anchors)
        gradient.users += 1
        return block, context

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        y, g, weight = ctx.saved_tensors
        d_block, d_context = grads
        d_y = _mapped_back(d_block, weight, ctx.block_scale) if ctx.needs_input_grad[0] else None
        d_g = ctx.gradient.add(d_context, weight[ctx.skip :], ctx.context_scale) if ctx.needs_input_grad[1] else None
        target = ctx.sink.buffer if ctx.sink is not None else torch.empty_like(weight)
        multiply(d_block.t(), y, target)
        multiply(d_context.t(), g, target[ctx.skip :], add=True)
        if ctx.sink is not None:
            ctx.sink.written()
        d_weight = None if ctx.sink is not None else target
        return (d_y, d_g, d_weight, None, None, None, None, *[None] * ctx.num_anchors)


def _mapped(x: Tensor, weight: Tensor, in_float8: bool) -> tuple[Tensor, Tensor | None]:
    """Map x [R, I] by weight [O, I]; also returns the weight's scales where that was done in 8 bits."""
    if not in_float8 or not float8.fits(x, weight):
        return multiply(x, weight.t()), None
    small_weight = float8.by_row(weight)
    return float8.multiply(float8.by_row(x), small_weight, x.dtype), small_weight[1]


def _mapped_back(d_out: Tensor, weight: Tensor, row_scale: Tensor | None) -> Tensor:
    """Return the gradient by the input, [R, I]; row_scale: what _mapped returned."""
    if row_scale is None:
        return multiply(d_out, weight)
    return float8.multiply(float8.by_row(d_out), float8.transposed(weight, row_scale), d_out.dtype)


def _weight_gradient(d_out: Tensor, x: Tensor, sink: Sink | None) -> Tensor | None:
    if sink is None:
        return multiply(d_out.t(), x)
    multiply(d_out.t(), x, sink.buffer)
    sink.written()
    return None
