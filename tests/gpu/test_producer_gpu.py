"""The target's side on a GPU: every way of reading gives the same states, and nothing waits in the steady state."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from configs.load import config_from
from configs.pack import pack_fields
from producer import packed_recurrent, selfcheck
from producer.packed import BOUNDS
from producer.setup import make_target
from producer.states import BadStates, StateCheck
from producer.target import TargetDescription
from producer.transfer import Transfer
from producer.trunk import Target
from shm_ring import Field, Reader, Ring, SlotSpec, ring_name
from shm_ring.tensors import PageLock, slot_tensor
from tests.helpers.corpus import all_packs, maker_of, random_documents
from tests.helpers.families import PACKED, VOCAB, make_family

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
GPU = torch.device("cuda:0")
TAPS = (0, 2, 4)
LENGTHS = (30, 141, 12, 225, 19, 64, 80, 7, 33)
TOKENS = 256
SIZES = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512}
LINEAR = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
needs_fla = pytest.mark.skipif(
    importlib.util.find_spec("fla") is None, reason="needs flash-linear-attention (pip install flash-linear-attention)"
)


def family(name: str) -> Any:
    return make_family(name, **SIZES, **(LINEAR if name == "qwen3_5" else {})).to(GPU, torch.bfloat16)


def made(name: str, *overrides: str) -> tuple[Target, list[str]]:
    config = config_from({}, [f"pack.tokens={TOKENS}", *overrides])
    description: Any = TargetDescription.__new__(TargetDescription)
    for key, value in {"name": name, "dtype": "bfloat16", "target_layer_ids": TAPS}.items():
        object.__setattr__(description, key, value)
    lines: list[str] = []
    log: Any = lambda event, **facts: lines.append(f"{event} {facts}")  # noqa: E731
    return make_target(description, config, GPU, log, lambda: family(name)), lines


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(
    ("name", "layout"),
    [("qwen3", "packed"), ("qwen3", "rows"), ("gemma3", "auto"), ("qwen3_5", "packed"), ("qwen3_5", "rows")],
)
def test_states_equal_those_of_each_document_alone(name: str, layout: str, compiled: bool) -> None:
    torch._dynamo.reset()
    target, lines = made(name, f"target.layout={layout}", f"target.compile={compiled}")
    assert f"'compiled': {compiled}" in lines[-1], lines
    assert target.is_packed == (layout == "packed" or (layout == "auto" and name in PACKED))
    alone = Target(family(name), TAPS)
    corpus = random_documents(LENGTHS, VOCAB)
    for pack in all_packs(*maker_of(corpus, target, TOKENS)):
        assert pack.features is not None
        for number, (start, end) in pack.spans.items():
            taps, _ = selfcheck.alone(alone, corpus.documents[number].tolist())
            found = pack.features[start:end].unflatten(1, (len(TAPS), -1))
            for place, tap in enumerate(taps):
                assert selfcheck.row_difference(found[:, place], tap) < 0.05


@needs_fla
def test_the_librarys_delta_rule_takes_each_document_for_itself_and_is_tuned_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from triton.runtime.autotuner import Autotuner

    heads, size, lengths = 4, 64, [1, 2, 3, 63, 64, 65, 130, 184]
    generator = torch.Generator(GPU).manual_seed(0)
    shape = (1, sum(lengths), heads)
    q, k, v = (torch.randn(*shape, size, generator=generator, device=GPU).bfloat16() for _ in range(3))
    g = -torch.rand(shape, generator=generator, device=GPU) * 0.1  # a state that lasts
    beta = torch.rand(shape, generator=generator, device=GPU).bfloat16()
    module = "transformers.models.qwen3_5.modeling_qwen3_5"
    importlib.import_module(module)

    def read(documents: list[int]) -> torch.Tensor:
        BOUNDS.set(documents, GPU)
        return packed_recurrent.packed_delta_rule(q, k, v, g, beta, True, module)

    assert packed_recurrent.flash_linear_attention() is not None
    found = read(lengths)
    tuned: list[str] = []
    tune = Autotuner._bench

    def counted(self: Any, *words: Any, **more: Any) -> Any:
        tuned.append(self.base_fn.__name__)
        return tune(self, *words, **more)

    monkeypatch.setattr(Autotuner, "_bench", counted)
    for other in ([512], [500, 12], [1] * 512, list(reversed(lengths))):
        read(other)
    assert tuned == []
    monkeypatch.setattr(packed_recurrent, "flash_linear_attention", lambda: None)
    assert selfcheck.row_difference(found[0].flatten(1), read(lengths)[0].flatten(1)) < 0.02


@contextmanager
def ring_of(hidden: int) -> Iterator[Ring]:
    spec = SlotSpec(tuple(Field(*field) for field in pack_fields(TOKENS, len(TAPS), hidden, "bfloat16", False)), {})
    ring = Ring.create(ring_name(f"gpu-producer-{os.getpid()}", 0), spec, num_slots=4)
    try:
        yield ring
    finally:
        ring.unlink()
        ring.close()


@pytest.mark.parametrize(
    ("name", "layout"),
    [("qwen3", "packed"), ("qwen3", "rows"), pytest.param("qwen3_5", "packed", marks=needs_fla)],
)
def test_packs_cross_bit_for_bit_and_the_host_never_waits_for_the_device(name: str, layout: str) -> None:
    target = Target(family(name), TAPS)
    if layout == "packed":
        target.use_packed()
    maker, num_packs = maker_of(random_documents([100] * 8, VOCAB), target, TOKENS)
    list(maker.advance())
    expected = {pack.pack_id: pack for pack in all_packs(*maker_of(random_documents([100] * 8, VOCAB), target, TOKENS))}
    with ring_of(target.hidden) as ring, ring.writer() as writer, PageLock(ring) as lock, Reader([ring], 0) as reader:
        assert lock.locked
        transfer = Transfer(writer, TAPS, StateCheck(TAPS, 16.0))
        maker.add(range(num_packs))
        taken = 0
        torch.cuda.synchronize()
        while len(maker):
            torch.cuda.set_sync_debug_mode("error")
            try:
                for pack in maker.advance():
                    transfer.start(writer.acquire(timeout_s=5), pack)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            transfer.publish()
            while ring.snapshot().ready:
                slot = reader.take(timeout_s=5)
                assert slot is not None
                wanted = expected[slot.header.pack_id].features
                assert wanted is not None
                assert torch.equal(slot_tensor(slot, "features"), wanted.cpu())
                reader.release(slot)
                taken += 1
        assert taken == num_packs


@pytest.mark.parametrize("value", [float("nan"), 0.0])
def test_bad_states_are_found_before_the_pack_is_published(value: float) -> None:
    target = Target(family("qwen3"), TAPS)
    target.use_packed()
    maker, _ = maker_of(random_documents([100] * 8, VOCAB), target, TOKENS)
    with ring_of(target.hidden) as ring, ring.writer() as writer:
        transfer = Transfer(writer, TAPS, StateCheck(TAPS, 16.0))
        maker.add([0])
        for pack in maker.advance():
            assert pack.features is not None
            pack.features[130] = value
            transfer.start(writer.acquire(timeout_s=5), pack)
        with pytest.raises(BadStates, match=rf"document {pack.documents[1]}, tap 0"):
            transfer.publish()
        assert ring.snapshot().published == 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_target_over_two_gpus_gives_the_same_states(tmp_path: Any) -> None:
    from producer.trunk import load_model

    make_family("qwen3", **SIZES).save_pretrained(tmp_path)
    config = config_from({}, []).target
    description: Any = TargetDescription.__new__(TargetDescription)
    for key, value in {"path": str(tmp_path), "architecture": "Qwen3ForCausalLM", "dtype": "float32"}.items():
        object.__setattr__(description, key, value)
    model: Any = load_model(description, config, GPU)
    assert len({parameter.device for parameter in model.parameters()}) == 2
    one = Target(make_family("qwen3", **SIZES).to(GPU), TAPS)
    several = Target(model, TAPS)
    ids = list(range(10, 60))
    for mine, theirs in zip(selfcheck.alone(one, ids)[0], selfcheck.alone(several, ids)[0], strict=True):
        assert selfcheck.row_difference(theirs, mine) < 1e-3
