"""doctor names what is wrong with a machine, and which side of a run became slow and why."""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import tracemalloc
from collections import namedtuple
from pathlib import Path

import pytest

from ops.doctor import compare, describe, read_report
from ops.doctor_machine import check_machine, is_hybrid
from ops.doctor_subject import examine
from ops.errors import RunMissing
from ops.findings import FAULT, OK, WARNING, Finding


def _metrics(path: Path, target: dict[str, float], drafter: dict[str, float]) -> Path:
    lines = []
    for step in range(10):
        warm = 0.1 if step < 2 else 1.0
        for role, values in (("target", target), ("drafter", drafter)):
            slow = values | {"tokens_per_s": values["tokens_per_s"] * warm}
            lines.append(json.dumps({"time": 1.0 + step, "role": role, "rank": 0, "step": step, **slow}))
    path.write_text("\n".join(lines) + "\nnot a line\n")
    return path


def test_a_slower_target_is_named_with_its_share_and_cause(tmp_path: Path) -> None:
    before = _metrics(tmp_path / "a", {"tokens_per_s": 1000, "blocked_pct": 30, "forward_pct": 60, "copy_pct": 5},
                      {"tokens_per_s": 1000, "starved_pct": 2})  # fmt: skip
    after = _metrics(tmp_path / "b", {"tokens_per_s": 800, "blocked_pct": 1, "forward_pct": 70, "copy_pct": 29},
                     {"tokens_per_s": 800, "starved_pct": 35})  # fmt: skip
    now = read_report(after)
    assert now.verdict.kind == "target-bound"
    lines = compare(now, read_report(before))
    assert lines[0] == (
        "the run lost 20%: 1,000 -> 800 tokens/s, because of the target's copy: 50 -> 362 s per million tokens"
    )
    assert lines[1].startswith("the target lost 20% of its throughput: 1,000 -> 800 tokens/s; it does not wait more")
    assert lines[2] == "  copy: 50 -> 362 s per million tokens (5 % -> 29 % of the time)"
    assert lines[3] == "  blocked: 300 -> 12.5 s per million tokens (30 % -> 1 % of the time)"
    assert lines[4] == "  forward: 600 -> 875 s per million tokens (60 % -> 70 % of the time)"
    assert any("the drafter lost 20%" in line and "it waits for the target 2 % -> 35 %" in line for line in lines)


def test_two_equal_runs_have_no_regression(tmp_path: Path) -> None:
    same = {"tokens_per_s": 1000, "blocked_pct": 30}
    report = read_report(_metrics(tmp_path / "a", same, {"tokens_per_s": 990, "starved_pct": 1}))
    assert compare(report, report) == [f"no change of more than 10% against {tmp_path / 'a'}"]


def test_a_run_is_described_by_where_its_time_went(tmp_path: Path) -> None:
    report = read_report(_metrics(tmp_path / "a", {"tokens_per_s": 1000, "blocked_pct": 70, "forward_pct": 25},
                                  {"tokens_per_s": 990, "starved_pct": 1}))  # fmt: skip
    text = "\n".join(describe(report))
    assert text.startswith("drafter-bound: ")
    assert "target: 1,000 tokens/s" in text, "the warm-up lines do not count"
    assert "  blocked: 70 % of the time\n  forward: 25 % of the time\n  everything else: 5 % of the time" in text


def _spent(path: Path, step_s: float, starved_s: float) -> Path:
    """A drafter whose every tenth line also has a checkpoint of 9 s; the median of the shares would not see it."""
    lines = []
    for number in range(22):
        spent = {"step": step_s, "starved": starved_s, "checkpoint": 9.0 if number in (11, 21) else 0.0}
        whole = sum(spent.values())
        lines.append({"time": 1.0 * number, "role": "drafter", "rank": 0, "step": number, "spent_s": spent,
                      "tokens_per_s": 1000 / whole, "checkpoint_pct": 100 * spent["checkpoint"] / whole})  # fmt: skip
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


def test_each_second_of_a_side_is_accounted_for_also_the_rare_ones(tmp_path: Path) -> None:
    text = describe(read_report(_spent(tmp_path / "a", step_s=1.0, starved_s=0.1)))
    assert text[-3:] == [
        "  step: 50 % of the time (20.0 s)",
        "  checkpoint: 45 % of the time (18.0 s)",
        "  starved: 5 % of the time (2.0 s)",
    ]


def test_a_slower_step_is_named_although_the_drafter_waits_less(tmp_path: Path) -> None:
    before = read_report(_spent(tmp_path / "a", step_s=1.0, starved_s=0.2))
    now = read_report(_spent(tmp_path / "b", step_s=1.6, starved_s=0.0))
    lines = compare(now, before)
    assert lines[0].startswith("the run lost 25%: 833 -> 625 tokens/s, because of the drafter's step: ")
    assert "it does not wait more than before" in lines[1]


def test_a_lost_process_is_the_cause(tmp_path: Path) -> None:
    full, few = ([{"time": 1.0, "role": role, "rank": rank, "step": 1, "tokens_per_s": 500.0,
                   "starved_pct" if role == "drafter" else "blocked_pct": 0.0}
                  for role in ("drafter", "target") for rank in range(count)] for count in (4, 3))  # fmt: skip
    for name, records in (("full", full), ("few", few)):
        (tmp_path / name).write_text("\n".join(map(json.dumps, records)) + "\n")
    lines = compare(read_report(tmp_path / "few"), read_report(tmp_path / "full"))
    assert lines[0] == "the run lost 25%: 2,000 -> 1,500 tokens/s, and it has 3 drafter process(es) where it had 4"


def test_a_missing_or_empty_metrics_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(RunMissing, match="no metrics"):
        read_report(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(RunMissing, match="holds no lines"):
        read_report(tmp_path)


def test_this_machine_is_fit_for_the_tests() -> None:
    findings = check_machine()
    assert {finding.what for finding in findings} >= {
        "python",
        "packages",
        "libatomic",
        "futex",
        "/dev/shm",
        "locked memory",
        "cores",
        "threads",
        "sockets",
        "GPUs",
    } - ({"GPUs"} if any(f.what == "GPU" for f in findings) else set())
    assert [finding.line for finding in findings if finding.what == "libatomic"] == ["ok       libatomic: found"]


def test_a_small_shared_memory_is_a_fault_for_a_large_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("ops.doctor_machine.shutil.disk_usage", lambda _path: usage(64 << 20, 0, 64 << 20))
    (finding,) = [each for each in check_machine(shm_bytes=25_600_000_000) if each.what == "/dev/shm"]
    assert finding.level == FAULT
    assert "the run's rings need 25.60 GB" in finding.text
    assert "--shm-size" in finding.text


def test_a_missing_libatomic_is_a_fault_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ctypes.CDLL

    def without(name: str | None, **options: bool) -> ctypes.CDLL:
        if name == "libatomic.so.1":
            raise OSError(name)
        return real(name, **options)

    monkeypatch.setattr("ops.doctor_machine.ctypes.CDLL", without)
    findings = check_machine()
    (finding,) = [each for each in findings if each.what == "libatomic"]
    assert finding.level == FAULT
    assert "apt-get install libatomic1" in finding.text
    assert [each.level for each in findings if each.what == "futex"] == [OK]


def _of(what: str) -> list[Finding]:
    return [each for each in check_machine() if each.what == what]


def test_a_version_that_is_not_asked_for_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr("ops.doctor_machine.importlib.metadata.requires", lambda _name: ["torch>=2.11,<2.14", "rich"])
    monkeypatch.setattr(
        "ops.doctor_machine.importlib.metadata.version", lambda name: "2.10.1+cu128" if name == "torch" else real(name)
    )
    untested, found = _of("packages")
    assert (untested.level, found.level) == (WARNING, OK)
    assert untested.text.startswith("untested: torch 2.10.1+cu128 (wanted <2.14,>=2.11)")


def test_few_threads_are_a_warning_that_names_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ops.doctor_machine.resource.getrlimit", lambda _which: (512, 512))
    (finding,) = _of("threads")
    assert finding.level == WARNING
    assert "at most 512 of this user (ulimit -u)" in finding.text


def test_the_limit_for_locked_memory_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ops.doctor_machine.resource.getrlimit", lambda _which: (8 << 20, 8 << 20))
    assert _of("locked memory")[0].text.startswith("8 MB (ulimit -l")


@pytest.mark.parametrize(
    ("described", "expected"),
    [
        ({"layer_types": ["linear_attention", "full_attention"]}, True),
        ({"text_config": {"layer_types": ["linear_attention"]}, "vision_config": {}}, True),
        ({"linear_num_value_heads": 32}, True),
        ({"layer_types": ["full_attention", "sliding_attention"]}, False),
        ({}, False),
        ([], False),
    ],
)
def test_a_hybrid_is_known_by_its_config(described: object, expected: bool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(described))
    assert is_hybrid(str(tmp_path)) is expected


def test_a_target_that_is_not_here_is_not_looked_up_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert not is_hybrid(str(tmp_path / "none"))
    assert not is_hybrid("owner/absent")


@pytest.mark.parametrize(("gpus", "version", "warned"), [(["0"], "", True), (["0"], "0.6.0", False), ([], "", False)])
def test_a_hybrid_on_a_gpu_without_its_kernel_library_is_warned_about(
    gpus: list[str], version: str, warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text('{"layer_types": ["linear_attention"]}')
    (tmp_path / "run.yaml").write_text(f"target: {{model: {tmp_path / 'target'}}}\n")
    monkeypatch.setattr("ops.doctor_subject.find_gpus", lambda: gpus)
    monkeypatch.setattr("ops.doctor_subject.hybrid_kernels", lambda: version)
    lines = examine(str(tmp_path / "run.yaml"), None, tmp_path)
    assert any("hybrid" in line and line.endswith('pip install -e ".[hybrid]"') for line in lines) == warned


def test_on_a_machine_with_a_gpu_doctor_says_whether_hybrids_have_their_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ops.doctor_machine.check_gpus", lambda: iter(()))
    monkeypatch.setattr("ops.doctor_machine.shutil.which", lambda _name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr("ops.doctor_machine.hybrid_kernels", lambda: "")
    assert [(each.level, each.text) for each in _of("flash-linear-attention")] == [
        (OK, 'not installed; only hybrid targets on a GPU need it: pip install -e ".[hybrid]"')
    ]
    monkeypatch.setattr("ops.doctor_machine.hybrid_kernels", lambda: "0.6.0")
    assert [each.text for each in _of("flash-linear-attention")] == ["0.6.0"]
    monkeypatch.setattr("ops.doctor_machine.hybrid_kernels", lambda: "")
    monkeypatch.setattr("ops.doctor_machine.shutil.which", lambda _name: None)
    assert _of("flash-linear-attention") == []


def test_a_file_of_metrics_need_not_fit_into_memory(tmp_path: Path) -> None:
    """Metrics of weeks are gigabytes, and doctor runs beside the run."""
    record = {"time": 1.5, "role": "drafter", "rank": 0, "step": 1, "loss": 2.5, "accuracy": [0.25] * 100}
    path = tmp_path / "metrics.jsonl"
    path.write_text(f"{json.dumps(record | {'tokens_per_s': 1000.0, 'spent_s': {'step': 0.5}})}\n" * 3_000)
    tracemalloc.start()
    try:
        report = read_report(path)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert report.sides["drafter"].num_lines == 3_000
    assert report.sides["drafter"].spent_s == {"step": 0.5 * 2_998}
    assert report.value("drafter", "tokens_per_s") == 1000.0
    assert peak_bytes < path.stat().st_size / 2
