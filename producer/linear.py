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


@torch.library.custom_op("dflash_ring::product_onto", mutates_args=())
def product_onto(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    """Return residual + x @ weight^T, rounded once. Shapes as in `product`; residual [..., N]."""
    onto = residual.contiguous().flatten(0, -2)
    return multiply(x.flatten(0, -2), weight.t(), onto=onto).view(residual.shape)


@product_onto.register_fake
def _(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:  # noqa: ARG001
    return residual.new_empty(residual.shape)


def join_residuals(graph: torch.fx.Graph) -> int:
    """Let a product be added to the residual stream by itself: add(r, product(x, w)) to product_onto(x, w, r).

    A pass over a compiled layer's graph; spares a kernel that reads two and writes one. Returns how many were joined.
    """
    joined = 0
    for node in list(graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)):
        if node.kwargs or len(node.args) != 2:
            continue
        for made, other in (node.args, node.args[::-1]):
            if not (isinstance(made, torch.fx.Node) and isinstance(other, torch.fx.Node)):
                continue
            if made.target is not torch.ops.dflash_ring.product.default or len(made.users) != 1:
                continue
            if made.meta["val"].shape != other.meta["val"].shape or made.meta["val"].dtype != other.meta["val"].dtype:
                continue
            with graph.inserting_before(node):
                new = graph.call_function(torch.ops.dflash_ring.product_onto.default, (*made.args, other))
            new.meta.update(node.meta)
            node.replace_all_uses_with(new)
            graph.erase_node(node)
            graph.erase_node(made)
            joined += 1
            break
    return joined


def joining_options() -> dict[str, object]:
    """Return torch.compile's options that put `join_residuals` behind its own passes."""
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files  # seconds to import

    class JoinResiduals(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            join_residuals(graph)

        def uuid(self) -> bytes:  # part of what the compiler's cache is keyed by
            return get_hash_for_files((__file__,))

    return {"post_grad_custom_post_pass": JoinResiduals()}


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
