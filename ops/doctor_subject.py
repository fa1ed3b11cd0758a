"""What doctor says about a configuration, a run or a metrics file."""

from __future__ import annotations

from pathlib import Path

from configs.cores import usable_cores
from configs.load import load_config
from ops.devices import find_gpus, place
from ops.doctor import compare, describe, read_report
from ops.doctor_machine import hybrid_kernels, is_hybrid
from ops.paths import TARGET
from ops.run_folder import find_run, read_json
from shm_ring import SlotSpec
from shm_ring.layout import ring_bytes, slot_stride


def examine(subject: str, against: str | None, folder: Path) -> list[str]:
    """Return lines about `subject`, compared with `against`; raises ConfigError, RunMissing."""
    if subject.endswith((".yaml", ".yml")):
        return _config_lines(Path(subject))
    path = _metrics_of(subject, folder)
    report = read_report(path)
    lines = [f"{report.name}:", *describe(report)]
    if path.is_dir():
        lines += _ring_lines(path)
    if against is not None:
        other = read_report(_metrics_of(against, folder))
        lines += [f"against {other.name}:", *compare(report, other)]
    return lines


def _metrics_of(subject: str, folder: Path) -> Path:
    return Path(subject) if Path(subject).is_file() else find_run(subject, folder)


def _config_lines(path: Path) -> list[str]:
    """Load the configuration and say which process would run where."""
    config = load_config(path)
    places = place(config, find_gpus(), usable_cores())
    lines = [f"{path}: valid", *(f"  {each.line}" for each in places.placements)]
    warnings = list(places.warnings)
    on_gpu = any(each.gpu is not None for each in places.of(TARGET))
    if on_gpu and not hybrid_kernels() and is_hybrid(config.target.model, config.target.revision):
        warnings.append(
            "the target is a hybrid and flash-linear-attention is not installed: its recurrent layers are read "
            'document by document in plain torch, which is slow; pip install -e ".[hybrid]"'
        )
    return lines + [f"  warning: {warning}" for warning in warnings]


def _ring_lines(run_dir: Path) -> list[str]:
    """Say how much shared memory the run's rings take."""
    plan = read_json(run_dir / "plan.json")
    if "slot_spec" not in plan:
        return []
    config = load_config(run_dir / "config.yaml")
    slot_bytes = SlotSpec.from_json(plan["slot_spec"]).slot_bytes
    rings, slots = len(config.target.devices), config.ring.num_slots
    total, stride = rings * ring_bytes(slots, slot_bytes), slot_stride(slot_bytes)
    return [f"rings: {rings} of {slots} slots of {stride / 1e6:.1f} MB, {total / 1e9:.2f} GB in /dev/shm"]
