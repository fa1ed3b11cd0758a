"""speculators 0.9.0's own DFlash model, loss and optimizer, driven as its trainer drives them: autocast to bfloat16
over float32 weights, loss "ce" fused, fixed exponential decay, clip 1.

`speculators` is a step with its trainer's defaults (`log_freq` 1): its own step timer waits for the device at each
mark, and the host reads every metric. `speculators_log_rarely` is a step that is not logged: no waiting, no reading.
Batches are on the device already, and its fused loss is kept out of torch.compile, which on torch 2.11 does not take
it. Each step draws its anchors and makes its block mask anew, as its trainer does: by its own compiled
create_block_mask where that comes back from the compiler within STEP_MASK_LIMIT_S seconds (default 300; on torch 2.11
ptxas takes over three minutes), else by torch's plain one; the result says which. `speculators_mask_once`: as
`speculators_log_rarely`, with the mask made once, before the clock starts.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.drafter_step import BLOCK, DEVICE, DOCUMENT, SIZES, TAPS, WINDOW, Size, memory, timed
from configs.drafter_shape import DrafterShape

ITS_OWN, PLAIN = "its own, compiled", "torch's plain create_block_mask"


def speculators(name: str, size: Size, shape: DrafterShape) -> list[dict[str, Any]]:
    """Measure one step of speculators at a size: the mask made in each step, and once."""
    own_mask = MaskTrial(name)  # compiles while the model does
    try:
        return _measured(size, shape, own_mask)
    finally:
        own_mask.end()


def _measured(size: Size, shape: DrafterShape, own_mask: MaskTrial) -> list[dict[str, Any]]:
    model, masks = make_model(shape, "simple_flex_attention")
    from speculators.losses import resolve_loss_config

    extra = {
        "loss_config": resolve_loss_config("ce", "fused"),
        "gamma": 7.0,
        "max_anchors": size.anchors,
        "per_position_loss_weight": "fixed-exp-decay",
    }
    run = TrainerStep(model, make_batch(size), extra)
    began = time.perf_counter()
    run()
    first_s = time.perf_counter() - began
    masks.each_step, masks.own = True, own_mask.came_back()
    run()  # compiles, from the cache, or torch's plain one
    results = []
    for variant in ("speculators", "speculators_log_rarely", "speculators_mask_once"):
        masks.each_step, run.logged = variant != "speculators_mask_once", variant == "speculators"
        torch.cuda.reset_peak_memory_stats()
        result = {"variant": variant} | timed(run) | memory() | {"first_step_s": round(first_s, 1)}
        seen = {name: value.item() for name, value in run.metrics.items()}
        results.append(result | {"loss": seen["loss_sum"] / seen["loss_total"], "mask": masks.note})
    return results


class TrainerStep:
    """One step as its trainer's train_epoch does it, with its own optimizer, schedule and timer."""

    def __init__(self, model: Any, batch: dict[str, torch.Tensor], extra: dict[str, Any]) -> None:
        """`extra`: what its trainer passes to the model beside the batch."""
        from speculators.train.optimizers import build_optimizers
        from speculators.train.trainer import _StepTimer
        from transformers import get_linear_schedule_with_warmup

        self.model, self.batch, self.extra, self.logged = model, batch, extra, True
        self.optimizers = build_optimizers(model, SimpleNamespace(optimizer="adamw", lr=6e-4, weight_decay=0.0))
        self.schedules = [get_linear_schedule_with_warmup(optimizer, 10, 1000) for optimizer in self.optimizers]
        self.timer, self.ended = _StepTimer(), time.perf_counter()
        self.metrics: dict[str, torch.Tensor] = {}

    def __call__(self) -> None:
        """Do it."""
        device, timer = self.batch["input_ids"].device, self.timer
        timer.reset(self.logged)
        timer.mark_value("start", self.ended)
        timer.mark("queue")
        timer.mark("pre_h2d")
        with torch.autocast(device.type, dtype=torch.bfloat16):
            timer.mark("fetch")
            _, loss, metrics = self.model(**self.batch, **self.extra)
        timer.mark("fwd")
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        timer.mark("pre_clip")
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        metrics["error_records_sum"] = torch.tensor(0.0, device=device)
        metrics["error_records_total"] = torch.tensor(1.0, device=device)
        timer.mark("bwd")
        for stepper in (*self.optimizers, *self.schedules):
            stepper.step()
        timer.mark("opt")
        self.ended = timer.now() or time.perf_counter()
        if self.logged:
            timer.profile(int((self.batch["document_ids"] != -1).sum().item()))
            for value in metrics.values():
                value.item()
        self.metrics = metrics


class MaskTrial:
    """Another process that compiles its create_block_mask, into the compiler's cache; it may not come back."""

    def __init__(self, name: str) -> None:
        """`name`: of a size. Starts at once."""
        self._until = time.monotonic() + float(os.environ.get("STEP_MASK_LIMIT_S", "300"))
        command = [sys.executable, "-m", "benchmarks.drafter_step_speculators", name]
        self._process = subprocess.Popen(command, start_new_session=True)

    def came_back(self) -> bool:
        """Wait for its end, up to the limit; tell whether it made a mask."""
        try:
            return self._process.wait(max(0.0, self._until - time.monotonic())) == 0
        except subprocess.TimeoutExpired:
            return False

    def end(self) -> None:
        """End it, with the compilers that it has started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


class Masks:
    """Its making of anchors and masks, done in each step or kept from the last one that did it."""

    def __init__(self, core: Any) -> None:
        """`core`: its module of the model, whose class is changed."""
        from torch.nn.attention.flex_attention import create_block_mask

        self.each_step = self.own = False
        self._made: Any = None
        self._compiled, self._plain = core._compiled_create_block_mask, create_block_mask
        make = core.DFlashDraftModel._build_attention_mask

        def build(model: Any, *given: Any) -> Any:
            if self.each_step or self._made is None:
                model._create_mask_fn = self._compiled if self.own else self._plain
                self._made = make(model, *given)
            return self._made

        core.DFlashDraftModel._build_attention_mask = torch.compiler.disable(build)

    @property
    def note(self) -> str:
        """How masks are made."""
        return (ITS_OWN if self.own else PLAIN) + ("" if self.each_step else ", made once")


def compile_its_mask(size: Size) -> float:
    """Make masks as its model does in each step; returns the milliseconds of one when compiled."""
    import speculators.models.dflash.core as core
    from speculators.models.dflash.attention import create_anchor_block_mask_mod

    documents = torch.arange(size.tokens, device=DEVICE) // DOCUMENT
    for number in range(12):
        if number == 2:
            torch.cuda.synchronize()
            began = time.perf_counter()
        anchors = torch.randperm(size.tokens - BLOCK, device=DEVICE)[: size.anchors].sort().values
        mask, rows, columns = create_anchor_block_mask_mod(
            document_ids=documents, total_seq_len=size.tokens, anchor_positions=anchors, block_size=BLOCK,
            sliding_window=WINDOW, sliding_window_non_causal=False,
        )  # fmt: skip
        core._compiled_create_block_mask(mask, B=None, H=None, Q_LEN=rows, KV_LEN=columns, device=DEVICE)
    torch.cuda.synchronize()
    return (time.perf_counter() - began) * 1e3 / 10


def make_model(shape: DrafterShape, attention: str) -> tuple[Any, Masks]:
    """Build its model with random weights; embedding and heads frozen, as it has them. And what makes its masks."""
    import speculators.models.dflash.core as core
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.dflash import DFlashSpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import Qwen3Config

    core.compute_metrics = torch.compiler.disable(core.compute_metrics)
    layers = Qwen3Config(
        vocab_size=shape.vocab_size, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.num_layers, num_attention_heads=shape.num_heads, head_dim=shape.head_dim,
        num_key_value_heads=shape.num_kv_heads, rms_norm_eps=shape.rms_eps, sliding_window=shape.sliding_window,
        use_sliding_window=True, layer_types=list(shape.layer_types), max_position_embeddings=40960,
        tie_word_embeddings=False, pad_token_id=None,
    )  # fmt: skip
    layers._attn_implementation = attention
    config = DFlashSpeculatorConfig(
        transformer_layer_config=layers,
        draft_vocab_size=shape.vocab_size,
        block_size=shape.block_size,
        aux_hidden_state_layer_ids=[2 + 8 * tap for tap in range(TAPS)],
        mask_token_id=shape.mask_token_id,
        speculators_config=SpeculatorsConfig(
            algorithm="dflash",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=BLOCK - 1)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["Qwen3ForCausalLM"]),
        ),
    )
    masks = Masks(core)
    with DEVICE:
        model = core.DFlashDraftModel(config)
    model = model.to(DEVICE)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.02)
            elif "norm" in name:
                parameter.fill_(1.0)
    return model.train(), masks


def make_batch(size: Size) -> dict[str, torch.Tensor]:
    """Random data of the same kind as ours."""
    torch.manual_seed(0)
    tokens = torch.arange(size.tokens, device=DEVICE)
    return {
        "hidden_states": torch.randn(1, size.tokens, TAPS * size.hidden, device=DEVICE, dtype=torch.bfloat16),
        "input_ids": torch.randint(0, size.vocab - 1, (1, size.tokens), device=DEVICE),
        "loss_mask": torch.ones(1, size.tokens, device=DEVICE, dtype=torch.long),
        "verifier_last_hidden_states": torch.randn(1, size.tokens, size.hidden, device=DEVICE, dtype=torch.bfloat16),
        "document_ids": (tokens // DOCUMENT)[None],
        "position_ids": (tokens % DOCUMENT)[None],
    }


if __name__ == "__main__":
    print(f"its own mask: {compile_its_mask(SIZES[sys.argv[1]]):.2f} ms", flush=True)
