"""The flow of a drafter process, on one screen: take -> copy -> journal -> release -> steps -> checkpoint.

It ends when every pack of the plan is in the weights, or at max_steps or max_seconds, or when it is told to stop;
each time after a whole pack, with a checkpoint. What was trained since the last checkpoint when it is killed is not in
the weights any more: the next generation's record says so, and the producers make those packs again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from configs.load import ConfigError
from configs.run_files import read_plan, write_atomically
from configs.schema import Config
from consumer.capture import prepare
from consumer.checkpoint import Checkpoint, CheckpointError, keep_newest, newest_checkpoint, save_checkpoint
from consumer.journal import Journal, begin_generation
from consumer.meter import Meter
from consumer.selfcheck import self_check
from consumer.setup import make_drafter, make_head, shape_as_dict, step_dtype
from consumer.staging import Staging, allocate_pack, check_pack
from consumer.step import TrainStep
from ops.control import Control
from ops.telemetry import Log, Metrics
from shm_ring import Board, Reader, ReadSlot, Ring, SlotSpec, ring_name
from shm_ring.errors import RingStopped, RingTimeout
from shm_ring.tensors import PageLock

STARVED_REPORT_S = 30.0
AT_END_S = 0.1
SELF_CHECK_TOLERANCE = 1e-3  # relative, of a loss in bfloat16
WARM_STEPS = 20  # before that the pace says little


class Unstable(Exception):
    """Too many steps in a row had a non-finite loss or gradient. Exit code 3."""

    exit_code = 3


def run(config: Config, run_dir: Path, rank: int, device: torch.device, control: Control, log: Log) -> None:
    """Train until done or told to stop. Raises ConfigError, RingError, HeadError, CheckpointError, ..."""
    if len(config.training.devices) > 1:
        found = len(config.training.devices)
        raise ConfigError([f"training.devices: one drafter process for now, got {found}; several do not reduce yet"])
    plan = read_plan(run_dir)
    rings = [
        Ring.open(ring_name(config.run.name, k), spec=SlotSpec.from_json(plan["slot_spec"]))
        for k in range(len(config.target.devices))
    ]
    board = Board.open(config.run.name)
    trainer = Trainer(config, plan, run_dir, rank, device, rings[0].spec, log)
    ring_config = config.ring
    with ExitStack() as stack:
        for ring in rings if device.type == "cuda" and ring_config.page_lock else []:
            stack.enter_context(PageLock(ring))
        pick, max_age = ring_config.pick, ring_config.max_age
        reader = stack.enter_context(Reader(rings, rank, pick, ring_config.min_ready, max_age, config.run.seed, board))
        staging = Staging(trainer.pack)
        meter = Meter(Metrics(run_dir, "drafter", rank), control, rings, reader)
        control.report(state="ready", step=trainer.step.step)
        while not trainer.done and not control.stopping:
            control.wait_while_paused()
            _apply_settings(reader, trainer, control)
            slot = _take(reader, control, log)
            if slot is None:
                continue
            if slot.header.pack_id in trainer.journal:  # extracted twice, or held over a crash and already trained
                reader.release(slot)
                continue
            check_pack(slot, tuple(plan["target"]["target_layer_ids"]))
            staging.start(slot)
            staging.finish()
            trainer.journal.begin(slot.header.pack_id, trainer.step.step)
            staging.wait_copied()  # on a GPU the steps before this pack still run
            reader.release(slot)
            trainer.train(slot.header.pack_id, meter)
            meter.trained(slot.header.num_tokens)
            if control.take_checkpoint_request() or trainer.checkpoint_due:
                trainer.save()
        meter.write(trainer.step, len(trainer.journal.trained))
        trainer.finish()
    for ring in rings:
        ring.close()
    board.close()


def _take(reader: Reader, control: Control, log: Log) -> ReadSlot | None:
    """Take a slot; None at the end of what there is for now, when told to stop, or after 30 s without any."""
    try:
        slot = reader.take(timeout_s=STARVED_REPORT_S, stop=lambda: control.stopping)
    except RingStopped:
        return None
    except RingTimeout as empty:
        log("starved", detail=str(empty))
        return None
    if slot is None:
        time.sleep(AT_END_S)
    return slot


def _apply_settings(reader: Reader, trainer: Trainer, control: Control) -> None:
    """Follow the settings that may change while the run lives."""
    reader.min_ready = int(control.settings.get("ring.min_ready", reader.min_ready))
    reader.pick = control.settings.get("ring.pick", reader.pick)
    trainer.log_every_steps = int(control.settings.get("training.log_every_steps", trainer.log_every_steps))


class Trainer:
    """The drafter with its step, journal and checkpoints; resumes from the newest complete checkpoint."""

    def __init__(
        self,
        config: Config,
        plan: dict[str, Any],
        run_dir: Path,
        rank: int,
        device: torch.device,
        spec: SlotSpec,
        log: Log,
    ) -> None:
        self._config, self._plan, self._run_dir, self._log = config, plan, run_dir, log
        self._folder = run_dir / "checkpoints"
        dtype = step_dtype(config.training.precision, device)
        drafter = make_drafter(config, plan, device, log)
        head = make_head(plan, dtype, device)
        self.pack = allocate_pack(spec, device)
        packs_to_train = plan["num_packs"]
        limit = packs_to_train * config.training.steps_per_pack
        self._total_steps = min(limit, config.training.max_steps or limit)
        seed = config.run.seed + rank
        self.step = TrainStep(
            drafter, head, self.pack, config.anchors, config.loss, config.optimizer, self._total_steps, seed, dtype
        )
        saved = newest_checkpoint(self._folder, lambda line: log("checkpoint", detail=line))
        if saved is not None:
            self._restore(saved)
        trained = saved.trained if saved else frozenset()
        self._seconds_before = float(saved.meta.get("train_seconds", 0.0)) if saved else 0.0
        self.journal = Journal(run_dir, rank, begin_generation(run_dir, trained), trained)
        self._last_saved = self.step.step
        self.log_every_steps = config.training.log_every_steps
        if device.type == "cuda":
            self._speed_up(config, log)
        self._started = time.monotonic()
        if saved is None:
            self.save()

    def _speed_up(self, config: Config, log: Log) -> None:
        """Capture the step on a GPU; where it does not compute what the eager lines do, go on with those."""
        say: Callable[[str], None] = lambda line: log("capture", detail=line)  # noqa: E731
        captured = prepare(self.step, config.training.compile, config.training.cuda_graph, say)
        wrong = self_check(self.step, SELF_CHECK_TOLERANCE)
        for claim in wrong:
            log("start-up check failed", claim=claim)
        if wrong:
            self.step.execute = self.step.on_device
        log("step", captured=captured and not wrong, attention=self.step.attention_note or "dense")

    @property
    def train_seconds(self) -> float:
        """Seconds of training so far, over all lives whose work is in the weights."""
        return self._seconds_before + time.monotonic() - self._started

    @property
    def done(self) -> bool:
        """Whether every pack is in the weights, or a limit is reached."""
        limit_s = self._config.training.max_seconds
        out_of_time = limit_s is not None and self.train_seconds >= limit_s
        return (
            out_of_time or self.step.step >= self._total_steps or len(self.journal.trained) >= self._plan["num_packs"]
        )

    @property
    def checkpoint_due(self) -> bool:
        """Whether enough steps have passed since the last checkpoint."""
        return self.step.step - self._last_saved >= self._config.checkpoint.every_steps

    def train(self, pack_id: int, meter: Meter) -> None:
        """Do the steps of one pack; raises Unstable."""
        for _ in range(self._config.training.steps_per_pack):
            if self.step.step >= self._total_steps:
                break
            self.step.run()
            if self.step.skipped_in_a_row >= self._config.training.max_skipped_steps:
                raise Unstable(
                    f"pack {pack_id}, step {self.step.step}: {self.step.skipped_in_a_row} steps in a row with a "
                    "non-finite loss or gradient; the newest checkpoint is good: lower optimizer.lr"
                )
            if self.step.step % self.log_every_steps == 0:
                meter.write(self.step, len(self.journal.trained))
        self.journal.finish(pack_id)
        self._aim_at_the_time_limit()

    def _aim_at_the_time_limit(self) -> None:
        """Let the learning rate reach its end when `training.max_seconds` does, at the pace so far."""
        limit_s = self._config.training.max_seconds
        if limit_s is not None and self.step.step > WARM_STEPS:
            reachable = int(self.step.step * limit_s / self.train_seconds)
            self.step.total_steps.fill_(min(self._total_steps, max(reachable, self.step.step)))

    def save(self) -> Path | None:
        """Write a checkpoint; one that cannot be written is reported, and training goes on with the older ones."""
        meta = {
            "shape": shape_as_dict(self.step.shape),
            "target": self._plan["target"],
            "draft_vocab": self._plan["draft_vocab"],
            "data_digest": self._plan["data_digest"],
            "generation": self.journal.generation,
            "train_seconds": round(self.train_seconds, 3),
            "config": self._config.model_dump(mode="json"),
        }
        weights = self.step.drafter.state_dict()
        try:
            path = save_checkpoint(self._folder, self.step.step, weights, self.step.state(), self.journal.trained, meta)
        except CheckpointError as error:
            self._log("checkpoint failed", detail=str(error))
            return None
        keep_newest(self._folder, self._config.checkpoint.keep)
        self._last_saved = self.step.step
        self._log("checkpoint", step=self.step.step, path=str(path), packs=len(self.journal.trained))
        return path

    def finish(self) -> None:
        """Write the last checkpoint and, if training is done, RUN/final.json. Raises CheckpointError."""
        path = self.save() if self._last_saved != self.step.step else self._folder / f"step-{self.step.step}"
        if path is None:
            raise CheckpointError(f"{self._folder}: the final checkpoint could not be written; free space and resume")
        if self.done:
            facts = {
                "steps": self.step.step,
                "packs_trained": len(self.journal.trained),
                "checkpoint": str(path),
                "train_seconds": round(self.train_seconds, 2),
            }
            write_atomically(self._run_dir / "final.json", json.dumps(facts))
        self.journal.close()

    def _restore(self, saved: Checkpoint) -> None:
        self.step.load(saved.drafter(), saved.state())
        self._log("resumed", step=saved.step, packs=len(saved.trained), path=str(saved.path))
