"""What benchmarks/pipeline.py runs: targets of real shapes with random weights, documents of a real distribution.

Nothing is read from disk but a run folder with configuration and plan, which `make_run` writes; weights are made on the
device. Documents: log-normal lengths (median 600, sigma 1, 16 to the pack's 8192 tokens), random tokens, supervised.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import nn

from configs.drafter_shape import drafter_shape
from configs.load import config_from
from configs.run_files import plan_path
from configs.schema import Config
from consumer.drafter import Drafter
from consumer.frozen_head import FrozenHead
from ops.run_folder import write_config
from producer.corpus.schedule import Schedule
from producer.prepare import slot_spec
from producer.target import describe_target

EPOCHS = 4
DIGEST = "0" * 64


class Shape(NamedTuple):
    """One target's configuration and the run's settings."""

    model: str
    sizes: dict[str, Any]
    taps: tuple[int, ...]
    settings: tuple[str, ...]
    documents: int
    median: int

    @property
    def tokens(self) -> int:
        """T: tokens of a pack."""
        return next(int(text.split("=")[1]) for text in self.settings if text.startswith("pack.tokens="))


def _qwen3(layers: int, hidden: int, intermediate: int, heads: int, vocab: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    }  # fmt: skip


_REAL = ("pack.tokens=8192", "ring.num_slots=8", "anchors.num=512", "loss.gamma=7", "drafter.block_size=16")
_TINY = (
    "pack.tokens=256", "ring.num_slots=4", "anchors.num=16", "drafter.block_size=4", "drafter.sliding_window=64",
    "drafter.num_layers=1",
)  # fmt: skip
_HYBRID = _qwen3(64, 5120, 17408, 24, 248320) | {
    "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 48,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip
_SMALL = _qwen3(4, 64, 128, 4, 264) | {"num_key_value_heads": 2, "head_dim": 16}
_SMALL_HYBRID = _SMALL | {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip

SHAPES = {
    "8b": Shape("Qwen3", _qwen3(36, 4096, 12288, 32, 151936), (1, 9, 17, 25, 33), _REAL, 6000, 600),
    "27b": Shape("Qwen3", _qwen3(64, 5120, 17408, 40, 248320), (1, 16, 31, 46, 61), _REAL, 3000, 600),
    "27b_hybrid": Shape(
        "Qwen3_5", _HYBRID, (1, 16, 31, 46, 61), (*_REAL, "pack.window_packs=12"), 3000, 600
    ),
    "tiny": Shape("Qwen3", _SMALL, (0, 2), _TINY, 3000, 40),
    "tiny_hybrid": Shape("Qwen3_5", _SMALL_HYBRID, (0, 2), _TINY, 3000, 40),
}  # fmt: skip


class _Tokenizer:
    """What describe_target asks of a tokenizer."""

    pad_token_id = bos_token_id = eos_token_id = 0


def model_config(shape: Shape) -> Any:
    """The transformers configuration of a shape."""
    name = "Qwen3Config" if shape.model == "Qwen3" else "Qwen3_5TextConfig"
    config = getattr(transformers, name)(**shape.sizes)
    config.architectures = [f"{shape.model}ForCausalLM"]
    return config


def random_model(shape: Shape, device: torch.device) -> nn.Module:
    """The whole target with random weights, made on `device`; bfloat16 on a GPU."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(model_config(shape), dtype=dtype)
    return model.eval().requires_grad_(False)


def random_drafter(config: Config, plan: dict[str, Any], device: torch.device) -> Drafter:
    """The drafter of a plan with random weights, made on `device`."""
    torch.manual_seed(0)
    with device:
        return Drafter(drafter_shape(config.drafter, plan["target"], plan["draft_vocab"]))


def random_head(plan: dict[str, Any], dtype: torch.dtype, device: torch.device) -> FrozenHead:
    """An untied embedding and head with random weights."""
    rows, hidden = plan["target"]["vocab_size"], plan["target"]["hidden"]
    embedding, head = (torch.empty(rows, hidden, dtype=dtype, device=device).normal_(std=0.02) for _ in range(2))
    return FrozenHead(embedding, head)


class RandomDocument(NamedTuple):
    """A document as the corpus hands it out."""

    ids: np.ndarray[Any, Any]
    loss_mask: np.ndarray[Any, Any]


class RandomDocuments:
    """A corpus in memory: document d is always the same."""

    def __init__(self, shape: Shape) -> None:
        generator = np.random.Generator(np.random.PCG64(0))
        lengths = generator.lognormal(np.log(shape.median), 1.0, shape.documents)
        self.lengths: list[int] = np.clip(lengths.astype(int), 16, shape.tokens).tolist()
        self._vocab = shape.sizes["vocab_size"]

    def __getitem__(self, number: int) -> RandomDocument:
        generator = np.random.Generator(np.random.PCG64(number))
        ids = generator.integers(1, self._vocab - 1, self.lengths[number], dtype=np.int32)
        return RandomDocument(ids, np.ones(len(ids), dtype=np.uint8))


def schedule_of(shape: Shape, lengths: Sequence[int]) -> Schedule:
    """The packs of the benchmark."""
    return Schedule(lengths, DIGEST, 0, EPOCHS, shape.tokens)


def make_run(folder: Path, run_name: str, name: str, on_gpu: bool) -> tuple[Config, dict[str, Any]]:
    """Write the run folder of a shape: config.yaml, plan.json and shape.json. Returns configuration and plan.

    Two folders with the same `run_name` share the rings of that name.
    """
    shape = SHAPES[name]
    model = folder / "target"
    model.mkdir(parents=True)
    model_config(shape).save_pretrained(model)
    settings = [
        f"run.name={run_name}", f"run.folder={folder.parent}", f"target.target_layer_ids={json.dumps(shape.taps)}",
        f"target.mask_token_id={shape.sizes['vocab_size'] - 1}", f"training.epochs={EPOCHS}",
        f"target.dtype={'bfloat16' if on_gpu else 'float32'}", *shape.settings,
    ]  # fmt: skip
    config = config_from({}, settings)
    target = describe_target(model, "random", config.target, _Tokenizer(), on_gpu)
    schedule = schedule_of(shape, RandomDocuments(shape).lengths)
    plan = {
        "target": target.as_dict(),
        "slot_spec": slot_spec(config, target, DIGEST).to_json(),
        "data_digest": DIGEST,
        "num_packs": schedule.num_packs,
        "packs_per_epoch": schedule.packs_per_epoch,
        "pack_fill": schedule.fill(),
        "draft_vocab": None,
    }
    write_config(folder, config)
    plan_path(folder).write_text(json.dumps(plan))
    (folder / "shape.json").write_text(json.dumps(name))
    return config, plan
