"""One optimizer step on the pack at hand: anchors, blocks, forward, loss, backward, clip, update, metrics.

Everything here happens on the device: no value is read by the host, every per-step value lives in a tensor that never
moves, so `run` is either these lines one by one (eager; the reference, and all there is on a CPU) or one replay of the
CUDA graph that capture.py made of them. Metrics accumulate on the device and leave in one copy (`metrics`).

Shapes: T tokens, A anchors, B block slots, S = B - 1 predicted slots, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from configs.drafter_shape import DrafterShape
from configs.schema import AnchorsConfig, LossConfig, OptimizerConfig
from consumer.anchors import Anchors, lay_out_blocks, positions_in_document, random_keys, select_anchors
from consumer.attention import dense_attention, document_attention
from consumer.drafter import Attend, Drafter
from consumer.flat import FlatWeights, MakeZeros, joined
from consumer.frozen_head import FrozenHead
from consumer.host_copy import copy_all
from consumer.loss import LossRule, LossTerms, default_gamma, head_loss
from consumer.optimizer import AdamW, AdamWRule, Control, Muon, set_clip
from consumer.schedule import Schedule
from consumer.staging import PackTensors

MakeAttention = Callable[[Anchors, Tensor, DrafterShape], Attend]


class Reduction(Protocol):
    """Adds up gradients and sums over all ranks, in place (consumer/distributed.py)."""

    def begin(self) -> None:
        """Get ready; called before the backward pass, so that what it has finished can travel meanwhile."""

    def finish(self, sums: Tensor) -> None:
        """Have the flat gradients and `sums` added up over all ranks when later work on the stream reads them."""


class TrainStep:
    """Trains `drafter` in place. `pack` holds the current pack; `run` does one step with fresh anchors."""

    def __init__(
        self,
        drafter: Drafter,
        head: FrozenHead,
        pack: PackTensors,
        anchors: AnchorsConfig,
        loss: LossConfig,
        optimizer: OptimizerConfig,
        total_steps: int,
        seed: int,
        dtype: torch.dtype | None = None,
        attention: MakeAttention | None = None,
        micro_steps: int = 1,
        make_grads: MakeZeros = torch.zeros,
    ) -> None:
        """Take over the drafter's weights (they move into flat buffers) in `dtype`; None keeps theirs.

        `attention`: how a step attends; None: per document on a CPU, dense on a GPU (capture.py sets FlexAttention).
        `micro_steps`: above 1, `run_micro` may add gradients to those of the next `run`; costs one more float32 buffer.
        `make_grads`: see FlatWeights.
        """
        device = drafter.fc.weight.device
        dtype = dtype or drafter.fc.weight.dtype
        self.drafter, self.pack, self.shape = drafter, pack, drafter.shape
        self.head = head.cast(dtype)
        gamma = loss.gamma or default_gamma(self.shape.block_size)
        self.rule = LossRule(loss.labels, loss.decay, gamma, loss.dpace_alpha, loss.chunk_rows)
        self.step = 0
        self.reduction: Reduction | None = None
        """Where the ranks meet, and nowhere else in a step; None: there is one rank."""
        self.side_stream: torch.cuda.Stream | None = None
        self.execute: Callable[[], None] = self.on_device
        self.execute_micro: Callable[[], None] = self.micro_on_device
        self.attention: MakeAttention = attention or (document_attention if device.type == "cpu" else dense_attention)
        self.flat = FlatWeights(drafter, dtype, make_grads)
        self.carried = Carried(self.flat, self.shape.block_size) if micro_steps > 1 else None
        self.attention_note = ""
        """Which attention was chosen; for the log."""
        self.tuned_products = 0
        """How many different products run with a measured algorithm (products.py); for the log."""
        self.anchor_sizes, self.num_anchors = anchors.choices, anchors.choices[0]
        """A: blocks of a step; may change between steps, to one of the sizes."""
        self._per_document_min, self._config = anchors.per_document_min, optimizer
        self._schedule = Schedule(optimizer.schedule, optimizer.warmup_share, optimizer.min_lr_share)
        self.control = Control(device)
        self._make_counters(device, total_steps, seed)
        self._make_optimizers()
        self._sums = torch.zeros(_NUM_SUMS + 2 * (self.shape.block_size - 1), dtype=torch.float64, device=device)
        self.skipped_in_a_row_seen = 0
        self.latest = torch.zeros(3, dtype=torch.float64, device=device)
        """Gradient norm, loss sum and weight sum of the latest step, trial runs included."""

    def _make_counters(self, device: torch.device, total_steps: int, seed: int) -> None:
        self.number = torch.zeros((), dtype=torch.int64, device=device)
        self.updates = torch.zeros_like(self.number)
        self.seed = torch.full_like(self.number, seed)
        self.total_steps = torch.full_like(self.number, total_steps)
        self.in_a_row = torch.zeros_like(self.number)
        self.lr_factor = torch.ones((), dtype=torch.float32, device=device)
        """Multiplies both learning rates; may be changed while training."""
        self.armed = torch.ones((), dtype=torch.float32, device=device)
        """1; 0 during a trial run, which must leave no trace in weights, moments, counters and metrics."""

    def device_counters(self) -> list[Tensor]:
        """Return every small tensor that a step changes, for a check that puts them back."""
        return [self.number, self.updates, self.in_a_row, self.lr_factor, self._sums, self.latest]

    def _make_optimizers(self) -> None:
        config, flat = self._config, self.flat
        rule = AdamWRule(config.betas, config.eps, config.weight_decay)
        self.muon = Muon(flat, config.weight_decay) if config.name == "muon" else None
        first = flat.num_matrix_elements if self.muon else 0
        self.adamw = AdamW(flat, slice(first, flat.size), rule, flat.num_matrix_elements)

    @property
    def lr(self) -> Tensor:
        """AdamW's learning rate of the latest step, 0-dim; always the same tensor."""
        return self.control.lr

    @property
    def skipped_in_a_row(self) -> int:
        """Latest steps skipped in a row; on a GPU as of the last Reading, so that no step waits for it."""
        return self.skipped_in_a_row_seen if self.in_a_row.is_cuda else int(self.in_a_row)

    def run(self) -> None:
        """Do one step on the current pack. A non-finite loss or gradient leaves the weights as they are, counted."""
        self.step += 1
        self.execute()

    def run_micro(self) -> None:
        """Carry the gradient sums of the current pack over to the next `run`; needs micro_steps above 1."""
        self.execute_micro()

    def reseed(self, seed: int) -> None:
        """Set what the anchors of the next steps are drawn with, beside the step's number. No host wait."""
        self.seed.fill_(seed)

    def micro_on_device(self) -> None:
        """Do what `run_micro` does, in tensors alone."""
        if self.carried is None:
            raise RuntimeError("run_micro: this step was made with micro_steps 1")
        self.flat.zero_norm_grads()
        self.number.add_(1)  # the anchors are those of the step that this is a part of
        self.carried.add(self.flat.grads, self._backward())
        self.number.sub_(1)

    def on_device(self) -> None:
        """Do what `run` does, in tensors alone: this is what is captured."""
        self.number.add_(self.armed.to(torch.int64))
        share = self._schedule.share(self.number, self.total_steps) * self.lr_factor
        self.control.lr.copy_(share * self._config.lr)
        self.control.muon_lr.copy_(share * self._config.muon_lr)
        self.flat.zero_norm_grads()
        if self.reduction is not None:
            self.reduction.begin()
        sums = self._backward()
        if self.carried is not None:
            self.carried.add(self.flat.grads, sums)
            self.carried.give(self.flat.grads, sums)
        if self.reduction is not None:
            self.reduction.finish(sums)
        self._update(sums)

    def _backward(self) -> Tensor:
        """Fill the flat gradients from the current pack; returns loss, weight, accept, blocks, correct, counted."""
        terms = self.forward()
        terms.loss.backward()
        return torch.cat([torch.stack([terms.loss.detach(), *terms[1:2], *terms[4:]]), *terms[2:4]])

    def _update(self, sums: Tensor) -> None:
        """Clip, update and account, given the sums of all ranks: loss, weight, accept, blocks, correct, counted."""
        loss, weight = sums[0], sums[1]
        norm = torch.linalg.vector_norm(self.flat.grads, dtype=self.flat.wide)
        norm = torch.where(torch.isfinite(loss), norm, loss).to(torch.float32)
        norm = set_clip(self.control, norm, weight, self._config.clip_norm, self.armed)
        self.control.count_update(self.updates, self._config.betas)
        if self.muon is not None:
            self.muon.step(self.control)
        self.adamw.step(self.control)
        good = torch.isfinite(norm)
        self.in_a_row.copy_(torch.where(self.armed > 0, torch.where(good, 0, self.in_a_row + 1), self.in_a_row))
        row = torch.cat([torch.stack([torch.ones_like(norm), norm]), sums.to(norm.dtype)]).to(self._sums.dtype)
        self.latest.copy_(row[1:4])
        self._sums[1:] += torch.where(good & (self.armed > 0), row, 0.0)
        self._sums[0] += torch.where(good, 0.0, self.armed)

    def draw_anchors(self) -> Anchors:
        """Draw the anchors of the step whose number is set: a function of seed, step number and pack."""
        pack, floor = self.pack, self._per_document_min
        keys = random_keys(self.seed, self.number, pack.input_ids.shape[0])
        size = self.shape.block_size
        return select_anchors(pack.loss_mask, pack.doc_start, self.num_anchors, size, floor, keys)

    def forward(self, anchors: Anchors | None = None) -> LossTerms:
        """Compute the loss sums of the current pack, with gradient, for given anchors or for freshly drawn ones."""
        pack, shape = self.pack, self.shape
        with self._beside():  # dozens of tiny kernels, hidden behind the one large product below
            anchors = self.draw_anchors() if anchors is None else anchors
            blocks = lay_out_blocks(
                anchors, pack.input_ids, pack.loss_mask, pack.doc_start, shape.block_size, shape.mask_token_id
            )
            tokens = torch.cat([blocks.input_ids[:, 0], blocks.input_ids.new_full((1,), shape.mask_token_id)])
            attend = self.attention(anchors, pack.doc_start, shape)
            positions = positions_in_document(pack.doc_start)
            labels, valid = self.head.labels(blocks.labels[:, 1:]), blocks.valid[:, 1:]
        g_TH = self.drafter.context(pack.features.to(self.flat.weights.dtype))
        self._meet()
        hidden = self.drafter(
            self.head.embedding[tokens],
            g_TH,
            blocks.positions.flatten(),
            positions,
            attend,
            predicted_only=True,
            shared_mask_row=True,
        )
        hidden_ASH = hidden.unflatten(0, (-1, shape.block_size - 1))
        goal = self._target_hidden(anchors)
        return head_loss(hidden_ASH, self.head.head, labels, valid, anchors.keep, self.rule, goal)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Queue what is inside on the side stream, where there is one; `_meet` makes the main stream wait for it."""
        if self.side_stream is None:
            yield
            return
        self.side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side_stream):
            yield

    def _meet(self) -> None:
        if self.side_stream is not None:
            torch.cuda.current_stream().wait_stream(self.side_stream)

    def _target_hidden(self, anchors: Anchors) -> Tensor | None:
        """The target's final hidden state at anchor + k - 1 for slots k = 1..B-1, [A, S, H]; None for hard labels."""
        if self.rule.labels == "hard" or self.pack.final_hidden is None:
            return None
        slots = torch.arange(self.shape.block_size - 1, device=anchors.position.device)
        place = (anchors.position[:, None] + slots).clamp(max=self.pack.input_ids.shape[0] - 1)
        return self.pack.final_hidden[place].to(self.head.head.dtype)

    def start_reading(self) -> Reading:
        """Begin to read, and clear, what has accumulated since the last call: one copy, which no GPU step waits for."""
        extra = torch.stack([self.control.lr.double(), self.in_a_row.double()])
        values = torch.cat([extra, self._sums])
        self._sums.zero_()
        return Reading(self, values)

    def metrics(self) -> dict[str, float | list[float]]:
        """Read and clear what has accumulated since the last call, and wait for it; keys as in Reading.result."""
        return self.start_reading().result()

    def state(self) -> dict[str, Tensor]:
        """Everything but the weights that training needs to go on: masters, moments, step, updates, seed."""
        state = {"step": self.number, "updates": self.updates, "seed": self.seed}
        for prefix, views in self._state_views().items():
            state |= {f"{prefix}.{name}": view for name, view in views.items()}
        return state

    def shared_state(self) -> list[Tensor]:
        """Everything that the ranks must have alike when they start: masters, moments, counters. Views, not copies.

        What no collective knows (int16) is given as bytes.
        """
        moments = [self.adamw.exp_avg, self.adamw.exp_avg_sq, *([self.muon.momentum] if self.muon else [])]
        stored = [each.view(torch.uint8) if each.dtype == torch.int16 else each for each in self.flat.stored]
        return [*stored, *moments, self.number, self.updates]

    def adopt(self) -> None:
        """Follow what was copied into `shared_state`."""
        self.step = int(self.number)

    def _state_views(self) -> dict[str, dict[str, Tensor]]:
        flat, views = self.flat, {}
        if flat.low is not None:
            views["master_low"] = flat.named_views(flat.low)
        first = self.adamw.part.start
        for prefix, buffer in (("exp_avg", self.adamw.exp_avg), ("exp_avg_sq", self.adamw.exp_avg_sq)):
            views[prefix] = flat.named_views(buffer, first=first)
        if self.muon is not None:
            views["momentum"] = flat.named_views(self.muon.momentum, stop=flat.num_matrix_elements)
        return views

    @torch.no_grad()
    def load(self, drafter: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        """Copy saved weights and state into the existing tensors. Raises KeyError or RuntimeError where they differ.

        Moments that the saved run did not have (another optimizer) start at zero; masters that it did not have are
        its weights. Masters saved whole, in float32, are taken as well.
        """
        pairs = self._load_masters(drafter, state)
        for prefix, views in self._state_views().items():
            if prefix == "master_low":
                continue
            for name, view in views.items():
                saved = state.get(f"{prefix}.{name}")
                pairs += [] if saved is None else [(view, saved)]
                if saved is None:
                    view.zero_()
        copy_all(pairs)
        for counter, name in ((self.number, "step"), (self.updates, "updates"), (self.seed, "seed")):
            counter.copy_(state[name])
        self.step = int(state["step"])

    def _load_masters(self, drafter: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Set the masters of which the saved form differs; return what is left to copy: where to, and from."""
        flat, pairs = self.flat, []
        for name, weight in flat.named_views(flat.weights).items():
            saved, low = drafter[name], state.get(f"master_low.{name}")
            if saved.shape != weight.shape:
                raise RuntimeError(f"{name}: expected shape {tuple(weight.shape)}, got {tuple(saved.shape)}")
            if flat.low is not None and low is not None:
                pairs += [(weight, saved), (flat.view(flat.low, name), low)]
            elif flat.low is None and low is None and f"master.{name}" not in state:
                pairs.append((weight, saved))
            else:
                flat.set_master(name, joined(saved, low) if low is not None else state.get(f"master.{name}", saved))
        return pairs


class Reading:
    """Accumulated metrics on their way to the host, through a page-locked buffer where they come from a GPU."""

    def __init__(self, step: TrainStep, values: Tensor) -> None:
        """Start the copy, in the order of the current stream. `values`: learning rate, skipped in a row, the sums."""
        self.step = step.step
        self._owner = step
        self._copied = torch.cuda.Event() if values.is_cuda else None
        self._values = values
        if self._copied is not None:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._copied.record()

    @property
    def ready(self) -> bool:
        """Whether the copy is complete, so that `result` need not wait."""
        return self._copied is None or self._copied.query()

    def result(self) -> dict[str, float | list[float]]:
        """Return loss (mean per weight), accept_len, accuracy by slot, grad_norm (mean per step), lr, skipped_steps."""
        if self._copied is not None:
            self._copied.synchronize()
        lr, in_a_row, *sums = self._values.tolist()
        self._owner.skipped_in_a_row_seen = int(in_a_row)
        skipped, steps, norm, loss, weight, accept, blocks = sums[:_NUM_SUMS]
        slots = (len(sums) - _NUM_SUMS) // 2
        correct, counted = sums[_NUM_SUMS : _NUM_SUMS + slots], sums[_NUM_SUMS + slots :]
        return {
            "loss": loss / weight if weight else float("nan"),
            "accept_len": accept / blocks if blocks else float("nan"),
            "accuracy": [right / total if total else 0.0 for right, total in zip(correct, counted, strict=True)],
            "grad_norm": norm / steps if steps else float("nan"),
            "lr": lr,
            "skipped_steps": skipped,
        }


class Carried:
    """Gradients and sums of micro-steps, in at least float32, until the step that uses them."""

    def __init__(self, flat: FlatWeights, block_size: int) -> None:
        """Start at zero."""
        device = flat.grads.device
        self.grads = torch.zeros(flat.size, dtype=flat.wide, device=device)
        self.sums = torch.zeros(_NUM_SUMS - 3 + 2 * (block_size - 1), dtype=flat.wide, device=device)

    def add(self, grads: Tensor, sums: Tensor) -> None:
        """Add one micro-step's."""
        self.grads.add_(grads)
        self.sums.add_(sums)

    def give(self, grads: Tensor, sums: Tensor) -> None:
        """Move everything carried into `grads` and `sums`, and start at zero again."""
        grads.copy_(self.grads)
        sums.copy_(self.sums)
        self.zero()

    def zero(self) -> None:
        """Forget what was carried."""
        self.grads.zero_()
        self.sums.zero_()


_NUM_SUMS = 7
"""Leading sums: skipped steps, steps, gradient norm, loss, weight, accept, blocks; then correct and counted by slot."""
