"""What is evaluated: a drafter (of a run, a checkpoint or an exported folder), its head, and which target it is for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from configs.schema import TargetConfig
from consumer.drafter import Drafter
from consumer.export.facts import DrafterFacts, ExportError
from consumer.export.folder import is_export, read_export
from consumer.export.identity import identify
from consumer.export.source import facts_of, find_checkpoint
from consumer.frozen_head import FrozenHead, load_frozen_head
from producer.target import TargetDescription, describe_target, load_tokenizer
from producer.target_source import check_weights, find_target


@dataclass(frozen=True)
class Subject:
    """A drafter ready to draft for a target that is not loaded yet."""

    name: str
    facts: DrafterFacts
    drafter: Drafter
    head: FrozenHead
    description: TargetDescription
    tokenizer: Any
    run_dir: Path | None


def load_subject(path: Path, target: str | None, device: torch.device, dtype: str = "auto") -> Subject:
    """Load the drafter at `path` for `target` (a folder or hub id; None: the run's own). dtype: of both models.

    An export says which target it is for; every fact in which the one given is another is printed as a warning.

    auto: float32 on a CPU, else the target's stored type. Raises ExportError, CheckpointError, HeadError, TargetError,
    TargetNotFound.
    """
    run_dir = None
    if is_export(path):
        if target is None:
            raise ExportError(f"{path}: an exported drafter needs --target, its target's folder or hub id")
        folder = find_target(target, None, print).path
        found = read_export(path)
        facts, drafter = found.facts, found.drafter()
    else:
        checkpoint = find_checkpoint(path)
        folder = find_target(target, None, print).path if target else Path(checkpoint.meta["target"]["path"])
        if not folder.is_dir():
            raise ExportError(f"target: {folder} is not there (any more); give it with --target")
        facts = facts_of(checkpoint, folder)
        drafter = Drafter(facts.shape)
        drafter.load_state_dict(checkpoint.drafter())
        run_dir = path if (path / "checkpoints").is_dir() else checkpoint.path.parent.parent
    description, tokenizer = describe(folder, target or str(folder), facts, device, dtype)
    if run_dir is None and facts.identity is not None:
        for line in facts.identity.differences(identify(folder, facts.identity.name, None, description.as_dict())):
            print(f"warning: {line}", flush=True)
    head = load_frozen_head(folder, description.tie_word_embeddings, getattr(torch, description.dtype), device)
    _check_rows(head, facts)
    if facts.draft_vocab is not None:
        head = head.reduced(list(facts.draft_vocab))
    drafter = drafter.to(device=device, dtype=getattr(torch, description.dtype))
    return Subject(path.name, facts, drafter, head, description, tokenizer, run_dir)


def describe(
    folder: Path, name: str, facts: DrafterFacts, device: torch.device, dtype: str
) -> tuple[TargetDescription, Any]:
    """Describe the target with the drafter's taps and mask token; returns its tokenizer too.

    Raises TargetError, TargetNotFound.
    """
    tokenizer = load_tokenizer(folder)
    check_weights(folder)
    settings = TargetConfig.model_validate(
        {
            "model": str(folder),
            "dtype": dtype,
            "target_layer_ids": facts.target_layer_ids,
            "mask_token_id": facts.shape.mask_token_id,
        }
    )
    return describe_target(folder, name, settings, tokenizer, on_gpu=device.type == "cuda"), tokenizer


def _check_rows(head: FrozenHead, facts: DrafterFacts) -> None:
    """Refuse a target whose embedding is not the drafter's."""
    rows, hidden = head.embedding.shape
    if hidden != facts.shape.hidden or rows < facts.shape.vocab_size:
        raise ExportError(
            f"target: its embedding is [{rows}, {hidden}], the drafter's target had "
            f"[{facts.shape.vocab_size}, {facts.shape.hidden}]; this is another target"
        )
