"""What would eight GPUs make? A table by calculation from measured rates, for docs/scaling.md; nothing is run.

    python -m benchmarks.eight_gpus benchmarks/results/pipeline_X.json --scaling benchmarks/results/scaling_X.json
                                    [--write docs/scaling.md]

Rates of one target and of one drafter, each alone, are the pipeline benchmark's; what adding up gradients costs two
drafters is the scaling benchmark's. ops/balance.py does the sums, as `plan --calibrate` does. With --write the text
between the two marks of the page is replaced, and tests/unit/test_eight_gpus.py holds the page to it.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from ops.balance import EFFICIENCY, Rates, Split, splits

NUM_GPUS = 8
SPLITS = ((4, 4), (5, 3), (6, 2), (7, 1))
NAMES = {"27b": "27B", "27b_hybrid": "27B hybrid", "8b": "8B"}
BEGIN, END = "<!-- begin: python -m benchmarks.eight_gpus {} -->", "<!-- end -->"
MARKED = re.compile(r"<!-- begin: python -m benchmarks\.eight_gpus (.*?) -->\n.*?<!-- end -->", re.DOTALL)


def rates_of(pipeline: dict[str, Any]) -> dict[str, Rates]:
    """Rates by shape; a shape that was not measured is left out."""
    summary = pipeline["summary"]
    keys = ("target_alone_tokens_per_s", "drafter_alone_tokens_per_s")
    return {
        shape: Rates(*(float(summary[f"{shape}.{key}"]) for key in keys))
        for shape in NAMES
        if all(f"{shape}.{key}" in summary for key in keys)
    }


def rank_costs(scaling: dict[str, Any], shapes: list[str]) -> dict[str, float]:
    """Share of its rate that the reduction costs each of two drafters; the worst for a shape not measured."""
    found = {
        shape: 1 - float(value) / 2
        for shape in shapes
        if (value := scaling["summary"].get(f"{shape}.scaling_during")) is not None
    }
    return {shape: found.get(shape, max(found.values())) for shape in shapes}


def table(pipeline: dict[str, Any], scaling: dict[str, Any]) -> list[str]:
    """Word the table and what it rests on."""
    rates = rates_of(pipeline)
    costs = rank_costs(scaling, list(rates))
    found = {
        shape: {split[:2]: split for split in splits(rate, NUM_GPUS, rank_cost=costs[shape])}
        for shape, rate in rates.items()
    }
    best = {shape: max(by[which].tokens_per_s for which in SPLITS) for shape, by in found.items()}
    head = [f"{NAMES[shape]}, expected tokens/s | waits | anchors for nothing" for shape in rates]
    lines = [f"| targets:drafters | {' | '.join(head)} |", f"|{'---|' * (1 + 3 * len(head))}"]
    for which in SPLITS:
        cells = [_cells(found[shape][which], best[shape]) for shape in rates]
        lines.append(f"| {which[0]}:{which[1]} | {' | '.join(cells)} |")
    facts = [
        f"{NAMES[shape]}: target {rate.target / 1e3:.1f}K tokens/s, drafter {rate.drafter / 1e3:.1f}K, reduction "
        f"{100 * costs[shape]:.1f} % of two drafters' time"
        + (f", {100 * kept:.0f} % of the slower side kept at 1:1" if (kept := _kept(pipeline, shape)) else "")
        for shape, rate in rates.items()
    ]
    return [*lines, "", f"Measured: {'; '.join(facts)}."]


def _cells(split: Split, best: float) -> str:
    rate = f"{split.tokens_per_s / 1e3:.1f}K"
    waits = f"targets {split.blocked_pct:.0f} %" if split.blocked_pct else f"drafters {split.starved_pct:.0f} %"
    more = f"{1 / (1 - split.starved_pct / 100):.1f} x" if split.starved_pct >= 10 else "-"
    return f"{f'**{rate}**' if split.tokens_per_s == best else rate} | {waits} | {more}"


def _kept(pipeline: dict[str, Any], shape: str) -> float:
    return float(pipeline["summary"].get(f"{shape}.efficiency", 0.0))


def section(pipeline: Path, scaling: Path) -> str:
    """Word the part of the page between its marks, marks included."""
    lines = table(json.loads(pipeline.read_text()), json.loads(scaling.read_text()))
    assumed = f"Assumed: {100 * EFFICIENCY:.0f} % of the slower side is kept end to end."
    return "\n".join([BEGIN.format(f"{pipeline} --scaling {scaling}"), *lines[:-1], f"{lines[-1]} {assumed}", END])


def main() -> None:
    """Print the section, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipeline", type=Path)
    parser.add_argument("--scaling", type=Path, required=True)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    text = section(arguments.pipeline, arguments.scaling)
    print(text)
    if arguments.write is not None:
        page = arguments.write.read_text()
        if not MARKED.search(page):
            raise SystemExit(f"{arguments.write}: no part between '{BEGIN.format('...')}' and '{END}' to replace")
        arguments.write.write_text(MARKED.sub(lambda _found: text, page))


if __name__ == "__main__":
    main()
