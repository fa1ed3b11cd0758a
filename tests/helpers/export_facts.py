"""Facts of three drafters whose exported config.json is kept as golden files: tests/golden/FORMAT_NAME.json."""

from __future__ import annotations

from configs.drafter_shape import DrafterShape, layer_types_of
from consumer.export.facts import DrafterFacts, TargetIdentity


def facts_named(name: str) -> DrafterFacts:
    """mixed: the public Qwen3.6-27B drafter (4 sliding layers, 1 full); full; reduced: sliding both ways, 3 tokens."""
    return {"mixed": _mixed, "full": _full, "reduced": _reduced}[name]()


def _mixed() -> DrafterFacts:
    shape = DrafterShape(
        hidden=5120, intermediate=17408, num_layers=5, num_heads=32, num_kv_heads=8, head_dim=128, num_taps=5,
        block_size=16, layer_types=layer_types_of("mixed", 5), sliding_window=2048, sliding_causal=True, rms_eps=1e-6,
        rope_theta=1e7, mask_token_id=248070, vocab_size=248320,
    )  # fmt: skip
    identity = TargetIdentity(
        "Qwen/Qwen3.6-27B",
        "main",
        "Qwen3_5ForConditionalGeneration",
        64,
        5120,
        248320,
        1e7,
        "a" * 64,
        "b" * 64,
        "c" * 64,
    )
    training = {"steps": 1000, "longest_document_tokens": 3072, "chat_template_kwargs": {"enable_thinking": False}}
    return DrafterFacts(
        shape, (1, 16, 31, 46, 61), "bfloat16", 262144, None, (248046, 248044), 248044, 64, identity, None, training
    )


def _full() -> DrafterFacts:
    shape = DrafterShape(
        hidden=576, intermediate=1536, num_layers=2, num_heads=9, num_kv_heads=3, head_dim=64, num_taps=3, block_size=8,
        layer_types=layer_types_of("full", 2), sliding_window=2048, sliding_causal=True, rms_eps=1e-5, rope_theta=1e5,
        mask_token_id=17, vocab_size=49152,
    )  # fmt: skip
    return DrafterFacts(shape, (1, 14, 27), "float32", 8192, 1, (2,), 2, 30)


def _reduced() -> DrafterFacts:
    shape = DrafterShape(
        hidden=64, intermediate=128, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16, num_taps=1, block_size=4,
        layer_types=layer_types_of("sliding", 1), sliding_window=24, sliding_causal=False, rms_eps=1e-6,
        rope_theta=10000.0, mask_token_id=3, vocab_size=264, draft_vocab_size=3,
    )  # fmt: skip
    return DrafterFacts(shape, (3,), "bfloat16", 512, 1, (2,), 0, 6, None, (4, 9, 200))
