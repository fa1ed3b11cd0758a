"""Products in 8-bit floats: scales, layouts, gradients, against plain ones. The CPU computes with the same values."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from configs.load import ConfigError
from consumer import float8
from consumer.linear import ContextGradient, ContextProjection, Projection
from consumer.setup import step_dtype

GRAIN = 2.0**-4  # e4m3 has three bits behind the point


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_rows_keep_their_own_scale():
    x = random(16, 32) * torch.logspace(-6, 6, 16)[:, None]
    small, scale = float8.by_row(x)
    assert small.dtype == torch.float8_e4m3fn
    assert float(small.float().abs().max()) <= float8.LARGEST
    error = (small.float() * scale - x).abs()
    assert bool((error <= GRAIN * x.abs() + 1e-3 * x.abs().amax(1, keepdim=True)).all())


def test_a_row_of_zeros_stays_zero():
    small, scale = float8.by_row(torch.zeros(2, 16))
    assert bool((small.float() * scale == 0).all())


def test_a_row_that_is_not_finite_stays_so():
    x = random(2, 16)
    x[1, 3] = float("inf")
    small, scale = float8.by_row(x)
    assert not bool(torch.isfinite(small.float() * scale)[1].all())


def test_the_transposed_weight_is_the_weight():
    weight = random(48, 32)
    turned, scale = float8.transposed(weight, float8.by_row(weight)[1])
    assert turned.shape == (32, 48)
    assert turned.is_contiguous()
    torch.testing.assert_close(turned.float() * scale, weight.t(), rtol=GRAIN, atol=1e-2)


def gradients(in_float8: bool) -> list[torch.Tensor]:
    linears = [nn.Linear(64, width, bias=False) for width in (32, 16, 16)]
    for seed, linear in enumerate(linears):
        linear.weight.data = random(*linear.weight.shape, seed=seed) * 0.1
    block = Projection(*linears)
    block.in_float8 = in_float8
    y, g = random(16, 64, seed=5).requires_grad_(), random(48, 64, seed=6).requires_grad_()
    out = [*ContextProjection(block)(y, g, ContextGradient()), block(y)]
    loss = sum((value * random(*value.shape, seed=7)).sum() for value in out)
    return [*out, *torch.autograd.grad(loss, [y, g, *(linear.weight for linear in linears)])]


def test_results_and_input_gradients_are_near_the_plain_ones_and_weight_gradients_equal_them():
    names = ["block", "context", "alone", "by y", "by g", "by q", "by k", "by v"]
    for name, plain, small in zip(names, gradients(False), gradients(True), strict=True):
        error = float((plain - small).detach().norm() / plain.detach().norm())
        assert error == 0 if name in ("by q", "by k", "by v") else 0.005 < error < 0.06, name


def test_sizes_that_are_no_multiples_of_16_are_multiplied_plainly():
    linear = nn.Linear(64, 32, bias=False)
    projection, x = Projection(linear), random(17, 64)
    plain = projection(x)
    projection.in_float8 = True
    assert torch.equal(projection(x), plain)


def test_a_cpu_refuses_fp8_in_one_line():
    with pytest.raises(ConfigError, match=r"training\.precision: fp8 needs an NVIDIA GPU .* got cpu; use bfloat16"):
        step_dtype("fp8", torch.device("cpu"))
