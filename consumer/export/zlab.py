"""The z-lab format's config.json (vLLM's method "dflash", SGLang's DFLASH), written field by field and read back.

No transformers object is asked what it would emit: a library release must not move a field (golden files in tests).
Facts: z-lab/dflash 0.1.0 (model.py) and vLLM (models/qwen3_dflash.py). In-block causality is resolved by both from
`is_causal`, else by vLLM from `dflash_config.causal`, else per layer: sliding layers causal, full ones not. The first
two speak for ALL layers, so they are written only where all layers agree.
"""

from __future__ import annotations

from typing import Any

from configs.drafter_shape import FULL, SLIDING, DrafterShape
from consumer.export.facts import DrafterFacts, ExportError
from consumer.export.fields import QWEN3_DEFAULTS, identity_of, rope_theta_of, take, transformer_fields


def to_config(facts: DrafterFacts) -> dict[str, Any]:
    """Write config.json. Raises ExportError for a reduced vocabulary, which the format has no tensor for."""
    shape = facts.shape
    if facts.draft_vocab is not None:
        raise ExportError(
            f"the z-lab format has no reduced vocabulary, and this drafter was trained with one of "
            f"{len(facts.draft_vocab)} tokens (drafter.draft_vocab_size): export it with --format speculators"
        )
    dflash: dict[str, Any] = {
        "mask_token_id": shape.mask_token_id,
        "target_layer_ids": list(facts.target_layer_ids),
        "block_size": shape.block_size,
    }
    causal = causal_of_all(shape)
    if causal is not None:
        dflash["causal"] = causal
    config = {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": shape.block_size,
        "num_target_layers": facts.num_target_layers,
        "dflash_config": dflash,
        **transformer_fields(facts),
        "training_facts": facts.training,
    }
    if causal is not None:
        config["is_causal"] = causal
    if facts.identity is not None:
        config["target_identity"] = facts.identity.as_dict()
    return config


def causal_of_all(shape: DrafterShape) -> bool | None:
    """In-block causality if all layers agree on it; None where sliding ones are causal beside full ones."""
    found = {shape.causal_of(kind) for kind in shape.layer_types}
    return found.pop() if len(found) == 1 else None


def from_config(config: dict[str, Any], where: str) -> DrafterFacts:
    """Read config.json as a server reads it. Raises ExportError naming what is missing or cannot be served."""
    config = QWEN3_DEFAULTS | config
    dflash = config.get("dflash_config") or {}
    block = dflash.get("block_size") or config.get("block_size")
    ids = take(dflash, "target_layer_ids", f"{where}: dflash_config")
    if block is None:
        raise ExportError(f"{where}: block_size is missing, at the top and in dflash_config")
    kinds = tuple(config.get("layer_types") or [FULL] * take(config, "num_hidden_layers", where))
    causal = config.get("is_causal", dflash.get("causal"))
    if causal and FULL in kinds:
        raise ExportError(f"{where}: is_causal is true with full attention layers; this drafter has none such")
    if SLIDING in kinds and not (config.get("use_sliding_window", True) and config.get("sliding_window")):
        raise ExportError(f"{where}: layer_types has sliding layers, but no sliding_window is in use")
    shape = DrafterShape(
        hidden=take(config, "hidden_size", where),
        intermediate=take(config, "intermediate_size", where),
        num_layers=take(config, "num_hidden_layers", where),
        num_heads=take(config, "num_attention_heads", where),
        num_kv_heads=take(config, "num_key_value_heads", where),
        head_dim=take(config, "head_dim", where),
        num_taps=len(ids),
        block_size=int(block),
        layer_types=kinds,
        sliding_window=int(config.get("sliding_window") or take(config, "max_position_embeddings", where)),
        sliding_causal=SLIDING in kinds if causal is None else bool(causal),
        rms_eps=take(config, "rms_norm_eps", where),
        rope_theta=rope_theta_of(config, where),
        mask_token_id=take(dflash, "mask_token_id", f"{where}: dflash_config"),
        vocab_size=take(config, "vocab_size", where),
        attention_bias=bool(config.get("attention_bias", False)),
    )
    eos = config.get("eos_token_id")
    return DrafterFacts(
        shape=shape,
        target_layer_ids=tuple(ids),
        dtype=config.get("dtype") or config.get("torch_dtype") or "float32",
        max_position_embeddings=take(config, "max_position_embeddings", where),
        bos_token_id=config.get("bos_token_id"),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else (() if eos is None else (eos,)),
        pad_token_id=config.get("pad_token_id"),
        num_target_layers=take(config, "num_target_layers", where),
        identity=identity_of(config),
        training=config.get("training_facts") or {},
    )
