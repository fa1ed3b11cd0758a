"""The drafter decoding one prompt: keys and values of the context are computed once per token and kept.

Block entries never enter the cache. What comes out equals the training-side forward (a test compares them), for which
the whole context is one pack (proposers.py).

Shapes: S context tokens, n new ones, B block slots, H hidden, K taps, D head size, V' draft vocabulary.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from consumer.drafter import Drafter, Layer, gated, rms_norm, rotation
from consumer.frozen_head import FrozenHead

_FIRST_CAPACITY = 512


class DrafterSession:
    """A drafter with its context cache; computes in the drafter's type."""

    def __init__(self, drafter: Drafter, head: FrozenHead, zero_context: bool = False) -> None:
        """`zero_context`: see zeros in place of every feature, to tell what the context is worth."""
        self.drafter, self.shape = drafter.eval(), drafter.shape
        dtype = drafter.fc.weight.dtype
        self.head = head.cast(dtype)
        self._zero = zero_context
        self._layers = [cast(Layer, layer) for layer in drafter.layers]
        self._length = 0
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    @property
    def length(self) -> int:
        """S: context tokens cached."""
        return self._length

    def start(self) -> None:
        """Forget the context."""
        self._length = 0

    @torch.inference_mode()
    def extend(self, features: Tensor) -> None:
        """Add context tokens, given their taps [n, K*H] in text order."""
        if not len(features):
            return
        shape = self.shape
        features = features.to(self.drafter.fc.weight.dtype)
        if self._zero:
            features = torch.zeros_like(features)
        g = rms_norm(
            functional.linear(features, self.drafter.fc.weight), self.drafter.hidden_norm.weight, shape.rms_eps
        )
        first, last = self._length, self._length + len(features)
        self._reserve(last, g)
        angles = rotation(torch.arange(first, last, device=g.device), shape.head_dim, shape.rope_theta)
        for index, layer in enumerate(self._layers):
            attention = layer.self_attn
            self._keys[index][first:last] = self._rotated(attention.k_proj, attention.k_norm.weight, g, angles)
            self._values[index][first:last] = attention.v_proj(g).unflatten(-1, (-1, shape.head_dim))
        self._length = last

    @torch.inference_mode()
    def propose(self, anchor: int) -> Tensor:
        """Logits [B-1, V'] for the tokens after `anchor`, which stands right behind the context."""
        shape, start = self.shape, self._length
        device = self.drafter.fc.weight.device
        ids = torch.full((shape.block_size,), shape.mask_token_id, device=device)
        ids[0] = anchor
        x = self.head.embedding[ids]
        self._reserve(start, x)  # a drafter may be asked before it has any context
        position = torch.arange(start, start + shape.block_size, device=device)
        angles = rotation(position, shape.head_dim, shape.rope_theta)
        for index, layer in enumerate(self._layers):
            attention = layer.self_attn
            y = rms_norm(x, layer.input_layernorm.weight, shape.rms_eps)
            q = self._rotated(attention.q_proj, attention.q_norm.weight, y, angles)
            k = torch.cat(
                [self._keys[index][:start], self._rotated(attention.k_proj, attention.k_norm.weight, y, angles)]
            )
            v = torch.cat([self._values[index][:start], attention.v_proj(y).unflatten(-1, (-1, shape.head_dim))])
            mask = self._mask(position, shape.layer_types[index])
            q, k, v = (rows.transpose(0, 1)[None] for rows in (q, k, v))
            out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
            x = x + attention.o_proj(out[0].transpose(0, 1).flatten(1))
            y = rms_norm(x, layer.post_attention_layernorm.weight, shape.rms_eps)
            gate_up = torch.cat([layer.mlp.gate_proj(y), layer.mlp.up_proj(y)], dim=-1)
            x = x + layer.mlp.down_proj(gated(gate_up))
        hidden = rms_norm(x, self.drafter.norm.weight, shape.rms_eps)[1:]
        logits: Tensor = hidden @ self.head.head.T
        return logits

    def _rotated(self, projection: nn.Linear, weight: Tensor, rows: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Project, norm per head and rotate: [n, H] -> [n, heads, D]."""
        heads = rms_norm(projection(rows).unflatten(-1, (-1, self.shape.head_dim)), weight, self.shape.rms_eps)
        wide = heads.float()
        low, high = wide.chunk(2, dim=-1)
        cos, sin = (angle[:, None] for angle in angles)
        return (wide * cos + torch.cat([-high, low], dim=-1) * sin).to(heads.dtype)

    def _mask(self, position_B: Tensor, layer_type: str) -> Tensor:
        """Who sees what, [B, S + B]: the context inside the window, and the block, causally where the layer is."""
        window = self.shape.window_of(layer_type)
        context = torch.arange(self._length, device=position_B.device)
        seen = torch.ones(len(position_B), self._length, dtype=torch.bool, device=position_B.device)
        if window is not None:
            seen = position_B[:, None] - context < window
        own = torch.ones(len(position_B), len(position_B), dtype=torch.bool, device=position_B.device)
        return torch.cat([seen, own.tril() if self.shape.causal_of(layer_type) else own], dim=1)

    def _reserve(self, size: int, like: Tensor) -> None:
        """Make room for `size` context tokens, doubling; what is cached moves along."""
        if self._keys and self._keys[0].shape[0] >= size:
            return
        capacity = _FIRST_CAPACITY
        while capacity < size:
            capacity *= 2
        for cache in (self._keys, self._values):
            old = list(cache)
            cache[:] = [
                like.new_empty(capacity, self.shape.num_kv_heads, self.shape.head_dim)
                for _ in range(self.shape.num_layers)
            ]
            for new, kept in zip(cache, old, strict=False):
                new[: self._length] = kept[: self._length]
