"""speculators 0.9.0's own model and loss, trained on the same packs for the same steps as ours.

Its model, its loss (KL to the target's distribution, fixed exponential decay, its defaults), its choice of anchors
and its AdamW; the learning rate, its schedule, the batch and the clipping are ours. Its weights have the names of ours,
so what it learnt is measured by the same code. Run with TORCHDYNAMO_DISABLE=1: its compiled mask did not come back from
ptxas on torch 2.11 (docs/log.md), and its results do not depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from configs.drafter_shape import DrafterShape, tensor_shapes
from consumer.drafter import Drafter
from consumer.staging import PackTensors


def train(
    shape: DrafterShape,
    layer_ids: Sequence[int],
    embedding: Tensor,
    head: Tensor,
    packs: list[PackTensors],
    num_steps: int,
    anchors: int,
    lr: float,
    device: torch.device,
    initial: Drafter | None,
    say: Callable[[str], None],
    out_of_time: Callable[[], bool],
) -> tuple[Drafter, int]:
    """Train and return its weights as a drafter of ours, and the steps done. initial: weights to begin with."""
    from speculators.losses import resolve_loss_config
    from speculators.train.optimizers import build_optimizers

    model = make_model(shape, layer_ids, embedding, head, device)
    if initial is not None:
        model.load_state_dict({name: value.float() for name, value in initial.state_dict().items()}, strict=False)
    settings = SimpleNamespace(optimizer="adamw", lr=lr, weight_decay=0.0)
    optimizers = build_optimizers(model, settings)
    extra = {"loss_config": resolve_loss_config("kl_div", "eager"), "gamma": 4.0, "max_anchors": anchors}
    done = 0
    for number in range(num_steps):
        if out_of_time():
            break
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * schedule_share(number + 1, num_steps)
        pack = packs[number % len(packs)]
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            _, loss, metrics = model(**batch_of(pack), **extra)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        for optimizer in optimizers:
            optimizer.step()
        done += 1
        if number % 100 == 0:
            length = float(metrics["eal_sum"] / metrics["eal_total"])
            say(f"speculators step {number}: loss {loss.item():.3f}, accepted {length:.3f}")
    drafter = Drafter(shape)
    state = model.state_dict()
    drafter.load_state_dict({name: state[name].detach().float().cpu() for name in tensor_shapes(shape)})
    return drafter.to(device), done


def schedule_share(step: int, total: int) -> float:
    """Our schedule: 4 % of warm-up, then a cosine to zero."""
    warm = max(1, int(0.04 * total))
    return step / warm if step <= warm else 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, total - warm)))


def batch_of(pack: PackTensors) -> dict[str, Tensor]:
    """A pack of ours as its trainer passes batches."""
    starts = pack.doc_start.long()
    index = torch.arange(len(starts), device=starts.device)
    assert pack.final_hidden is not None
    return {
        "hidden_states": pack.features[None],
        "input_ids": pack.input_ids.long()[None],
        "loss_mask": pack.loss_mask.long()[None],
        "verifier_last_hidden_states": pack.final_hidden[None],
        "document_ids": starts[None],  # the number itself does not matter, -1 is padding
        "position_ids": torch.where(starts >= 0, index - starts, 0)[None],
    }


def make_model(
    shape: DrafterShape, layer_ids: Sequence[int], embedding: Tensor, head: Tensor, device: torch.device
) -> Any:
    """Build its model; embedding and heads are the target's, frozen. Its final norm is the identity, see the end."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import Qwen3Config

    layers = Qwen3Config(
        vocab_size=shape.vocab_size, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.num_layers, num_attention_heads=shape.num_heads, head_dim=shape.head_dim,
        num_key_value_heads=shape.num_kv_heads, rms_norm_eps=shape.rms_eps, layer_types=list(shape.layer_types),
        use_sliding_window=True, sliding_window=shape.sliding_window, max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=False, pad_token_id=None,
    )  # fmt: skip
    layers._attn_implementation = "sdpa"
    config = DFlashSpeculatorConfig(
        transformer_layer_config=layers,
        draft_vocab_size=shape.vocab_size,
        block_size=shape.block_size,
        aux_hidden_state_layer_ids=[number + 1 for number in layer_ids],
        mask_token_id=shape.mask_token_id,
        sliding_window_non_causal=not shape.sliding_causal,
        speculators_config=SpeculatorsConfig(
            algorithm="dflash",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=shape.block_size - 1)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
    )
    model: Any = DFlashDraftModel(config).to(device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in ("embed_tokens.weight",):
                parameter.copy_(embedding)
            elif name in ("lm_head.weight", "verifier_lm_head.weight"):
                parameter.copy_(head)
            elif parameter.ndim == 2:
                parameter.normal_(std=0.02)
            else:
                parameter.fill_(1.0)
    model.verifier_norm = torch.nn.Identity()  # packs hold the state after the target's own final norm
    return model.train()
