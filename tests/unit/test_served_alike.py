"""What a drafter is trained with is what it will be served with: rotation, mask token, decoded lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from configs.drafter_shape import drafter_shape, shape_as_dict
from configs.schema import DrafterConfig, TargetConfig
from consumer.drafter import Drafter, rotation
from evaluation.decode import decode
from evaluation.verifier import Verifier
from producer.target import TargetError, choose_mask_token, describe_target, rope_theta_of
from tests.helpers.tiny_target import make_tokenizer, save_target


def text_config(**rope: Any) -> Any:
    config = transformers.Qwen3Config(
        hidden_size=64, num_hidden_layers=6, num_attention_heads=4, head_dim=32, num_key_value_heads=2
    )
    config.rope_parameters = rope
    return config


def test_the_drafter_rotates_whole_heads_with_the_targets_base(tmp_path: Path) -> None:
    """Case T-11: theta 5e6 is taken over, a partial factor is not, and head_dim / 2 frequencies turn."""
    config = text_config(rope_type="default", rope_theta=5e6, partial_rotary_factor=0.25)
    config.save_pretrained(tmp_path)
    target = describe_target(tmp_path, "t", TargetConfig(target_layer_ids=(1, 4)), make_tokenizer(), on_gpu=False)
    shape = drafter_shape(DrafterConfig(num_layers=1, layout="full"), target.as_dict(), None)
    assert shape.rope_theta == 5e6
    assert not any("partial" in key or "scaling" in key for key in shape_as_dict(shape))
    _, sin = rotation(torch.arange(1, 3), shape.head_dim, shape.rope_theta)
    assert len(sin[0].abs().unique()) == shape.head_dim // 2  # each frequency once, or for both halves
    assert (sin[0] != sin[1]).all()
    assert Drafter(shape).shape.rope_theta == 5e6


@pytest.mark.parametrize(
    ("rope", "theta"),
    [
        ({"full_attention": {"rope_theta": 7e5}, "sliding_attention": {"rope_theta": 1e4}}, 7e5),
        ({"rope_theta": 3e4, "rope_type": "yarn", "factor": 4.0}, 3e4),
        ({}, 1e4),
    ],
)
def test_the_base_is_found_where_this_version_keeps_it(rope: dict[str, Any], theta: float) -> None:
    """Case T-11: by kind of layer, beside scaling, or nowhere."""
    assert rope_theta_of(type("Config", (), {"rope_parameters": rope})(), "t") == theta


def test_a_base_of_zero_is_refused() -> None:
    """Case T-11."""
    with pytest.raises(TargetError, match="rope_theta must be positive, got 0"):
        rope_theta_of(type("Config", (), {"rope_parameters": {"rope_theta": 0}})(), "t")


def test_without_a_mask_token_a_reserved_row_is_taken_though_pad_is_eos() -> None:
    """Case T-09: never eos or pad; an explicit row beyond the embedding is an error."""
    tokenizer = make_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    chosen = choose_mask_token(None, tokenizer, 264)
    assert chosen == tokenizer.convert_tokens_to_ids("<|reserved|>")
    assert chosen not in (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id)
    with pytest.raises(TargetError, match=r"expected below 264 \(embedding rows\), got 264"):
        choose_mask_token(264, tokenizer, 264)


class ProposesMasks:
    """Proposes the mask token for every slot."""

    block_size = 4

    def __init__(self, mask: int) -> None:
        self.mask = mask

    def propose(self, texts: list[list[int]], _features: list[Tensor]) -> Tensor:
        """Drafts [R, B - 1]."""
        return torch.full((len(texts), self.block_size - 1), self.mask)


def test_a_decoder_trims_by_place_and_not_by_value(tmp_path: Path) -> None:
    """Case T-10: prompts and outputs that hold the mask token keep their length and the target's own greedy text."""
    folder = save_target(tmp_path)
    target = describe_target(folder, "t", TargetConfig(target_layer_ids=(1, 4)), make_tokenizer(), on_gpu=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    prompts = [[9, 10, 11, 12], [20, 21, 22]]
    plain = [greedy(model, prompt, 12) for prompt in prompts]
    inner = next(token for token in plain[0][2:8] if token not in target.eos_token_ids)
    for mask in (target.mask_token_id, inner):  # the second stands in the middle of the target's own text
        marked = [[*prompt[:2], mask, *prompt[2:]] for prompt in prompts]
        wanted = [greedy(model, prompt, 12) for prompt in [*prompts, *marked]]
        decoded = decode(Verifier(target, torch.device("cpu")), ProposesMasks(mask), [*prompts, *marked], 12)
        assert decoded.tokens == wanted
    assert any(inner in tokens for tokens in plain)


def greedy(model: Any, prompt: list[int], new: int) -> list[int]:
    """The target's own text, up to and with an end token."""
    ids = list(prompt)
    for _ in range(new):
        with torch.inference_mode():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == model.config.eos_token_id:
            break
    return ids[len(prompt) :]
