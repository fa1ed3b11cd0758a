"""The training step as a whole, on the CPU: the proxies of what a captured graph needs, skips, resume, determinism."""

from __future__ import annotations

import math

import pytest
import torch

from configs.drafter_shape import FULL, SLIDING, DrafterShape
from configs.schema import AnchorsConfig, LossConfig, OptimizerConfig
from consumer.attention import dense_attention
from consumer.drafter import Drafter
from consumer.frozen_head import FrozenHead
from consumer.memory import checkpoint_bytes
from consumer.selfcheck import self_check
from consumer.staging import PackTensors
from consumer.step import TrainStep

TOKENS, HIDDEN, VOCAB, SIZE = 96, 16, 40, 4


def pack_of(seed: int = 0, supervised: float = 1.0) -> PackTensors:
    generator = torch.Generator().manual_seed(seed)
    start = torch.zeros(TOKENS, dtype=torch.int32)
    start[40:80], start[80:] = 40, -1
    mask = (torch.rand(TOKENS, generator=generator) < supervised) & (start >= 0)
    return PackTensors(
        torch.randint(0, VOCAB - 1, (TOKENS,), generator=generator, dtype=torch.int32),
        mask.to(torch.uint8),
        start,
        torch.randn(TOKENS, 2 * HIDDEN, generator=generator),
        torch.randn(TOKENS, HIDDEN, generator=generator),
    )


def step_of(
    pack: PackTensors | None = None, seed: int = 5, dtype=None, attention=None, micro_steps: int = 1, **optimizer
) -> TrainStep:
    shape = DrafterShape(HIDDEN, 24, 2, 2, 1, 8, 2, SIZE, (SLIDING, FULL), 8, True, 1e-6, 1e4, VOCAB - 1, VOCAB)
    generator = torch.Generator().manual_seed(2)
    drafter = Drafter(shape)
    drafter.reset_parameters(generator)
    head = FrozenHead(*(torch.randn(VOCAB, HIDDEN, generator=generator) * 0.3 for _ in range(2)))
    settings = OptimizerConfig(**({"lr": 1e-2, "warmup_share": 0.1} | optimizer))
    return TrainStep(
        drafter, head, pack or pack_of(), AnchorsConfig(num=12), LossConfig(chunk_rows=10), settings, 100, seed,
        dtype=dtype, attention=attention, micro_steps=micro_steps,
    )  # fmt: skip


def losses(step: TrainStep, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        step.run()
        found.append(step.metrics()["loss"])
    return found


def overwrite(step: TrainStep, pack: PackTensors) -> None:
    for name, value in vars(pack).items():
        getattr(step.pack, name).copy_(value)


def pointers(step: TrainStep) -> list[int]:
    tensors = [*vars(step.pack).values(), *step.drafter.parameters(), *step.state().values(), step.lr]
    tensors += [parameter.grad for parameter in step.drafter.parameters()]
    return [tensor.data_ptr() for tensor in tensors]


def test_it_learns_the_pack():
    found = losses(step_of(), 60)
    assert sum(found[-5:]) < 0.7 * sum(found[:5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_checkpoint_holds_is_as_large_as_plan_says(dtype):
    step = step_of(dtype=dtype)
    held = [*step.drafter.state_dict().values(), *step.state().values()]
    parameters = sum(parameter.numel() for parameter in step.drafter.parameters())
    expected = checkpoint_bytes(parameters, muon=False)
    assert sum(tensor.nbytes for tensor in held) == pytest.approx(expected, rel=0, abs=64)  # step, updates, seed


def test_dense_and_document_attention_train_alike():
    assert losses(step_of(), 4) == pytest.approx(losses(step_of(attention=dense_attention), 4), rel=1e-5)


def test_g01_the_learning_rate_stays_the_same_tensor_and_follows_the_schedule():
    step = step_of()
    before, seen = step.lr, []
    for _ in range(3):
        step.run()
        assert step.lr is before
        seen.append(float(step.lr))
    assert seen == pytest.approx([1e-3, 2e-3, 3e-3], rel=1e-5)


def test_g02_g03_no_tensor_moves_or_changes_shape_over_packs():
    step = step_of()
    step.run()
    before = pointers(step)
    shapes = set()
    for seed in range(5):
        overwrite(step, pack_of(seed, 0.2 * (seed + 1)))
        anchors = step.draw_anchors()
        shapes.add((anchors.position.shape, anchors.keep.shape))
        step.run()
    assert pointers(step) == before
    assert len(shapes) == 1


def test_g02_two_packs_give_two_losses():
    step = step_of()
    other = step_of(pack_of(1))
    assert losses(step, 1) != losses(other, 1)


def test_g05_each_step_draws_other_anchors_and_a_seed_repeats_them():
    def drawn(seed: int) -> list[list[int]]:
        step, found = step_of(seed=seed), []
        for _ in range(3):
            step.run()
            found.append(step.draw_anchors().position.tolist())
        return found

    assert len({tuple(positions) for positions in drawn(5)}) == 3
    assert drawn(5) == drawn(5)
    assert drawn(5) != drawn(6)


def test_same_seed_same_run():
    assert losses(step_of(), 5) == losses(step_of(), 5)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_t06_resume_equals_an_unbroken_run(optimizer):
    unbroken, first, resumed = (step_of(name=optimizer) for _ in range(3))
    losses(unbroken, 12)
    losses(first, 7)
    weights = {name: value.clone() for name, value in first.drafter.state_dict().items()}
    state = {name: value.clone() for name, value in first.state().items()}
    losses(resumed, 2)  # whatever it held before is overwritten
    before = pointers(resumed)
    resumed.load(weights, state)
    assert pointers(resumed) == before  # G-08
    assert resumed.step == 7
    losses(resumed, 5)
    torch.testing.assert_close(resumed.flat.masters, unbroken.flat.masters, rtol=1e-6, atol=1e-6)
    assert float(resumed.lr) == float(unbroken.lr)


def test_state_of_bfloat16_holds_masters_and_restores_them():
    first, second = step_of(dtype=torch.bfloat16), step_of(dtype=torch.bfloat16)
    losses(first, 3)
    state = {name: value.clone() for name, value in first.state().items()}
    assert state["master_low.fc.weight"].dtype == torch.int16
    second.load(first.drafter.state_dict(), state)
    assert torch.equal(second.flat.masters, first.flat.masters)
    assert torch.equal(second.flat.weights, first.flat.weights)
    for name, value in first.state().items():
        assert torch.equal(value, second.state()[name]), name


@pytest.mark.parametrize("into", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("saved_as", ["halves", "whole", "float32 run"])
def test_masters_are_taken_from_every_form_they_were_saved_in(into, saved_as):
    first, second = step_of(dtype=torch.bfloat16 if saved_as != "float32 run" else torch.float32), step_of(dtype=into)
    losses(first, 3)
    state = dict(first.state())
    if saved_as == "whole":  # as checkpoints were written before masters were split
        for name in first.drafter.state_dict():
            del state[f"master_low.{name}"]
            state[f"master.{name}"] = first.flat.master(name)
    second.load(first.drafter.state_dict(), state)
    assert torch.equal(second.flat.masters, first.flat.masters)
    assert second.flat.weights.dtype == into


def test_weights_of_another_shape_are_refused():
    step = step_of()
    weights = step.drafter.state_dict()
    with pytest.raises(RuntimeError, match=r"norm.weight: expected shape \(\d+,\), got \(3,\)"):
        step.load(weights | {"norm.weight": torch.ones(3)}, step.state())


def test_t02_a_non_finite_record_changes_nothing_and_is_counted():
    step = step_of()
    step.run()
    step.metrics()
    before, moments = step.flat.masters.clone(), step.adamw.exp_avg.clone()
    good = step.pack.features.clone()
    step.pack.features[30:60] = math.inf
    step.run()
    step.run()
    assert torch.equal(before, step.flat.masters)
    assert torch.equal(moments, step.adamw.exp_avg)
    assert step.skipped_in_a_row == 2
    step.pack.features.copy_(good)
    step.run()
    metrics = step.metrics()
    assert metrics["skipped_steps"] == 2
    assert math.isfinite(metrics["loss"])
    assert step.skipped_in_a_row == 0
    assert int(step.updates) == 2


@pytest.mark.parametrize("supervised", [0.0, 0.03])
def test_p08_none_or_few_anchors_give_finite_numbers(supervised):
    step = step_of(pack_of(0, supervised), attention=dense_attention)
    before = step.flat.masters.clone()
    for _ in range(3):
        step.run()
    assert bool(torch.isfinite(step.flat.masters).all())
    assert step.metrics()["skipped_steps"] == 0
    if supervised == 0.0:
        assert torch.equal(before, step.flat.masters)


def test_p08_one_used_and_eleven_unused_blocks_give_the_gradient_of_the_one():
    pack = pack_of()
    pack.loss_mask.zero_()
    pack.loss_mask[20:22] = 1
    step = step_of(pack, attention=dense_attention)
    step.run()
    assert int(step.draw_anchors().keep.sum()) == 1
    assert bool(torch.isfinite(step.flat.grads).all())
    assert float(step.flat.grads.abs().sum()) > 0


class Doubled:
    """Stands for a second rank with the same pack."""

    def __init__(self, step: TrainStep) -> None:
        self.step = step

    def begin(self) -> None:
        pass

    def finish(self, sums: torch.Tensor) -> None:
        self.step.flat.grads.mul_(2.0)
        sums.mul_(2.0)


def test_t05_an_all_reduce_over_two_equal_ranks_changes_nothing():
    alone, doubled = step_of(), step_of()
    doubled.reduction = Doubled(doubled)
    losses(alone, 3), losses(doubled, 3)
    torch.testing.assert_close(alone.flat.masters, doubled.flat.masters, rtol=1e-6, atol=1e-7)


def test_metrics_are_means_and_start_anew():
    step = step_of()
    step.run()
    first = step.metrics()
    assert set(first) == {"loss", "accept_len", "accuracy", "grad_norm", "lr", "skipped_steps"}
    assert 1.0 <= first["accept_len"] <= SIZE
    assert len(first["accuracy"]) == SIZE - 1
    assert first["loss"] == pytest.approx(math.log(VOCAB), rel=0.5)
    assert math.isnan(step.metrics()["loss"])


def test_a_trial_run_leaves_no_trace():
    step = step_of()
    before = {name: value.clone() for name, value in step.state().items()}
    weights = step.flat.masters.clone()
    step.armed.zero_()
    step.on_device()
    assert torch.equal(weights, step.flat.masters)
    assert all(torch.equal(value, before[name]) for name, value in step.state().items())
    assert math.isnan(step.metrics()["loss"])


def test_the_self_check_passes_leaves_no_trace_and_finds_faults():
    step = step_of()
    before = step.flat.masters.clone()
    assert self_check(step, 1e-6) == []
    assert torch.equal(before, step.flat.masters)
    assert int(step.number) == 0

    def frozen_rate() -> None:
        step.lr_factor.fill_(1.0)
        step.on_device()

    def frozen_anchors() -> None:
        step.number.zero_()
        step.on_device()

    stale = step.pack.features.clone().normal_()

    def stale_features() -> None:
        step.pack.features.copy_(stale)
        step.on_device()

    for fault, claim in (
        (frozen_rate, "a learning rate of 0"),
        (frozen_anchors, "each step draws other anchors"),
        (stale_features, "another pack gives another loss"),
    ):
        step.execute = fault
        assert any(claim in found for found in self_check(step, 1e-6)), claim


@pytest.mark.parametrize("labels", ["soft", "target_argmax"])
def test_other_labels_train(labels):
    step = step_of()
    step.rule = step.rule._replace(labels=labels)
    found = losses(step, 40)
    assert found[-1] < found[0]


def test_the_self_check_allows_a_replay_what_the_eager_lines_allow_themselves():
    step = step_of()
    eager, generator = step.on_device, torch.Generator().manual_seed(0)

    def any_order() -> None:
        eager()
        step.flat.masters.mul_(1.0 + 1e-3 * torch.randn(step.flat.size, generator=generator) * float(step.lr_factor))

    step.on_device = step.execute = any_order
    assert self_check(step, 1e-9) == []
    step.on_device = eager
    found = self_check(step, 1e-9)
    assert any("give the same losses" in claim for claim in found)
