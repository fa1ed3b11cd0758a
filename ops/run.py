"""The whole life of a run, in order: claim, join, prepare, rings, processes, supervision, evaluation, summary.

Each host of a run goes through it; only node 0's drafter saves, and only node 0 evaluates (ops/hosts.py).

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

from configs.cores import usable_cores
from configs.load import require_sources
from configs.run_files import read_plan
from configs.schema import Config
from ops import data_report
from ops.commander import Commander, for_others
from ops.control import set_title
from ops.devices import Map, find_gpus, place
from ops.errors import ChildFailed
from ops.feed import Feed
from ops.hosts import HostPlace, JoinedHosts, OneHost, plan_digest
from ops.live import side_lines
from ops.metrics_reader import MetricsReader
from ops.output import Output
from ops.paths import DRAFTER, LAUNCHER, TARGET, log_path, runtime_dir
from ops.rings import Rings, clean_left_overs, room_for_state
from ops.run_folder import Trial, claim, on_trial
from ops.stage import Interrupted, run_stage
from ops.summary import end_table, make_summary, write_summary
from ops.supervisor import Modules, Supervisor
from ops.telemetry import METRICS_FILE, end_last_line
from shm_ring import SlotSpec

DONE, INTERRUPTED = 0, 130
_TICK_S = 0.1
_REDRAW_S = 0.5


class Interrupts:
    """Counts the requests to end: Ctrl-C, SIGTERM, a lost terminal, `stop`. One is graceful; a second Ctrl-C or SIGTERM
    is at once.
    """

    def __init__(self) -> None:
        self.count = 0

    def add(self, _number: int = 0, _frame: FrameType | None = None) -> None:
        """Note one request; safe in a signal handler."""
        self.count += 1

    def stop_once(self, _number: int = 0, _frame: FrameType | None = None) -> None:
        """Note a `stop` command or a lost terminal, which may be repeated without becoming a kill."""
        self.count = max(self.count, 1)

    @property
    def asked(self) -> bool:
        """Whether anyone asked."""
        return self.count > 0

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Catch the signals."""
        handlers: dict[signal.Signals, Any] = {signal.SIGINT: self.add, signal.SIGTERM: self.add}
        handlers[signal.SIGCHLD] = signal.SIG_DFL  # where it is ignored from before, children's exits are never seen
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # with nohup a lost terminal ends nothing
            handlers[signal.SIGHUP] = self.stop_once  # shell and kernel may both send it
        old = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)


def run_folder(config: Config) -> Path:
    """Where a run's files are."""
    return (Path(config.run.folder) / config.run.name).absolute()


def run(
    config: Config, modules: Modules | None = None, where: HostPlace | None = None, prepare_only: bool = False
) -> int:
    """Run a configuration to its end and return the exit code; raises OpsError, ConfigError or RingError.

    `where`: which of several hosts this one is; None for a run on one host. `prepare_only`: end with the data report.
    """
    run_dir = run_folder(config)
    places = None if where else _places(config)  # with several hosts the others are to hear of a refusal
    require_sources(config)
    interrupts = Interrupts()
    with interrupts.installed(), ExitStack() as stack:
        stack.callback(claim(run_dir).drop)
        out = Output(log_path(run_dir, LAUNCHER))
        set_title(f"dflash {config.run.name} {LAUNCHER}")
        try:
            launch = Launch(config, run_dir, places, modules or Modules(), interrupts, out, where)
            return launch.run(prepare_only)
        except Interrupted:
            out.say("interrupted: nothing is running any more")
            return INTERRUPTED
        except Exception as error:
            out.log_only(f"ended by {type(error).__name__}: {error}")
            raise


def _places(config: Config) -> Map:
    return place(config, find_gpus(), usable_cores())


def _metrics_start(run_dir: Path) -> int:
    """Where this run's metrics begin: at the file's start if a checkpoint is continued, else after the old ones."""
    metrics = run_dir / METRICS_FILE
    continued = any((run_dir / "checkpoints").glob("step-*"))
    return metrics.stat().st_size if metrics.exists() and not continued else 0


class Launch:
    """One launch of a run whose folder is claimed."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        places: Map | None,
        modules: Modules,
        interrupts: Interrupts,
        out: Output,
        where: HostPlace | None,
    ) -> None:
        self.config, self.run_dir, self.modules = config, run_dir, modules
        self.places = places or Map(())
        self.interrupts, self.out = interrupts, out
        self._waiting_for = ""
        self.metrics = MetricsReader(run_dir, start=_metrics_start(run_dir))
        self.hosts: OneHost | JoinedHosts
        if where is None:
            self.hosts = OneHost(len(config.target.devices), len(config.training.devices))
        else:
            limit_s = config.supervisor.ready_timeout_s
            self.hosts = JoinedHosts(where, config, limit_s, lambda: for_others(self.commander.status()))
        self.commander = Commander(config, run_dir, os.getpid(), interrupts.stop_once, self.hosts)

    def run(self, prepare_only: bool = False) -> int:
        """Go through the stages; see the top of the file."""
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, runtime_dir(self.run_dir), ignore_errors=True)
            self.out.say(f"run {self.config.run.name}: {self.run_dir}, launcher pid {os.getpid()}")
            clean_left_overs(self.run_dir, self.out.say, lambda: self.interrupts.asked)
            trial = stack.enter_context(on_trial(self.run_dir, self.config))
            end_last_line(self.run_dir)
            self.commander.start()
            stack.callback(self.commander.close)
            stack.callback(Feed(self.run_dir).close)
            stack.enter_context(self._joined())
            for warning in self.places.warnings:
                self.out.warn(warning)
            self._prepare()
            if prepare_only:
                trial.accept()
                return DONE
            self._wait_for_data()
            self._train(trial)
            self._stage_evaluation()
            return self._summarise()

    def _prepare(self) -> None:
        """Have answers rewritten if that is asked for, data tokenised and packs planned; show the report."""
        on_gpu = ["--on-gpu"] if self.places.of(TARGET)[0].gpu is not None else []
        if self.config.data.regenerate.enabled:
            self._stage("regenerate", [self.modules.regenerate], TARGET)
        self._stage("prepare", [self.modules.prepare, *on_gpu], TARGET)
        plan = read_plan(self.run_dir)
        if "data_report" in plan:
            self.out.show(data_report.draw(plan))

    @contextmanager
    def _joined(self) -> Iterator[None]:
        """Be one of several hosts while this lasts; the others hear how it ends. Nothing to do for one host."""
        hosts = self.hosts
        if isinstance(hosts, OneHost):
            yield
            return
        hosts.start()
        try:
            self.places = _places(self.config)
            hosts.join(self.out.say, lambda: self.interrupts.asked)
            self._leave_if_asked()
            hosts.preparing()
            yield
            hosts.leave("finished")
        except Interrupted:
            hosts.leave("stopping")
            raise
        except Exception as error:
            hosts.leave("failed", str(error), int(getattr(error, "exit_code", 4)))
            raise
        finally:
            hosts.close()

    def _wait_for_data(self) -> None:
        """Several hosts: wait until all have prepared, compare, and take this host's global ranks."""
        if isinstance(self.hosts, JoinedHosts):
            digest = plan_digest(read_plan(self.run_dir))
            self.hosts.wait_for_data(digest, self.out.say, lambda: self.interrupts.asked)
            self._leave_if_asked()
            fleet = self.hosts.fleet
            self.places = self.places.starting_at(fleet.first_target, fleet.first_drafter)

    def _asked(self) -> bool:
        """Whether the end was asked for, here or on another host; raises ChildFailed if another host has failed."""
        if self.hosts.check():
            self.interrupts.stop_once()
        return self.interrupts.asked

    def _leave_if_asked(self) -> None:
        if self.interrupts.asked:
            raise Interrupted

    def _stage(self, name: str, command: list[str], role: str) -> None:
        cores = str(usable_cores())
        environment = self.places.of(role)[0].environment | {"OMP_NUM_THREADS": cores}
        run_stage(name, command, self.run_dir, environment, self.out, self._asked)

    def _stage_evaluation(self) -> None:
        if self.config.evaluation.enabled and self.hosts.is_first:
            self.commander.state = "evaluating"
            heldout = read_plan(self.run_dir).get("data_report", {}).get("heldout", "all")
            self.out.say(
                f"evaluation: the target decodes {heldout} held-out prompts, up to "
                f"{self.config.evaluation.max_new_tokens} tokens each, with the first weights, the last, the last "
                "without context, and a bigram table; a line follows as each is done"
            )
            self._stage("evaluation", [self.modules.evaluation], DRAFTER)

    def _train(self, trial: Trial) -> None:
        """Make the rings, start both sides, and watch them until the drafters have finished."""
        spec = SlotSpec.from_json(read_plan(self.run_dir)["slot_spec"])
        num_rings = len(self.places.of(TARGET))
        first = self.hosts.fleet.first_target
        slots, name = self.config.ring.num_slots, self.config.run.name
        with Rings(name, spec, num_rings, slots, first) as rings, room_for_state(self.run_dir, self.out.say):
            self.out.say(f"{num_rings} ring(s) of {slots} slots, {rings.nbytes / 1e6:,.1f} MB")
            trial.set_results_aside()
            supervisor = Supervisor(self.config, self.run_dir, self.places, self.modules, self.out, self.hosts)
            self.commander.watch(supervisor, rings.rings)
            self.commander.state = "starting"
            try:
                supervisor.start()
                with self.out.live():
                    self._supervise(supervisor, trial)
                    self._stop(supervisor)
            finally:
                supervisor.close()
                self.commander.watch(supervisor, ())
        if supervisor.failure is not None:
            raise supervisor.failure
        if not supervisor.finished:
            where = self.run_dir / "checkpoints" if self.hosts.is_first else "node 0's checkpoints"
            self.out.say(f"interrupted at step {self._step()}; what was saved is in {where}")
            raise Interrupted

    def _supervise(self, supervisor: Supervisor, trial: Trial) -> None:
        next_draw = 0.0
        while not (supervisor.finished or supervisor.failure or self.interrupts.asked):
            supervisor.tick()
            self._hear_others(supervisor)
            if not trial.accepted and (supervisor.finished or any(s.published for s in self.commander.snapshots())):
                trial.accept()
            if self.commander.state == "starting" and supervisor.all_ready:
                self.commander.state = "running"
            if time.monotonic() >= next_draw:
                next_draw = time.monotonic() + _REDRAW_S
                self._draw()
            time.sleep(_TICK_S)

    def _hear_others(self, supervisor: Supervisor) -> None:
        """Stop or fail with the other hosts; say once why there is nothing to do."""
        try:
            if self.hosts.check():
                self.out.say("another host was asked to stop")
                self.interrupts.stop_once()
        except ChildFailed as error:
            supervisor.failure = supervisor.failure or error
        reason = self.hosts.reason
        if bool(reason) != bool(self._waiting_for):
            self.out.warn(reason) if reason else self.out.say("all hosts are there again")
        self._waiting_for = reason

    def _stop(self, supervisor: Supervisor) -> None:
        """End what still runs: gracefully, or at once at the second request."""
        self.commander.state = "stopping"
        began, killed = self.interrupts.count, False  # before the line that invites another request
        if self.interrupts.asked:
            self.hosts.stopping()
            self.out.say("stopping: both sides finish their step, the drafter saves (again to end at once)")
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
        return self.metrics.latest.get(self.metrics.lead(DRAFTER), {}).get("step", "unknown")

    def _summarise(self) -> int:
        self.metrics.poll()
        summary = make_summary(self.run_dir, self.commander.config, self.metrics)  # restarts may have changed it
        self.out.show(end_table(self.config.run.name, summary))  # first: the disk may be full
        write_summary(self.run_dir, summary)
        self.commander.state = "finished"
        return DONE
