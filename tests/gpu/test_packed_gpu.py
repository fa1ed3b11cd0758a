"""A packed row on a GPU: attention against float32, recurrent layers against plain torch and each document alone."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from producer import packed, packed_recurrent, selfcheck
from producer.packed_cuda import LONG_DOCUMENT, long_from
from producer.packed_recurrent import Recurrent
from producer.trunk import Target
from tests.helpers.families import VOCAB, make_family

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LENGTHS = [1300, 640, 513, 200, 90, 3]
SHORT = [65, 1, 2, 130, 3, 64, 4, 63]
GPU = torch.device("cuda")
needs_fla = pytest.mark.skipif(
    importlib.util.find_spec("fla") is None, reason="needs flash-linear-attention (pip install flash-linear-attention)"
)


class Config:
    """The heads of a target."""

    def __init__(self, heads: int, groups: int, size: int) -> None:
        self.num_attention_heads, self.num_key_value_heads, self.head_dim = heads, groups, size


@pytest.mark.parametrize("sizes", [(8, 2, 128), (6, 1, 256), (9, 3, 64)])
@pytest.mark.parametrize("window", [packed.WHOLE_CONTEXT, 300])
@torch.inference_mode()
def test_each_document_attends_to_itself_alone(sizes: tuple[int, int, int], window: int) -> None:
    device = torch.device("cuda")
    heads, groups, size = sizes
    found = long_from(Config(*sizes), torch.bfloat16, device)
    if torch.cuda.get_device_capability() >= (9, 0):
        assert found == LONG_DOCUMENT
    # as transformers hands them over: heads first in memory
    q, k, v = (
        torch.randn(count, sum(LENGTHS), size, dtype=torch.bfloat16, device=device).transpose(0, 1)
        for count in (heads, groups, groups)
    )
    try:
        packed.BOUNDS.long_from = found
        packed.BOUNDS.set(LENGTHS, device)
        ours = packed.attend_packed(q, k, v, size**-0.5, window)
    finally:
        packed.BOUNDS.long_from = None
    assert ours.is_contiguous()
    start = 0
    for length in LENGTHS:
        rows = [tensor[start : start + length].transpose(0, 1)[None].float() for tensor in (q, k, v)]
        seen = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        if window != packed.WHOLE_CONTEXT:
            seen = seen.triu(1 - window)
        exact = F.scaled_dot_product_attention(rows[0], rows[1], rows[2], attn_mask=seen, enable_gqa=True)[0]
        torch.testing.assert_close(ours[start : start + length].float(), exact.transpose(0, 1), atol=2e-2, rtol=2e-2)
        start += length


@pytest.mark.parametrize("lengths", [SHORT, [1], [1] * 70, [300, 29], [4096, 900, 1, 3195]])
@pytest.mark.parametrize(
    ("channels", "taps", "gap"), [(6, 4, 0), (300, 2, 0), (300, 8, 20), (1024, 4, 0), (768, 3, 64)]
)
@pytest.mark.parametrize(("biased", "silu", "dtype"), [(True, True, "bfloat16"), (False, False, "float32")])
@torch.inference_mode()
def test_the_kernel_is_the_plain_convolution(
    lengths: list[int], channels: int, taps: int, gap: int, biased: bool, silu: bool, dtype: str
) -> None:
    kind, tolerance = getattr(torch, dtype), 2e-2 if dtype == "bfloat16" else 1e-5
    generator = torch.Generator(GPU).manual_seed(sum(lengths))
    draw: Any = lambda *shape: torch.randn(*shape, generator=generator, device=GPU).to(kind)  # noqa: E731
    x, weight = draw(1, sum(lengths), channels + gap)[:, :, :channels], draw(channels, taps)
    bias = draw(channels) if biased else None
    packed.BOUNDS.set(lengths, GPU)
    found = packed_recurrent.convolution(x.transpose(1, 2), weight, bias, "silu" if silu else None).transpose(1, 2)
    assert found.is_contiguous()
    expected = packed_recurrent.plain_convolution(x, weight, bias, silu)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    if len(lengths) > 1:
        first = lengths[0]
        other = x.clone()
        other[:, :first] = float("nan")
        found_other = packed_recurrent.packed_convolution(other, weight, bias, silu)
        assert torch.equal(found_other[:, first:], found[:, first:])
        assert found_other[:, :first].isnan().all()


@needs_fla
@torch.inference_mode()
def test_the_library_takes_few_heads_for_many_values_and_unit_rows_made_before_it() -> None:
    module, heads, repeats, size = "transformers.models.qwen3_5.modeling_qwen3_5", 2, 3, 64
    importlib.import_module(module)
    generator = torch.Generator(GPU).manual_seed(0)
    draw: Any = lambda *shape: torch.randn(1, sum(SHORT), *shape, generator=generator, device=GPU)  # noqa: E731
    query, key = (draw(heads, size).bfloat16().repeat_interleave(repeats, dim=2) for _ in range(2))
    value, beta = draw(heads * repeats, size).bfloat16(), draw(heads * repeats).sigmoid().bfloat16()
    g = -draw(heads * repeats).sigmoid() * 0.1  # a state that lasts
    packed.BOUNDS.set(SHORT, GPU)
    many = packed_recurrent.packed_delta_rule(query, key, value, g, beta, True, module)
    rule = packed_recurrent._delta_rule_of(Recurrent(module, repeats))
    few, _ = rule(query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=True)
    assert selfcheck.row_difference(few[0].flatten(1), many[0].flatten(1)) < 0.01


@needs_fla
@pytest.mark.parametrize("compiled", [True, False])
def test_each_document_of_a_packed_hybrid_equals_itself_alone(compiled: bool) -> None:
    torch._dynamo.reset()
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 6}
    sizes = {"hidden_size": 256, "head_dim": 64, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
    target, alone = (
        Target(make_family("qwen3_5", **sizes, **heads).to(GPU, torch.bfloat16), (0, 2, 4)) for _ in range(2)
    )
    target.use_packed()
    if compiled:
        target.compile(fullgraph=True)
    ids = torch.randint(4, VOCAB, (sum(SHORT),), generator=torch.Generator().manual_seed(3)).to(GPU)
    taps, _ = target.forward_packed(ids, SHORT)
    start = 0
    for length, document in zip(SHORT, ids.split(SHORT), strict=True):
        for found, one in zip(taps, selfcheck.alone(alone, document.tolist())[0], strict=True):
            assert selfcheck.row_difference(found[0, start : start + length], one) < 0.05
        start += length
