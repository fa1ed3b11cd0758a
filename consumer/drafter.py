"""The DFlash drafter: what its layers compute, and its weights by their public names. docs/drafter.md has the formulas.

Knows nothing of packs, anchors, masks or losses: attention is a callable that is handed in, and so are rotations.
The steps between matrix products (norms, rotation, gating) are plain functions held in `Pieces`, so that a GPU can
replace them one by one; the products are in linear.py.

Shapes: T context tokens, A anchors, B block slots, Q = A*B block rows, H hidden, K taps, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from configs.drafter_shape import DrafterShape
from consumer.linear import ContextGradient, ContextProjection, Projection

Attend = Callable[[Tensor, Tensor, Tensor, str], Tensor]
"""(q [Q, heads, D], k and v [T + Q, kv heads, D] with the context first, layer type) -> [Q, heads*D]."""


class Rotation(NamedTuple):
    """Cosine and sine of each row's rotation, [R, D] float32 (both halves of D alike)."""

    cos: Tensor
    sin: Tensor


def rotation(position_R: Tensor, head_dim: int, theta: float) -> Rotation:
    """Rotary angles of integer positions: plain rotate-half over the whole head, one theta, no scaling."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=position_R.device) / head_dim
    angle = position_R.to(torch.float32)[:, None] * torch.exp(-math.log(theta) * exponent)
    angle = torch.cat([angle, angle], dim=-1)
    return Rotation(angle.cos(), angle.sin())


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide by the root mean square over the last dimension and scale; computed in at least float32."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def add_norm(x: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add `update` to the residual stream and norm the sum; returns both."""
    total = x + update
    return total, rms_norm(total, weight, eps)


def gated(gate_up: Tensor) -> Tensor:
    """SwiGLU of [R, 2*I], gate first: silu(gate) * up."""
    gate, up = gate_up.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads [R, heads, D] by float32 angles [R, D]; computed in at least float32."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    low, high = wide.chunk(2, dim=-1)
    return (wide * cos[:, None] + torch.cat([-high, low], dim=-1) * sin[:, None]).to(x.dtype)


def heads(
    qkv: Tensor, kv_context: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm, rotate and lay out the heads.

    Shapes: qkv [Q, q|k|v], kv_context [T, k|v], cos and sin [T + Q, D] (context first)
    -> q [Q, heads, D], k and v [T + Q, kv heads, D].
    """
    head_dim, kv_width = q_weight.shape[0], kv_context.shape[1] // 2
    q, k, v = qkv.split([qkv.shape[1] - 2 * kv_width, kv_width, kv_width], dim=-1)
    k_context, v_context = kv_context.chunk(2, dim=-1)
    k = torch.cat([k_context, k]).unflatten(-1, (-1, head_dim))
    v = torch.cat([v_context, v]).unflatten(-1, (-1, head_dim))
    num_context = kv_context.shape[0]
    q = _turned(rms_norm(q.unflatten(-1, (-1, head_dim)), q_weight, eps), cos[num_context:], sin[num_context:])
    k = _turned(rms_norm(k, k_weight, eps), cos, sin)
    return q, k, v


def spread(rows: Tensor, block_size: int) -> Tensor:
    """Turn [A + 1, O], the anchors' rows and the one that all other slots share, into [A*B, O]."""
    num_anchors = rows.shape[0] - 1
    others = rows[-1:].expand(num_anchors * (block_size - 1), -1).view(num_anchors, block_size - 1, -1)
    return torch.cat([rows[:-1, None], others], dim=1).flatten(0, 1)


def without_anchors(rows_Q: Tensor, block_size: int) -> Tensor:
    """Drop slot 0 of each block: [A*B, O] to [A*(B-1), O]."""
    return rows_Q.view(-1, block_size, rows_Q.shape[-1])[:, 1:].flatten(0, 1)


@dataclass
class Pieces:
    """The functions between the matrix products that a GPU has kernels for (piece_kernels.py)."""

    rms_norm: Callable[..., Tensor] = rms_norm
    add_norm: Callable[..., tuple[Tensor, Tensor]] = add_norm
    gated: Callable[..., Tensor] = gated
    heads: Callable[..., tuple[Tensor, Tensor, Tensor]] = heads
    spread: Callable[[Tensor, int], Tensor] = spread
    without_anchors: Callable[[Tensor, int], Tensor] = without_anchors


class Norm(nn.Module):
    """Weight of an RMS norm."""

    def __init__(self, size: int) -> None:
        """Start at one."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


class Attention(nn.Module):
    """Weights of one attention layer, q, k and v first and side by side."""

    def __init__(self, shape: DrafterShape) -> None:
        """Allocate the weights of `shape`."""
        super().__init__()
        q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, q_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, shape.hidden, bias=False)
        self.q_norm = Norm(shape.head_dim)
        self.k_norm = Norm(shape.head_dim)
        self.qkv = Projection(self.q_proj, self.k_proj, self.v_proj)
        self.qkv_and_context = ContextProjection(self.qkv)
        self.out = Projection(self.o_proj)


class Mlp(nn.Module):
    """Weights of the gated feed-forward part."""

    def __init__(self, shape: DrafterShape) -> None:
        """Allocate the weights of `shape`."""
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)
        self.gate_up = Projection(self.gate_proj, self.up_proj)
        self.down = Projection(self.down_proj)


class Layer(nn.Module):
    """Weights of one drafter layer."""

    def __init__(self, shape: DrafterShape) -> None:
        """Allocate the weights of `shape`."""
        super().__init__()
        self.input_layernorm = Norm(shape.hidden)
        self.post_attention_layernorm = Norm(shape.hidden)
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape)


class Drafter(nn.Module):
    """The trained part of DFlash; embedding and head belong to the target (frozen_head.py)."""

    def __init__(self, shape: DrafterShape) -> None:
        """Allocate the weights of `shape` and set initial values (seed 0; see reset_parameters)."""
        super().__init__()
        self.shape = shape
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.fc = nn.Linear(shape.num_taps * shape.hidden, shape.hidden, bias=False)
        self.hidden_norm = Norm(shape.hidden)
        self.norm = Norm(shape.hidden)
        self.taps = Projection(self.fc)
        self.pieces = Pieces()
        self.reset_parameters(torch.Generator(self.fc.weight.device).manual_seed(0))

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator) -> None:
        """Set initial weights: matrices normal with deviation 0.02, norms one. Drawn on the generator's device."""
        for parameter in self.parameters():
            if parameter.ndim == 2:
                drawn = (
                    parameter
                    if parameter.device == generator.device
                    else torch.empty_like(parameter, device=generator.device)
                )
                parameter.copy_(drawn.normal_(std=0.02, generator=generator))
            else:
                parameter.fill_(1.0)

    def projections(self) -> list[Projection]:
        """List every product whose weights lie side by side."""
        found = [self.taps]
        for layer in self._layers():
            found += [layer.self_attn.qkv, layer.self_attn.out, layer.mlp.gate_up, layer.mlp.down]
        return found

    def use_float8(self, on: bool = True) -> None:
        """Compute the feed-forward parts' products, three quarters of all, in 8 bits from now on (float8.py), or not.

        The rest stays as it is: with all of them in 8 bits a synthetic task was learnt visibly later (docs/log.md).
        """
        for layer in self._layers():
            layer.mlp.gate_up.in_float8 = layer.mlp.down.in_float8 = on

    def _layers(self) -> list[Layer]:
        return [cast(Layer, layer) for layer in self.layers]

    def context(self, features: Tensor) -> Tensor:
        """Project features [.., T, K*H] to g [.., T, H], which every layer reads unchanged."""
        projected = self.taps(features.reshape(-1, features.shape[-1]))
        g = self.pieces.rms_norm(projected, self.hidden_norm.weight, self.shape.rms_eps)
        return g.reshape(*features.shape[:-1], -1)

    def forward(
        self,
        block_x: Tensor,
        g: Tensor,
        block_position: Tensor,
        context_position: Tensor,
        attend: Attend,
        predicted_only: bool = False,
        shared_mask_row: bool = False,
    ) -> Tensor:
        """Run the layers over the block rows and return their states after the final norm.

        block_x [Q, H] embedded blocks, or, with `shared_mask_row`, [A + 1, H]: the anchors' rows, then the mask
        token's, which all other slots share; the first layer's products then take A + 1 rows in place of A*B.
        g [T, H]; block_position [Q] and context_position [T]: positions in the document; attend: attention.py makes
        it for the step's anchors.
        Returns [Q, H], or [A*(B-1), H] with `predicted_only`: slot 0 predicts nothing and is dropped as soon as no
        later layer reads it.
        """
        eps = self.shape.rms_eps
        cos, sin = rotation(torch.cat([context_position, block_position]), self.shape.head_dim, self.shape.rope_theta)
        layers, pieces, size = self._layers(), self.pieces, self.shape.block_size
        y = pieces.rms_norm(block_x, layers[0].input_layernorm.weight, eps)
        x = pieces.spread(block_x, size) if shared_mask_row else block_x
        gradient = ContextGradient()
        for index, layer in enumerate(layers):
            last = index + 1 == len(layers)
            attention, mlp = layer.self_attn, layer.mlp
            qkv, kv_context = attention.qkv_and_context(y, g, gradient)
            if shared_mask_row and index == 0:
                qkv = pieces.spread(qkv, size)
            q, k, v = pieces.heads(qkv, kv_context, attention.q_norm.weight, attention.k_norm.weight, cos, sin, eps)
            mixed = attend(q, k, v, self.shape.layer_types[index])
            if last and predicted_only:
                x, mixed = pieces.without_anchors(x, size), pieces.without_anchors(mixed, size)
            x, y = pieces.add_norm(x, attention.out(mixed), layer.post_attention_layernorm.weight, eps)
            hidden = mlp.down(pieces.gated(mlp.gate_up(y)))
            following = self.norm if last else layers[index + 1].input_layernorm
            x, y = pieces.add_norm(x, hidden, following.weight, eps)
        return y
