"""Fields that both formats share: the plain Qwen3 decoder of the drafter, its rotation, and the target's identity."""

from __future__ import annotations

from typing import Any

from configs.drafter_shape import SLIDING
from consumer.export.facts import DrafterFacts, ExportError, TargetIdentity

QWEN3_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 32,
    "num_attention_heads": 32,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "vocab_size": 151936,
}
"""What transformers leaves out of a Qwen3 config.json because it is the default; others' files rely on it."""


def transformer_fields(facts: DrafterFacts) -> dict[str, Any]:
    """The drafter as a Qwen3 configuration.

    Rotation is plain, over the whole head, with the target's theta: what the target has of partial rotation, scaling or
    multimodal sections is not trained with, so it must not be served with. theta stands where transformers 5 and
    where earlier releases look for it; dtype under its new and its old name.
    """
    shape = facts.shape
    num_sliding = sum(kind == SLIDING for kind in shape.layer_types)
    ends = facts.eos_token_ids
    return {
        "model_type": "qwen3",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "head_dim": shape.head_dim,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "num_hidden_layers": shape.num_layers,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rms_norm_eps": shape.rms_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "layer_types": list(shape.layer_types),
        "sliding_window": shape.sliding_window if num_sliding else None,
        "use_sliding_window": num_sliding > 0,
        "max_window_layers": shape.num_layers,
        "max_position_embeddings": facts.max_position_embeddings,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "rope_scaling": None,
        "vocab_size": shape.vocab_size,
        "bos_token_id": facts.bos_token_id,
        "eos_token_id": None if not ends else (ends[0] if len(ends) == 1 else list(ends)),
        "pad_token_id": facts.pad_token_id,
        "tie_word_embeddings": False,
        "use_cache": True,
        "dtype": facts.dtype,
        "torch_dtype": facts.dtype,
    }


def take(config: dict[str, Any], key: str, where: str) -> Any:
    """Return a field that must be there. Raises ExportError."""
    if config.get(key) is None:
        raise ExportError(f"{where}: {key} is missing")
    return config[key]


def rope_theta_of(config: dict[str, Any], where: str) -> float:
    """Theta from either place. Raises ExportError for rotations that this drafter does not do, and for no theta."""
    rope = config.get("rope_parameters") or {}
    scaling = {key: value for key, value in (config.get("rope_scaling") or {}).items() if value != "default"}
    kind, partial = rope.get("rope_type", "default"), rope.get("partial_rotary_factor", 1.0)
    if kind != "default" or partial != 1.0 or config.get("partial_rotary_factor", 1.0) != 1.0 or scaling:
        raise ExportError(
            f"{where}: expected plain rotation over the whole head, got rope_parameters {rope}, "
            f"rope_scaling {config.get('rope_scaling')}"
        )
    theta = rope.get("rope_theta") or config.get("rope_theta")
    if not theta:
        raise ExportError(f"{where}: no rope_theta, neither at the top nor in rope_parameters")
    return float(theta)


def identity_of(config: dict[str, Any]) -> TargetIdentity | None:
    """The target's identity as this project writes it; None in others' files."""
    plain = config.get("target_identity")
    if not isinstance(plain, dict):
        return None
    try:
        return TargetIdentity(**plain)
    except TypeError:  # written by another release of this project
        return None
