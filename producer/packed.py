"""Packed reading: documents laid end to end in one row, each attending to itself alone. No padding, one shape.

Attention is the only place where tokens of a softmax target meet, so a target whose attention is cut by document reads
a whole pack exactly. transformers lets a name stand for an attention function; ours is `NAME`. On a GPU it is cuDNN and
variable-length FlashAttention (packed_cuda.py), elsewhere one SDPA call per document. Where it cannot say what a layer
asks for (chunked attention, soft caps, sinks) it is not used: rows are (producer/row_plan.py). Linear layers of a
hybrid target are cut by producer/packed_recurrent.py.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.masking_utils import AttentionMaskInterface

from gpu.device import to_device
from producer import packed_cuda

NAME = "dflash_packed"
WHOLE_CONTEXT = -1
KINDS = {"full_attention", "sliding_attention"}
LINEAR = "linear_attention"
UNKNOWN_WORDS = ("softcap", "s_aux", "position_bias", "head_mask")


class CannotPack(Exception):
    """A layer asks for attention that packed reading does not do; the target is read in rows instead."""


class Bounds:
    """Where the documents of the current row begin and end. Filled before each forward, read by every layer."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.starts = torch.zeros(1, dtype=torch.int32)
        self.long_from: int | None = None
        """Tokens from which a leading document is attended apart (packed_cuda.py); None: never."""
        self.apart: list[packed_cuda.Apart] = []
        self.rest_starts = self.starts
        self.positions = torch.zeros(0, dtype=torch.int32)  # [T]: tokens of the same document before each

    def set(self, lengths: list[int], device: torch.device) -> None:
        """Describe a row: `lengths` in tokens, adding up to the row's."""
        self.lengths = lengths
        self.starts = self.rest_starts = _ends(lengths, device)
        self.apart = packed_cuda.documents_apart(lengths, self.long_from)
        if self.apart:
            self.rest_starts = _ends(self.rest, device)
        self.positions = to_device(torch.cat([torch.arange(length, dtype=torch.int32) for length in lengths]), device)

    @property
    def rest(self) -> list[int]:
        """Lengths of the documents that are not attended apart."""
        return self.lengths[len(self.apart) :]


def _ends(lengths: list[int], device: torch.device) -> Tensor:
    return to_device(torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32), device)


BOUNDS = Bounds()
"""One process has one target, and layers are called one after another: so one record serves."""


@torch.library.custom_op("dflash_ring::attend_packed", mutates_args=())
def attend_packed(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
    """Attend causally inside each document of BOUNDS.

    Shapes: q [T, heads, d], k and v [T, kv heads, d] -> [T, heads, d], contiguous. `window`: a token sees at
    most this many tokens, itself included; WHOLE_CONTEXT for all. An operator of its own, so that torch.compile need
    not know BOUNDS.
    """
    if q.is_cuda:
        if window == WHOLE_CONTEXT or window >= max(BOUNDS.lengths):
            return packed_cuda.attend(q, k, v, scale, BOUNDS.apart, BOUNDS.rest, BOUNDS.rest_starts)
        return packed_cuda.varlen(q, k, v, BOUNDS.starts, max(BOUNDS.lengths), scale, window).contiguous()
    return _one_by_one(q, k, v, scale, window)


def _one_by_one(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
    parts = []
    documents = zip(*(tensor.split(BOUNDS.lengths) for tensor in (q, k, v)), strict=True)
    for one_q, one_k, one_v in documents:
        tokens = one_q.shape[0]
        mask = None
        if window != WHOLE_CONTEXT and tokens > window:
            distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
            mask = (distance >= 0) & (distance < window)
        q4, k4, v4 = (tensor.transpose(0, 1)[None] for tensor in (one_q, one_k, one_v))
        out = F.scaled_dot_product_attention(
            q4, k4, v4, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


@attend_packed.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:  # noqa: ARG001
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **words: Any,
) -> tuple[Tensor, None]:
    """Stand in for transformers' attention functions. Shapes: query [1, heads, T, d] -> [1, T, heads, d].

    Raises CannotPack for what it does not do.
    """
    asked = [word for word in UNKNOWN_WORDS if words.get(word) is not None]
    if asked or attention_mask is not None or dropout or query.shape[0] != 1 or query.shape[-1] != value.shape[-1]:
        raise CannotPack(f"{type(module).__name__} asks for {asked or 'a mask, dropout, rows or unequal head sizes'}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return attend_packed(q, k, v, float(scale), sliding_window or WHOLE_CONTEXT)[None], None


def _no_mask(*_words: Any, **_more: Any) -> None:
    return None


def use(config: Any) -> None:
    """Make the modules that share `config` attend by document. Raises CannotPack for kinds of layers it cannot cut.

    Linear layers attend to nothing; that they can be cut is for packed_recurrent to say.
    """
    kinds = set(getattr(config, "layer_types", None) or KINDS)
    if not kinds <= KINDS | {LINEAR} or getattr(config, "attention_chunk_size", None):
        raise CannotPack(f"layers of kinds {sorted(kinds)}")
    transformers.AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, _no_mask)
    config._attn_implementation = NAME
