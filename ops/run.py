"""The whole life of a run, in order: claim, prepare, rings, processes, supervision, evaluation, summary.

Whatever happens, the way out is the same: processes ended, rings removed, sockets removed, lock given back.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from configs.run_files import read_plan
from configs.schema import Config
from ops.commander import Commander
from ops.control import set_title
from ops.devices import Map, find_gpus, place
from ops.live import side_lines
from ops.metrics_reader import MetricsReader
from ops.output import Output
from ops.paths import DRAFTER, LAUNCHER, TARGET, log_path, runtime_dir
from ops.rings import Rings, clean_left_overs
from ops.run_folder import claim, set_results_aside, write_config
from ops.stage import Interrupted, run_stage
from ops.summary import end_table, make_summary, write_summary
from ops.supervisor import Modules, Supervisor
from ops.telemetry import METRICS_FILE, end_last_line
from shm_ring import SlotSpec

DONE, INTERRUPTED = 0, 130
_TICK_S = 0.1
_REDRAW_S = 0.5


class Interrupts:
    """Counts the requests to end: Ctrl-C, SIGTERM, a lost terminal, `stop`. One is graceful, two are at once."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, _number: int = 0, _frame: FrameType | None = None) -> None:
        """Note one request; safe in a signal handler."""
        self.count += 1

    def stop_once(self) -> None:
        """Note a `stop` command, which may be repeated without becoming a kill."""
        self.count = max(self.count, 1)

    @property
    def asked(self) -> bool:
        """Whether anyone asked."""
        return self.count > 0

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Catch the signals."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        old = [signal.signal(number, self.add) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, old, strict=True):
                signal.signal(number, handler)


def run_folder(config: Config) -> Path:
    """Where a run's files are."""
    return (Path(config.run.folder) / config.run.name).absolute()


def run(config: Config, modules: Modules | None = None) -> int:
    """Run a configuration to its end and return the exit code; raises OpsError, ConfigError or RingError."""
    run_dir = run_folder(config)
    places = place(config, find_gpus(), len(os.sched_getaffinity(0)))
    interrupts = Interrupts()
    with interrupts.installed(), ExitStack() as stack:
        stack.callback(claim(run_dir).drop)
        out = Output(log_path(run_dir, LAUNCHER))
        set_title(f"dflash {config.run.name} {LAUNCHER}")
        try:
            return Launch(config, run_dir, places, modules or Modules(), interrupts, out).run()
        except Interrupted:
            out.say("interrupted: nothing is running any more")
            return INTERRUPTED
        except Exception as error:
            out.log_only(f"ended by {type(error).__name__}: {error}")
            raise


def _metrics_start(run_dir: Path) -> int:
    """Where this run's metrics begin: at the file's start if a checkpoint is continued, else after the old ones."""
    metrics = run_dir / METRICS_FILE
    continued = any((run_dir / "checkpoints").glob("step-*"))
    return metrics.stat().st_size if metrics.exists() and not continued else 0


class Launch:
    """One launch of a run whose folder is claimed."""

    def __init__(
        self, config: Config, run_dir: Path, places: Map, modules: Modules, interrupts: Interrupts, out: Output
    ) -> None:
        self.config, self.run_dir, self.places, self.modules = config, run_dir, places, modules
        self.interrupts, self.out = interrupts, out
        self.metrics = MetricsReader(run_dir, start=_metrics_start(run_dir))
        self.commander = Commander(config, run_dir, os.getpid(), interrupts.stop_once)

    def run(self) -> int:
        """Go through the stages; see the top of the file."""
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, runtime_dir(self.run_dir), ignore_errors=True)
            self.out.say(f"run {self.config.run.name}: {self.run_dir}, launcher pid {os.getpid()}")
            clean_left_overs(self.config.run.name, self.out.say, lambda: self.interrupts.asked)
            set_results_aside(self.run_dir)
            write_config(self.run_dir, self.config)
            end_last_line(self.run_dir)
            for warning in self.places.warnings:
                self.out.warn(warning)
            self.commander.start()
            stack.callback(self.commander.close)
            on_gpu = ["--on-gpu"] if self.places.of(TARGET)[0].gpu is not None else []
            self._stage("prepare", [self.modules.prepare, *on_gpu], TARGET)
            self._train()
            self._stage_evaluation()
            return self._summarise()

    def _stage(self, name: str, command: list[str], role: str) -> None:
        cores = str(len(os.sched_getaffinity(0)))
        environment = self.places.of(role)[0].environment | {"OMP_NUM_THREADS": cores}
        run_stage(name, command, self.run_dir, environment, self.out, lambda: self.interrupts.asked)

    def _stage_evaluation(self) -> None:
        if self.config.evaluation.enabled:
            self.commander.state = "evaluating"
            self._stage("evaluation", [self.modules.evaluation], DRAFTER)

    def _train(self) -> None:
        """Make the rings, start both sides, and watch them until the drafters have finished."""
        spec = SlotSpec.from_json(read_plan(self.run_dir)["slot_spec"])
        num_rings = len(self.places.of(TARGET))
        with Rings(self.config.run.name, spec, num_rings, self.config.ring.num_slots) as rings:
            self.out.say(f"{num_rings} ring(s) of {self.config.ring.num_slots} slots, {rings.nbytes / 1e6:,.1f} MB")
            supervisor = Supervisor(self.config, self.run_dir, self.places, self.modules, self.out)
            self.commander.watch(supervisor, rings.rings)
            self.commander.state = "starting"
            try:
                supervisor.start()
                with self.out.live():
                    self._supervise(supervisor)
                    self._stop(supervisor)
            finally:
                supervisor.close()
                self.commander.watch(supervisor, ())
        if supervisor.failure is not None:
            raise supervisor.failure
        if not supervisor.finished:
            self.out.say(f"interrupted at step {self._step()}; what was saved is in {self.run_dir / 'checkpoints'}")
            raise Interrupted

    def _supervise(self, supervisor: Supervisor) -> None:
        next_draw = 0.0
        while not (supervisor.finished or supervisor.failure or self.interrupts.asked):
            supervisor.tick()
            if self.commander.state == "starting" and supervisor.all_ready:
                self.commander.state = "running"
            if time.monotonic() >= next_draw:
                next_draw = time.monotonic() + _REDRAW_S
                self._draw()
            time.sleep(_TICK_S)

    def _stop(self, supervisor: Supervisor) -> None:
        """End what still runs: gracefully, or at once at the second request."""
        self.commander.state = "stopping"
        if self.interrupts.asked:
            self.out.say("stopping: both sides finish their step, the drafter saves (again to end at once)")
        began, killed = self.interrupts.count, False
        supervisor.stop()
        while not supervisor.all_left:
            if not killed and self.interrupts.count > max(began, 1):
                self.out.say("ending at once")
                supervisor.stop(now=True)
                killed = True
            supervisor.tick()
            time.sleep(_TICK_S / 2)

    def _draw(self) -> None:
        self.metrics.poll()
        status = self.commander.status()
        self.out.update(side_lines(self.metrics, status["rings"], status["processes"]))

    def _step(self) -> Any:
        self.metrics.poll()
        return self.metrics.latest.get((DRAFTER, 0), {}).get("step", "unknown")

    def _summarise(self) -> int:
        self.metrics.poll()
        summary = make_summary(self.run_dir, self.metrics)
        write_summary(self.run_dir, summary)
        self.commander.state = "finished"
        self.out.show(end_table(self.config.run.name, summary))
        return DONE
