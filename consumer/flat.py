"""The drafter's weights as a few large buffers: what the optimizer and an all-reduce work on.

One buffer of weights in the compute type, one of gradients. A bfloat16 weight is the upper half of its float32 master,
and one more buffer holds what is missing (`low`), so a master takes 4 bytes and no second copy. Every parameter is a
view. Matrices come first, norm weights last: the products write matrix gradients in place (linear.py), so only the tail
has to be zeroed before a step. Source of the split: Split-SGD (Kalamkar et al. 2020, 2005.04680).

Shapes: N all parameters in a row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from consumer.drafter import Drafter
from consumer.linear import Sink

MakeZeros = Callable[..., Tensor]
"""Makes zeros as torch.zeros does: of a size, dtype=, device=."""


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Split finite float32 numbers into the nearest bfloat16 (a tie goes away from 0) and the int16 that is missing."""
    bits = master.contiguous().view(torch.int32)
    high = (bits + 0x8000) >> 16
    return high.to(torch.int16).view(torch.bfloat16), (bits - (high << 16)).to(torch.int16)


def joined(weight: Tensor, low: Tensor) -> Tensor:
    """Undo `split`, exactly."""
    return ((weight.contiguous().view(torch.int16).to(torch.int32) << 16) + low).view(torch.float32)


class FlatWeights:
    """Owns the drafter's storage. `drafter` is bound to it from here on; do not move or cast it afterwards."""

    def __init__(self, drafter: Drafter, dtype: torch.dtype, make_grads: MakeZeros = torch.zeros) -> None:
        """Move the weights into flat buffers on their device, in `dtype`, and bind the products to them.

        `make_grads`: makes the gradients [N], where other GPUs may have to read them (copy_engines.py).
        """
        parameters = list(drafter.named_parameters())
        self.named = [item for item in parameters if item[1].ndim == 2] + [i for i in parameters if i[1].ndim != 2]
        device = parameters[0][1].device
        size = sum(parameter.numel() for _, parameter in self.named)
        self.wide = torch.promote_types(dtype, torch.float32)
        """Type of masters and moments."""
        self.num_matrix_elements = sum(p.numel() for _, p in self.named if p.ndim == 2)
        self.weights = torch.empty(size, dtype=dtype, device=device)
        self.grads = make_grads(size, dtype=dtype, device=device)
        self.low = torch.zeros(size, dtype=torch.int16, device=device) if dtype == torch.bfloat16 else None
        """Lower halves of the masters of bfloat16 weights; None where weights are their own masters."""
        self.on_written: Callable[[slice], None] | None = None
        """Called in the backward pass as soon as a matrix product's gradient, a slice of `grads`, is complete."""
        self._places: dict[str, tuple[int, torch.Size]] = {}
        at = 0
        for name, parameter in self.named:
            self._places[name] = (at, parameter.shape)
            self.set_master(name, parameter.detach())
            at += parameter.numel()
        for name, parameter in self.named:
            parameter.data = self.view(self.weights, name)
            parameter.grad = self.view(self.grads, name)
        self._bind(drafter)

    @property
    def size(self) -> int:
        """Number of parameters."""
        return self.weights.numel()

    def view(self, buffer: Tensor, name: str) -> Tensor:
        """Return the part of a buffer [N] that belongs to a parameter, in its shape."""
        at, shape = self._places[name]
        return buffer[at : at + shape.numel()].view(shape)

    def named_views(self, buffer: Tensor, first: int = 0, stop: int | None = None) -> dict[str, Tensor]:
        """Return each parameter's part, by its public name, of a buffer over elements first..stop of [N]."""
        stop = self.size if stop is None else stop
        return {
            name: buffer[at - first : at - first + shape.numel()].view(shape)
            for name, (at, shape) in self._places.items()
            if first <= at < stop
        }

    @property
    def stored(self) -> list[Tensor]:
        """The buffers that hold the masters."""
        return [self.weights] if self.low is None else [self.weights, self.low]

    @property
    def masters(self) -> Tensor:
        """All masters, [N]: the weights themselves, or, of bfloat16 weights, a copy in float32."""
        return self.weights if self.low is None else joined(self.weights, self.low)

    def master(self, name: str) -> Tensor:
        """One parameter's master: the weight itself, or, of a bfloat16 weight, a copy in float32."""
        weight = self.view(self.weights, name)
        return weight if self.low is None else joined(weight, self.view(self.low, name))

    def set_master(self, name: str, value: Tensor) -> None:
        """Set a parameter's master, and with it the weight, from a value of any type, on any device."""
        value = value.to(self.weights.device, self.wide)
        if self.low is not None:
            value, low = split(value)
            self.view(self.low, name).copy_(low)
        self.view(self.weights, name).copy_(value)

    def check_announced(self, elements: int) -> None:
        """Raise RuntimeError unless `on_written` has been told of every matrix gradient: `elements` in all."""
        if elements != self.num_matrix_elements:
            raise RuntimeError(f"{elements} of {self.num_matrix_elements} gradient elements were announced")

    def zero_norm_grads(self) -> None:
        """Clear the gradients that accumulate; those of matrices are overwritten."""
        self.grads[self.num_matrix_elements :].zero_()

    def _bind(self, drafter: Drafter) -> None:
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.named}
        for projection in drafter.projections():
            first = projection.parameters()[0]
            at, _ = self._places[names[first]]
            rows = sum(weight.shape[0] for weight in projection.parameters())
            part = slice(at, at + rows * first.shape[1])
            sink = Sink(self.grads[part].view(rows, -1), partial(self._written, part))
            projection.attach(self.weights[part].view(rows, -1), sink)

    def _written(self, part: slice) -> None:
        if self.on_written is not None:
            self.on_written(part)
