"""The step on a GPU against its eager twin, the CPU reference and float64. Skipped without a CUDA device."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from configs.drafter_shape import FULL, SLIDING, DrafterShape
from configs.schema import AnchorsConfig, LossConfig, OptimizerConfig
from consumer import drafter as drafter_module
from consumer import float8
from consumer import loss as loss_module
from consumer.anchors import Anchors, random_keys, select_anchors
from consumer.attention import block_mask_of, dense_attention, flex_attention_of, flex_rows
from consumer.block_mask import closed_form_tables, dense_mask, intervals
from consumer.capture import captured, prepare
from consumer.drafter import Drafter
from consumer.frozen_head import FrozenHead
from consumer.optimizer import AdamW, AdamWRule
from consumer.selfcheck import self_check
from consumer.staging import PackTensors
from consumer.step import TrainStep
from gpu import products

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

TOKENS, HIDDEN, VOCAB = 512, 128, 999
LAYOUTS = {"sliding": (SLIDING, SLIDING), "mixed": (SLIDING, FULL), "full": (FULL, FULL)}


@pytest.fixture(autouse=True)
def _exact_products():
    torch.backends.cuda.matmul.allow_tf32 = False
    torch._dynamo.reset()


def shape_of(layout: str = "mixed", block_size: int = 8) -> DrafterShape:
    return DrafterShape(
        HIDDEN, 256, 2, 4, 2, 32, 3, block_size, LAYOUTS[layout], 64, True, 1e-6, 1e4, VOCAB - 1, VOCAB
    )  # fmt: skip


def pack_of(device: str, dtype: torch.dtype, supervised: float = 1.0, seed: int = 0) -> PackTensors:
    generator = torch.Generator().manual_seed(seed)
    start = torch.zeros(TOKENS, dtype=torch.int32)
    start[200:420], start[420:] = 200, -1
    mask = (torch.rand(TOKENS, generator=generator) < supervised) & (start >= 0)
    tensors = (
        torch.randint(0, VOCAB - 1, (TOKENS,), generator=generator, dtype=torch.int32),
        mask.to(torch.uint8),
        start,
        torch.randn(TOKENS, 3 * HIDDEN, generator=generator).to(dtype),
        torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype),
    )
    return PackTensors(*(tensor.to(device) for tensor in tensors))


def step_of(device: str, dtype: torch.dtype, layout: str = "mixed", **more) -> TrainStep:
    generator = torch.Generator().manual_seed(3)
    drafter = Drafter(shape_of(layout))
    drafter.reset_parameters(generator)
    weights = [(torch.randn(VOCAB, HIDDEN, generator=generator) * 0.1).to(device) for _ in range(2)]
    settings = {"labels": "hard", "decay": "exponential", "optimizer": "adamw", "supervised": 0.9, "floor": 0} | more
    return TrainStep(
        drafter.to(device),
        FrozenHead(*weights),
        pack_of(device, dtype, settings["supervised"]),
        AnchorsConfig(num=32, per_document_min=settings["floor"]),
        LossConfig(labels=settings["labels"], decay=settings["decay"], chunk_rows=100),
        OptimizerConfig(name=settings["optimizer"], lr=3e-3, warmup_share=0.0),
        100,
        7,
        dtype=dtype,
    )


def curve(step: TrainStep, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        step.run()
        _, loss, weight = step.latest.tolist()
        losses.append(loss / weight)
    return losses


@pytest.mark.parametrize("name", ["flex", "intervals"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_flex_and_interval_attention_equal_dense_attention(layout, name):
    from consumer.attention_kernels import interval_attention

    shape = shape_of(layout)
    pack = pack_of("cuda", torch.float32)
    keys = random_keys(torch.tensor(1, device="cuda"), torch.tensor(2, device="cuda"), TOKENS)
    anchors = select_anchors(pack.loss_mask, pack.doc_start, 32, 8, 0, keys)
    compiled = torch.compile(flex_rows, dynamic=False)
    rows = 32 * 8
    results = []
    fast = interval_attention if name == "intervals" else partial(flex_attention_of, flex=compiled)
    for make in (dense_attention, fast):
        torch.manual_seed(0)
        q, k, v = (
            torch.randn(length, heads, 32, device="cuda", requires_grad=True)
            for heads, length in ((4, rows), (2, TOKENS + rows), (2, TOKENS + rows))
        )
        attend = make(anchors, pack.doc_start, shape)
        out = attend(q, k, v, shape.layer_types[1])
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    for reference, found in zip(*results, strict=True):
        torch.testing.assert_close(found, reference, rtol=2e-3, atol=2e-4)


def test_tables_on_the_device_equal_torch_create_block_mask():
    from torch.nn.attention.flex_attention import create_block_mask

    for seed in range(10):
        shape = shape_of("mixed", 16)
        pack = pack_of("cuda", torch.float32, 0.5, seed)
        keys = random_keys(torch.tensor(seed, device="cuda"), torch.tensor(2, device="cuda"), TOKENS)
        anchors = select_anchors(pack.loss_mask, pack.doc_start, 32, 16, 0, keys)
        for kind in (SLIDING, FULL):
            seen = intervals(anchors, pack.doc_start, shape, kind)
            mask = dense_mask(anchors, pack.doc_start, shape, kind)
            theirs = create_block_mask(_reader(mask), None, None, *mask.shape, device="cuda")
            ours = closed_form_tables(seen, mask.shape[1])
            for name in ours._fields:
                assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
            assert block_mask_of(seen, mask.shape[1]).kv_indices.shape == theirs.kv_indices.shape


def _reader(mask: torch.Tensor):
    return lambda _batch, _head, query, key: mask[query, key]


@pytest.mark.parametrize("attention", ["flex", "intervals"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_graph_equals_eager_equals_cpu_in_float32(layout, attention):
    cpu = curve(step_of("cpu", torch.float32, layout), 6)
    eager, graph = step_of("cuda", torch.float32, layout), step_of("cuda", torch.float32, layout)
    assert prepare(eager, compile_parts=False, cuda_graph=False, say=pytest.fail) is False
    assert prepare(graph, compile_parts=True, cuda_graph=True, say=pytest.fail, attention=attention) is True
    eager_losses, graph_losses = curve(eager, 6), curve(graph, 6)
    assert eager_losses == pytest.approx(cpu, rel=1e-4)
    assert graph_losses == pytest.approx(cpu, rel=1e-4)
    assert graph.metrics()["accept_len"] == pytest.approx(eager.metrics()["accept_len"], rel=1e-2)


@pytest.mark.parametrize("decay", ["exponential", "dpace"])
@pytest.mark.parametrize("labels", ["hard", "soft", "target_argmax"])
def test_every_loss_replays_as_on_the_cpu(labels, decay):
    cpu = curve(step_of("cpu", torch.float32, labels=labels, decay=decay, floor=4), 3)
    graph = step_of("cuda", torch.float32, labels=labels, decay=decay, floor=4)
    assert prepare(graph, compile_parts=True, cuda_graph=True, say=pytest.fail)
    assert curve(graph, 3) == pytest.approx(cpu, rel=1e-4)


def test_muon_replays_as_eager():
    eager, graph = step_of("cuda", torch.float32, optimizer="muon"), step_of("cuda", torch.float32, optimizer="muon")
    prepare(eager, compile_parts=True, cuda_graph=False, say=pytest.fail)
    assert prepare(graph, compile_parts=True, cuda_graph=True, say=pytest.fail)
    assert curve(graph, 4) == pytest.approx(curve(eager, 4), rel=2e-3)


def test_bfloat16_curve_of_50_steps_stays_within_noise_of_the_cpu():
    """Noise: how far the CPU's own bfloat16 curve strays from its float32 one."""
    cpu, rounded = curve(step_of("cpu", torch.float32), 50), curve(step_of("cpu", torch.bfloat16), 50)
    graph = step_of("cuda", torch.bfloat16)
    assert prepare(graph, compile_parts=True, cuda_graph=True, say=pytest.fail)
    found = curve(graph, 50)
    noise = max(abs(a - b) / a for a, b in zip(cpu, rounded, strict=True))
    assert max(abs(a - b) / a for a, b in zip(cpu, found, strict=True)) < 1.5 * noise + 0.01
    assert found[-1] < 0.9 * found[0]


def test_self_check_passes_in_bfloat16_and_leaves_no_trace():
    step = step_of("cuda", torch.bfloat16)
    assert prepare(step, compile_parts=True, cuda_graph=True, say=pytest.fail)
    before = step.flat.masters.clone()
    assert self_check(step, 1e-3) == []
    assert torch.equal(before, step.flat.masters)
    assert int(step.number) == 0


@pytest.mark.parametrize("supervised", [0.0, 0.01, 0.05])
def test_few_anchors_give_no_nan(supervised):
    step = step_of("cuda", torch.bfloat16, supervised=supervised)
    assert prepare(step, compile_parts=True, cuda_graph=True, say=pytest.fail)
    for _ in range(3):
        step.run()
    assert bool(torch.isfinite(step.flat.masters).all())
    assert step.metrics()["skipped_steps"] == 0


def test_non_finite_features_skip_the_step_and_change_nothing():
    step = step_of("cuda", torch.bfloat16)
    assert prepare(step, compile_parts=True, cuda_graph=True, say=pytest.fail)
    before = step.flat.masters.clone()
    step.pack.features[100:110] = math.inf
    step.run()
    assert torch.equal(before, step.flat.masters)
    assert step.metrics()["skipped_steps"] == 1
    assert step.skipped_in_a_row == 1


def test_a_failed_capture_falls_back_to_eager_with_one_line():
    step, lines = step_of("cuda", torch.float32), []
    plain = step.attention

    def syncing(anchors: Anchors, doc_start: torch.Tensor, shape: DrafterShape):
        anchors.keep.sum().item()
        return plain(anchors, doc_start, shape)

    step.attention = syncing
    assert prepare(step, compile_parts=False, cuda_graph=True, say=lines.append) is False
    assert len(lines) == 1
    assert "going on without a CUDA graph" in lines[0]
    assert curve(step, 2) == pytest.approx(curve(step_of("cpu", torch.float32), 2), rel=1e-4)


def test_resume_copies_into_the_tensors_that_the_graph_reads():
    first, second = step_of("cuda", torch.bfloat16), step_of("cuda", torch.bfloat16)
    for step in (first, second):
        step.execute = captured_with_dense(step)
    curve(first, 3)
    weights = {name: value.clone() for name, value in first.drafter.state_dict().items()}
    second.load(weights, {name: value.clone() for name, value in first.state().items()})
    assert curve(second, 3) == pytest.approx(curve(first, 3), rel=1e-3)


def captured_with_dense(step: TrainStep):
    graph = captured(step, step.on_device)
    return graph.replay


def test_gradients_agree_with_float64():
    grads = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32)):
        step = step_of(device, dtype)
        if device == "cuda":
            prepare(step, compile_parts=True, cuda_graph=False, say=pytest.fail)
        step.flat.zero_norm_grads()
        step.number.fill_(1)
        step.forward(step.draw_anchors()).loss.backward()
        grads.append(step.flat.grads.double().cpu())
    assert float((grads[0] - grads[1]).norm() / grads[0].norm()) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_equal_their_plain_twins(dtype):
    from consumer import loss_kernels, optimizer_kernels

    torch.manual_seed(0)
    rows, columns = 33, 20011
    logits = (torch.randn(rows, columns, device="cuda") * 3).to(dtype)
    labels = torch.randint(0, columns, (rows,), device="cuda")
    labels[3] = -1
    weights = torch.rand(rows, device="cuda")
    statistics = loss_kernels.row_statistics(logits, labels)
    for found, wanted in zip(statistics, loss_module._Plain.row_statistics(logits, labels), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    found, wanted = logits.clone(), logits.clone()
    loss_kernels.hard_gradient(found, statistics[0], labels, weights)
    loss_module._Plain.hard_gradient(wanted, statistics[0], labels, weights)
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-6)
    results = []
    for device in ("cpu", "cuda"):
        step = step_of(device, torch.float32)
        step.flat.grads.copy_(torch.randn(step.flat.size, generator=torch.Generator().manual_seed(5)))
        optimizer = AdamW(step.flat, slice(0, step.flat.size), AdamWRule(weight_decay=0.1), 1000)
        step.control.values.copy_(torch.tensor([1e-2, 0.0, 0.5, 1.0, 0.1, 0.05]))
        optimizer.step(step.control)
        results.append(step.flat.masters.cpu())
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)
    assert optimizer_kernels.adamw is not None


def test_pieces_as_kernels_equal_the_plain_functions():
    from consumer import piece_kernels

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    generator = torch.Generator("cuda").manual_seed(0)
    angle = random(100 + 96, 16).repeat(1, 2)
    cases = {
        "rms_norm": ([random(96, 640), random(640)], [1e-6]),
        "add_norm": ([random(96, 640), random(96, 640), random(640)], [1e-6]),
        "gated": ([random(96, 2 * 1100)], []),
        "spread": ([random(13, 2100)], [8]),
        "without_anchors": ([random(96, 2100)], [8]),
        "heads": ([random(96, 8 * 32), random(100, 4 * 32), random(32), random(32)], [angle.cos(), angle.sin(), 1e-6]),
    }
    for name, (inputs, fixed) in cases.items():
        results = []
        for module in (drafter_module, piece_kernels):
            leaves = [value.clone().requires_grad_() for value in inputs]
            out = getattr(module, name)(*leaves, *fixed)
            outs = list(out) if isinstance(out, tuple) else [out]
            weights = [torch.linspace(-1, 1, value.numel(), device="cuda").view_as(value) for value in outs]
            loss = sum((value * weight).sum() for value, weight in zip(outs, weights, strict=True))
            results.append([*outs, *torch.autograd.grad(loss, leaves)])
        for wanted, found in zip(*results, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=2e-4, msg=name)


def test_measured_products_equal_torch_and_say_what_they_gained(monkeypatch):
    monkeypatch.setattr(products, "LEAST_FLOP", 1e6)
    monkeypatch.setattr(products, "SHORT_MS", 0.01)
    monkeypatch.setattr(products, "LONG_MS", 0.1)
    a, b, c = (torch.randn(256, 256, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    wide = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)

    def work() -> list[torch.Tensor]:
        return [
            products.multiply(a, b),
            products.multiply(a, b.t()),
            products.multiply(a.t(), wide),
            products.multiply(a, b, c.clone(), add=True),
            products.multiply(wide[:, 256:], b),
        ]

    plain = work()
    try:
        assert products.tuned(lambda: work() and None, pytest.fail) == 5
        for found, wanted in zip(work(), plain, strict=True):
            torch.testing.assert_close(found.float(), wanted.float(), rtol=2e-2, atol=0.2)
        assert all(best <= first for first, best in products.measured().values())
        assert len(products.measured()) == 5
    finally:
        products.forget()


@pytest.mark.skipif(not float8.supported(torch.device("cuda")), reason="needs 8-bit products")
def test_float8_products_equal_those_of_the_cpu_and_replay_as_eager():
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(64, 256, generator=generator), torch.randn(128, 256, generator=generator)
    results = []
    sides = [float8.by_row(value.bfloat16()) for value in (x, weight)]  # a device may round a few values the other way
    for device in ("cpu", "cuda"):
        rows, scale = float8.by_row(weight.to(device, torch.bfloat16))
        product = float8.multiply(*((side.to(device), by.to(device)) for side, by in sides), torch.bfloat16)
        turned, one = float8.transposed(weight.to(device, torch.bfloat16), scale)
        results.append([product.float().cpu(), turned.float().cpu() * one.cpu(), rows.float().cpu() * scale.cpu()])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0.1, atol=0.15)
    step = step_of("cuda", torch.bfloat16)
    step.drafter.use_float8()
    assert prepare(step, compile_parts=True, cuda_graph=True, say=pytest.fail)
    assert self_check(step, 1e-3) == []
    found = curve(step, 30)
    assert found[-1] < 0.95 * found[0]


def test_metrics_arrive_without_a_wait_and_are_those_of_their_steps():
    step = step_of("cuda", torch.bfloat16)
    assert prepare(step, compile_parts=True, cuda_graph=True, say=pytest.fail)
    readings = []
    for _ in range(3):
        step.run()
        readings.append(step.start_reading())
    torch.cuda.synchronize()
    assert all(reading.ready for reading in readings)
    assert [reading.step for reading in readings] == [1, 2, 3]
    assert len({float(reading.result()["loss"]) for reading in readings}) == 3
    assert math.isnan(step.metrics()["loss"])
