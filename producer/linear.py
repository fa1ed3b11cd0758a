"""The large matrix products of a packed target, by the cuBLASLt algorithm that measured fastest here (gpu/products.py).

A packed target reads one shape, so its products never change: each is measured once, at start. Layers keep their
weights; only how x @ W^T is done changes. Products too small to matter, with a bias, or of quantised layers stay as
they are.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from gpu.products import LEAST_FLOP, multiply, tuned
from producer.trunk import Target


@torch.library.custom_op("dflash_ring::product", mutates_args=())
def product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight^T. Shapes: x [..., K], weight [N, K] -> [..., N]. Opaque to torch.compile."""
    rows = multiply(x.flatten(0, -2), weight.t())
    return rows.view(*x.shape[:-1], weight.shape[0])


@product.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


class MeasuredLinear(nn.Linear):
    """nn.Linear by `product`. A class, since torch.compile makes layers anew whose modules differ by an attribute."""

    def forward(self, input: Tensor) -> Tensor:
        """Return input @ weight^T."""
        result: Tensor = product(input, self.weight)
        return result


def large_products(target: Target, tokens: int) -> list[nn.Linear]:
    """The layers whose product with `tokens` rows is worth measuring."""
    return [
        module
        for module in target.layers.modules()
        if type(module) is nn.Linear
        and getattr(module, "bias", None) is None
        and module.weight.dtype == torch.bfloat16
        and 2.0 * tokens * module.weight.numel() >= LEAST_FLOP
    ]


def replace_products(target: Target, tokens: int) -> int:
    """Let `product` do the large products of `target`, before its layers are compiled; returns how many layers."""
    found = large_products(target, tokens)
    for module in found:
        module.__class__ = MeasuredLinear
    return len(found)


def restore_products(target: Target) -> None:
    """Undo `replace_products`."""
    for module in target.layers.modules():
        if type(module) is MeasuredLinear:
            module.__class__ = nn.Linear  # type: ignore[assignment]


def measure_products(target: Target, tokens: int, say: Callable[[str], None], memory: Path | None = None) -> int:
    """Measure and use the algorithms for a pack of `tokens`; returns how many different products use one.

    `memory`: a file of what was measured before, which is used and not measured again.
    """
    ids = torch.zeros(tokens, dtype=torch.int64, device=target.device)
    return tuned(lambda: _forget(target.forward_packed(ids, [tokens])), say, memory)


def _forget(_result: object) -> None:
    return None
