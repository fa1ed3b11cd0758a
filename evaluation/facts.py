"""The models of a configuration, found out without loading them: for `python launch.py plan CONFIG`.

Reads the target's description and counts its tensors without allocating them; tokenises nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from configs.facts import Facts
from configs.pack import longest_document
from configs.schema import Config
from consumer.memory import checkpoint_bytes, estimate_of
from producer import packed_recurrent
from producer.corpus.sources import check_files
from producer.drafter_check import check_drafter, check_target, planned_shape
from producer.packed import KINDS, LINEAR, CannotPack
from producer.prepare import identity_of, slot_spec
from producer.target import (
    TargetDescription,
    TargetError,
    describe_target,
    find_trunk,
    layer_kinds,
    load_tokenizer,
)
from producer.target_source import TargetFolder, find_target
from producer.trunk import model_class

SHORT_CONTEXT = 4
"""A pack shorter than the target's context by more than this factor is worth a warning."""


class TargetSize(NamedTuple):
    """Parameters and bytes of a target's tensors, in the type it computes in, and whether it can be read packed.

    `packs`: none of them forbids it (the start-up check may still). `slow`: a warning for a hybrid on a GPU, or None.
    """

    parameters: int
    trunk_parameters: int
    bytes: int
    files_bytes: int
    packs: bool
    slow: str | None


def find_facts(config: Config, on_gpu: bool) -> Facts:
    """Find what there is to know, and judge the files it needs as a run would.

    Raises TargetNotFound, TargetError, SourceError; ConfigError for a drafter that could not start.
    """
    folder = find_target(config.target.model, config.target.revision, lambda _line: None)
    tokenizer = load_tokenizer(folder.path)
    target = describe_target(folder.path, config.target.model, config.target, tokenizer, on_gpu)
    check_target(config, folder.path, needs_weights=False)
    check_files(config.data.sources)
    check_drafter(Path(config.run.folder) / config.run.name, config, target, identity_of(config, target, folder.path))
    size, step = target_size(folder.path, target), estimate_of(config, target.as_dict())
    slot_bytes = slot_spec(config, target, "0" * 64).slot_bytes
    return Facts(
        _target_lines(target, folder, size, config),
        _drafter_lines(config, target),
        _warnings(config, target) + ([size.slow] if on_gpu and size.slow else []),
        slot_bytes,
        _target_bytes(config, target, size, slot_bytes),
        step.total_bytes,
        str(step),
        checkpoint_bytes(planned_shape(config, target).num_parameters, config.optimizer.name == "muon"),
    )


def target_size(folder: Path, target: TargetDescription) -> TargetSize:
    """Count the target's tensors without allocating them."""
    with torch.device("meta"):
        outer = transformers.AutoConfig.from_pretrained(folder)
        model = model_class(target)._from_config(outer)
    counts = {name: parameter.numel() for name, parameter in model.named_parameters()}
    total = sum(counts.values())
    layers = max(target.target_layer_ids) + 1
    skipped = sum(count for name, count in counts.items() if _layer_of(name) >= layers or "lm_head" in name)
    item = torch.empty((), dtype=getattr(torch, target.dtype)).element_size()
    files = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    packs, slow = _of_layers(model)
    return TargetSize(total, total - skipped, total * item, files, packs, slow)


def _of_layers(model: torch.nn.Module) -> tuple[bool, str | None]:
    """Whether the kinds of layers can be read packed, and what there is to say of recurrent ones on a GPU."""
    try:
        trunk = find_trunk(model)
        text: Any = trunk.config
        kinds = getattr(text, "layer_types", None) or ["full_attention"]
        layers: Any = trunk.layers
        packed_recurrent.modules_of(layers, kinds)
    except (CannotPack, TargetError):
        return False, None
    return set(kinds) <= KINDS | {LINEAR}, packed_recurrent.warning(layers, torch.device("cuda"))


def _layer_of(name: str) -> int:
    parts = name.split(".")
    place = parts.index("layers") if "layers" in parts else None
    return int(parts[place + 1]) if place is not None and "vision" not in name and "visual" not in name else -1


def _target_bytes(config: Config, target: TargetDescription, size: TargetSize, slot_bytes: int) -> int:
    """The whole target is there until the start-up check has passed; then the trunk, some packs and activations."""
    item = size.bytes // max(1, size.parameters)
    trunk = (size.parameters if config.target.final_hidden else size.trunk_parameters) * item
    activations = 4 * config.pack.tokens * max(target.intermediate, target.hidden) * item
    return max(size.bytes, trunk + 3 * slot_bytes + activations)


def _target_lines(target: TargetDescription, folder: TargetFolder, size: TargetSize, config: Config) -> list[str]:
    text = transformers.AutoConfig.from_pretrained(folder.path).get_text_config()
    kinds = sorted(layer_kinds(text))
    reads = "packed" if size.packs and config.target.layout != "rows" else "rows"
    tied = "tied to the embedding" if target.tie_word_embeddings else "its own"
    deepest = max(target.target_layer_ids) + 1
    run = target.num_layers if config.target.final_hidden else deepest
    return [
        f"target: {target.name} ({folder.origin}: {folder.path}), {target.architecture}",
        f"  layers {target.num_layers} ({', '.join(kinds)}), of which {run} are run; hidden size {target.hidden}, "
        f"{target.num_heads} heads, {target.num_kv_heads} kv heads of {target.head_dim}",
        f"  taps {list(target.target_layer_ids)}; head {tied}, {target.vocab_size} rows; mask token "
        f"{target.mask_token_id}; context {target.max_position_embeddings}",
        f"  {size.parameters / 1e9:.3f} billion parameters, {_gb(size.bytes)} in {target.dtype} "
        f"({_gb(size.files_bytes)} of files); read {reads}",
    ]


def _drafter_lines(config: Config, target: TargetDescription) -> list[str]:
    shape = planned_shape(config, target)
    return [
        f"drafter: {shape.num_parameters / 1e6:.1f} million parameters, {shape.num_layers} layers "
        f"({', '.join(sorted(set(shape.layer_types)))}), block size {shape.block_size}, {_anchors(config)} anchors a "
        f"pack, {shape.draft_vocab_size or shape.vocab_size} rows of head",
        *auto_line(config),
    ]


def _anchors(config: Config) -> str:
    *others, largest = map(str, config.anchors.choices)
    return f"{', '.join(others)} or {largest}" if others else largest


def auto_line(config: Config) -> list[str]:
    """Say how `anchors.num: auto` chooses; nothing where it is a number."""
    if config.anchors.num != "auto":
        return []
    return [
        f"  anchors.num: auto begins with {config.anchors.choices[0]} and chooses among {_anchors(config)} every "
        f"{config.anchors.review_steps} steps, by how long the drafters wait for packs; memory is that of the largest"
    ]


def _warnings(config: Config, target: TargetDescription) -> list[str]:
    longest = longest_document(config.data.max_document_tokens, config.pack.tokens)
    if longest > target.max_position_embeddings:
        return [f"documents end at {target.max_position_embeddings} tokens, the target's context, not at {longest}"]
    if longest * SHORT_CONTEXT >= target.max_position_embeddings:
        return []
    return [
        f"documents have at most {longest} tokens, the target's context is {target.max_position_embeddings}: a drafter "
        "accepts less beyond what it was trained on; raise pack.tokens if longer texts will be served"
    ]


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
