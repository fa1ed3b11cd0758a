"""The speculators format's config.json, written field by field and read back, and its tensors of a reduced vocabulary.

Facts: speculators 0.9.0 (models/dflash, train/vocab_mapping.py). Its layer ids count the residual stream AFTER n
layers, so they are one higher than z-lab's. `d2t` holds offsets (target id = draft id + d2t[draft id]), `t2d` a mask.
vLLM takes `causal = not sliding_window_non_causal` for ALL layers, so it serves a mix of causal sliding and full layers
wrongly from this format; the z-lab format says it right. speculators' own mask lets a sliding layer see W tokens before
the anchor whatever the slot, one window edge wider for slot k by k tokens than z-lab's and ours.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from configs.drafter_shape import SLIDING
from consumer.export.facts import DrafterFacts, ExportError
from consumer.export.fields import identity_of, take, transformer_fields
from consumer.export.zlab import from_config as from_zlab

VERSION = "0.9.0"
MAPS = ("d2t", "t2d")
HEAD = "lm_head.weight"


def to_config(facts: DrafterFacts) -> dict[str, Any]:
    """Write config.json."""
    shape, identity = facts.shape, facts.identity
    verifier = {
        "name_or_path": None if identity is None else identity.name,
        "architectures": [] if identity is None else [identity.architecture],
    }
    config = {
        "speculators_model_type": "dflash",
        "speculators_version": VERSION,
        "architectures": ["DFlashDraftModel"],
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": facts.num_speculative_tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": verifier,
        },
        "transformer_layer_config": transformer_fields(facts),
        "draft_vocab_size": shape.draft_vocab_size or shape.vocab_size,
        "target_hidden_size": None,
        "block_size": shape.block_size,
        "aux_hidden_state_layer_ids": [number + 1 for number in facts.target_layer_ids],
        "mask_token_id": shape.mask_token_id,
        "sliding_window_non_causal": not any(shape.causal_of(kind) for kind in shape.layer_types),
        "sample_from_anchor": False,
        "tie_word_embeddings": False,
        "dtype": facts.dtype,
        "torch_dtype": facts.dtype,
        "num_target_layers": facts.num_target_layers,
        "training_facts": facts.training,
    }
    if identity is not None:
        config["target_identity"] = identity.as_dict()
    return config


def from_config(config: dict[str, Any], where: str) -> DrafterFacts:
    """Read config.json. Raises ExportError. `draft_vocab` comes from the tensors, see draft_vocabulary."""
    if config.get("speculators_model_type") != "dflash":
        raise ExportError(
            f"{where}: expected speculators_model_type dflash, got {config.get('speculators_model_type')!r}"
        )
    if config.get("sample_from_anchor"):
        raise ExportError(f"{where}: sample_from_anchor is true; slot 0 of this drafter predicts nothing")
    layers = dict(take(config, "transformer_layer_config", where))
    ids = [number - 1 for number in take(config, "aux_hidden_state_layer_ids", where)]
    sliding = SLIDING in (layers.get("layer_types") or ())
    plain = {
        **layers,
        "dflash_config": {
            "target_layer_ids": ids,
            "mask_token_id": take(config, "mask_token_id", where),
            "block_size": take(config, "block_size", where),
        },
        "dtype": config.get("dtype") or config.get("torch_dtype") or layers.get("dtype"),
        "num_target_layers": config.get("num_target_layers") or max(ids) + 1,
        "training_facts": config.get("training_facts"),
        "target_identity": config.get("target_identity"),
    }
    facts = from_zlab(plain, where)
    causal = sliding and not config.get("sliding_window_non_causal", False)
    size = int(config.get("draft_vocab_size") or facts.shape.vocab_size)
    reduced = None if size == facts.shape.vocab_size else size
    shape = replace(facts.shape, sliding_causal=causal, draft_vocab_size=reduced)
    return replace(facts, shape=shape, identity=identity_of(config))


def vocabulary_tensors(draft_vocab: tuple[int, ...], head_rows: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """The tensors of a reduced vocabulary: both maps, and the target's head rows [V', H], which servers read."""
    ids = torch.tensor(draft_vocab, dtype=torch.int64)
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[ids] = True
    return {"d2t": ids - torch.arange(len(draft_vocab)), "t2d": mask, HEAD: head_rows}


def check_sizes(config: dict[str, Any], tensors: dict[str, Tensor], vocab_size: int, where: str) -> None:
    """Compare `draft_vocab_size` with the tensors that have a row for each of its tokens. Raises ExportError."""
    size = int(config.get("draft_vocab_size") or vocab_size)
    for name, rows, said in (
        ("d2t", size, "draft_vocab_size"),
        (HEAD, size, "draft_vocab_size"),
        ("t2d", vocab_size, "vocab_size"),
    ):
        if name in tensors and tensors[name].shape[0] != rows:
            raise ExportError(f"{where}: {said} is {rows} in config.json, {name} has {tensors[name].shape[0]} rows")


def draft_vocabulary(tensors: dict[str, Tensor], where: str) -> tuple[int, ...]:
    """Read the reduced vocabulary from d2t, and check it against t2d. Raises ExportError."""
    if "d2t" not in tensors or "t2d" not in tensors:
        raise ExportError(f"{where}: draft_vocab_size is reduced, but the tensors d2t and t2d are missing")
    ids = tensors["d2t"] + torch.arange(tensors["d2t"].shape[0])
    if not torch.equal(torch.nonzero(tensors["t2d"]).flatten(), ids):
        raise ExportError(f"{where}: d2t and t2d name different tokens; the file is damaged")
    return tuple(int(number) for number in ids)
