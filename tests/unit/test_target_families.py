"""Any target that transformers loads: loaded, found behind its wrapper, checked, and read exactly, family by family."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import masking_utils

from configs.load import config_from
from configs.schema import Config
from consumer.frozen_head import load_frozen_head
from producer import packed, packed_recurrent, selfcheck
from producer.setup import make_target
from producer.states import StateCheck
from producer.target import TargetDescription, TargetError, describe_target
from producer.trunk import Target
from tests.helpers.corpus import FakeCorpus, all_packs, maker_of, random_documents
from tests.helpers.families import FAMILIES, HIDDEN, LAYERS, PACKED, VOCAB, make_family
from tests.helpers.tiny_target import make_tokenizer

CPU = torch.device("cpu")
TAPS = (0, 2, 4)
LENGTHS = (30, 41, 12, 25, 19)


def saved(folder: Path, model: Any, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def setup(folder: Path, *overrides: str) -> tuple[Target, TargetDescription, list[str]]:
    target_ids = json.dumps(list(TAPS))
    settings = ["pack.tokens=96", f"target.target_layer_ids={target_ids}", *overrides]
    config: Config = config_from({}, settings)
    description = describe_target(folder, folder.name, config.target, make_tokenizer(), on_gpu=False)
    lines: list[str] = []
    target = make_target(description, config, CPU, lambda event, **facts: lines.append(f"{event} {facts}"))  # type: ignore[arg-type]
    return target, description, lines


def tuple_states(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with torch.inference_mode():
        states: tuple[torch.Tensor, ...] = model(
            input_ids=ids, output_hidden_states=True, use_cache=False
        ).hidden_states
        return states


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_loaded_checked_and_read_exactly(family: str, tmp_path: Path) -> None:
    model = make_family(family)
    target, description, lines = setup(saved(tmp_path / family, model), "target.final_hidden=true")
    assert (description.hidden, description.num_layers, description.vocab_size) == (HIDDEN, LAYERS, VOCAB)
    assert target.is_packed == (family in PACKED), lines
    corpus = random_documents(LENGTHS, VOCAB)
    for pack in all_packs(*maker_of(corpus, target, 96, "target.final_hidden=true")):
        for number, (start, end) in pack.spans.items():
            states = tuple_states(model, torch.from_numpy(corpus.documents[number]).long()[None])
            expected = torch.cat([states[tap + 1][0] for tap in TAPS], dim=-1)
            assert pack.features is not None
            assert pack.final_hidden is not None
            assert selfcheck.row_difference(pack.features[start:end], expected) < 1e-3
            assert selfcheck.row_difference(pack.final_hidden[start:end], states[-1][0]) < 1e-3


@pytest.mark.parametrize("family", sorted(PACKED))
def test_rows_and_packed_give_the_same_states(family: str) -> None:
    corpus = random_documents(LENGTHS, VOCAB)
    made = []
    for layout in ("rows", "packed"):
        target = Target(make_family(family), TAPS)
        if layout == "packed":
            target.use_packed()
        made.append({pack.pack_id: pack for pack in all_packs(*maker_of(corpus, target, 96))})
    for pack_id, pack in made[0].items():
        assert pack.features is not None
        difference = selfcheck.row_difference(
            made[1][pack_id].features[: pack.num_tokens], pack.features[: pack.num_tokens]
        )
        assert difference < 1e-4


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_h08_the_drafters_frozen_head_gives_the_targets_argmax(tied: bool, shard: str, tmp_path: Path) -> None:
    model = make_family("qwen3", tie_word_embeddings=tied)
    folder = saved(tmp_path / "target", model, max_shard_size=shard)
    assert (folder / "model.safetensors.index.json").exists() == (shard == "20KB")
    target, description, _ = setup(folder, "target.final_hidden=true")
    assert description.tie_word_embeddings == tied
    head = load_frozen_head(folder, description.tie_word_embeddings, torch.float32, CPU)
    ids = torch.arange(10, 40)[None]
    with torch.inference_mode():
        greedy = model(input_ids=ids).logits.argmax(-1)[0]
    _, final = selfcheck.alone(target, ids[0].tolist())
    assert torch.equal((final @ head.head.T).argmax(-1), greedy)


def test_h08_a_head_that_does_not_give_the_targets_argmax_is_refused() -> None:
    model = make_family("llama")
    target = Target(model, TAPS)
    reference = selfcheck.read_alone(target)
    selfcheck.check_head(target, model, reference)
    target.head = torch.nn.Linear(HIDDEN, VOCAB, bias=False)
    with pytest.raises(TargetError, match="the head on the final hidden state gives another token"):
        selfcheck.check_head(target, model, reference)


def test_h10_a_recurrent_target_is_read_packed_only_where_its_layers_stop_at_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path / "hybrid", make_family("qwen3_5"))
    assert "'reads': 'packed'" in setup(folder)[2][-1]
    monkeypatch.setattr(packed_recurrent, "by_document", lambda _modules: nullcontext())
    assert "rows (target self-check: document 1" in setup(folder)[2][-1]
    with pytest.raises(TargetError, match="packed is not possible"):
        setup(folder, "target.layout=packed")
    monkeypatch.setattr(packed_recurrent, "DELTA_RULE", "a_function_of_another_name")
    assert "rows (layer 0 is recurrent in a way of its own: Qwen3_5GatedDeltaNet)" in setup(folder)[2][-1]


def test_a_hybrid_that_will_be_slow_is_one_line_in_the_targets_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path / "hybrid", make_family("qwen3_5"))
    assert not any(line.startswith("warning") for line in setup(folder)[2])
    monkeypatch.setattr(packed_recurrent, "warning", lambda _layers, _device: "slow without its library")
    assert [line for line in setup(folder)[2] if line.startswith("warning")] == [
        "warning {'detail': 'slow without its library'}"
    ]


def test_h10_a_kernel_library_that_does_not_work_makes_a_recurrent_target_read_in_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_another_version(*_tensors: Any, **_words: Any) -> torch.Tensor:
        raise TypeError("chunk_gated_delta_rule() got an unexpected keyword argument 'chunk_indices'")

    folder = saved(tmp_path / "hybrid", make_family("qwen3_5"))
    monkeypatch.setattr(packed_recurrent, "_delta_rule", of_another_version)
    assert "rows (TypeError: chunk_gated_delta_rule() got an unexpected keyword argument" in setup(folder)[2][-1]
    with pytest.raises(TargetError, match=r"packed is not possible \(TypeError"):
        setup(folder, "target.layout=packed")


class Leaking(torch.nn.Module):
    """A layer in which every token sees the running sum of all tokens before it, over document bounds."""

    def forward(self, hidden: torch.Tensor, **_words: Any) -> torch.Tensor:
        return hidden + 0.1 * hidden.cumsum(dim=1)


def test_h10_a_layer_that_leaks_in_disguise_makes_the_start_up_check_choose_rows() -> None:
    model = make_family("llama")
    model.model.layers[1] = Leaking()
    target = Target(model, TAPS)
    reference = selfcheck.read_alone(target)
    target.use_packed()
    with pytest.raises(TargetError, match=re.escape("document 1, tap 1 (output of layer 2): read beside another")):
        selfcheck.check_target(target, reference, "float32", 96)
    target.use_rows()
    selfcheck.check_target(target, reference, "float32", 48)


def test_h09_a_tap_that_is_not_the_layers_output_is_refused() -> None:
    target = Target(make_family("llama"), TAPS)
    reference = selfcheck.read_alone(target)
    taken = target.forward

    def rounded(ids: torch.Tensor) -> Any:
        taps, last = taken(ids)
        return [tap.half().float() for tap in taps], last

    target.forward = rounded  # type: ignore[method-assign]
    with pytest.raises(TargetError, match="the pack does not hold what the layer put out"):
        selfcheck.check_target(target, reference, "float32", 48)


@pytest.mark.parametrize("own", [True, False])
def test_answers_that_the_target_wrote_agree_with_it(own: bool) -> None:
    model = make_family("qwen3")
    texts = [torch.tensor([start]) for start in (5, 50, 100)]
    for _ in range(12):
        with torch.inference_mode():
            following = [model(input_ids=text[None]).logits[0, -1].argmax()[None] for text in texts]
        texts = [torch.cat([text, token]) for text, token in zip(texts, following, strict=True)]
    target = Target(model, TAPS)
    target.use_packed()
    corpus = FakeCorpus([text.numpy() if own else text.flip(0).numpy() for text in texts])
    check = StateCheck(TAPS, 16.0, target.head)
    for pack in all_packs(*maker_of(corpus, target, 96, "target.final_hidden=true")):
        check.judge(check.start(pack))
    assert check.agreement is not None
    assert check.agreement == 1.0 if own else check.agreement < 0.5


@pytest.mark.parametrize("layout", ["rows", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_never_looks_for_packed_documents_on_the_device(
    family: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def search(_position_ids: torch.Tensor) -> None:
        raise AssertionError("the host would wait for the device")

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", search)
    target = Target(make_family(family), TAPS)
    if layout == "rows":
        target.forward(torch.arange(10, 40)[None])
    elif family in PACKED:
        target.use_packed()
        target.forward_packed(torch.arange(10, 40), [12, 18])
    assert masking_utils.find_packed_sequence_indices is search


def test_the_noise_of_a_deep_target_in_bfloat16_is_allowed_and_a_leak_is_not() -> None:
    model = make_family("llama", num_hidden_layers=12).to(torch.bfloat16)
    target = Target(model, (0, 5, 11))
    reference = selfcheck.read_alone(target)
    assert all(0 <= noise < 0.1 for one in reference for noise in one.noise)
    target.use_packed()
    selfcheck.check_target(target, reference, "bfloat16", 96)
    model.model.layers[1] = Leaking()
    with pytest.raises(TargetError, match="differs from itself alone"):
        selfcheck.check_target(target, selfcheck.read_alone(target), "bfloat16", 96)


def test_where_long_documents_are_attended_in_another_way_the_check_reads_one() -> None:
    assert selfcheck.lengths_for(None, 8192) == selfcheck.lengths_for(512, 600) == selfcheck.LENGTHS
    lengths = selfcheck.lengths_for(40, 160)
    assert lengths == (40 + selfcheck.LONG, selfcheck.LENGTHS[1])
    model = make_family("llama")
    target = Target(model, TAPS)
    reference = selfcheck.read_alone(target, lengths)
    selfcheck.check_head(target, model, reference)
    target.use_packed()
    selfcheck.check_target(target, reference, "float32", 160)
    attention = packed.attend_packed
    try:
        packed.attend_packed = lambda q, k, v, scale, window: _blind(attention(q, k, v, scale, window), lengths[0])
        with pytest.raises(TargetError, match="document 0, tap 0"):
            selfcheck.check_target(target, reference, "float32", 160)
    finally:
        packed.attend_packed = attention


def _blind(out: torch.Tensor, tokens: int) -> torch.Tensor:
    """What a kernel that fails from the 64th token on makes of the first document."""
    return torch.cat([out[:64], torch.zeros_like(out[64:tokens]), out[tokens:]])


def test_compiled_layers_give_the_same_states_and_equal_layers_compile_once() -> None:
    torch._dynamo.reset()
    target = Target(make_family("qwen3"), TAPS)
    reference = selfcheck.read_alone(target)
    target.use_packed()
    target.cut()
    target.compile(backend="aot_eager", fullgraph=True)
    torch._dynamo.utils.counters.clear()
    selfcheck.check_target(target, reference, "float32", 96)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    target.uncompile()
    target.use_rows()
    target.compile(backend="aot_eager", fullgraph=True)
    torch._dynamo.utils.counters.clear()
    for rows, tokens in ((2, 48), (1, 64), (5, 80), (3, 128), (1, 96)):
        target.forward(torch.ones(rows, tokens, dtype=torch.int64))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3
    torch._dynamo.reset()


def test_a_quantised_checkpoint_is_loaded_as_transformers_loads_it(tmp_path: Path) -> None:
    model = make_family("llama")
    with torch.no_grad():  # values that 8 bits hold
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.float8_e4m3fn))
    folder = saved(tmp_path / "fp8", model)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "proj" in name]:
        weight = tensors[name]
        tensors[name] = weight.to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.ones(weight.shape[0] // 16, weight.shape[1] // 16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16], "dequantize": True}
    (folder / "config.json").write_text(json.dumps(config))
    target, _, _ = setup(folder)
    ids = torch.arange(10, 40)
    states = tuple_states(model, ids[None])
    taps, _ = selfcheck.alone(target, ids.tolist())
    for tap, found in zip(TAPS, taps, strict=True):
        assert selfcheck.row_difference(found, states[tap + 1][0]) < 1e-3
