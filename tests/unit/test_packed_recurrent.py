"""Hybrid targets read packed: convolution and recurrence of each document as if it were alone, on any release."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from producer import packed_recurrent, selfcheck
from producer.packed import BOUNDS, CannotPack
from producer.packed_recurrent import Recurrent
from producer.target import TargetError
from producer.trunk import Target
from tests.helpers.families import VOCAB, make_family

CPU = torch.device("cpu")
TAPS = (0, 2, 4)
LENGTHS = (65, 1, 2, 130, 3, 64, 4, 63)
HYBRIDS = ("qwen3_5", "qwen3_next")
MODULE = "transformers.models.qwen3_5.modeling_qwen3_5"
MODULES = (MODULE, "transformers.models.qwen3_next.modeling_qwen3_next")
interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None,
    reason="needs Triton and TRITON_INTERPRET=1 (tests/gpu runs the kernel on a GPU)",
)


def random_ids(lengths: Sequence[int]) -> Tensor:
    return torch.randint(4, VOCAB, (sum(lengths),), generator=torch.Generator().manual_seed(3))


def packed_target(family: str = "qwen3_5") -> Target:
    target = Target(make_family(family), TAPS)
    target.use_packed()
    return target


@pytest.mark.parametrize("lengths", [LENGTHS, tuple(reversed(LENGTHS)), (200,), (1, 1, 1)])
@pytest.mark.parametrize("family", HYBRIDS)
def test_each_document_of_a_packed_hybrid_equals_itself_alone(family: str, lengths: Sequence[int]) -> None:
    target, ids = packed_target(family), random_ids(lengths)
    taps, last = target.forward_packed(ids, list(lengths))
    start = 0
    for length, document in zip(lengths, ids.split(list(lengths)), strict=True):
        expected, final = selfcheck.alone(target, document.tolist())
        for found, one in zip([*taps, last], [*expected, final], strict=True):
            assert selfcheck.row_difference(found[0, start : start + length], one) < 1e-5
        start += length


@pytest.mark.parametrize("family", HYBRIDS)
def test_h10_another_first_document_changes_no_other(family: str) -> None:
    target, ids = packed_target(family), random_ids(LENGTHS)
    first, _ = target.forward_packed(ids, list(LENGTHS))
    first = [tap.clone() for tap in first]
    other = torch.cat([VOCAB - 1 - ids[: LENGTHS[0]], ids[LENGTHS[0] :]])
    second, _ = target.forward_packed(other, list(LENGTHS))
    for one, two in zip(first, second, strict=True):
        assert torch.equal(one[0, LENGTHS[0] :], two[0, LENGTHS[0] :])
        assert not torch.equal(one[0, : LENGTHS[0]], two[0, : LENGTHS[0]])


@pytest.mark.parametrize("channels_side_by_side", [True, False])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("taps", "activation"), [(4, "silu"), (2, None), (1, "swish"), (9, "silu")])
def test_the_convolution_is_torchs_of_each_document(
    taps: int, activation: str | None, biased: bool, channels_side_by_side: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(1, 6, sum(LENGTHS), generator=generator), torch.randn(6, taps, generator=generator)
    bias = torch.randn(6, generator=generator) if biased else None
    BOUNDS.set(list(LENGTHS), CPU)
    parts = [
        F.conv1d(F.pad(one, (taps - 1, 0)), weight[:, None], bias, groups=6) for one in x.split(list(LENGTHS), dim=-1)
    ]
    expected = torch.cat(parts, dim=-1)
    expected = F.silu(expected) if activation else expected
    if channels_side_by_side:  # as the layers hand it over
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    found = packed_recurrent.convolution(x, weight, bias, activation=activation)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert found.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiler_is_told_the_truth_about_the_convolution(dtype: torch.dtype, biased: bool) -> None:
    BOUNDS.set(list(LENGTHS), CPU)
    wide = torch.randn(1, sum(LENGTHS), 9, dtype=dtype)
    bias = torch.randn(6, dtype=dtype) if biased else None
    for x in (wide[:, :, :6], wide[:, :, :6].contiguous()):
        words = (x, torch.randn(6, 4, dtype=dtype), bias, True)
        torch.library.opcheck(packed_recurrent.packed_convolution, words)


@interpreted
@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 70), min_size=1, max_size=8), st.integers(1, 300), st.integers(2, 8), st.data(),
)  # fmt: skip
def test_the_kernel_is_the_plain_convolution(lengths: list[int], channels: int, taps: int, data: st.DataObject) -> None:
    from producer import recurrent_kernels

    biased, silu, half, gap = (data.draw(st.booleans(), name) for name in ("biased", "silu", "half", "gap"))
    dtype, tolerance = (torch.bfloat16, 2e-2) if half else (torch.float32, 1e-5)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    x = torch.randn(1, sum(lengths), channels + 16 * gap, generator=generator).to(dtype)[:, :, :channels]
    weight = torch.randn(channels, taps, generator=generator).to(dtype)
    bias = torch.randn(channels, generator=generator).to(dtype) if biased else None
    BOUNDS.set(lengths, CPU)
    found = recurrent_kernels.convolve(x, weight, bias, BOUNDS.positions, silu)
    expected = packed_recurrent.plain_convolution(x, weight, bias, silu)
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_a_number_that_is_not_finite_stays_in_its_document() -> None:
    x = torch.randn(1, 6, 8)
    x[:, :, 4] = float("nan")
    BOUNDS.set([5, 3], CPU)
    assert packed_recurrent.convolution(x, torch.randn(6, 4))[:, :, 5:].isfinite().all()


@pytest.fixture
def rules_anew() -> Iterator[None]:
    """Stand-ins made in a test see what the test has put in other functions' places, and no later test sees them."""
    packed_recurrent._delta_rule_of.cache_clear()
    yield
    packed_recurrent._delta_rule_of.cache_clear()


def grouped(heads: int, repeats: int) -> dict[str, Tensor]:
    """What a layer gives its rule on LENGTHS: heads of queries and keys repeated, each `repeats` times in a row."""
    BOUNDS.set(list(LENGTHS), CPU)
    generator = torch.Generator().manual_seed(1)
    shape = (1, sum(LENGTHS), heads * repeats)
    few = [torch.randn(*shape[:2], heads, 8, generator=generator) for _ in range(2)]
    query, key = (each.repeat_interleave(repeats, dim=2) for each in few)
    value = torch.randn(*shape, 8, generator=generator)
    g = -torch.rand(shape, generator=generator) * 0.1  # a state that lasts
    return {"query": query, "key": key, "value": value, "g": g, "beta": torch.rand(shape, generator=generator)}


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.usefixtures("rules_anew")
def test_heads_that_are_copies_may_be_left_out(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module(module)
    asked: list[tuple[int, int, bool]] = []
    delta_rule = packed_recurrent._delta_rule

    def watched(q: Tensor, k: Tensor, v: Tensor, *words: Any) -> Tensor:
        asked.append((q.shape[2], k.shape[2], all(each.is_contiguous() for each in (q, k, v))))
        return delta_rule(q, k, v, *words)

    monkeypatch.setattr(packed_recurrent, "_delta_rule", watched)
    words = grouped(heads=2, repeats=3)
    expected, found, other = (
        packed_recurrent._delta_rule_of(Recurrent(module, repeats))(**words, use_qk_l2norm_in_kernel=True)[0]
        for repeats in (1, 3, 2)
    )
    assert asked == [(6, 6, True), (2, 2, True), (3, 3, True)]
    assert torch.equal(found, expected)
    assert selfcheck.row_difference(other[0].flatten(1), expected[0].flatten(1)) > 0.1  # the order of heads matters


@pytest.mark.parametrize("family", HYBRIDS)
def test_the_rule_gets_no_copies_of_heads(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, asked = packed_target(family), set()
    delta_rule = packed_recurrent._delta_rule

    def watched(q: Tensor, k: Tensor, v: Tensor, *words: Any) -> Tensor:
        asked.add((q.shape[2], k.shape[2], v.shape[2]))
        return delta_rule(q, k, v, *words)

    monkeypatch.setattr(packed_recurrent, "_delta_rule", watched)
    target.forward_packed(random_ids(LENGTHS), list(LENGTHS))
    assert asked == {(2, 2, 4)}


def test_heads_are_left_out_only_where_it_is_known_that_they_are_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    known = packed_recurrent._repeats
    repeats = {packed_recurrent.REPEAT}
    assert known(SimpleNamespace(num_k_heads=2, num_v_heads=6), repeats) == 3
    assert known(SimpleNamespace(num_k_heads=2, num_v_heads=6), ()) == 1
    assert known(SimpleNamespace(num_k_heads=4, num_v_heads=6), repeats) == 1
    assert known(SimpleNamespace(num_v_heads=6), repeats) == 1
    target = Target(make_family("qwen3_5"), TAPS)
    kinds = target.trunk.config.layer_types
    monkeypatch.setattr(packed_recurrent, "REPEAT", packed_recurrent.CONVOLUTION)  # so that every release repeats
    assert packed_recurrent.modules_of(target.layers, kinds) == (Recurrent(MODULE, 2),)
    linear: Any = target.layers[1].linear_attn
    linear.num_k_heads = 1
    assert packed_recurrent.modules_of(target.layers, kinds) == (Recurrent(MODULE, 1),)


@pytest.mark.usefixtures("rules_anew")
def test_on_a_gpu_the_library_gets_few_heads_of_unit_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    words = grouped(heads=2, repeats=3)
    expected = packed_recurrent._delta_rule_of(Recurrent(MODULE, 1))(**words, use_qk_l2norm_in_kernel=True)[0]
    packed_recurrent._delta_rule_of.cache_clear()

    def library(q: Tensor, k: Tensor, v: Tensor, **words: Any) -> tuple[Tensor, None]:
        assert q.shape[2] == k.shape[2] == 2
        assert not words["use_qk_l2norm_in_kernel"]
        for rows in (q, k):
            torch.testing.assert_close(rows.norm(dim=-1), torch.ones(rows.shape[:-1]), rtol=1e-5, atol=1e-5)
        with monkeypatch.context() as cpu:
            cpu.setattr(packed_recurrent, "flash_linear_attention", lambda: None)
            return packed_recurrent._delta_rule(q, k, v, words["g"], words["beta"], False, MODULE), None

    monkeypatch.setattr(packed_recurrent, "flash_linear_attention", lambda: library)
    monkeypatch.setattr(packed_recurrent, "_chunk_indices", lambda _: None)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    found = packed_recurrent._delta_rule_of(Recurrent(MODULE, 3))(**words, use_qk_l2norm_in_kernel=True)[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_packed_equals_rows_and_the_modules_own_functions_are_back_after_a_forward() -> None:
    target = packed_target()
    import transformers.models.qwen3_5.modeling_qwen3_5 as module

    own = module.causal_conv1d_fn, module.torch_chunk_gated_delta_rule
    with pytest.raises(RuntimeError):
        target.forward_packed(random_ids([8]), [5, 2])  # lengths that are not the row's
    assert own == (module.causal_conv1d_fn, module.torch_chunk_gated_delta_rule)
    ids = random_ids([24])
    packed, _ = target.forward_packed(ids, [24])
    with target.in_rows():
        rows, _ = target.forward(ids[None])
    assert target.is_packed
    for one, two in zip(packed, rows, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)


def test_compiled_a_hybrid_is_two_graphs_for_all_packs() -> None:
    torch._dynamo.reset()
    target = packed_target()
    rows = ([*LENGTHS], [300, 32], [332], [2, 300, 30])
    expected = [[tap.clone() for tap in target.forward_packed(random_ids(row), row)[0]] for row in rows]
    target.compile(backend="aot_eager", fullgraph=True)
    torch._dynamo.utils.counters.clear()
    for row, taps in zip(rows, expected, strict=True):
        for one, two in zip(target.forward_packed(random_ids(row), row)[0], taps, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # a linear layer's and an attention layer's
    target.uncompile()
    torch._dynamo.reset()


@pytest.mark.parametrize("part", ["convolution", "rule"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_h10_a_leak_of_either_function_fails_the_start_up_check(
    part: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target(make_family("qwen3_5").to(dtype), TAPS)
    reference = selfcheck.read_alone(target)
    target.use_packed()
    name = str(dtype).removeprefix("torch.")
    assert all(change == 0 for one in reference for change in one.unsteady)
    selfcheck.check_target(target, reference, name, 96)
    import transformers.models.qwen3_5.modeling_qwen3_5 as module

    if part == "convolution":
        monkeypatch.setattr(packed_recurrent, "convolution", module.causal_conv1d_fn)
    else:
        monkeypatch.setattr(packed_recurrent, "_delta_rule_of", lambda _: module.torch_chunk_gated_delta_rule)
    with pytest.raises(TargetError, match="document 1, tap"):
        selfcheck.check_target(target, reference, name, 96)


def test_h10_a_recurrent_layer_of_a_kind_we_do_not_know_is_never_packed() -> None:
    target = Target(make_family("qwen3_5"), TAPS)
    linear: Any = target.layers[1].linear_attn

    class Other(type(linear)):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, **_words: Any) -> Tensor:
            return hidden_states.cumsum(1)

    linear.__class__ = Other
    with pytest.raises(CannotPack, match="layer 1 is recurrent in a way of its own: Other"):
        target.use_packed()
    assert not target.is_packed
    with pytest.raises(CannotPack, match="layer 0"):
        packed_recurrent.modules_of([torch.nn.Linear(1, 1)], ["linear_attention"])


@pytest.mark.parametrize("tokens", [1200, 700, 30])
def test_kernels_are_timed_on_a_row_of_the_packs_length(tokens: int) -> None:
    target = Target(make_family("qwen3_5"), TAPS)
    assert packed_recurrent.tune(target.layers, tokens, target.hidden)
    assert sum(BOUNDS.lengths) == len(BOUNDS.positions) == tokens
    assert 0 not in BOUNDS.lengths
    assert not packed_recurrent.tune(Target(make_family("llama"), TAPS).layers, tokens, target.hidden)


def test_chunks_are_counted_by_document() -> None:
    pairs = packed_recurrent.chunk_pairs([65, 1, 64, 129]).tolist()
    assert pairs == [[0, 0], [0, 1], [1, 0], [2, 0], [3, 0], [3, 1], [3, 2]]


def test_on_a_gpu_the_library_gets_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def library(q: Tensor, k: Tensor, v: Tensor, **words: Any) -> tuple[Tensor, None]:  # noqa: ARG001
        asked.update(words)
        return torch.zeros_like(v), None

    monkeypatch.setattr(packed_recurrent, "flash_linear_attention", lambda: library)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    BOUNDS.set([65, 7], CPU)
    on_gpu: Any = SimpleNamespace(is_cuda=True, device=CPU)
    value = torch.ones(1, 72, 2, 4)
    packed_recurrent._delta_rule(on_gpu, value, value, value, value, True, MODULE)
    assert asked["cu_seqlens"].tolist() == [0, 65, 72]
    assert asked["chunk_indices"].tolist() == [[0, 0], [0, 1], [1, 0]]
    assert (asked["chunk_size"], asked["use_qk_l2norm_in_kernel"]) == (packed_recurrent.CHUNK, True)


def test_a_hybrid_on_a_gpu_without_the_library_is_warned_about_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    hybrid, plain = (Target(make_family(name), TAPS).layers for name in ("qwen3_5", "llama"))
    gpu = torch.device("cuda")
    monkeypatch.setattr(packed_recurrent, "_library", lambda: (None, "No module named 'fla'"))
    said = packed_recurrent.warning(hybrid, gpu)
    assert said is not None
    assert "No module named 'fla'" in said
    assert said.endswith('pip install -e ".[hybrid]"')
    assert "\n" not in said
    assert packed_recurrent.warning(plain, gpu) is None
    assert packed_recurrent.warning(hybrid, CPU) is None
    monkeypatch.setattr(packed_recurrent, "_library", lambda: (lambda: None, ""))
    assert packed_recurrent.warning(hybrid, gpu) is None
