"""The flow of a drafter process, on one screen: take -> agree -> copy -> journal -> release -> steps -> checkpoint.

Several drafter processes (ranks) go through it in step: before each pack they agree on what to do (distributed.py), so
all train, wait, save and stop together; a rank without a pack takes part with an empty one. It ends when every pack of
the plan is in the weights, or at max_steps or max_seconds, or when any rank is told to stop; each time after a whole
pack, with a checkpoint, or with its state in memory where it is started again at once (saver.py). What was trained
since the last checkpoint when a rank is killed is not in the weights any more: the next generation's record says so,
and the producers make those packs again.
"""

from __future__ import annotations

import json
import math
import os
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from configs.drafter_shape import shape_as_dict
from configs.resume import digest_of
from configs.run_files import read_plan, read_trained, write_atomically
from configs.schema import Config
from configs.targets import targets_of
from consumer.anchor_size import AnchorSize
from consumer.capture import each_size, prepare
from consumer.checkpoint import Checkpoint, CheckpointError, Contents
from consumer.distributed import Ranks, Turn
from consumer.heldout import HeldoutWatch
from consumer.intake import Intake
from consumer.journal import Journal, begin_generation
from consumer.memory import estimate_of
from consumer.meter import Meter
from consumer.resume import find_saved, identity_of
from consumer.saver import Handed, Saver
from consumer.selfcheck import bytes_of_check, facts_of_check, note_passed, self_check, was_passed
from consumer.setup import check_memory, make_drafter, make_head, step_dtype
from consumer.staging import Staging, allocate_pack, check_pack, empty_pack
from consumer.start_clock import StartClock
from consumer.step import TrainStep
from ops.control import RESTART, Control
from ops.telemetry import Log, Metrics
from shm_ring import Board, Reader, Ring, SlotSpec, ring_name
from shm_ring.handover import Handover
from shm_ring.tensors import PageLock

AT_REST_S = 0.1
SELF_CHECK_TOLERANCE = 1e-3  # relative, of a loss in bfloat16
WARM_STEPS = 20  # before that the pace says little


class Unstable(Exception):
    """Too many steps in a row had a non-finite loss or gradient. Exit code 3."""

    exit_code = 3


def run(
    config: Config, run_dir: Path, ranks: Ranks, device: torch.device, control: Control, log: Log, clock: StartClock
) -> None:
    """Train until done or told to stop. Raises ConfigError, RingError, HeadError, CheckpointError, PeerLost, ..."""
    plan = read_plan(run_dir)
    spec = SlotSpec.from_json(plan["slot_spec"])
    with ExitStack() as stack:
        ranks_of_targets = targets_of(config, os.environ).ranks
        rings = [stack.enter_context(Ring.open(ring_name(config.run.name, k), spec=spec)) for k in ranks_of_targets]
        board = stack.enter_context(Board.open(config.run.name))
        trainer = Trainer(config, plan, run_dir, ranks, device, spec, log, clock)
        ring_config, me, step = config.ring, ranks.local_rank, trainer.step.step
        for ring in rings if device.type == "cuda" and ring_config.page_lock else []:
            stack.enter_context(PageLock(ring))
        pick, max_age = ring_config.pick, ring_config.max_age
        reader = stack.enter_context(Reader(rings, me, pick, ring_config.min_ready, max_age, config.run.seed, board))
        clock.ends("rings")
        meter = Meter(stack.enter_context(Metrics(run_dir, "drafter", ranks.rank)), control, rings, device, ranks, step)
        intake = Intake(reader, trainer.journal, control, meter.phases)
        staging = Staging(trainer.pack)
        control.report(state="ready", step=trainer.step.step)
        while not trainer.done:
            _apply_settings(reader, trainer, control)
            turn = ranks.exchange(intake.offer(trainer.train_seconds))
            trainer.hear(turn)
            if turn.stop:
                break
            if turn.wait or not (turn.packs or trainer.in_a_step):
                time.sleep(AT_REST_S if control.paused or not turn.wait else 0)
                continue
            meter.phases.begin("staging")
            pack_id, slot = turn.pack_of(ranks.rank), intake.slot
            if slot is not None and pack_id is not None:
                check_pack(slot, tuple(plan["target"]["target_layer_ids"]))
                staging.start(slot)
                staging.finish()
                trainer.journal.begin(pack_id, trainer.step.step, trainer.step.num_anchors)
                meter.trained(slot.header.num_tokens)
                staging.wait_copied()  # on a GPU the steps before this pack still run
            else:
                empty_pack(trainer.pack)
            intake.release()
            trainer.train(turn.packs, pack_id, meter)
            if trainer.checkpoint_due:
                meter.phases.begin("checkpoint")
                trainer.save()
        meter.write(trainer.step, len(trainer.journal.trained))
        meter.flush()
        control.report(saving=True)
        trainer.finish(handing_over=control.stop_reason == RESTART)


def _apply_settings(reader: Reader, trainer: Trainer, control: Control) -> None:
    """Follow the settings that may change while the run lives."""
    reader.min_ready = int(control.settings.get("ring.min_ready", reader.min_ready))
    reader.pick = control.settings.get("ring.pick", reader.pick)
    trainer.log_every_steps = int(control.settings.get("training.log_every_steps", trainer.log_every_steps))


def anchor_seed(seed: int, pack_id: int, draw: int) -> int:
    """Seed of a pack's anchors: the same whichever rank trains the pack, and whatever else is in that step."""
    return zlib.crc32(f"{seed}:{pack_id}:{draw}".encode())


class Trainer:
    """The drafter with its step, journal and checkpoints; resumes from the newest complete checkpoint.

    Rank 0 alone reads and writes checkpoints; the others receive its weights and state at their start.
    """

    def __init__(
        self,
        config: Config,
        plan: dict[str, Any],
        run_dir: Path,
        ranks: Ranks,
        device: torch.device,
        spec: SlotSpec,
        log: Log,
        clock: StartClock,
    ) -> None:
        self._ranks, self._clock = ranks, clock
        self._config, self._plan, self._run_dir, self._log = config, plan, run_dir, log
        self._folder = run_dir / "checkpoints"
        self._identity = identity_of(config, plan)
        saved = self._find_saved()
        dtype = step_dtype(config.training.precision, device)
        check_memory(config, plan, device, log)
        drafter = make_drafter(config, plan, device, log, weights_follow=saved is not None or ranks.rank > 0)
        drafter.use_float8(config.training.precision == "fp8")
        head = make_head(plan, dtype, device)
        self.pack = allocate_pack(spec, device)
        self.step = TrainStep(
            drafter, head, self.pack, config.anchors, config.loss, config.optimizer, 1, config.run.seed, dtype,
            micro_steps=config.training.micro_steps, make_grads=ranks.grads_maker(config.training, log),
        )  # fmt: skip
        clock.ends("model")
        self._restore(saved)
        ranks.share(self.step.shared_state())
        self.step.adopt()
        clock.ends("state")
        meta = saved.meta if saved else {}
        facts = (saved.trained if saved else frozenset(), meta.get("train_seconds", 0.0), meta.get("anchors"))
        trained, seconds_before, anchors = ranks.from_first(facts)
        self._anchor_size = AnchorSize(config.anchors, anchors)
        self.step.num_anchors = self._anchor_size.size
        self._seconds_before = float(seconds_before)
        before = read_trained(run_dir)
        generation = 1 + ranks.largest(-1 if before is None else before.generation)
        if ranks.local_rank == 0:  # the producers of each host read it in their own run folder
            begin_generation(run_dir, trained, generation)
        self.journal = Journal(run_dir, ranks.rank, generation, trained)
        self._total_steps = self._plan_steps(len(trained))
        self.step.total_steps.fill_(self._total_steps)
        self.step.reduction = ranks.reduction_of(self.step)
        self._watch = HeldoutWatch(run_dir, drafter, self.step.head)
        self._open_packs: list[int] = []
        self._micro_done = 0
        self._clock_s = self._seconds_before
        self._aim_at_the_time_limit()  # as before the interruption
        self._save_asked = False
        self._last_saved = self.step.step
        self.log_every_steps = config.training.log_every_steps
        if device.type == "cuda":
            self._speed_up(config, log)
        clock.ends("capture")
        self._start: dict[str, Any] | None = None
        self._started = time.monotonic()
        if self.step.step == 0:
            self.save()

    def _find_saved(self) -> Checkpoint | Handed | None:
        """Make the saver and return what to go on from; None on every rank but 0, and where there is nothing."""
        shared = Handover.open(self._config.run.name) if self._ranks.rank == 0 else None
        checkpoint = self._config.checkpoint
        self._saver = Saver(self._folder, checkpoint.keep, self._log, shared if checkpoint.handover else None)
        found = find_saved(self._run_dir, self._identity, shared, self._log) if self._ranks.rank == 0 else None
        self._resumed_from, self._handed_over = found.path if found else None, isinstance(found, Handed)
        return found

    def _plan_steps(self, num_trained: int) -> int:
        """Steps after which the packs are trained, if every rank always has one: what the learning rate aims at."""
        training = self._config.training
        rounds = math.ceil((self._plan["num_packs"] - num_trained) / self._ranks.world)
        planned = self.step.step + math.ceil(rounds * training.steps_per_pack / training.micro_steps)
        return int(min(planned, training.max_steps or planned))

    def _speed_up(self, config: Config, log: Log) -> None:
        """Capture the step on a GPU; where it does not compute what the eager lines do, go on with those."""
        say: Callable[[str], None] = lambda line: log("warning", detail=line)  # noqa: E731
        training, memory = config.training, self._run_dir / "compile_cache"
        agree = self._ranks.largest
        captured = prepare(self.step, training.compile, training.cuda_graph, say, memory=memory, agree=agree)
        wrong = self._check_step(memory / "self_check")
        for claim in wrong:
            log("warning", detail=f"start-up check failed, going on without a CUDA graph (slower): {claim}")
        if wrong:
            self.step.execute, self.step.execute_micro = self.step.on_device, self.step.micro_on_device
        log(
            "step", captured=captured and not wrong, attention=self.step.attention_note or "dense",
            products_measured=self.step.tuned_products,
        )  # fmt: skip

    def _check_step(self, mark: Path) -> list[str]:
        """Return the claims that failed; after a hand-over a check that was passed with the same facts stands."""
        ranks, facts = self._ranks, facts_of_check(self._config, self._plan, self._ranks.world)
        stands = ranks.from_first(self._handed_over) and was_passed(mark, facts)
        if ranks.largest(int(not stands)) == 0:  # all or none: the step that is checked may wait for every rank
            self._log("start-up check", detail="passed before with this code, configuration and GPU; not repeated")
            return []
        torch.cuda.empty_cache()  # what trial runs and the capture's warm-up took; again below
        free_bytes, _ = torch.cuda.mem_get_info()
        estimate = estimate_of(self._config, self._plan["target"], len(self._plan["draft_vocab"] or ()) or None)
        wanted_bytes = bytes_of_check(self.step) + estimate.activations_bytes + estimate.logits_bytes
        if ranks.largest(int(wanted_bytes > free_bytes)):
            wanted = f"it takes {wanted_bytes / 1e9:.1f} GB beside the step, {free_bytes / 1e9:.1f} GB are free here"
            self._log("warning", detail=f"start-up check left out: {wanted}; the step runs unchecked")
            return []
        claims = each_size(self.step, lambda: self_check(self.step, SELF_CHECK_TOLERANCE))
        torch.cuda.empty_cache()
        wrong = [claim for found in claims.values() for claim in found]
        if not wrong and ranks.local_rank == 0:
            note_passed(mark, facts)
        return wrong

    @property
    def train_seconds(self) -> float:
        """Seconds of training so far, over all lives whose work is in the weights."""
        return self._seconds_before + time.monotonic() - self._started

    @property
    def done(self) -> bool:
        """Whether every pack is in the weights, or a limit is reached."""
        limit_s, max_steps = self._config.training.max_seconds, self._config.training.max_steps
        out_of_time = limit_s is not None and self._clock_s >= limit_s
        out_of_steps = max_steps is not None and self.step.step >= max_steps
        return out_of_time or out_of_steps or len(self.journal.trained) >= self._plan["num_packs"]

    @property
    def in_a_step(self) -> bool:
        """Whether micro-steps wait for the rest of their step."""
        return self._micro_done % self._config.training.micro_steps != 0

    @property
    def checkpoint_due(self) -> bool:
        """Whether one was asked for, or enough steps have passed since the last; never in the middle of a step."""
        due = self.step.step - self._last_saved >= self._config.checkpoint.every_steps
        return (due or self._save_asked) and not self.in_a_step and not self._saver.busy

    def hear(self, turn: Turn) -> None:
        """Follow rank 0's clock, any rank's wish for a checkpoint, and how long all wait for packs (anchor_size.py)."""
        self._clock_s = turn.elapsed_s
        self._save_asked |= turn.checkpoint
        change = self._anchor_size.hear(self.step.step, turn, self.in_a_step)
        if change is not None:
            self.step.num_anchors = change.now
            if self._ranks.rank == 0:
                self._log("anchors", step=self.step.step, **change._asdict())

    def train(self, packs: Sequence[int], mine: int | None, meter: Meter) -> None:
        """Do the steps of the packs that all ranks have at hand, `mine` being this one's; raises Unstable."""
        meter.phases.begin("step")
        if self._start is None:
            self._clock.ends("first_pack")
        self._open_packs += packs
        for draw in range(self._config.training.steps_per_pack):
            if self.step.step >= (self._config.training.max_steps or math.inf):
                break
            self.step.reseed(anchor_seed(self._config.run.seed, mine or 0, draw))
            self._micro_done += 1
            if self.in_a_step:
                self.step.run_micro()
                continue
            self.step.run()
            if self._start is None:
                self._start = self._first_step_done()
            if self.step.skipped_in_a_row >= self._config.training.max_skipped_steps:
                raise Unstable(
                    f"pack {mine}, step {self.step.step}: {self.step.skipped_in_a_row} steps in a row with a "
                    "non-finite loss or gradient; the newest checkpoint is good: lower optimizer.lr"
                )
            if self.step.step % self.log_every_steps == 0:
                facts = {"train_seconds": round(self.train_seconds, 1), **self._heldout(meter), **self._start_facts()}
                meter.write(self.step, len(self.journal.trained), **facts)
        if not self.in_a_step:
            self.journal.finish(*self._open_packs)
            self._open_packs = []
        self._aim_at_the_time_limit()

    def _first_step_done(self) -> dict[str, Any]:
        """Say how long the start took, its first step included; what was handed over goes to disk from now on."""
        if self.pack.features.is_cuda:
            torch.cuda.synchronize(self.pack.features.device)
        self._clock.ends("first_step")
        self._saver.write_adopted()
        facts = self._clock.result()
        self._log("started", resumed=self._resumed_from or "anew", **facts)
        return {"start": facts | {"handed_over": self._handed_over}}

    def _start_facts(self) -> dict[str, Any]:
        """What `_first_step_done` found, for the first line of metrics; nothing for later ones."""
        facts, self._start = self._start or {}, {}
        return facts

    def _heldout(self, meter: Meter) -> dict[str, float]:
        """Held-out accepted length, where it is due now (rank 0 measures); nothing else."""
        every = self._config.evaluation.every_steps
        if every is None or self.step.step % every or self._ranks.rank:
            return {}
        meter.phases.begin("evaluation")
        length = self._watch.measure()
        meter.phases.begin("step")
        return {} if length is None else {"heldout_accept_len": round(length, 4)}

    def _aim_at_the_time_limit(self) -> None:
        """Let the learning rate reach its end when `training.max_seconds` does, at the pace so far."""
        limit_s = self._config.training.max_seconds
        if limit_s is not None and self.step.step > WARM_STEPS:
            reachable = int(self.step.step * limit_s / max(self._clock_s, 1e-3))
            self.step.total_steps.fill_(min(self._total_steps, max(reachable, self.step.step)))

    def save(self) -> None:
        """Begin to write a checkpoint; one that cannot be written is reported, and training goes on with older ones."""
        self._save_asked = False
        self._last_saved = self.step.step
        if self._ranks.rank == 0:
            self._saver.start(self._contents())

    def _contents(self) -> Contents:
        """What a checkpoint holds now."""
        config = self._config.model_dump(mode="json")
        meta = {
            "identity": self._identity,
            "shape": shape_as_dict(self.step.shape),
            "target": self._plan["target"],
            "draft_vocab": self._plan["draft_vocab"],
            "template": self._plan.get("data_report", {}).get("template"),
            "data_digest": self._plan["data_digest"],
            "config_digest": digest_of(config),
            "generation": self.journal.generation,
            "train_seconds": round(self.train_seconds, 3),
            "anchors": self.step.num_anchors,
            "planned_steps": int(self.step.total_steps),
            "config": config,
        }
        step = self.step
        return Contents(step.step, step.drafter.state_dict(), step.state(), self.journal.trained, meta)

    def finish(self, handing_over: bool = False) -> None:
        """Write the last checkpoint and, if training is done, RUN/final.json on each host.

        `handing_over`: leave the state in memory instead, if it can be (rank 0 decides) and training is not done.
        Raises CheckpointError where the disk refuses it, with the state left in memory if it can be.
        """
        if self._ranks.from_first(handing_over and not self.done and self._hand_over()):
            self._ranks.barrier()
            self.journal.close()
            return
        path = self._saver.wait() or self._resumed_from
        if path is None or path.name != f"step-{self.step.step}":
            self.save()
            path = self._saver.wait()
        if path is None and self._ranks.rank == 0:
            kept = "; until then its state is in memory" if self._hand_over() else ""
            raise CheckpointError(
                f"{self._folder}: the last checkpoint could not be written; free space and launch again{kept}"
            )
        path = self._ranks.from_first(path)  # the others leave when it is written
        if self.done and self._ranks.local_rank == 0:
            facts = {
                "steps": self.step.step,
                "packs_trained": len(self.journal.trained),
                "checkpoint": str(path),
                "train_seconds": round(self.train_seconds, 2),
            }
            write_atomically(self._run_dir / "final.json", json.dumps(facts))
        self._ranks.barrier()  # so that final.json is there on every host before anyone leaves
        self.journal.close()

    def _hand_over(self) -> bool:
        return self._ranks.rank == 0 and self._saver.hand_over(self._contents(), self._run_dir)

    def _restore(self, saved: Checkpoint | Handed | None) -> None:
        if saved is None:
            return
        if isinstance(saved, Handed):
            self._saver.adopt(saved)
        contents = saved.load()
        self.step.load(contents.drafter, contents.state)
        self._log("resumed", step=saved.step, packs=len(saved.trained), path=str(saved.path))
