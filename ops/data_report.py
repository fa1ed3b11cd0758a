"""Draw the data report of a prepared run: what was read, used and skipped, and which tokens are supervised."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

_BAR = 30
_SUPERVISED, _CONTEXT = "bold green", "dim"


def draw(plan: dict[str, Any]) -> RenderableType:
    """Draw the report of a plan (plan.json)."""
    report = plan["data_report"]
    parts: list[RenderableType] = [_numbers(plan, report)]
    if report["skipped"]:
        parts.append(_skipped(report))
    if len(report["sources"]) > 1:
        parts.append(_sources(report))
    parts.append(_lengths(report))
    parts.append(_example(report))
    parts += [Text(f"warning: {warning}", style="yellow") for warning in report["warnings"]]
    return Group(*parts)


def row_law(plan: dict[str, Any]) -> str:
    """Where every row that was read has gone."""
    report = plan["data_report"]
    used = f"{report['used']:,} used + {report['heldout']:,} held out"
    dropped = f" + {report['duplicates_dropped']:,} duplicates dropped" if report["duplicates_dropped"] else ""
    return f"{report['rows']:,} read = {used}{dropped} + {sum(report['skipped'].values()):,} skipped"


def _numbers(plan: dict[str, Any], report: dict[str, Any]) -> Table:
    table = Table(title="data", title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    skipped = sum(report["skipped"].values())
    table.add_row("rows", row_law(plan))
    share = 100 * report["supervised_tokens"] / report["tokens"]
    table.add_row("documents", f"{report['documents']:,} with {report['tokens']:,} tokens, {share:.1f} % supervised")
    table.add_row(
        "supervised tokens",
        f"{report['supervised_read']:,} read = {report['supervised_tokens']:,} offered + {report['supervised_cut']:,} "
        f"cut off + {report['supervised_heldout']:,} held out + {report['supervised_dropped']:,} dropped",
    )
    table.add_row("long documents", f"{report['truncated']:,} truncated, {report['split']:,} split")
    share = 100 * report["duplicates"] / max(1, report["rows"] - skipped)
    table.add_row("exact duplicates", f"{report['duplicates']:,} ({share:.1f} %)")
    table.add_row("packs", f"{plan['num_packs']:,} over all epochs, {100 * plan['pack_fill']:.1f} % full")
    template = report["template"]
    arguments = ", ".join(f"{key}={value}" for key, value in template["kwargs"].items()) or "no arguments"
    table.add_row("chat template", f"{template['sha256'][:12]}, {arguments}, answers found by {template['spans']}")
    for note, count in report["notes"].items():
        table.add_row("counted", f"{count:,} {note}")
    return table


def _skipped(report: dict[str, Any]) -> Table:
    table = Table("skipped", "rows", "first at")
    for reason, count in sorted(report["skipped"].items(), key=lambda item: -item[1]):
        table.add_row(reason, f"{count:,}", Text(report["first_place"][reason], overflow="fold"))
    return table


def _sources(report: dict[str, Any]) -> Table:
    table = Table(
        "source", "rows", "documents", "tokens", "share %", "weight", "share % weighted", title_justify="left"
    )
    for source in report["sources"]:
        table.add_row(
            Text(source["name"], overflow="fold"),
            f"{source['rows']:,}",
            f"{source['documents']:,}",
            f"{source['tokens']:,}",
            f"{source['share_pct']:.1f}",
            f"{source['weight']:g}",
            f"{source['weighted_share_pct']:.1f}",
        )
    return table


def _lengths(report: dict[str, Any]) -> Table:
    table = Table("tokens", "documents", "")
    most = max((count for _, _, count in report["lengths"]), default=1)
    for low, high, count in report["lengths"]:
        table.add_row(
            f"{low} to {high - 1}" if high else f"{low} and more", f"{count:,}", "█" * round(_BAR * count / most)
        )
    return table


def _example(report: dict[str, Any]) -> Text:
    text = Text.assemble("first document, ", ("supervised", _SUPERVISED), " and ", ("not", _CONTEXT), ":\n")
    for part, supervised in report["example"]:
        text.append(part, style=_SUPERVISED if supervised else _CONTEXT)
    return text
