"""speculators 0.9.0's own DFlash model, loss and optimizer, driven as its trainer drives them: autocast to bfloat16
over float32 weights, loss "ce" fused, fixed exponential decay, clip 1, every metric read by the host each step.

Batches are on the device already. Two things are set apart, both in its favour: its fused loss is kept out of
torch.compile, which on torch 2.11 does not take it; and its block mask is made once, before the clock starts, with the
anchors of that time (its compiled create_block_mask had not come back from ptxas after 175 s there).
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.drafter_step import BLOCK, DEVICE, DOCUMENT, TAPS, Size, memory, timed
from configs.drafter_shape import DrafterShape


def speculators(size: Size, shape: DrafterShape, attention: str = "simple_flex_attention") -> dict[str, Any]:
    """Measure one step of speculators at a size."""
    model = make_model(shape, attention)
    from speculators.losses import resolve_loss_config
    from speculators.train.optimizers import build_optimizers

    settings = SimpleNamespace(optimizer="adamw", lr=6e-4, weight_decay=0.0)
    optimizers = build_optimizers(model, settings)
    batch = make_batch(size)
    extra = {
        "loss_config": resolve_loss_config("ce", "fused" if DEVICE.type == "cuda" else "eager"),
        "gamma": 7.0,
        "max_anchors": size.anchors,
        "per_position_loss_weight": "fixed-exp-decay",
    }
    seen: dict[str, float] = {}

    def run() -> None:
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            _, loss, metrics = model(**batch, **extra)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        seen.update({name: value.item() for name, value in metrics.items()})

    began = time.perf_counter()
    run()
    first_s = time.perf_counter() - began
    result = timed(run) | {"first_step_s": round(first_s, 1)}
    return result | memory() | {"loss": seen["loss_sum"] / seen["loss_total"]}


def make_model(shape: DrafterShape, attention: str) -> Any:
    """Build its model with random weights; embedding and heads frozen, as it has them."""
    import speculators.models.dflash.core as core
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.dflash import DFlashSpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import Qwen3Config

    core.compute_metrics = torch.compiler.disable(core.compute_metrics)
    layers = Qwen3Config(
        vocab_size=shape.vocab_size, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.num_layers, num_attention_heads=shape.num_heads, head_dim=shape.head_dim,
        num_key_value_heads=shape.num_kv_heads, rms_norm_eps=shape.rms_eps, sliding_window=shape.sliding_window,
        use_sliding_window=True, layer_types=list(shape.layer_types), max_position_embeddings=40960,
        tie_word_embeddings=False, pad_token_id=None,
    )  # fmt: skip
    layers._attn_implementation = attention
    config = DFlashSpeculatorConfig(
        transformer_layer_config=layers,
        draft_vocab_size=shape.vocab_size,
        block_size=shape.block_size,
        aux_hidden_state_layer_ids=[2 + 8 * tap for tap in range(TAPS)],
        mask_token_id=shape.mask_token_id,
        speculators_config=SpeculatorsConfig(
            algorithm="dflash",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=BLOCK - 1)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["Qwen3ForCausalLM"]),
        ),
    )
    core.DFlashDraftModel._build_attention_mask = torch.compiler.disable(_made_once(core))
    with DEVICE:
        model = core.DFlashDraftModel(config)
    model = model.to(DEVICE)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.02)
            elif "norm" in name:
                parameter.fill_(1.0)
    return model.train()


def _made_once(core: Any) -> Any:
    """Wrap its making of anchors and masks so that it happens once, with torch's plain create_block_mask."""
    from torch.nn.attention.flex_attention import create_block_mask

    kept: list[Any] = []
    make = core.DFlashDraftModel._build_attention_mask

    def build(model: Any, *given: Any) -> Any:
        if not kept:
            if model._attn_impl == "simple_flex_attention":
                model._create_mask_fn = create_block_mask
            kept.append(make(model, *given))
        return kept[0]

    return build


def make_batch(size: Size) -> dict[str, torch.Tensor]:
    """Random data of the same kind as ours."""
    torch.manual_seed(0)
    tokens = torch.arange(size.tokens, device=DEVICE)
    return {
        "hidden_states": torch.randn(1, size.tokens, TAPS * size.hidden, device=DEVICE, dtype=torch.bfloat16),
        "input_ids": torch.randint(0, size.vocab - 1, (1, size.tokens), device=DEVICE),
        "loss_mask": torch.ones(1, size.tokens, device=DEVICE, dtype=torch.long),
        "verifier_last_hidden_states": torch.randn(1, size.tokens, size.hidden, device=DEVICE, dtype=torch.bfloat16),
        "document_ids": (tokens // DOCUMENT)[None],
        "position_ids": (tokens % DOCUMENT)[None],
    }
