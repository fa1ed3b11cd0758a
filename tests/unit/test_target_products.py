"""A packed target whose large products are done by the operator of producer/linear.py reads the same states."""

from __future__ import annotations

import pytest
import torch

from producer import linear
from producer.trunk import Target
from tests.helpers.tiny_target import make_model


def test_states_stay_the_same_and_small_or_unfit_products_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(make_model().to(torch.bfloat16).eval(), (1, 3))
    target.use_packed()
    ids, lengths = torch.arange(5, 45), [25, 15]
    before, last = target.forward_packed(ids, lengths)
    assert linear.replace_products(target, 40) == 0  # nothing here is large
    monkeypatch.setattr(linear, "LEAST_FLOP", 2 * 40 * 64 * 64)
    gate = target.layers[0].mlp.gate_proj
    gate.bias = torch.nn.Parameter(torch.zeros(gate.out_features, dtype=torch.bfloat16))
    large = linear.large_products(target, 40)
    assert gate not in large
    assert target.layers[1].mlp.gate_proj in large
    assert linear.replace_products(target, 40) == len(large) > 0
    after, last_after = target.forward_packed(ids, lengths)
    assert all(torch.equal(one, two) for one, two in zip([*before, last], [*after, last_after], strict=True))
    linear.restore_products(target)
    assert all(type(module) is torch.nn.Linear for module in large)


def test_the_operator_is_well_formed() -> None:
    x, weight = torch.randn(1, 6, 8), torch.randn(4, 8)
    torch.library.opcheck(linear.product, (x, weight))  # type: ignore[no-untyped-call]
    torch.testing.assert_close(linear.product(x, weight), x @ weight.T)
