"""Attention of a packed row on a GPU: long documents one by one through cuDNN, the rest in one FlashAttention call.

torch's variable-length FlashAttention (2) reaches half of what cuDNN does on a Hopper GPU: a document of 4096 tokens
with 40 heads takes 0.61 ms against 0.32, one of 1024 takes 0.066 against 0.037. cuDNN plans each shape once (40 ms), so
a document is read with its length rounded up, and all lengths are planned at the first use: what follows a document in
the row is behind every token of it, and a causal token does not look there. Packs hold their longest documents first,
so the rest of a row is one piece.

Shapes: T tokens of the row, h heads, g key-value heads, d of a head.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu.device import to_device

_log = logging.getLogger("producer")
LONG_DOCUMENT = 512
"""Tokens from which a document is worth a call of its own."""
STEP = 128
"""Its length is rounded up to a multiple of this: at most 64 shapes in a pack of 8192."""
HOPPER = (9, 0)
ALLOWED_DIFFERENCE = 2e-2


class Apart(NamedTuple):
    """A document attended by itself: where it begins, its tokens, and the tokens read."""

    start: int
    tokens: int
    read: int


def documents_apart(lengths: Sequence[int], long_from: int | None) -> list[Apart]:
    """Return the leading documents of a row with at least `long_from` tokens whose rounded length is in the row."""
    found: list[Apart] = []
    start, end = 0, sum(lengths)
    for length in lengths:
        read = -(-length // STEP) * STEP
        if long_from is None or length < long_from or start + read > end:
            break
        found.append(Apart(start, length, read))
        start += length
    return found


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, apart: Sequence[Apart], rest: Sequence[int], starts: Tensor
) -> Tensor:
    """Attend causally inside each document; q [T, h, d], k and v [T, g, d] -> [T, h, d], contiguous.

    `apart`: the leading documents taken one by one. `rest`: lengths of the others, `starts` [len(rest) + 1] where they
    begin and end, counted from the first of them.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    planned = bool(apart) and _plan(q, k, v, scale)
    for start, tokens, read in apart:
        if planned:
            part = slice(start, start + read)
            out[start : start + tokens] = dense(q[part], k[part], v[part], scale)[:tokens]
        else:
            part, ends = slice(start, start + tokens), torch.tensor([0, tokens], dtype=torch.int32)
            out[part] = varlen(q[part], k[part], v[part], to_device(ends, q.device), tokens, scale, None)
    if rest:
        first = sum(each.tokens for each in apart)
        out[first:] = varlen(q[first:], k[first:], v[first:], starts, max(rest), scale, None)
    return out


_planned: dict[object, bool] = {}


def _plan(q: Tensor, k: Tensor, v: Tensor, scale: float) -> bool:
    """Let cuDNN plan every length for rows that lie in memory as these do, once: 2.7 s for rows of 8192 tokens.

    False: it refused one, and FlashAttention has to do.
    """
    rows = (q.device, q.dtype, *(size for each in (q, k, v) for size in (each.shape, each.stride())))
    if rows not in _planned:
        try:
            for read in range(LONG_DOCUMENT, len(q) + 1, STEP):
                dense(q[:read], k[:read], v[:read], scale)
            _planned[rows] = True
        except RuntimeError as error:
            _planned[rows] = False
            _log.warning("long documents | cudnn=refused attention=flash | %s", str(error).splitlines()[0])
    return _planned[rows]


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """One document through cuDNN; q [n, h, d], k and v [n, g, d] -> [n, h, d]."""
    rows = [tensor.transpose(0, 1)[None] for tensor in (q, k, v)]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(rows[0], rows[1], rows[2], is_causal=True, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def varlen(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, scale: float, window: int | None) -> Tensor:
    """Documents that begin and end at `starts` through FlashAttention; a token sees `window` tokens at most, or all."""
    starts = starts if starts.device == q.device else starts.to(q.device)
    sides: dict[str, Any] = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
    out: Tensor = torch.ops.aten._flash_attention_forward(
        q, k, v, starts, starts, longest, longest, 0.0, True, False, scale=scale, **sides
    )[0]
    return out


def long_from(config: Any, dtype: torch.dtype, device: torch.device) -> int | None:
    """Return from how many tokens on documents are attended apart on this GPU: None where cuDNN is no gain or no help.

    `config`: the target's, for its heads.
    """
    heads = int(getattr(config, "num_attention_heads", 0))
    if not heads or device.type != "cuda":
        return None
    size = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    return _long_from(heads, int(getattr(config, "num_key_value_heads", None) or heads), size, dtype, device)


@functools.cache
@torch.inference_mode()
def _long_from(heads: int, groups: int, size: int, dtype: torch.dtype, device: torch.device) -> int | None:
    """Try one document both ways and compare."""
    if torch.cuda.get_device_capability(device) < HOPPER or dtype == torch.float32:
        return None
    tokens = LONG_DOCUMENT + STEP
    try:
        q, k, v = (torch.randn(tokens, count, size, dtype=dtype, device=device) for count in (heads, groups, groups))
        starts = torch.tensor([0, tokens], dtype=torch.int32, device=device)
        ours, theirs = dense(q, k, v, size**-0.5), varlen(q, k, v, starts, tokens, size**-0.5, None)
        same = bool((ours - theirs).abs().max() <= ALLOWED_DIFFERENCE * theirs.abs().max())
    except RuntimeError:
        return None
    return LONG_DOCUMENT if same else None
