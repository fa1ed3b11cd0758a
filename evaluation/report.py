"""The result of an evaluation for people: a table in the terminal and a picture of acceptance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


def table(result: dict[str, Any]) -> Table:
    """Draw the table of an evaluation (measure.as_json)."""
    title = f"{result['drafter']} for {Path(result['target']).name}, B {result['block_size']}, {result['device']}"
    if result["temperature"]:
        title += f", temperature {result['temperature']:g}"
    drawn = Table(title=Text(title, "table.title"), title_justify="left")
    for column in ("prompts", "method", "accepted length", "tokens/pass", "tokens/s", "speedup", "same text"):
        drawn.add_column(column, justify="left" if column in ("prompts", "method") else "right", no_wrap=True)
    for name, found in result["sets"].items():
        for row, method in enumerate(found["methods"]):
            same = method["same_text_share"]
            drawn.add_row(
                f"{Path(name).stem} ({found['prompts']})" if row == 0 else "",
                method["method"],
                f"{method['accept_len']:.3f}",
                f"{method['tokens_per_target_pass']:.3f}",
                f"{method['tokens_per_s']:.1f}",
                f"{method['speedup']:.2f}x",
                "" if same is None else f"{100 * same:.0f} %",
            )
        drawn.add_section()
    return drawn


def write(result: dict[str, Any], folder: Path, console: Console) -> None:
    """Print the table; write eval.json and, where matplotlib is installed, acceptance.png into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    console.print(table(result), markup=False)  # names and paths may hold [brackets]
    (folder / "eval.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    console.print(f"{folder / 'eval.json'}", soft_wrap=True, markup=False)
    try:
        draw(result, folder / "acceptance.png")
    except ImportError:
        missing = 'no picture: matplotlib is not installed (pip install -e ".[extras]")'
        console.print(missing, soft_wrap=True, markup=False)
    else:
        console.print(f"{folder / 'acceptance.png'}", soft_wrap=True, markup=False)


def draw(result: dict[str, Any], file: Path) -> None:
    """Draw acceptance by position (one block per round) and accepted length by tree budget. Raises ImportError."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    by_position, by_budget = figure.subplots(1, 2)
    for name, found in result["sets"].items():
        methods = {method["method"]: method for method in found["methods"]}
        shares = methods["dflash"]["accepted_by_position"]
        by_position.plot(range(1, len(shares) + 1), shares, marker="o", label=name)
        budgets = {int(key.split()[1]): method for key, method in methods.items() if key.startswith("ddtree ")}
        places = [result["block_size"] - 1, *budgets]
        lengths = [methods["dflash"]["accept_len"], *(method["accept_len"] for method in budgets.values())]
        by_budget.plot(places, lengths, marker="o", label=name)
    by_position.set(xlabel="slot of the block", ylabel="share of rounds that accept it", ylim=(0, 1))
    by_budget.set(xlabel="drafted tokens per round (first: the plain block)", ylabel="accepted length")
    by_budget.set_xscale("log", base=2)
    for axes in (by_position, by_budget):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(f"{result['drafter']}, block size {result['block_size']}, {result['device']}")
    figure.savefig(file, dpi=120)
