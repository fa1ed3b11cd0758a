"""Checkpoints of tensors on a GPU: what is written is what was when saving began. Skipped without a CUDA device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from consumer.checkpoint import Contents, read_checkpoint
from consumer.saver import Saver

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_a_checkpoint_holds_the_weights_of_its_step_though_the_next_steps_are_queued_at_once(tmp_path: Path) -> None:
    said: list[tuple[str, dict[str, Any]]] = []
    saver = Saver(tmp_path, 3, lambda event, **values: said.append((event, values)))
    weights = {"w": torch.full((1024, 1024), 1.0, dtype=torch.bfloat16, device="cuda")}
    state = {"master.w": torch.full((1024, 1024), 1.0, device="cuda"), "step": torch.tensor(1, device="cuda")}
    for step in (1, 2):
        wanted = float(weights["w"][0, 0])
        saver.start(Contents(step, weights, state, frozenset({step}), {}))
        for tensor in (*weights.values(), *state.values()):
            tensor.add_(1)
        path = saver.wait()
        assert path is not None
        found = read_checkpoint(path)
        assert (found.drafter()["w"] == wanted).all()
        assert (found.state()["master.w"] == wanted).all()
        assert int(found.state()["step"]) == step
    assert [event for event, _ in said] == ["checkpoint", "checkpoint"]
