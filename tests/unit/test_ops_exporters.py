"""Exporters take every line of a run's metrics, and their own formats read back."""

from __future__ import annotations

import os
import socket
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from ops.errors import NoResource, RunTaken
from ops.exporters import Prometheus, TensorBoard, WeightsAndBiases, export, numbers
from ops.metrics_reader import MetricsReader
from ops.telemetry import METRICS_FILE, Metrics


def _write(run_dir: Path, steps: range) -> None:
    with Metrics(run_dir, "drafter", 0) as metrics:
        for step in steps:
            metrics.write(step=step, loss=2.0 / (step + 1), accuracy=[0.5, None], text="x", done=True)


class _Collector:
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.closed = False

    def write(self, record: dict[str, Any]) -> None:
        self.steps.append(record["step"])

    def close(self) -> None:
        self.closed = True


def test_every_line_is_exported_once_and_the_exporter_is_closed(tmp_path: Path) -> None:
    _write(tmp_path, range(5))
    collector = _Collector()
    assert export(tmp_path, [collector]) == 5
    assert collector.steps == [0, 1, 2, 3, 4]
    assert collector.closed


def test_only_finite_numbers_are_exported_and_lists_by_position() -> None:
    record = {
        "time": 1.0,
        "role": "drafter",
        "rank": 0,
        "step": 1,
        "a": 2,
        "b": [1.0, None],
        "c": "x",
        "d": True,
        "e": None,
    }
    assert list(numbers(record)) == [("a", 2.0), ("b_1", 1.0)]


def test_prometheus_serves_the_latest_numbers_by_role_and_rank(tmp_path: Path) -> None:
    exporter = Prometheus(tmp_path, 0)
    try:
        for step in (1, 2):
            exporter.write({"time": 5.0, "role": "drafter", "rank": 1, "step": step, "loss": 0.5 * step})
        with urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics", timeout=300) as answer:
            text = answer.read().decode()
    finally:
        exporter.close()
    labels = f'{{run="{tmp_path.name}",role="drafter",rank="1"}}'
    assert f"# TYPE dflash_loss gauge\ndflash_loss{labels} 1.0\n" in text
    assert f"dflash_step{labels} 2\n" in text


def test_a_port_in_use_is_refused_by_number(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(NoResource, match=f"port {port} of 127.0.0.1 cannot be used"):
            Prometheus(tmp_path, port)


def test_tensorboard_files_hold_the_numbers(tmp_path: Path) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    _write(tmp_path, range(3))
    export(tmp_path, [TensorBoard(tmp_path)])
    (file,) = (tmp_path / "tensorboard").iterdir()
    tags = [
        (value.tag, event.step) for event in loader.EventFileLoader(str(file)).Load() for value in event.summary.value
    ]
    assert ("drafter0/loss", 2) in tags
    assert ("drafter0/accuracy_1", 0) in tags


def test_tensorboard_started_again_writes_no_line_twice_and_not_beside_another(tmp_path: Path) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    _write(tmp_path, range(3))
    export(tmp_path, [TensorBoard(tmp_path)])
    _write(tmp_path, range(3, 5))
    writing = TensorBoard(tmp_path)
    with pytest.raises(RunTaken, match=f"process {os.getpid()} writes these event files already"):
        TensorBoard(tmp_path)
    export(tmp_path, [writing])
    TensorBoard(tmp_path).close()  # one that ends before it has written takes nothing away
    steps = [
        event.step
        for file in (tmp_path / "tensorboard").iterdir()
        for event in loader.EventFileLoader(str(file)).Load()
        for value in event.summary.value
        if value.tag == "drafter0/loss"
    ]
    assert steps == [0, 1, 2, 3, 4]


class _FakeWandb:
    """W&B's run, with the three calls that are used."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.axes: dict[str, str] = {}
        self.options: dict[str, Any] = {}
        self.finished = False

    def init(self, **options: Any) -> _FakeWandb:
        self.options = options
        return self

    def define_metric(self, name: str, step_metric: str = "", hidden: bool = False) -> None:
        if not hidden:
            self.axes[name] = step_metric

    def log(self, row: dict[str, float]) -> None:
        self.rows.append(row)

    def finish(self) -> None:
        self.finished = True


def test_wandb_gets_each_line_once_over_the_steps_of_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = _FakeWandb()
    monkeypatch.setattr("ops.exporters.importlib.import_module", lambda _name: fake)
    _write(tmp_path, range(3))
    export(tmp_path, [WeightsAndBiases(tmp_path, "project")])
    assert fake.options == {"project": "project", "name": tmp_path.name, "dir": str(tmp_path)}
    assert fake.axes == {"drafter0/*": "drafter0/step"}
    assert [row["drafter0/step"] for row in fake.rows] == [0, 1, 2]
    assert fake.rows[1] == {"drafter0/step": 1, "drafter0/loss": 1.0, "drafter0/accuracy_1": 0.5}
    assert fake.finished


def test_a_missing_package_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ops.exporters.importlib.import_module", _no_module)
    with pytest.raises(NoResource, match="tensorboard is not installed; pip install tensorboard"):
        TensorBoard(tmp_path)


def _no_module(name: str) -> None:
    raise ImportError(name)


def test_a_reader_waits_for_the_end_of_a_line_and_skips_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / METRICS_FILE
    path.write_bytes(
        b'{"time": 1, "role": "target", "rank": 0, "st\n{"time": 1, "role": "target", "rank": 0, "step": 1}\n{"ti'
    )
    reader = MetricsReader(tmp_path)
    assert reader.poll() == 1
    with path.open("ab") as file:
        file.write(b'me": 2, "role": "target", "rank": 0, "step": 2}\n')
    assert reader.poll() == 1
    assert reader.latest["target", 0]["step"] == 2


def test_a_mean_leaves_the_first_line_out_and_sums_over_processes(tmp_path: Path) -> None:
    for rank in (0, 1):
        with Metrics(tmp_path, "target", rank) as metrics:
            for rate in (1.0, 100.0, 200.0):
                metrics.write(step=1, tokens_per_s=rate)
    reader = MetricsReader(tmp_path)
    reader.poll()
    assert reader.mean("target", "tokens_per_s") == 300.0
    assert reader.mean("drafter", "tokens_per_s") is None
