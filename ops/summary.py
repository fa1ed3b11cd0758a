"""The end of a run: summary.json and the table that the launcher prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from configs.run_files import write_atomically
from configs.schema import Config
from ops import data_report
from ops.errors import RunMissing
from ops.metrics_reader import MetricsReader
from ops.paths import DRAFTER, TARGET
from ops.picture import write_svg
from ops.run_folder import read_json

HELDOUT_KEYS = ("before", "after", "bigram", "zero_context")


def make_summary(run_dir: Path, config: Config, metrics: MetricsReader) -> dict[str, Any]:
    """Gather the run's results: final.json and heldout.json first, metrics where they are silent; null if unknown."""
    final = read_json(run_dir / "final.json")
    heldout = read_json(run_dir / "heldout.json")
    plan = read_json(run_dir / "plan.json")
    lead = metrics.lead(DRAFTER)  # its loss is that of all ranks
    first = metrics.first.get(lead, {})
    latest = metrics.latest.get(lead, {})
    summary: dict[str, Any] = {
        "loss_first": final.get("loss_first", first.get("loss")),
        "loss_last": final.get("loss_last", latest.get("loss")),
    }
    for key in HELDOUT_KEYS:
        name = f"heldout_accept_len_{key}"
        summary[name] = heldout.get(name)
    summary |= {
        "target_tokens_per_s": _rounded(final.get("target_tokens_per_s", metrics.mean(TARGET, "tokens_per_s"))),
        "drafter_tokens_per_s": _rounded(final.get("drafter_tokens_per_s", metrics.mean(DRAFTER, "tokens_per_s"))),
        "steps": final.get("steps", latest.get("step")),
        "packs_trained": final.get("packs_trained", latest.get("packs_trained")),
        "packs_planned": plan.get("num_packs"),
        "ended_by": ended_by(config, final, plan.get("num_packs")),
        "train_seconds": final.get("train_seconds"),
        "rows": data_report.row_law(plan) if "data_report" in plan else None,
        "checkpoint": final.get("checkpoint", latest.get("checkpoint")),
    }
    return summary


def ended_by(config: Config, final: dict[str, Any], num_packs: int | None) -> str | None:
    """Name what ended the training, by final.json: all packs, or the limit that was reached first; None if unknown."""
    training = config.training
    if num_packs is not None and final.get("packs_trained", 0) >= num_packs:
        return "all packs trained"
    if training.max_steps is not None and final.get("steps", 0) >= training.max_steps:
        return f"training.max_steps ({training.max_steps:,})"
    if training.max_seconds is not None and final.get("train_seconds", 0.0) >= training.max_seconds:
        return f"training.max_seconds ({training.max_seconds:g} s)"
    return None


def write_summary(run_dir: Path, summary: dict[str, Any]) -> None:
    """Write summary.json."""
    write_atomically(run_dir / "summary.json", json.dumps(summary, indent=2) + "\n")


def show_again(run_dir: Path, svg: Path | None) -> None:
    """Print the table of a run that has ended, or write its picture; raises RunMissing."""
    summary = read_json(run_dir / "summary.json")
    if not summary:
        raise RunMissing(f"run {run_dir.name!r} has no summary.json: it has not reached its end")
    table = end_table(run_dir.name, summary)
    if svg is None:
        Console(highlight=False).print(table)
        return
    write_svg(table, svg, f"dflash-ring: run {run_dir.name}", width=90)
    print(f"wrote {svg}")


def end_table(run: str, summary: dict[str, Any]) -> Table:
    """Draw the final table."""
    table = Table(title=f"run {run}", title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("loss, first -> last", f"{_shown(summary['loss_first'], 3)} -> {_shown(summary['loss_last'], 3)}")
    before, after, bigram, zero = (summary[f"heldout_accept_len_{key}"] for key in HELDOUT_KEYS)
    table.add_row("held-out accepted length, before -> after", f"{_shown(before, 3)} -> {_shown(after, 3)}")
    table.add_row("  bigram table", _shown(bigram, 3))
    table.add_row("  same drafter, context zeroed", _shown(zero, 3))
    table.add_row("target tokens/s", _shown(summary["target_tokens_per_s"], 0))
    table.add_row("drafter tokens/s", _shown(summary["drafter_tokens_per_s"], 0))
    table.add_row("steps", _shown(summary["steps"], 0))
    planned = _shown(summary["packs_planned"], 0)
    table.add_row("packs trained", f"{_shown(summary['packs_trained'], 0)} of {planned}")
    table.add_row("ended by", summary.get("ended_by") or "unknown")
    if summary["rows"]:
        table.add_row("rows", summary["rows"])
    table.add_row("checkpoint", _near(summary["checkpoint"]))
    return table


def _near(path: str | None) -> str:
    """Word a path from here, where it lies below."""
    here = Path.cwd()
    return str(Path(path).relative_to(here) if path and Path(path).is_relative_to(here) else path or "none")


def _rounded(value: Any) -> float | None:
    return round(float(value), 1) if isinstance(value, (int, float)) else None


def _shown(value: Any, digits: int) -> str:
    return f"{value:,.{digits}f}" if isinstance(value, (int, float)) else "not measured"
