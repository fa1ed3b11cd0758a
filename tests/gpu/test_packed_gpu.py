"""Attention of a packed row on a GPU: cuDNN for long documents and FlashAttention for the rest, against float32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from producer import packed
from producer.packed_cuda import LONG_DOCUMENT, long_from

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LENGTHS = [1300, 640, 513, 200, 90, 3]


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
