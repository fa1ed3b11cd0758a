"""Draw what benchmarks/pipeline.py measured: occupancy and both rates over time, a column per shape."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

WINDOW_S = 4.0


def rate(at_s: list[float], tokens: list[float]) -> list[float]:
    """Tokens per second over the last WINDOW_S seconds, at each time."""
    rates = []
    for number, now in enumerate(at_s):
        first = next(index for index, then in enumerate(at_s) if now - then <= WINDOW_S)
        passed_s = now - at_s[first]
        rates.append((tokens[number] - tokens[first]) / passed_s if passed_s else float("nan"))
    return rates


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw every run that has a series; nothing where none has."""
    import_module("matplotlib").use("Agg")
    pyplot = import_module("matplotlib.pyplot")

    shown = {name: run for name, run in results.items() if "series" in run}
    if not shown:
        return
    figure, axes = pyplot.subplots(
        2, len(shown), figsize=(4.5 * len(shown), 5), sharex="col", height_ratios=(2, 1), squeeze=False
    )
    for (name, run), (rates, slots) in zip(shown.items(), axes.T, strict=True):
        series = run["series"]
        for side, style in (("target", "-"), ("drafter", "--")):
            rates.plot(series["at_s"], [each / 1e3 for each in rate(series["at_s"], series[f"{side}_tokens"])], style,
                       label=side)  # fmt: skip
            if f"{side}_alone_tokens_per_s" in run:
                rates.axhline(run[f"{side}_alone_tokens_per_s"] / 1e3, linewidth=0.7, color="grey")
                rates.text(0, run[f"{side}_alone_tokens_per_s"] / 1e3, f"{side} alone", fontsize=7, va="bottom")
        rates.set_title(f"{name}: {run['tokens_per_s'] / 1e3:.1f}K tokens/s")
        rates.set_ylim(bottom=0)
        slots.step(series["at_s"], series["occupancy"], where="post")
        slots.set(xlabel="s", ylim=(0, None))
    axes[0][0].set_ylabel("thousand tokens/s, over 4 s")
    axes[1][0].set_ylabel("occupancy (slots)")
    axes[0][0].legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=90)
