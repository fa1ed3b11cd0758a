"""An exported drafter as a folder: config.json, model.safetensors, README.md, probe.json. Written whole or not at all.

config.json         in the chosen format, field by field (zlab.py, speculators.py)
model.safetensors   the trained tensors alone; embedding and head are the target's
probe.json          logits of the training-side forward on made-up input, for `python launch.py verify`
README.md           which target, how it was trained, how to serve it
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from configs.drafter_shape import tensor_shapes
from consumer.drafter import Drafter
from consumer.export import speculators, zlab
from consumer.export.facts import DrafterFacts, ExportError
from consumer.export.identity import read_json

FORMATS = ("zlab", "speculators")
WEIGHTS = "model.safetensors"
_BEYOND_DRAFTER = (
    *speculators.MAPS,
    speculators.HEAD,
    "embed_tokens.weight",
    "verifier_lm_head.weight",
    "verifier_norm.weight",
)


@dataclass(frozen=True)
class Exported:
    """An exported drafter as read back: its facts and its own tensors, in their stored type."""

    path: Path
    format: str
    facts: DrafterFacts
    tensors: dict[str, Tensor]

    def drafter(self) -> Drafter:
        """Build the drafter in float32 with these weights."""
        drafter = Drafter(self.facts.shape)
        drafter.load_state_dict({name: tensor.float() for name, tensor in self.tensors.items()})
        return drafter.eval()


def write_export(
    out: Path,
    name: str,
    facts: DrafterFacts,
    weights: dict[str, Tensor],
    extra: dict[str, Tensor],
    texts: dict[str, str],
) -> Path:
    """Write the folder `out` in format `name`: `weights` in the facts' type, `extra` tensors as they are, text files.

    Raises ExportError if `out` exists or cannot be written, or a weight is not finite.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ExportError(f"{out}: exists and is {'not empty' if out.is_dir() else 'no folder'}; give another --out")
    dtype = getattr(torch, facts.dtype)
    stored = {}
    for key, tensor in weights.items():
        value = tensor.detach().to(dtype).cpu().contiguous()
        if not bool(torch.isfinite(value).all()):
            raise ExportError(f"{key} is not finite in {facts.dtype}; nothing was written")
        stored[key] = value
    config = (zlab if name == "zlab" else speculators).to_config(facts)
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        save_file(stored | extra, temporary / WEIGHTS, metadata={"format": "pt"})
        for file, text in ({"config.json": json.dumps(config, indent=2) + "\n"} | texts).items():
            (temporary / file).write_text(text, encoding="utf-8")
        shutil.copymode(temporary / "config.json", temporary / WEIGHTS)  # safetensors lets none but the owner read it
        if out.exists():
            out.rmdir()
        temporary.rename(out)
    except (OSError, SafetensorError) as error:
        raise ExportError(f"{out}: cannot be written: {getattr(error, 'strerror', None) or error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out


def read_export(folder: Path) -> Exported:
    """Read a drafter in either format, this project's or others'. Raises ExportError."""
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise ExportError(f"{folder}: no config.json; expected an exported drafter (z-lab or speculators format)")
    config = read_json(config_file)
    name = "speculators" if "speculators_model_type" in config else "zlab"
    try:
        facts = (zlab if name == "zlab" else speculators).from_config(config, str(config_file))
    except ValueError as error:  # an impossible shape
        raise ExportError(f"{config_file}: {error}") from None
    tensors = _read_tensors(folder)
    if name == "speculators":
        speculators.check_sizes(config, tensors, facts.shape.vocab_size, str(folder))
    if facts.shape.draft_vocab_size is not None:
        facts = replace(facts, draft_vocab=speculators.draft_vocabulary(tensors, str(folder)))
    own = {key: tensor for key, tensor in tensors.items() if key not in _BEYOND_DRAFTER}
    _check(facts, own, folder)
    return Exported(folder, name, facts, own)


def is_export(folder: Path) -> bool:
    """Whether a folder looks like an exported drafter, rather than a run or a checkpoint of ours."""
    if not (folder / "config.json").is_file():
        return False
    config = read_json(folder / "config.json")
    return "speculators_model_type" in config or "dflash_config" in config


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ExportError(f"{folder}: no *.safetensors file")
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= load_file(file)
    return tensors


def _check(facts: DrafterFacts, tensors: dict[str, Tensor], folder: Path) -> None:
    """Compare names and shapes with what the configuration says. Raises ExportError naming the first that differs."""
    wanted = tensor_shapes(facts.shape)
    missing, unknown = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    if missing or unknown:
        raise ExportError(f"{folder}: tensors missing {missing[:4]}, unknown {unknown[:4]}; not a DFlash drafter")
    for name, size in wanted.items():
        if tuple(tensors[name].shape) != size:
            raise ExportError(f"{folder}: {name} is {list(tensors[name].shape)}, config.json makes it {list(size)}")
