"""From a checkpoint of ours to an exported drafter: what `python launch.py export` does."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from configs.drafter_shape import shape_from_dict
from configs.pack import longest_document
from consumer.checkpoint import Checkpoint, CheckpointError, newest_checkpoint, read_checkpoint
from consumer.drafter import Drafter
from consumer.export import speculators
from consumer.export.facts import DrafterFacts, ExportError
from consumer.export.folder import FORMATS, read_export, write_export
from consumer.export.identity import identify, stored_dtype
from consumer.export.probe import as_json, as_trained, probe_input, training_logits
from consumer.export.readme import LAST_LAYER_WARNING, MIXED_WARNING, readme
from consumer.frozen_head import FrozenHead, load_frozen_head


def find_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint at `path`: a checkpoint's folder, or a run's (its newest). Raises CheckpointError."""
    if (path / "complete.json").is_file() or (path / "checkpoint.json").is_file():
        return read_checkpoint(path)
    rejected: list[str] = []
    found = newest_checkpoint(path / "checkpoints", rejected.append)
    if found is None:
        raise CheckpointError("; ".join(rejected) or f"{path}: no checkpoint yet, and it is none itself")
    return found


def facts_of(checkpoint: Checkpoint, target: Path, dtype: str = "auto") -> DrafterFacts:
    """Gather what the export says; `target` is the target's folder. dtype auto: the target's stored type."""
    meta, described = checkpoint.meta, checkpoint.meta["target"]
    config = meta["config"]
    vocabulary = meta.get("draft_vocab")
    chosen = (stored_dtype(target) or described["dtype"]) if dtype == "auto" else dtype
    training = {
        "steps": checkpoint.step,
        "packs_trained": len(checkpoint.trained),
        "longest_document_tokens": longest_document(
            config["data"]["max_document_tokens"], config["pack"]["tokens"], described["max_position_embeddings"]
        ),
        "chat_template_kwargs": config["data"]["chat_template_kwargs"],
        "labels": config["loss"]["labels"],
        "data_digest": meta["data_digest"],
        "made_with": "dflash-ring",
    }
    return DrafterFacts(
        shape=shape_from_dict(meta["shape"]),
        target_layer_ids=tuple(described["target_layer_ids"]),
        dtype=chosen,
        max_position_embeddings=described["max_position_embeddings"],
        bos_token_id=described["bos_token_id"],
        eos_token_ids=tuple(described["eos_token_ids"]),
        pad_token_id=described["pad_token_id"],
        num_target_layers=described["num_layers"],
        identity=identify(target, described["name"], config["target"]["revision"], described),
        draft_vocab=None if vocabulary is None else tuple(vocabulary),
        training=training,
    )


def in_layer_order(
    facts: DrafterFacts, weights: dict[str, torch.Tensor]
) -> tuple[DrafterFacts, dict[str, torch.Tensor]]:
    """Sort the taps, and the columns of fc [H, K*H] with them: the same drafter, the sums of fc in another order.

    vLLM 0.33.0 (models/interfaces.py) and SGLang 0.5.23 (models/qwen3.py) join the states in the order of the target's
    layers, not of `target_layer_ids`: a list in another order would be served with fc's columns mixed up.
    """
    ids = facts.target_layer_ids
    order = sorted(range(len(ids)), key=ids.__getitem__)
    columns = weights["fc.weight"].unflatten(1, (len(ids), -1))[:, order].flatten(1)
    return replace(facts, target_layer_ids=tuple(sorted(ids))), weights | {"fc.weight": columns}


def export_checkpoint(
    path: Path, name: str, out: Path, target: Path | None = None, dtype: str = "auto"
) -> tuple[Path, list[str]]:
    """Export the drafter of a run or checkpoint; returns the folder and lines to show.

    Raises ExportError, CheckpointError or HeadError; then nothing was written.
    """
    if name not in FORMATS:
        raise ExportError(f"--format: expected one of {', '.join(FORMATS)}, got {name!r}")
    checkpoint = find_checkpoint(path)
    folder = target or Path(checkpoint.meta["target"]["path"])
    if not folder.is_dir():
        raise ExportError(f"target: {folder} is not there (any more); give its folder with --target")
    facts, weights = in_layer_order(facts_of(checkpoint, folder, dtype), checkpoint.drafter())
    # As stored, whatever the export's type: `verify` reads the target so, and compares logits with the probe's.
    whole = load_frozen_head(folder, checkpoint.meta["target"]["tie_word_embeddings"], None, torch.device("cpu"))
    head = whole if facts.draft_vocab is None else whole.reduced(list(facts.draft_vocab))
    extra = {}
    if facts.draft_vocab is not None:
        rows = head.head.to(getattr(torch, facts.dtype))
        extra = speculators.vocabulary_tensors(facts.draft_vocab, rows, facts.shape.vocab_size)
    texts = {
        "README.md": readme(facts, name, out.name),
        "probe.json": json.dumps(_probe(facts, weights, head)) + "\n",
    }
    written = write_export(out, name, facts, weights, extra, texts)
    read_export(written)  # what cannot be read back must not be shipped
    lines = [
        f"{written}: {name} format, step {checkpoint.step}, {facts.dtype}, {facts.shape.num_parameters:,} parameters"
    ]
    if name == "speculators" and facts.is_mixed and facts.shape.sliding_causal:
        lines.append(f"warning: {MIXED_WARNING}")
    if name == "zlab" and facts.taps_last_layer:
        lines.append(f"warning: {LAST_LAYER_WARNING}")
    lines.append(
        f"serve it with num_speculative_tokens = {facts.num_speculative_tokens}; commands are in its README.md"
    )
    return written, lines


def _probe(facts: DrafterFacts, weights: dict[str, torch.Tensor], head: FrozenHead) -> dict[str, Any]:
    """Logits of the weights as stored, in float32."""
    drafter = Drafter(facts.shape)
    stored = getattr(torch, facts.dtype)
    drafter.load_state_dict({name: tensor.to(stored).float() for name, tensor in weights.items()})
    given = probe_input(facts.shape)
    rows = head.head[torch.tensor(given.head_rows)]
    plain = as_json(given, training_logits(drafter, given, head.embedding, rows))
    return plain | {"settings": as_trained(facts)}
