"""The target: which layers are tapped, how it is found and described, and what is cut off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from configs.schema import TargetConfig
from producer.target import (
    TargetError,
    choose_mask_token,
    default_target_layer_ids,
    describe_target,
    find_trunk,
    load_tokenizer,
)
from producer.trunk import Target
from tests.helpers.tiny_target import make_model, make_tokenizer, save_target


@pytest.mark.parametrize(
    ("num_layers", "num_taps", "expected"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (64, 5, (1, 16, 31, 46, 61)),
        (30, 5, (1, 8, 14, 20, 27)),
        (24, 5, (1, 6, 11, 16, 21)),
        (28, 5, (1, 7, 13, 19, 25)),
        (40, 5, (1, 10, 19, 28, 37)),
        (30, 1, (15,)),
    ],
)
def test_the_default_taps(num_layers: int, num_taps: int, expected: tuple[int, ...]) -> None:
    assert default_target_layer_ids(num_layers, num_taps) == expected


@pytest.mark.parametrize(("num_layers", "num_taps"), [(4, 5), (3, 5)])
def test_h11_the_default_rule_asks_for_a_list_where_it_breaks(num_layers: int, num_taps: int) -> None:
    with pytest.raises(TargetError, match="give 5 distinct ids"):
        default_target_layer_ids(num_layers, num_taps)


def test_h02_a_tap_is_the_raw_output_of_its_layer_also_the_last_one() -> None:
    model = make_model(num_layers=4)
    ids = torch.arange(10, 30)[None]
    tuple_states = model(ids, output_hidden_states=True).hidden_states
    taps, last = Target(model, (0, 2, 3), keep_final=True).forward(ids)
    assert torch.equal(taps[0], tuple_states[1])
    assert torch.equal(taps[1], tuple_states[3])
    assert not torch.allclose(taps[2], tuple_states[4])  # the tuple's last entry is normed
    assert torch.allclose(find_trunk(model).norm(taps[2]), tuple_states[4], atol=1e-6)
    assert torch.equal(last, tuple_states[4])


def test_layers_after_the_deepest_tap_are_not_run() -> None:
    whole, cut = make_model(num_layers=6), make_model(num_layers=6)
    target = Target(cut, (0, 3), keep_final=False)
    assert len(target.layers) == 4
    ids = torch.arange(10, 30)[None]
    assert torch.equal(target.forward(ids)[0][1], Target(whole, (0, 3), keep_final=True).forward(ids)[0][1])


def test_h05_the_head_is_never_run_for_features(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    target = Target(model, (1, 4), keep_final=False)
    monkeypatch.setattr(type(model.lm_head), "forward", forbid_head(model.lm_head))
    taps, _ = target.forward(torch.arange(10, 30)[None])
    assert len(taps) == 2
    assert target.head is None


def forbid_head(head: torch.nn.Module) -> Any:
    forward = type(head).forward

    def checked(self: torch.nn.Module, *arguments: Any) -> Any:
        assert self is not head
        return forward(self, *arguments)

    return checked


def test_h07_the_text_decoder_is_found_behind_wrappers() -> None:
    model = make_model()
    wrapper = torch.nn.Module()
    wrapper.model = torch.nn.Module()
    wrapper.model.language_model = model.model
    assert find_trunk(wrapper) is model.model
    with pytest.raises(TargetError, match="no decoder with layers"):
        find_trunk(torch.nn.Linear(2, 2))


def test_the_mask_token_is_a_reserved_row_and_never_pad_eos_or_bos() -> None:
    tokenizer = make_tokenizer()
    assert choose_mask_token(None, tokenizer, 260) == tokenizer.convert_tokens_to_ids("<|reserved|>")
    assert choose_mask_token(7, tokenizer, 264) == 7
    for wrong in (tokenizer.eos_token_id, tokenizer.pad_token_id, 264):
        with pytest.raises(TargetError, match=r"target\.mask_token_id"):
            choose_mask_token(wrong, tokenizer, 264)


@pytest.mark.parametrize(("served", "ends"), [({"eos_token_id": [3, 7]}, (3, 7, 2, 5)), ({}, (2, 5)), (None, (2, 5))])
def test_every_token_that_ends_the_served_text_is_known(
    tmp_path: Path, served: dict[str, Any] | None, ends: tuple[int, ...]
) -> None:
    """Qwen3.5's config.json has the end of a text alone, and its generation_config.json that of a turn too."""
    folder = save_target(tmp_path)
    edit(folder / "config.json", eos_token_id=5)
    (folder / "generation_config.json").unlink()
    if served is not None:
        (folder / "generation_config.json").write_text(json.dumps(served))
    settings = TargetConfig(target_layer_ids=(1, 4))
    assert describe_target(folder, "t", settings, make_tokenizer(), on_gpu=False).eos_token_ids == ends
    with pytest.raises(TargetError, match=r"target\.mask_token_id: 5 is"):
        describe_target(folder, "t", settings.model_copy(update={"mask_token_id": 5}), make_tokenizer(), on_gpu=False)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (None, "its config.json cannot be read"),
        ({"model_type": "brand_new"}, "its config.json cannot be read"),
        ({"model_type": "brand_new", "auto_map": {"AutoConfig": "own_code.Config"}}, "its config.json cannot be read"),
        ({"model_type": "clip_vision_model"}, "is not described as a decoder with layers is"),
    ],
)
def test_a_folder_that_is_no_known_target_is_one_line(
    tmp_path: Path, config: dict[str, Any] | None, words: str
) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(TargetError, match=words) as caught:
        describe_target(tmp_path, "t", TargetConfig(), load_tokenizer(tmp_path), on_gpu=False)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_tokenizer_is_one_line(tmp_path: Path) -> None:
    make_model(2).save_pretrained(tmp_path)
    with pytest.raises(TargetError, match="its tokenizer cannot be read") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def edit(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_taps_out_of_range_are_refused(tmp_path: Path) -> None:
    folder = save_target(tmp_path)
    with pytest.raises(TargetError, match=r"distinct ids in 0\.\.5"):
        describe_target(folder, "tiny", TargetConfig(target_layer_ids=(1, 6)), make_tokenizer(), on_gpu=False)


def test_h07_a_multimodal_description_is_that_of_its_text_decoder(tmp_path: Path) -> None:
    text = {"hidden_size": 48, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlavaConfig(text_config={"model_type": "llama", "vocab_size": 300, **text}, image_token_id=5)
    config.save_pretrained(tmp_path)
    found = describe_target(tmp_path, "wrapped", TargetConfig(target_layer_ids=(1, 2)), make_tokenizer(), on_gpu=False)
    assert (found.hidden, found.num_layers, found.vocab_size) == (48, 8, 300)
