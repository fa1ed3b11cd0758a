"""Reading the target's embedding and head: prefixes, shards, tied, missing, reduced, and initial weights."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from configs.drafter_shape import FULL, DrafterShape
from consumer.drafter import Drafter
from consumer.frozen_head import CheckpointTensors, FrozenHead, HeadError, init_from_target, load_frozen_head

CPU = torch.device("cpu")
V, H = 12, 16


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    made = {"model.embed_tokens.weight": random(V, H), "lm_head.weight": random(V, H), "model.norm.weight": random(H)}
    for index in range(3):
        layer = f"model.layers.{index}."
        made |= {f"{layer}input_layernorm.weight": random(H), f"{layer}post_attention_layernorm.weight": random(H)}
        shapes = {"q": (16, H), "k": (8, H), "v": (8, H), "o": (H, 16)}
        made |= {f"{layer}self_attn.{name}_proj.weight": random(*shape) for name, shape in shapes.items()}
        shapes = {"gate": (24, H), "up": (24, H), "down": (H, 24)}
        made |= {f"{layer}mlp.{name}_proj.weight": random(*shape) for name, shape in shapes.items()}
    return made


def test_a_single_file_is_read_bit_for_bit(tmp_path, tensors):
    save_file(tensors, tmp_path / "model.safetensors")
    found = load_frozen_head(tmp_path, False, torch.float32, CPU)
    assert torch.equal(found.embedding, tensors["model.embed_tokens.weight"])
    assert torch.equal(found.head, tensors["lm_head.weight"])


def test_shards_behind_an_index_and_a_longer_prefix(tmp_path, tensors):
    renamed = {name.replace("model.", "model.language_model."): value for name, value in tensors.items()}
    renamed["model.visual.embed_tokens.weight"] = torch.zeros(2, 2)
    first = {name: value for name, value in renamed.items() if "layers" in name}
    second = {name: value for name, value in renamed.items() if "layers" not in name}
    index = {}
    for file, part in (("a.safetensors", first), ("b.safetensors", second)):
        save_file(part, tmp_path / file)
        index |= dict.fromkeys(part, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    found = load_frozen_head(tmp_path, False, torch.float32, CPU)
    assert torch.equal(found.embedding, tensors["model.embed_tokens.weight"])
    assert torch.equal(found.head, tensors["lm_head.weight"])


def test_h08_tied_without_a_head_uses_the_embedding_and_stays_one_tensor(tmp_path, tensors):
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    found = load_frozen_head(tmp_path, True, torch.float32, CPU)
    assert found.head is found.embedding
    cast = found.cast(torch.bfloat16)
    assert cast.head is cast.embedding
    assert cast.head.dtype == torch.bfloat16


def test_h08_untied_without_a_head_is_an_error(tmp_path, tensors):
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(HeadError, match=r"no lm_head\.weight.*not tied"):
        load_frozen_head(tmp_path, False, torch.float32, CPU)


def test_an_empty_folder_is_an_error(tmp_path):
    with pytest.raises(HeadError, match=r"no .*safetensors"):
        CheckpointTensors(tmp_path)


def test_a_reduced_head_maps_tokens_to_rows_and_back():
    weight = torch.arange(V * 2.0).view(V, 2)
    head = FrozenHead(weight, weight).reduced([1, 4, 11])
    assert torch.equal(head.head, weight[[1, 4, 11]])
    assert head.labels(torch.tensor([4, 0, 11, -1, 1])).tolist() == [1, -1, 2, -1, 0]
    assert head.tokens(torch.tensor([2, 0])).tolist() == [11, 1]
    assert head.embedding.shape == (V, 2)


def test_initial_weights_are_the_targets_last_layers_and_the_last_tap(tmp_path, tensors):
    save_file(tensors, tmp_path / "model.safetensors")
    shape = DrafterShape(H, 24, 2, 2, 1, 8, 3, 4, (FULL, FULL), 64, True, 1e-6, 1e4, 5, V)
    drafter = Drafter(shape)
    copied = init_from_target(drafter, tmp_path)
    state = drafter.state_dict()
    assert torch.equal(state["layers.0.self_attn.q_proj.weight"], tensors["model.layers.1.self_attn.q_proj.weight"])
    assert torch.equal(state["layers.1.mlp.down_proj.weight"], tensors["model.layers.2.mlp.down_proj.weight"])
    assert torch.equal(state["norm.weight"], tensors["model.norm.weight"])
    features = torch.randn(5, 3 * H)
    assert torch.equal(features @ state["fc.weight"].T, features[:, -H:])
    assert "layers.0.self_attn.q_norm.weight" not in copied  # this target has none: it stays one
    assert bool((state["layers.0.self_attn.q_norm.weight"] == 1).all())
