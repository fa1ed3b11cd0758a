"""What the rest of the system needs to know of a target, read from its folder without its weights.

producer/trunk.py loads and runs it.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from configs.schema import TargetConfig

LONGEST_REASON = 300
TRUNK_NAMES = ("", "model", "language_model", "model.language_model", "text_model", "model.text_model", "model.model")


class TargetError(Exception):
    """The target and the configuration do not fit. Exit code 2."""

    exit_code = 2


@dataclass(frozen=True)
class TargetDescription:
    """What the rest of the system needs to know of a target; read from its config, without its weights."""

    path: str
    name: str
    architecture: str
    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rope_theta: float
    rms_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: str
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None

    def as_dict(self) -> dict[str, Any]:
        """The description as plain JSON data."""
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> TargetDescription:
        """Undo as_dict."""
        lists = {key: tuple(value) for key, value in plain.items() if isinstance(value, list)}
        return cls(**{**plain, **lists})


def default_target_layer_ids(num_layers: int, num_taps: int) -> tuple[int, ...]:
    """Spread taps over the target's depth: round(1 + i (N - 4) / (K - 1)), N // 2 for one tap (source: z-lab/dflash).

    Raises TargetError where that gives duplicates or ids out of range.
    """
    if num_taps == 1:
        return (num_layers // 2,)
    ids = tuple(round(1 + i * (num_layers - 4) / (num_taps - 1)) for i in range(num_taps))
    if len(set(ids)) != num_taps or not all(0 <= number < num_layers for number in ids):
        raise TargetError(
            f"target.target_layer_ids: the default rule gives {list(ids)} for {num_layers} layers and "
            f"{num_taps} taps; give {num_taps} distinct ids in 0..{num_layers - 1}, or fewer taps"
        )
    return ids


def load_tokenizer(folder: Path) -> Any:
    """Load the target's tokenizer. Raises TargetError where its files cannot be read."""
    return _read(folder, "tokenizer", transformers.AutoTokenizer.from_pretrained)


def read_config(folder: Path) -> Any:
    """Read the target's config.json; an outer one may hold a text model's. Raises TargetError."""
    return _read(folder, "config.json", transformers.AutoConfig.from_pretrained)


def _read(folder: Path, what: str, load: Callable[..., Any]) -> Any:
    try:
        return load(folder, trust_remote_code=False)
    except Exception as error:  # what is wrong with a model's files is raised in many kinds
        reason = textwrap.shorten(str(error) or repr(error), LONGEST_REASON, placeholder=" ...")
        raise TargetError(
            f"target.model: {folder}: its {what} cannot be read by transformers {transformers.__version__}: {reason}"
        ) from None


def describe_target(folder: Path, name: str, config: TargetConfig, tokenizer: Any, on_gpu: bool) -> TargetDescription:
    """Read the description of the target in `folder`. Raises TargetError."""
    outer = read_config(folder)
    try:
        return _described(folder, name, config, tokenizer, outer, on_gpu)
    except (AttributeError, TypeError) as error:
        raise TargetError(
            f"target.model: {name} ({type(outer).__name__}) is not described as a decoder with layers is: {error}"
        ) from None


def _described(
    folder: Path, name: str, config: TargetConfig, tokenizer: Any, outer: Any, on_gpu: bool
) -> TargetDescription:
    text = outer.get_text_config()
    num_layers = int(text.num_hidden_layers)
    heads = int(text.num_attention_heads)
    layer_ids = config.target_layer_ids or default_target_layer_ids(num_layers, config.num_taps)
    if len(set(layer_ids)) != len(layer_ids) or not all(0 <= number < num_layers for number in layer_ids):
        raise TargetError(
            f"target.target_layer_ids: expected distinct ids in 0..{num_layers - 1} ({name} has {num_layers} layers), "
            f"got {list(layer_ids)}"
        )
    ends = end_tokens(folder, text, tokenizer)
    return TargetDescription(
        path=str(folder),
        name=name,
        architecture=(outer.architectures or [type(outer).__name__])[0],
        hidden=int(text.hidden_size),
        intermediate=int(text.intermediate_size),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(text, "head_dim", None) or text.hidden_size // heads),
        vocab_size=int(text.vocab_size),
        rope_theta=rope_theta_of(text, name),
        rms_eps=float(getattr(text, "rms_norm_eps", 1e-6)),
        max_position_embeddings=int(text.max_position_embeddings),
        tie_word_embeddings=bool(outer.tie_word_embeddings),
        dtype=_dtype(config.dtype, outer, on_gpu),
        target_layer_ids=tuple(layer_ids),
        mask_token_id=choose_mask_token(config.mask_token_id, tokenizer, int(text.vocab_size), ends),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_ids=ends,
        pad_token_id=tokenizer.pad_token_id,
    )


def end_tokens(folder: Path, text: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every token that ends the target's text when served: generation_config.json's, the tokenizer's and config.json's.

    One place alone misses some: Qwen3.5's config.json has the end of a text but not of a turn, Gemma 2's neither.
    """
    file = folder / "generation_config.json"
    served = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
    named = (served, tokenizer.eos_token_id, getattr(text, "eos_token_id", None))
    tokens = [token for place in named for token in (place if isinstance(place, list) else [place])]
    return tuple(dict.fromkeys(token for token in tokens if token is not None))


def layer_kinds(text: Any) -> set[str]:
    """Kinds of the target's layers, by its text configuration; older ones name a window and no kinds."""
    kinds = getattr(text, "layer_types", None)
    if kinds:
        return set(kinds)
    for name, kind in (("sliding_window", "sliding_attention"), ("attention_chunk_size", "chunked_attention")):
        if getattr(text, name, None) is not None:
            return {kind}
    return {"full_attention"}


def refuse_batches(text: Any, name: str) -> None:
    """Refuse a target that evaluation/verifier.py cannot decode with. Raises TargetError."""
    others = sorted(layer_kinds(text) - {"full_attention"})
    if others:
        raise TargetError(
            f"evaluation.enabled: the measurement at a run's end decodes prompts together, which needs full attention "
            f"in every target layer, and {name} has {', '.join(others)}; set it to false, and measure with "
            "'python launch.py eval RUN'"
        )


DEFAULT_ROPE_THETA = 10000.0


def rope_theta_of(text: Any, name: str) -> float:
    """Find the base of the target's rotary positions; the drafter turns whole heads with it.

    A partial factor, sections or scaling stay the target's own: the drafter is not trained with them. Where kinds of
    layers differ, full attention's base counts. A target without rotary positions gives 10000, the usual one. Raises
    TargetError for a base that is not positive.
    """
    rope = getattr(text, "rope_parameters", None) or {}
    if rope and all(isinstance(kind, dict) for kind in rope.values()):
        rope = rope.get("full_attention") or next(iter(rope.values()))
    theta = rope.get("rope_theta", getattr(text, "rope_theta", None))
    if theta is None:
        return DEFAULT_ROPE_THETA
    if float(theta) <= 0:
        raise TargetError(f"target.model: {name}: rope_theta must be positive, got {theta}; mend its config.json")
    return float(theta)


def _dtype(wanted: str, outer: Any, on_gpu: bool) -> str:
    if wanted != "auto":
        return wanted
    if not on_gpu:
        return "float32"
    return str(outer.dtype or torch.bfloat16).removeprefix("torch.")


def choose_mask_token(explicit: int | None, tokenizer: Any, rows: int, ends: tuple[int, ...] = ()) -> int:
    """Choose the mask token: given, else the tokenizer's mask, else a reserved row. Never pad, eos or bos.

    `rows` is the number of embedding rows, `ends` further tokens that end a text. That the data never uses it is
    checked when the data is read. Raises TargetError.
    """
    taken = {tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id, *ends}
    if explicit is not None:
        if explicit >= rows:
            raise TargetError(f"target.mask_token_id: expected below {rows} (embedding rows), got {explicit}")
        if explicit in taken:
            raise TargetError(
                f"target.mask_token_id: {explicit} is the tokenizer's pad, eos or bos; choose another row"
            )
        return explicit
    mask = getattr(tokenizer, "mask_token_id", None)
    if mask is not None and mask < rows and mask not in taken:
        return int(mask)
    added = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items()}
    free = [number for number in sorted(added) if number < rows and number not in taken]
    reserved = [number for number in free if "reserved" in added[number].lower() or "unused" in added[number].lower()]
    if reserved:
        return int(reserved[0])
    if len(tokenizer) < rows:  # rows that no token uses pad the embedding
        return rows - 1
    if free:  # a special token that chat data does not use; the data is checked for it
        return int(free[-1])
    raise TargetError(
        "target.mask_token_id: no reserved row found in the tokenizer; give a row that the data never uses"
    )


def find_trunk(model: nn.Module) -> nn.Module:
    """Find the text decoder: the module with `layers` and `embed_tokens`, behind any multimodal or head wrapper.

    Raises TargetError that lists the candidates.
    """
    for name in TRUNK_NAMES:
        try:
            module = model.get_submodule(name)
        except AttributeError:
            continue
        if isinstance(getattr(module, "layers", None), nn.ModuleList) and hasattr(module, "embed_tokens"):
            return module
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    raise TargetError(
        f"target: no decoder with layers and embed_tokens in {type(model).__name__}; lists found: {lists}"
    )
