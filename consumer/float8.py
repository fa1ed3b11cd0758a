"""Products in 8-bit floats (e4m3) for training.precision: fp8, off by default; results and gradients stay bfloat16.

Forward and the gradient by the input are in 8 bits; the gradient by the weight, which the optimizer sums up over
thousands of steps, stays in bfloat16, as do head, norms and attention. Scales: one for each row of activations and
gradients and each row of a weight; one for the whole weight where it is read transposed (a factor along the summed
dimension could not be taken out). The same choice as torchao's recipe with the weight gradient in high precision.
float8_kernels.py has the kernels; the functions here are their reference and what a CPU computes in tests.

Shapes: R rows, I input width, O output width; both widths are multiples of 16.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
_LEAST_SCALE = 1e-12


def supported(device: torch.device) -> bool:
    """Tell whether a device multiplies 8-bit floats (NVIDIA, compute capability 8.9 and later)."""
    there = device.type == "cuda" and torch.cuda.is_available() and torch.version.hip is None
    return there and torch.cuda.get_device_capability(device) >= (8, 9)


def fits(x: Tensor, weight: Tensor) -> bool:
    """Tell whether x [R, I] and weight [O, I] may be multiplied in 8 bits."""
    return all(size % 16 == 0 for size in (x.shape[0], *weight.shape))


def by_row(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [R, I] in 8 bits and each row's scale [R, 1] float32."""
    if x.is_cuda:
        rows: tuple[Tensor, Tensor] = _kernels().by_row(x)
        return rows
    scale = (x.abs().amax(1, keepdim=True).float() / LARGEST).clamp(min=_LEAST_SCALE)
    return (x.float() / scale).to(E4M3), scale


def transposed(weight: Tensor, row_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return weight [O, I] as [I, O] in 8 bits, with one scale as [I, 1]; row_scale [O, 1]: by_row's."""
    scale = row_scale.amax()
    if weight.is_cuda:
        turned: Tensor = _kernels().transposed(weight, scale)
    else:
        turned = (weight.float() / scale).to(E4M3).t().contiguous()
    return turned, scale.expand(weight.shape[1], 1).contiguous()


def multiply(x: tuple[Tensor, Tensor], weight: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """Multiply x [R, I] by weight [O, I] transposed, both with scales by row; returns [R, O]."""
    if x[0].is_cuda:
        return torch._scaled_mm(
            x[0], weight[0].t(), scale_a=x[1], scale_b=weight[1].t(), out_dtype=dtype, use_fast_accum=True
        )
    return ((x[0].float() * x[1]) @ (weight[0].float() * weight[1]).t()).to(dtype)


def _kernels() -> ModuleType:
    from consumer import float8_kernels  # Triton is there on a GPU machine only

    return float8_kernels
