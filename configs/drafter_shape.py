"""The shape of the DFlash drafter: everything that fixes its tensors and its arithmetic. No torch, no weights.

Both sides read it: preparation refuses a shape that cannot be, or is not that of the checkpoint, before anything is
loaded; the drafter (consumer/drafter.py) is built from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sized
from dataclasses import asdict, dataclass
from typing import Any

from configs.schema import DrafterConfig

SLIDING = "sliding_attention"
FULL = "full_attention"


@dataclass(frozen=True)
class DrafterShape:
    """Everything that fixes the drafter's tensors and its arithmetic; refuses impossible values when built."""

    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_taps: int
    block_size: int
    layer_types: tuple[str, ...]
    sliding_window: int
    sliding_causal: bool
    rms_eps: float
    rope_theta: float
    mask_token_id: int
    vocab_size: int
    draft_vocab_size: int | None = None
    attention_bias: bool = False

    def __post_init__(self) -> None:
        _refuse(self.attention_bias, "attention_bias: the drafter has none, got true")
        _refuse(
            self.num_heads % self.num_kv_heads != 0,
            f"{self.num_heads} heads, {self.num_kv_heads} kv heads: the first must be a multiple of the second",
        )
        _refuse(self.head_dim % 2 != 0, f"head_dim must be even for the rotation, got {self.head_dim}")
        _refuse(self.block_size < 2, f"block_size must be at least 2, got {self.block_size}")
        _refuse(
            len(self.layer_types) != self.num_layers,
            f"layer_types has {len(self.layer_types)} entries for {self.num_layers} layers",
        )
        for kind in self.layer_types:
            _refuse(kind not in (SLIDING, FULL), f"unknown layer type {kind!r}")
        _refuse(
            SLIDING in self.layer_types and self.sliding_window < self.block_size,
            f"sliding_window must be at least the block size {self.block_size}, got {self.sliding_window}",
        )
        _refuse(
            not 0 <= self.mask_token_id < self.vocab_size,
            f"mask_token_id {self.mask_token_id} is no row of the embedding ({self.vocab_size} rows)",
        )
        _refuse(self.rope_theta <= 0, f"rope_theta must be positive, got {self.rope_theta}")

    def window_of(self, layer_type: str) -> int | None:
        """Return the window of a kind of layer; None where it sees the whole document before the anchor."""
        return self.sliding_window if layer_type == SLIDING else None

    def causal_of(self, layer_type: str) -> bool:
        """Tell whether a kind of layer is causal inside the block; full layers never are."""
        return self.sliding_causal and layer_type == SLIDING

    @property
    def num_parameters(self) -> int:
        """Trained parameters."""
        heads, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = self.hidden * (2 * heads + 2 * kv + 3 * self.intermediate) + 2 * self.hidden + 2 * self.head_dim
        return self.num_layers * layer + self.num_taps * self.hidden**2 + 2 * self.hidden


def _refuse(wrong: bool, message: str) -> None:
    if wrong:
        raise ValueError(f"drafter shape: {message}")


def layer_types_of(layout: str, num_layers: int) -> tuple[str, ...]:
    """Spell a layout out: "sliding" all sliding, "full" all full, "mixed" all sliding but the last."""
    kinds = {
        "sliding": [SLIDING] * num_layers,
        "full": [FULL] * num_layers,
        "mixed": [SLIDING] * (num_layers - 1) + [FULL],
    }
    if layout not in kinds:
        raise ValueError(f"drafter layout: expected sliding, mixed or full, got {layout!r}")
    return tuple(kinds[layout])


def drafter_shape(config: DrafterConfig, target: Mapping[str, Any], draft_vocab: Sized | None) -> DrafterShape:
    """Work out the drafter's shape; what the configuration leaves open is the target's. Raises ValueError."""
    return DrafterShape(
        hidden=target["hidden"],
        intermediate=config.intermediate_size or target["intermediate"],
        num_layers=config.num_layers,
        num_heads=config.num_attention_heads or target["num_heads"],
        num_kv_heads=config.num_key_value_heads or target["num_kv_heads"],
        head_dim=config.head_dim or target["head_dim"],
        num_taps=len(target["target_layer_ids"]),
        block_size=config.block_size,
        layer_types=config.layer_types or layer_types_of(config.layout, config.num_layers),
        sliding_window=config.sliding_window,
        sliding_causal=config.sliding_causal,
        rms_eps=target["rms_eps"],
        rope_theta=target["rope_theta"],
        mask_token_id=target["mask_token_id"],
        vocab_size=target["vocab_size"],
        draft_vocab_size=None if draft_vocab is None else len(draft_vocab),
    )


def shape_as_dict(shape: DrafterShape) -> dict[str, Any]:
    """The shape as plain JSON data, for a checkpoint."""
    return {**asdict(shape), "layer_types": list(shape.layer_types)}


def shape_from_dict(plain: dict[str, Any]) -> DrafterShape:
    """Undo shape_as_dict. Raises ValueError for an impossible shape."""
    return DrafterShape(**{**plain, "layer_types": tuple(plain["layer_types"])})


def tensor_shapes(shape: DrafterShape) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint by its public name (11 a layer, and 3), in ours and in both formats of export."""
    hidden, middle, size = shape.hidden, shape.intermediate, shape.head_dim
    q_width, kv_width = shape.num_heads * size, shape.num_kv_heads * size
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (q_width, hidden),
        "self_attn.k_proj": (kv_width, hidden),
        "self_attn.v_proj": (kv_width, hidden),
        "self_attn.o_proj": (hidden, q_width),
        "self_attn.q_norm": (size,),
        "self_attn.k_norm": (size,),
        "mlp.gate_proj": (middle, hidden),
        "mlp.up_proj": (middle, hidden),
        "mlp.down_proj": (hidden, middle),
    }
    names = {f"layers.{i}.{name}.weight": size for i in range(shape.num_layers) for name, size in layer.items()}
    whole = {"fc.weight": (hidden, shape.num_taps * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    return names | whole
