"""The real drafter process with a counting step: its weights are how often each document was trained on.

`python -m tests.helpers.counter_drafter --run-dir RUN --rank C`. Everything but the arithmetic of a step is the real
thing: ring, journal, checkpoints, ranks. Each text document begins with its number in six digits (write_numbered). The
environment variable COUNTER_STEP_S makes a step take that long; HOLD_FILE holds it at a step (held_launch.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import consumer.__main__
import consumer.loop
from consumer.step import TrainStep
from tests.helpers.held_launch import HeldControl

DIGITS = 6
MAX_DOCUMENTS = 20_000


class WrongStates(Exception):
    """A pack's features are not those of its tokens."""


class CounterStep(TrainStep):
    """Counts documents instead of training; the counts are part of the state that a checkpoint holds."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Start at zero."""
        super().__init__(*arguments, **options)
        self.counts = torch.zeros(MAX_DOCUMENTS, dtype=torch.float64)
        self.rest_s = float(os.environ.get("COUNTER_STEP_S", "0"))
        self.digit_of = digit_table(Path(os.environ["COUNTER_TARGET"]))
        self.first_states: dict[int, Tensor] = {}

    def on_device(self) -> None:
        """Count each document of the pack once, over all ranks."""
        self.number.add_(1)
        counted = torch.zeros_like(self.counts)
        for number in self.documents():
            counted[number] += 1
        if self.reduction is not None:
            self.reduction.begin()
            self.reduction.finish(counted)
        self.counts += counted
        time.sleep(self.rest_s)

    def documents(self) -> list[int]:
        """Numbers of the documents in the pack, none of one that carries no weight; raises WrongStates."""
        if not self.pack.loss_mask.any():  # this rank takes part without a pack (staging.empty_pack)
            return []
        starts = (self.pack.doc_start == torch.arange(len(self.pack.doc_start))).nonzero().flatten().tolist()
        numbers = []
        for start in starts:
            ids = self.pack.input_ids[start : start + DIGITS].tolist()
            numbers.append(int("".join(self.digit_of[token] for token in ids)))
            states = self.pack.features[start].clone()  # a first token's states depend on nothing but the token
            known = self.first_states.setdefault(ids[0], states)
            if not torch.allclose(known, states, atol=1e-3) or not states.any():
                raise WrongStates(f"document {numbers[-1]}: the states at its start are not those of its first token")
        return numbers

    def state(self) -> dict[str, Tensor]:
        """The counts, beside the usual state."""
        return {**super().state(), "counts": self.counts}

    def shared_state(self) -> list[Tensor]:
        """The counts, beside what ranks usually share."""
        return [*super().shared_state(), self.counts]

    def load(self, drafter: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        """Take the counts back."""
        super().load(drafter, state)
        self.counts.copy_(state["counts"])


def digit_table(target: Path) -> dict[int, str]:
    """The digit that each token id stands for."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    return {tokenizer(digit)["input_ids"][0]: digit for digit in "0123456789"}


if __name__ == "__main__":
    consumer.loop.TrainStep = CounterStep  # type: ignore[misc]
    consumer.__main__.Control = HeldControl  # type: ignore[misc]
    raise SystemExit(consumer.__main__.main())
