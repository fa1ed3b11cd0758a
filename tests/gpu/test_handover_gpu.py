"""What a restart on a GPU keeps: the state through /dev/shm bit for bit, and the measured products. Needs CUDA."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from consumer.checkpoint import Contents
from consumer.host_copy import PIECE_BYTES, copy_all
from consumer.saver import Saver, read_handed
from gpu import products
from shm_ring.handover import Handover

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def tensors() -> dict[str, Tensor]:
    """Sizes below, at and beyond the pieces that the copies are cut into; types of a real state."""
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = {"small": 3, "one piece": PIECE_BYTES // 4, "more": 5 * PIECE_BYTES // 4 + 17}
    made = {name: torch.randn(size, device="cuda", generator=generator) for name, size in sizes.items()}
    made["half"] = torch.randn(1025, 333, device="cuda", generator=generator).bfloat16()
    return made | {"step": torch.tensor(41, device="cuda"), "norm": torch.ones(64, device="cuda")}


def test_every_byte_crosses_the_bus_both_ways_also_while_the_gpu_is_still_writing_it() -> None:
    for _ in range(3):
        wanted = tensors()
        for tensor in wanted.values():
            tensor.add_(1)  # queued, not done
        host = {name: torch.empty_like(tensor, device="cpu") for name, tensor in wanted.items()}
        copy_all([(host[name], tensor) for name, tensor in wanted.items()])
        back = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
        copy_all([(tensor, host[name]) for name, tensor in back.items()])
        for name, tensor in wanted.items():
            assert torch.equal(host[name], tensor.cpu()), name
            assert torch.equal(back[name], tensor), name


@pytest.mark.parametrize("used", [False, True])
def test_a_state_is_handed_over_bit_for_bit_through_fresh_and_through_used_memory(used: bool, tmp_path: Path) -> None:
    shared = Handover.create(f"handover-gpu-{os.getpid()}")
    try:
        saver = Saver(tmp_path / "checkpoints", 3, lambda *_, **__: None, shared)
        wanted = tensors()
        if used:  # a checkpoint went through that memory before
            saver.start(Contents(1, {"half": wanted["half"]}, wanted, frozenset(), {}))
            saver.wait()
            for tensor in wanted.values():
                tensor.add_(1)
        left = Contents(2, {"half": wanted["half"]}, wanted, frozenset({0, 5}), {"generation": 0})
        assert saver.hand_over(left, tmp_path)
        found = read_handed(shared)
        assert found is not None
        assert (found.step, found.trained) == (2, {0, 5})
        back = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
        copy_all([(tensor, found.state[name]) for name, tensor in back.items()])
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in back.items())
    finally:
        shared.remove()
        shared.close()


def test_a_restart_uses_the_measured_products_again_and_measures_nothing(tmp_path: Path) -> None:
    memory = tmp_path / "products.json"
    lines: list[str] = []
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))

    def step() -> None:
        products.multiply(a, b)

    products.forget()
    try:
        assert products.tuned(step, lines.append, memory) == 1, lines
        before = products.measured()
        products.forget()
        assert products.tuned(step, lines.append, memory) == 1, lines
        assert products.measured() == before, "measured anew, the milliseconds would differ"
        error = (products.multiply(a, b).float() - torch.mm(a, b).float()).norm() / torch.mm(a, b).float().norm()
        assert float(error) < 1e-2
    finally:
        products.forget()
    assert lines == []
