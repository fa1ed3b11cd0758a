"""Clipping, AdamW, Muon, schedule and flat buffers."""

from __future__ import annotations

import math

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from configs.drafter_shape import FULL, DrafterShape
from consumer.drafter import Drafter
from consumer.flat import FlatWeights, joined, split
from consumer.linear import ContextGradient
from consumer.optimizer import AdamW, AdamWRule, Control, Muon, orthogonal, set_clip
from consumer.schedule import Schedule

ONE = torch.tensor(1.0)


def flat_of(dtype=torch.float32) -> tuple[Drafter, FlatWeights]:
    shape = DrafterShape(16, 24, 1, 2, 1, 8, 2, 4, (FULL,), 64, True, 1e-6, 1e4, 5, 50)
    drafter = Drafter(shape)
    return drafter, FlatWeights(drafter, dtype)


def ready(lr: float, scale: float = 1.0) -> Control:
    control = Control(torch.device("cpu"))
    control.values.copy_(torch.tensor([lr, lr, scale, 1.0, 1.0, 1.0]))
    return control


def test_t03_gradients_1_inf_0_leave_the_parameters_unchanged():
    _, flat = flat_of()
    before = flat.weights.clone()
    flat.grads[:3] = torch.tensor([1.0, math.inf, 0.0])
    adamw = AdamW(flat, slice(0, flat.size), AdamWRule(), flat.num_matrix_elements)
    control, updates = ready(1e-2), torch.tensor(0)
    norm = set_clip(control, torch.linalg.vector_norm(flat.grads), ONE, 1.0, ONE)
    control.count_update(updates, (0.9, 0.95))
    adamw.step(control)
    assert not math.isfinite(float(norm))
    assert (float(control.scale), float(control.applied), int(updates)) == (0.0, 0.0, 0)
    assert torch.equal(before, flat.weights)
    assert float(adamw.exp_avg.abs().sum() + adamw.exp_avg_sq.abs().sum()) == 0.0


@pytest.mark.parametrize(
    ("norm", "weight", "clip", "scale"), [(8.0, 2.0, 1.0, 0.125), (1.0, 2.0, 1.0, 0.5), (8.0, 2.0, None, 0.5)]
)
def test_scale_divides_by_the_weight_and_clips(norm, weight, clip, scale):
    control = ready(0.0)
    found = set_clip(control, torch.tensor(norm), torch.tensor(weight), clip, ONE)
    assert float(found) == norm / weight
    assert float(control.scale) == pytest.approx(scale, rel=1e-5)


def test_a_pack_without_blocks_applies_nothing_and_is_no_failure():
    control = ready(1e-2)
    norm = set_clip(control, torch.tensor(0.0), torch.tensor(0.0), 1.0, ONE)
    assert float(control.applied) == 0.0
    assert float(norm) == 0.0


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adamw_equals_torch_adamw(decay):
    drafter, flat = flat_of()
    twin = Drafter(drafter.shape)
    twin.load_state_dict(drafter.state_dict())
    groups = [
        {"params": [p for p in twin.parameters() if p.ndim == 2], "weight_decay": decay},
        {"params": [p for p in twin.parameters() if p.ndim != 2], "weight_decay": 0.0},
    ]
    theirs = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    ours = AdamW(flat, slice(0, flat.size), AdamWRule(weight_decay=decay), flat.num_matrix_elements)
    control, updates = ready(1e-2), torch.tensor(0)
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        for name, parameter in twin.named_parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            flat.view(flat.grads, name).copy_(parameter.grad)
        theirs.step()
        control.count_update(updates, (0.9, 0.95))
        ours.step(control)
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(flat.view(flat.weights, name), parameter.detach(), rtol=1e-5, atol=1e-6)


def test_t04_masters_move_where_bfloat16_weights_alone_would_not():
    drafter, flat = flat_of(torch.bfloat16)
    adamw = AdamW(flat, slice(0, flat.size), AdamWRule(), flat.num_matrix_elements)
    for name, _ in flat.named:
        flat.set_master(name, torch.ones(()).expand(flat.view(flat.weights, name).shape))
    flat.grads.fill_(1.0)
    control, updates = ready(1e-3), torch.tensor(0)
    for _ in range(1000):
        control.count_update(updates, (0.9, 0.95))
        adamw.step(control)
    assert float(flat.masters.mean()) == pytest.approx(0.0, abs=1e-2)
    assert flat.masters.dtype == torch.float32
    assert drafter.fc.weight.dtype == torch.bfloat16
    torch.testing.assert_close(drafter.fc.weight.float().mean(), flat.masters.mean(), rtol=0, atol=1e-2)


def test_orthogonal_brings_singular_values_near_1():
    matrix = torch.randn(24, 40, generator=torch.Generator().manual_seed(0))
    for given in (matrix, matrix.t()):
        values = torch.linalg.svdvals(orthogonal(given))
        assert orthogonal(given).shape == given.shape
        assert 0.5 < float(values.min()) < float(values.max()) < 1.5


def test_muon_moves_matrices_only_and_nothing_in_a_masked_step():
    _, flat = flat_of()
    flat.grads.normal_(generator=torch.Generator().manual_seed(0))
    muon, before = Muon(flat, 0.1), flat.masters.clone()
    control = ready(1e-2)
    control.applied.zero_()
    flat.grads[3] = math.nan
    muon.step(control)
    assert torch.equal(before, flat.masters)
    flat.grads[3] = 0.0
    control.applied.fill_(1.0)
    muon.step(control)
    cut = flat.num_matrix_elements
    assert bool((before[:cut] != flat.masters[:cut]).float().mean() > 0.99)
    assert torch.equal(before[cut:], flat.masters[cut:])


def test_t06_learning_rate_of_the_worked_example():
    schedule, total = Schedule("cosine", 0.1, 0.0), torch.tensor(100)
    rates = [6e-4 * float(schedule.share(torch.tensor(step), total)) for step in range(101)]
    assert rates[50] == pytest.approx(3.5209e-4, abs=5e-9)
    assert rates[51] == pytest.approx(3.4175e-4, abs=5e-9)
    assert [rates[step] for step in (1, 5, 10)] == pytest.approx([6e-5, 3e-4, 6e-4], rel=1e-5)
    assert rates[100] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(
    ("kind", "shares"),
    [("linear", [1.0, 0.5, 0.0]), ("constant", [1.0, 1.0, 1.0]), ("wsd", [1.0, 1.0, 0.0]), ("cosine", [1.0, 0.5, 0.0])],
)
def test_schedules_start_middle_end(kind, shares):
    schedule, total = Schedule(kind, 0.0, 0.1), torch.tensor(200)
    found = [float(schedule.share(torch.tensor(step), total)) for step in (0, 100, 200)]
    assert found == pytest.approx([0.1 + 0.9 * share for share in shares], abs=1e-6)
    assert float(schedule.share(torch.tensor(500), total)) == pytest.approx(found[2])


def test_wsd_is_flat_then_falls_over_the_last_fifth():
    schedule, total = Schedule("wsd", 0.0, 0.0), torch.tensor(100)
    found = [float(schedule.share(torch.tensor(step), total)) for step in (80, 90, 95)]
    assert found == pytest.approx([1.0, 0.5, 0.25], abs=1e-5)


def test_flat_weights_keep_values_names_and_storage():
    shape = flat_of()[0].shape
    drafter = Drafter(shape)
    before = {name: value.clone() for name, value in drafter.state_dict().items()}
    flat = FlatWeights(drafter, torch.float32)
    for name, value in drafter.state_dict().items():
        assert torch.equal(value, before[name])
        assert value.untyped_storage().data_ptr() == flat.weights.untyped_storage().data_ptr()
    assert flat.size == shape.num_parameters
    assert sorted(flat.named_views(flat.weights)) == sorted(before)


def test_bound_products_write_the_gradients_that_autograd_gives():
    drafter, flat = flat_of()
    plain = Drafter(drafter.shape)
    plain.load_state_dict(drafter.state_dict())
    features = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
    rows = torch.randn(5, 16, generator=torch.Generator().manual_seed(1))
    flat.grads.fill_(7.0)  # whatever was there before: matrices are overwritten
    flat.zero_norm_grads()
    for model in (drafter, plain):
        layer = model.layers[0]
        g = model.context(features)
        qkv, kv = layer.self_attn.qkv_and_context(rows, g, ContextGradient())
        out = layer.mlp.down(layer.mlp.gate_up(layer.self_attn.out(qkv[:, :16]))[:, :24])
        (out.sin().sum() + kv.cos().sum() + qkv.square().sum()).backward()
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(flat.view(flat.grads, name), parameter.grad, rtol=1e-5, atol=1e-5)


@hypothesis.given(st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=1))
def test_masters_come_back_from_their_halves_bit_for_bit_and_the_upper_one_is_the_nearest_bfloat16(values):
    master = torch.tensor(values, dtype=torch.float32)
    weight, low = split(master)
    assert torch.equal(joined(weight, low).view(torch.int32), master.view(torch.int32))
    nearest = (master - master.to(torch.bfloat16).float()).abs()
    assert torch.equal((master - weight.float()).abs(), nearest)
