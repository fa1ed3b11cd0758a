"""The target: which layers are tapped, that documents do not see each other, and that broken states stop the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from configs.load import config_from
from configs.schema import TargetConfig
from producer.corpus.documents import Documents
from producer.corpus.schedule import Schedule
from producer.rows import BadStates, PackMaker, check_states
from producer.target import (
    Target,
    TargetError,
    choose_mask_token,
    default_target_layer_ids,
    describe_target,
    find_trunk,
    load_target,
)
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
def test_the_default_rule_asks_for_a_list_where_it_breaks(num_layers: int, num_taps: int) -> None:
    with pytest.raises(TargetError, match="give 5 distinct ids"):
        default_target_layer_ids(num_layers, num_taps)


def test_a_tap_is_the_raw_output_of_its_layer_also_the_last_one() -> None:
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


def test_the_head_is_never_run_for_features(tmp_path: Path) -> None:
    config = TargetConfig(target_layer_ids=(1, 4))
    description = describe_target(save_target(tmp_path), "tiny", config, make_tokenizer(), on_gpu=False)
    target = load_target(description, config, torch.device("cpu"))
    assert not hasattr(target.trunk, "lm_head")


def packs_of(tmp_path: Path, documents: list[np.ndarray[Any, Any]], pack_tokens: int, row_tokens: int) -> list[Any]:
    np.save(tmp_path / "ids.npy", np.concatenate(documents).astype(np.int32))
    np.save(tmp_path / "mask.npy", np.ones(sum(map(len, documents)), dtype=np.uint8))
    np.save(tmp_path / "offsets.npy", np.concatenate([[0], np.cumsum([len(d) for d in documents])]))
    corpus = Documents(tmp_path)
    schedule = Schedule(corpus.lengths, "digest", 0, 1, pack_tokens)
    target = Target(make_model(), (0, 2, 5), keep_final=True)
    overrides = [f"pack.tokens={pack_tokens}", f"pack.max_row_tokens={row_tokens}", "target.final_hidden=true"]
    maker = PackMaker(corpus, schedule, target, torch.device("cpu"), config_from({}, overrides), [16, 32, 64])
    packs = list(maker.window(range(schedule.num_packs), lambda: False))
    assert sorted(number for pack in packs for number in pack.documents) == list(range(len(documents)))
    return packs


def test_each_documents_taps_equal_those_of_the_document_alone(tmp_path: Path) -> None:
    generator = np.random.Generator(np.random.PCG64(1))
    documents = [generator.integers(4, 260, size=length) for length in (40, 9, 64, 17, 33, 5, 21, 60, 12, 30, 48, 7)]
    alone = Target(make_model(), (0, 2, 5), keep_final=True)
    for pack in packs_of(tmp_path, documents, pack_tokens=128, row_tokens=128):
        assert pack.num_tokens == sum(len(documents[number]) for number in pack.documents)
        for number in pack.documents:
            start = pack.starts[number]
            place = slice(start, start + len(documents[number]))
            taps, last = alone.forward(torch.from_numpy(documents[number])[None])
            assert torch.equal(torch.from_numpy(pack.input_ids[place]), torch.from_numpy(documents[number]).int())
            assert set(pack.doc_start[place].tolist()) == {start}
            assert (pack.features[place] - torch.cat(taps, dim=-1)[0]).abs().max() < 1e-5
            assert (pack.final_hidden[place] - last[0]).abs().max() < 1e-5
        assert set(pack.doc_start[pack.num_tokens :].tolist()) <= {-1}
        assert not pack.features[pack.num_tokens :].any()


def test_a_stop_between_forwards_gives_the_window_up(tmp_path: Path) -> None:
    documents = [np.arange(4, 40) for _ in range(6)]
    packs_of(tmp_path, documents, pack_tokens=128, row_tokens=64)
    corpus = Documents(tmp_path)
    target = Target(make_model(), (0,), keep_final=True)
    config = config_from({}, ["pack.tokens=128", "pack.max_row_tokens=64"])
    schedule = Schedule(corpus.lengths, "digest", 0, 1, 128)
    answers = iter([False, True])
    maker = PackMaker(corpus, schedule, target, torch.device("cpu"), config, [64])
    assert list(maker.window([0, 1], lambda: next(answers))) == []


@pytest.mark.parametrize("fault", ["nan", "inf", "zero"])
def test_broken_states_stop_the_run_naming_document_and_tap(fault: str) -> None:
    states = torch.ones(5, 8)
    states[3] = {"nan": torch.nan, "inf": torch.inf, "zero": 0.0}[fault]
    with pytest.raises(BadStates, match="document 3, tap 2"):
        check_states(states, document=3, tap=2)
    check_states(torch.ones(5, 8), document=3, tap=2)


def test_the_text_decoder_is_found_behind_wrappers() -> None:
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


def test_taps_out_of_range_are_refused(tmp_path: Path) -> None:
    folder = save_target(tmp_path)
    with pytest.raises(TargetError, match=r"distinct ids in 0\.\.5"):
        describe_target(folder, "tiny", TargetConfig(target_layer_ids=(1, 6)), make_tokenizer(), on_gpu=False)


def test_a_multimodal_description_is_that_of_its_text_decoder(tmp_path: Path) -> None:
    text = {"hidden_size": 48, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlavaConfig(text_config={"model_type": "llama", "vocab_size": 300, **text}, image_token_id=5)
    config.save_pretrained(tmp_path)
    found = describe_target(tmp_path, "wrapped", TargetConfig(target_layer_ids=(1, 2)), make_tokenizer(), on_gpu=False)
    assert (found.hidden, found.num_layers, found.vocab_size) == (48, 8, 300)
