"""Captures without a GPU: what consumer/capture.py does around them is real."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from consumer import capture


class FakeStep:
    """As much of a TrainStep of several ranks as captures touch, with two numbers of anchors."""

    def __init__(self) -> None:
        self.anchor_sizes, self.num_anchors = (8, 16), 8
        self.armed, self.carried, self.reduction = torch.ones(()), None, object()
        self.execute = self.execute_micro = self.on_device

    def on_device(self) -> None:
        """Stand for the eager step."""

    def micro_on_device(self) -> None:
        """Stand for an eager micro-step."""


@contextmanager
def fake_captures(failing: int | None = None, warm_up: Any = None) -> Iterator[list[int]]:
    """Put recordings that count themselves in place of captures; number `failing` fails. Yields those made."""
    begun: list[int] = []
    made: list[int] = []

    def record(step: FakeStep, _work: object, _pool: object) -> Any:
        begun.append(step.num_anchors)
        if len(begun) - 1 == failing:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        made.append(step.num_anchors)
        return mock.Mock()

    with (
        mock.patch.object(capture.Pool, "new"),
        mock.patch.object(capture, "_warm_up", warm_up or (lambda *_: None)),
        mock.patch.object(capture, "_record", record),
        mock.patch.object(torch.cuda, "synchronize"),
        mock.patch.object(torch.cuda, "empty_cache"),
    ):
        yield made
