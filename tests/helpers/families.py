"""Tiny random models of the families that a target may belong to, as transformers configurations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

LAYERS, HIDDEN, VOCAB = 6, 64, 264
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
HYBRID = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": (["linear_attention"] * 2 + ["full_attention"]) * 2,
}
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def llama(**more: Any) -> Any:
    """Llama; `tie_word_embeddings` as given."""
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(TEXT | more)))


def qwen2(**more: Any) -> Any:
    """Qwen2: biases in q, k, v."""
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**(TEXT | more)))


def qwen3(**more: Any) -> Any:
    """Qwen3: norms of q and k."""
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**(TEXT | more)))


def mistral(**more: Any) -> Any:
    """Mistral with a window of 16 in every layer."""
    return transformers.MistralForCausalLM(transformers.MistralConfig(**(TEXT | {"sliding_window": 16} | more)))


def gemma2(**more: Any) -> Any:
    """Gemma 2: soft caps, norms of the form 1 + w."""
    config = transformers.Gemma2Config(**(TEXT | {"sliding_window": 16, "query_pre_attn_scalar": 16} | more))
    return transformers.Gemma2ForCausalLM(config)


def gemma3(**more: Any) -> Any:
    """Gemma 3: five sliding layers, then a full one; two rotary bases."""
    config = transformers.Gemma3TextConfig(**(TEXT | {"sliding_window": 16, "query_pre_attn_scalar": 16} | more))
    return transformers.Gemma3ForCausalLM(config)


def qwen3_moe(**more: Any) -> Any:
    """Qwen3 with experts."""
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**(TEXT | MOE | more)))


def qwen3_5(**more: Any) -> Any:
    """Qwen3.5 text: gated delta net (recurrent) layers, every third one full attention."""
    return transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**(TEXT | HYBRID | more)))


def qwen3_next(**more: Any) -> Any:
    """Qwen3-Next: gated delta net layers as in Qwen3.5, projected together, with experts."""
    sizes = {"shared_expert_intermediate_size": 32}
    return transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**(TEXT | HYBRID | MOE | sizes | more)))


def llava(**more: Any) -> Any:
    """A multimodal wrapper around Llama."""
    vision = transformers.CLIPVisionConfig(**VISION, image_size=32, patch_size=16, projection_dim=32)
    text = transformers.LlamaConfig(**(TEXT | more))
    return transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=5)
    )


def gpt_oss(**more: Any) -> Any:
    """gpt-oss: experts, sinks, every other layer with a window of 16; transformers has no SDPA for it."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32, "sliding_window": 16}
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**(TEXT | experts | more)))


FAMILIES: dict[str, Callable[..., Any]] = {
    make.__name__: make
    for make in (llama, qwen2, qwen3, mistral, gemma2, gemma3, qwen3_moe, qwen3_5, qwen3_next, gpt_oss, llava)
}
PACKED = {"llama", "qwen2", "qwen3", "mistral", "gemma3", "qwen3_moe", "qwen3_5", "qwen3_next", "llava"}
"""Families that can be read packed; Gemma 2 caps its scores, gpt-oss has sinks."""


def make_family(name: str, **more: Any) -> Any:
    """Build a family's random model, always the same, with weights large enough that every layer matters."""
    torch.manual_seed(0)
    model = FAMILIES[name](**more).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4.0)
    return model
