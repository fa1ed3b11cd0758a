"""Show a run's metrics elsewhere: TensorBoard, Weights & Biases, Prometheus, behind one small interface.

An exporter listens to the run's metrics like the dashboard does, in a process of its own (`launch.py telemetry`): the
run knows nothing of it, and it may come and go. TensorBoard and W&B need their packages; Prometheus needs none.
"""

from __future__ import annotations

import importlib
import math
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol

from configs.load import ConfigError
from ops.errors import NoResource, RunTaken
from ops.feed import Listener
from ops.locks import FileLock
from ops.metrics_reader import MetricsReader
from ops.run_folder import launcher_pid

POLL_S = 1.0
MAX_PORT = 65535


class Exporter(Protocol):
    """Takes every line of metrics in its order, then close()."""

    def write(self, record: dict[str, Any]) -> None:
        """Take one line: time, role, rank, step and numbers."""

    def close(self) -> None:
        """Flush and end."""


class TensorBoard:
    """Event files in RUN/tensorboard, written without torch, by one process at a time.

    Every line of the run is written each time, so the files of an earlier start go with the first one: else all would
    be there twice. Raises RunTaken while another process writes them.
    """

    def __init__(self, run_dir: Path) -> None:
        writer = _imported("tensorboard.summary.writer.event_file_writer", "tensorboard")
        self._event = _imported("tensorboard.compat.proto.event_pb2", "tensorboard").Event
        self._summary = _imported("tensorboard.compat.proto.summary_pb2", "tensorboard").Summary
        folder = run_dir / "tensorboard"
        self._lock = FileLock(run_dir / "tensorboard.lock")
        if pid := self._lock.take():
            who = f"process {pid}" if pid > 0 else "another process"
            raise RunTaken(f"{folder}: {who} writes these event files already; leave it running, or end it first")
        self._earlier = list(folder.glob("events.out.tfevents.*"))
        self._writer = writer.EventFileWriter(str(folder))

    def write(self, record: dict[str, Any]) -> None:
        """Write the numbers under role+rank/name."""
        while self._earlier:
            self._earlier.pop().unlink(missing_ok=True)
        prefix = f"{record['role']}{record['rank']}"
        values = [self._summary.Value(tag=f"{prefix}/{name}", simple_value=value) for name, value in numbers(record)]
        summary = self._summary(value=values)
        self._writer.add_event(self._event(step=record["step"], wall_time=record["time"], summary=summary))

    def close(self) -> None:
        """Flush the file."""
        self._writer.close()
        self._lock.drop()


class WeightsAndBiases:
    """A new run of the same name in a W&B project; mode and key as W&B's own environment variables say."""

    def __init__(self, run_dir: Path, project: str) -> None:
        wandb = _imported("wandb", "wandb")
        self._run = wandb.init(project=project, name=run_dir.name, dir=str(run_dir))
        self._axes: set[str] = set()

    def write(self, record: dict[str, Any]) -> None:
        """Log the numbers under role+rank/name, with that process's own step."""
        prefix = f"{record['role']}{record['rank']}"
        values = {f"{prefix}/{name}": value for name, value in numbers(record)}
        if prefix not in self._axes:  # its charts are drawn over its own step, not over the number of lines
            self._axes.add(prefix)
            self._run.define_metric(f"{prefix}/step", hidden=True)
            self._run.define_metric(f"{prefix}/*", step_metric=f"{prefix}/step")
        self._run.log(values | {f"{prefix}/step": record["step"]})

    def close(self) -> None:
        """Upload what is left."""
        self._run.finish()


class Prometheus:
    """The latest numbers of each process at http://HOST:PORT/metrics, in the text format; port 0 picks a free one."""

    def __init__(self, run_dir: Path, port: int, host: str = "127.0.0.1") -> None:
        if not 0 <= port <= MAX_PORT:
            raise ConfigError([f"--prometheus: expected a port in 0..{MAX_PORT}, got {port}"])
        self._run = run_dir.name
        self._latest: dict[tuple[str, int], dict[str, Any]] = {}
        self._lock = threading.Lock()
        try:
            self._server = ThreadingHTTPServer((host, port), self._handler())
        except OSError as error:
            raise NoResource(f"port {port} of {host} cannot be used ({error.strerror}); choose another") from None
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True)
        self._thread.start()

    def write(self, record: dict[str, Any]) -> None:
        """Keep the newest line of each process."""
        with self._lock:
            self._latest[record["role"], record["rank"]] = record

    def text(self) -> str:
        """Return the exposition: one gauge per number, labelled by run, role and rank."""
        with self._lock:
            latest = dict(self._latest)
        gauges: dict[str, list[str]] = {}
        for (role, rank), record in sorted(latest.items()):
            labels = f'run="{self._run}",role="{role}",rank="{rank}"'
            for name, value in [("step", record["step"]), ("time_seconds", record["time"]), *numbers(record)]:
                metric = "dflash_" + "".join(c if c.isalnum() else "_" for c in name)
                gauges.setdefault(metric, []).append(f"{metric}{{{labels}}} {value}")
        return "".join(f"# TYPE {name} gauge\n" + "\n".join(rows) + "\n" for name, rows in gauges.items())

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                known = self.path.split("?")[0] in ("/", "/metrics")
                body = owner.text().encode() if known else b"see /metrics\n"
                self.send_response(200 if known else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_arguments: Any) -> None:
                """Stay silent: one line per scrape helps nobody."""

        return Handler


def export(run_dir: Path, exporters: Sequence[Exporter]) -> int:
    """Feed every line of the run, old ones first, until the run ends; returns how many there were."""
    listener = Listener(run_dir)
    reader = MetricsReader(run_dir, start=0, history=1, listener=listener)
    count = 0
    try:
        while True:
            alive = bool(launcher_pid(run_dir))  # asked before reading, so that no last line is missed
            for record in reader.read(to_the_end=not alive):
                count += 1
                for exporter in exporters:
                    exporter.write(record)
            if not alive:
                return count
            listener.wait(POLL_S)
    finally:
        listener.close()
        for exporter in exporters:
            exporter.close()


def numbers(record: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the finite numbers of a line by name; lists become name_1, name_2, ..."""
    for name, value in record.items():
        if name in ("time", "role", "rank", "step"):
            continue
        items = enumerate(value, 1) if isinstance(value, list) else [(0, value)]
        for index, item in items:
            if isinstance(item, (int, float)) and not isinstance(item, bool) and math.isfinite(item):
                yield (f"{name}_{index}" if index else name), float(item)


def _imported(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise NoResource(f"{package} is not installed; pip install {package}") from None
