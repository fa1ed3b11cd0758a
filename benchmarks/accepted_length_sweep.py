"""One setting changed at a time, every drafter trained for the same steps on the same packs held in GPU memory.

No ring and no second process here: the training step alone, so that a trial takes seconds and nothing but the setting
differs. Part of benchmarks/accepted_length.py.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import accepted_length_speculators as speculators
from benchmarks.accepted_length_measure import Decoding, Reader, Text, measure
from configs.drafter_shape import DrafterShape, drafter_shape
from configs.schema import Config
from consumer.capture import prepare
from consumer.drafter import Drafter
from consumer.frozen_head import init_from_target, load_frozen_head
from consumer.staging import PackTensors
from consumer.step import TrainStep
from evaluation.prompts import prompt_ids

BASE: dict[str, dict[str, Any]] = {
    "target": {"final_hidden": True},
    "drafter": {"num_layers": 5, "block_size": 8, "layout": "full", "init": "target_last_layers"},
    "anchors": {"num": 128},
    "loss": {"decay": "exponential"},
    "optimizer": {"lr": 1e-3},
}
MASK_TOKEN = 16  # <empty_output>, a token that no text here holds


@dataclass(frozen=True)
class Trial:
    """A name and what it changes: settings by section, the share of the packs, or who trains."""

    name: str
    change: dict[str, dict[str, Any]] = field(default_factory=dict)
    share: float = 1.0
    theirs: bool = False
    steps_factor: float = 1.0
    seed: int = 0
    """Of initial weights and anchors."""
    float8: bool = False
    """Train with `precision: fp8`."""
    decode: bool = False
    """Whether the decoding loop runs too, where any does: it takes longer than the training."""


def trials(quick: bool) -> list[Trial]:
    """What is tried, most important first."""
    found = [
        Trial("base", decode=True),
        Trial("random initial weights", {"drafter": {"init": "random"}}, decode=True),
        Trial("speculators 0.9.0, random initial weights", {"drafter": {"init": "random"}}, theirs=True, decode=True),
        Trial("soft labels", {"loss": {"labels": "soft"}}),
        Trial("D-PACE", {"loss": {"decay": "dpace"}}),
        Trial("learning rate 2e-3", {"optimizer": {"lr": 2e-3}}),
        Trial("learning rate 5e-4", {"optimizer": {"lr": 5e-4}}),
        Trial("a quarter of the data", share=0.25),
        Trial("twice the steps", steps_factor=2.0),
        Trial("gamma 2", {"loss": {"gamma": 2.0}}),
        Trial("32 anchors", {"anchors": {"num": 32}}),
        Trial("sliding layers, causal in the block", {"drafter": {"layout": "sliding"}}),
        Trial("block 16", {"drafter": {"block_size": 16}}),
        Trial("another seed", seed=1),
        Trial("fp8", float8=True),
        Trial("fp8, another seed", seed=1, float8=True),
    ]
    return found[:3] if quick else found


class Sizes(NamedTuple):
    """Tokens of a pack, packs, steps of a trial, and settings that differ from BASE by section."""

    tokens: int = 2048
    packs: int = 400
    steps: int = 1200
    settings: dict[str, dict[str, Any]] = {}  # noqa: RUF012 - never changed


TINY = Sizes(256, 4, 4, {"drafter": {"num_layers": 1}, "anchors": {"num": 8}})


class Bench:
    """Packs in memory, and what is needed to train on them."""

    def __init__(
        self,
        reader: Reader,
        target: Path,
        corpus: Path,
        device: torch.device,
        dtype: torch.dtype,
        layer_ids: tuple[int, ...],
        sizes: Sizes,
    ) -> None:
        """Read the corpus with the target: the features of all packs stay on the device."""
        self.target, self.device, self.dtype, self.sizes, self.layer_ids = target, device, dtype, sizes, layer_ids
        self.head = load_frozen_head(target, True, torch.float32, device)
        documents = _documents(reader, corpus, sizes.tokens)
        self.successor = _successors(documents)
        self.packs = _packs(reader, documents, sizes.tokens, device, sizes.packs)
        self.num_tokens = sum(int((pack.doc_start >= 0).sum()) for pack in self.packs)
        described = json.loads((target / "config.json").read_text())
        self._described = {
            "hidden": described["hidden_size"], "intermediate": described["intermediate_size"],
            "num_heads": described["num_attention_heads"], "num_kv_heads": described["num_key_value_heads"],
            "head_dim": described["head_dim"], "target_layer_ids": list(layer_ids),
            "rms_eps": described["rms_norm_eps"], "rope_theta": described["rope_parameters"]["rope_theta"],
            "mask_token_id": MASK_TOKEN, "vocab_size": described["vocab_size"],
        }  # fmt: skip

    def shape_of(self, config: Config) -> DrafterShape:
        """The drafter that a configuration asks for, for this target."""
        return drafter_shape(config.drafter, self._described, None)

    def run(
        self, trial: Trial, sets: dict[str, list[Text]], deadline: float, decoding: Decoding | None = None
    ) -> dict[str, Any]:
        """Train one drafter and measure it; `decoding`: by the decoding loop too, if the trial wants that."""
        began = time.monotonic()
        own = self.sizes.settings
        settings = {name: part | own.get(name, {}) | trial.change.get(name, {}) for name, part in BASE.items()}
        config = Config.model_validate(settings)
        shape = self.shape_of(config)
        packs = self.packs[: max(1, int(trial.share * len(self.packs)))]
        steps = int(self.sizes.steps * trial.steps_factor)
        if trial.theirs:
            drafter, steps = self._theirs(config, shape, packs, steps, deadline)
        else:
            drafter = self._ours(config, shape, packs, steps, trial)
        trained_s = time.monotonic() - began
        found = measure(drafter.float(), self.head, sets)
        blind = measure(drafter, self.head, sets, zero_context=True)
        decoded: dict[str, Any] = {}
        if decoding is not None and trial.decode:
            decoded = {"decoded": decoding.measure(drafter, self.head)}
        return {
            "trial": trial.name,
            "block_size": shape.block_size,
            "steps": steps,
            "train_s": round(trained_s, 1),
            "accept_len": {name: methods["dflash"]["accept_len"] for name, methods in found.items()},
            "zero_context": {name: methods["dflash"]["accept_len"] for name, methods in blind.items()},
            **decoded,
        }

    def _initial(self, config: Config, shape: DrafterShape, seed: int = 0) -> Drafter:
        drafter = Drafter(shape)
        drafter.reset_parameters(torch.Generator().manual_seed(seed))
        if config.drafter.init == "target_last_layers":
            init_from_target(drafter, self.target)
        return drafter.to(self.device)

    def _ours(self, config: Config, shape: DrafterShape, packs: list[PackTensors], steps: int, trial: Trial) -> Drafter:
        drafter = self._initial(config, shape, trial.seed)
        drafter.use_float8(trial.float8)
        current = PackTensors(**{name: value.clone() for name, value in vars(packs[0]).items()})
        step = TrainStep(
            drafter, self.head, current, config.anchors, config.loss, config.optimizer, steps, trial.seed, self.dtype
        )
        if self.device.type == "cuda":
            prepare(step, compile_parts=False, cuda_graph=True, say=print)
        for number in range(steps):
            for name, value in vars(packs[number % len(packs)]).items():
                getattr(current, name).copy_(value)
            step.run()
        print({key: value for key, value in step.metrics().items() if key != "accuracy"}, flush=True)
        finished = Drafter(shape)
        finished.load_state_dict({name: value.detach().float().cpu() for name, value in drafter.state_dict().items()})
        return finished.to(self.device)

    def _theirs(
        self, config: Config, shape: DrafterShape, packs: list[PackTensors], steps: int, deadline: float
    ) -> tuple[Drafter, int]:
        drafter = self._initial(config, shape)
        return speculators.train(
            shape, self.layer_ids, self.head.embedding, self.head.head, packs, steps, config.anchors.choices[0],
            config.optimizer.lr, self.device, drafter, print, lambda: time.monotonic() > deadline,
        )  # fmt: skip


def _documents(reader: Reader, corpus: Path, longest: int) -> list[tuple[list[int], int]]:
    """Token ids of each conversation, and where its answer begins; the end of turn is part of the answer."""
    end = reader.tokenizer.eos_token_id
    found = []
    for line in corpus.read_text().splitlines():
        question, answer = (turn["content"] for turn in json.loads(line)["messages"][:2])
        prompt = prompt_ids(reader.tokenizer, question)
        ids = prompt + reader.tokenizer(answer, add_special_tokens=False)["input_ids"] + [end]
        if len(prompt) + 2 < len(ids) <= longest:
            found.append((ids, len(prompt)))
    return found


def _successors(documents: list[tuple[list[int], int]]) -> dict[int, int]:
    """The most frequent successor of each token in the answers."""
    counts: dict[int, Counter[int]] = {}
    for ids, start in documents:
        for before, after in zip(ids[start - 1 :], ids[start:], strict=False):
            counts.setdefault(before, Counter())[after] += 1
    return {token: found.most_common(1)[0][0] for token, found in counts.items()}


def _packs(
    reader: Reader, documents: list[tuple[list[int], int]], tokens: int, device: torch.device, most: int
) -> list[PackTensors]:
    """Fill at most so many packs in the given (random) order and read their documents, one forward a pack."""
    groups: list[list[tuple[list[int], int]]] = [[]]
    filled = 0
    for document in documents:
        if filled + len(document[0]) > tokens:
            groups.append([])
            filled = 0
        groups[-1].append(document)
        filled += len(document[0])
    return [pack_of(reader, group, tokens, device) for group in groups[:most] if group]


def pack_of(reader: Reader, group: list[tuple[list[int], int]], tokens: int, device: torch.device) -> PackTensors:
    """Lay documents (ids, where the answer begins) end to end and read them: a pack of `tokens` places."""
    ids = torch.zeros(tokens, dtype=torch.int32)
    mask, start = torch.zeros(tokens, dtype=torch.uint8), torch.full((tokens,), -1, dtype=torch.int32)
    states = reader.read([row for row, _ in group])
    width, hidden, dtype = states[0][0].shape[1], states[0][1].shape[1], states[0][0].dtype
    features = torch.zeros(tokens, width, dtype=dtype, device=device)
    final = torch.zeros(tokens, hidden, dtype=dtype, device=device)
    place = 0
    for (row, answer), (taps, last) in zip(group, states, strict=True):
        end = place + len(row)
        ids[place:end], start[place:end] = torch.tensor(row, dtype=torch.int32), place
        mask[place + answer : end] = 1
        features[place:end], final[place:end] = taps, last
        place = end
    return PackTensors(ids.to(device), mask.to(device), start.to(device), features, final)
