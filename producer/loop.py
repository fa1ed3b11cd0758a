"""The flow of a target process, on one screen: todo -> window of packs -> target -> slot -> check, publish.

Backpressure is one rule: no FREE slot, the producer waits. It ends when it is told to; after its last pack it stays,
because a drafter that restarts from a checkpoint may need packs again.
"""

from __future__ import annotations

import math
import os
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from configs.run_files import read_plan
from configs.schema import Config
from configs.targets import targets_of
from gpu.device import marks_of
from ops.control import Control
from ops.telemetry import Log, Metrics, Phases
from producer.corpus.documents import Documents
from producer.corpus.schedule import schedule_of
from producer.heldout import write_heldout
from producer.meter import Meter
from producer.rows import PackMaker
from producer.setup import Load, make_target
from producer.states import StateCheck
from producer.target import TargetDescription
from producer.todo import Todo
from producer.transfer import Transfer
from shm_ring import Board, Ring, SlotSpec, Writer, WriteSlot, ring_name
from shm_ring.errors import RingTimeout
from shm_ring.tensors import PageLock

IDLE_S = 0.2  # how often a producer without work looks for a new drafter generation
MEASURED_PRODUCTS = "compile_cache/products_target.json"
UNDER_WAY = 1  # packs queued on the device while the host waits for the one before: it never runs dry, nor far ahead


def run(
    config: Config, run_dir: Path, rank: int, device: torch.device, control: Control, log: Log, load: Load | None = None
) -> None:
    """Produce packs until told to stop. Raises RingError, TargetError, BadStates. `load`: see make_target."""
    plan = read_plan(run_dir)
    description = TargetDescription.from_dict(plan["target"])
    corpus = Documents(run_dir / "data")
    schedule = schedule_of(corpus, plan["data_digest"], config, plan["packs_per_epoch"])
    ring = Ring.open(ring_name(config.run.name, rank), spec=SlotSpec.from_json(plan["slot_spec"]))
    board = Board.open(config.run.name)
    target = make_target(description, config, device, log, load, run_dir / MEASURED_PRODUCTS)
    write_heldout(run_dir, config, target, rank, log)
    maker = PackMaker(corpus, schedule, target, config)
    check = StateCheck(description.target_layer_ids, config.target.state_band, target.head)
    todo = Todo(run_dir, ring, schedule.num_packs, rank, targets_of(config, os.environ).total)
    with ring.writer(board) as writer, _page_locked(ring, config, device), Metrics(run_dir, "target", rank) as metrics:
        transfer = Transfer(writer, description.target_layer_ids, check)
        phases = Phases(mark=marks_of(target.last_device))
        meter = Meter(metrics, control, ring, phases, config.target.min_agreement, log)
        control.report(state="ready")
        while not control.stopping:
            phases.begin("other")
            control.wait_while_paused()
            phases.begin("data")
            if todo.refresh(maker.pack_ids | transfer.pack_ids):
                writer.reopen()
                log("todo", packs=len(todo), generation=todo.generation)
            maker.add(todo.take(maker.room))
            if not len(maker):
                transfer.publish()
                phases.begin("other")
                _rest(writer, todo, control)
            phases.begin("forward")
            for pack in maker.advance():  # queued on a GPU, not waited for
                phases.begin("blocked")
                slot = _acquire(writer, transfer, control)
                phases.begin("copy")
                transfer.start(slot, pack)
                meter.packed(pack.pack_id, pack.num_tokens, maker.padding, check)
            phases.begin("copy")
            transfer.publish(leave=UNDER_WAY)
        transfer.publish()
    ring.close()
    board.close()


def _page_locked(ring: Ring, config: Config, device: torch.device) -> AbstractContextManager[object]:
    """Page-lock the ring for the GPU while the producer runs; nothing to do on a CPU."""
    return PageLock(ring) if config.ring.page_lock and device.type == "cuda" else nullcontext()


def _acquire(writer: Writer, transfer: Transfer, control: Control) -> WriteSlot:
    """Return a FREE slot; waits while the ring is full, which the ring reports. Raises RingStopped."""
    try:
        return writer.acquire(timeout_s=0.0)
    except RingTimeout:  # nobody can release what is not published, so publish before waiting
        transfer.publish()
    return writer.acquire(timeout_s=math.inf, stop=lambda: control.stopping)


def _rest(writer: Writer, todo: Todo, control: Control) -> None:
    """Nothing to make: declare the end of the data (a new generation takes that back), look again in a moment."""
    if todo.generation >= 0:
        writer.finish()
        control.report(state="finished")
    time.sleep(IDLE_S)
