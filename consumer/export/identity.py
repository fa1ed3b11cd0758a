"""Digests of a target's folder: its configuration, its tokenizer and its chat template. Reads files, loads no model."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from consumer.export.facts import NO_DIGEST, ExportError, TargetIdentity

_VOLATILE = ("_name_or_path", "_model_name_or_path", "transformers_version")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt")


def identify(folder: Path, name: str, revision: str | None, described: dict[str, Any]) -> TargetIdentity:
    """Identify the target in `folder`; `described` is its description as the plan has it. Raises ExportError."""
    config = folder / "config.json"
    if not config.is_file():
        raise ExportError(f"{folder}: no config.json; give the target's folder with --target")
    plain = {key: value for key, value in read_json(config).items() if key not in _VOLATILE}
    return TargetIdentity(
        name=name,
        revision=revision,
        architecture=described["architecture"],
        num_layers=described["num_layers"],
        hidden=described["hidden"],
        vocab_size=described["vocab_size"],
        rope_theta=described["rope_theta"],
        config_sha256=_digest(json.dumps(plain, sort_keys=True).encode()),
        tokenizer_sha256=_tokenizer_digest(folder),
        chat_template_sha256=_template_digest(folder),
    )


def stored_dtype(folder: Path) -> str | None:
    """Type of the target's weights as its config.json states it; None where it states none."""
    config = read_json(folder / "config.json")
    found = config.get("dtype") or config.get("torch_dtype") or (config.get("text_config") or {}).get("dtype")
    return None if found is None else str(found)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ExportError naming the file."""
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ExportError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(plain, dict):
        raise ExportError(f"{path}: expected a JSON object, got {type(plain).__name__}")
    return plain


def _tokenizer_digest(folder: Path) -> str:
    """Digest of the vocabulary files, in a fixed order; "" where there are none."""
    digest, found = hashlib.sha256(), False
    for name in _TOKENIZER_FILES:
        if (folder / name).is_file():
            digest.update(name.encode() + b"\0" + (folder / name).read_bytes())
            found = True
            if name == "tokenizer.json":  # holds all that the others hold
                break
    return digest.hexdigest() if found else NO_DIGEST


def _template_digest(folder: Path) -> str:
    """Digest of the chat template, from its own file or from tokenizer_config.json."""
    if (folder / "chat_template.jinja").is_file():
        return _digest((folder / "chat_template.jinja").read_bytes())
    if (folder / "tokenizer_config.json").is_file():
        template = read_json(folder / "tokenizer_config.json").get("chat_template")
        if template:
            return _digest((template if isinstance(template, str) else json.dumps(template)).encode())
    return NO_DIGEST


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
