"""Where a step's time goes: kernel time by kind, the share of time with a kernel running, and a picture of both."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

OUR_ATTENTION = ("_forward_kernel", "_backward_q_kernel", "_backward_kv_kernel")
ATTENTION = ("sdpa", "flex", "triton_tem", "flash", "fmha", *OUR_ATTENTION)
PIECES = ("_norm_kernel", "_norm_backward_kernel", "_gated", "_heads", "_sum_kernel", "triton_")
RECURRENT = ("delta_rule", "chunk_", "recompute_w_u", "l2norm", "solve_tril", "causal_conv", "cumsum_kernel")
OVERHEAD = "command buffer full"
"""An event of the profiler's own that is booked on the device."""
KINDS = (
    ("recurrent layers", RECURRENT),
    ("attention", ATTENTION),
    ("products", ("gemm", "nvjet", "cutlass", "sm90_xmma", "splitk", "gemv")),
    ("head and loss passes", ("_statistics_kernel", "_hard_kernel", "_soft_kernel")),
    ("pieces between products", PIECES),
    ("casts to 8 bits", ("_row_kernel", "_transposed_kernel")),
    ("optimizer and norm", ("_adamw_kernel", "adam", "multi_tensor", "normtwo", "normops", "norm")),
    ("copies and fills", ("memcpy", "memset", "copy", "fill")),
)


def breakdown(run: Callable[[], Any], picture: Path | None = None, steps: int = 3) -> dict[str, Any]:
    """Kernel time per step by kind, the share of time with a kernel running, and the longest kernels."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            run()
        torch.cuda.synchronize()
    spans: list[tuple[float, float]] = []
    bars: list[tuple[str, float, float]] = []
    names: dict[str, float] = {}
    kinds = dict.fromkeys([*(kind for kind, _ in KINDS), "rest"], 0.0)
    for event in profiler.events() or []:
        if "CUDA" not in str(event.device_type) or OVERHEAD in event.name.lower():
            continue
        spans.append((event.time_range.start, event.time_range.end))
        lower, took_ms = event.name.lower(), event.time_range.elapsed_us() / 1e3 / steps
        kind = next((kind for kind, marks in KINDS if any(mark in lower for mark in marks)), "rest")
        kinds[kind] += took_ms
        bars.append((kind, *spans[-1]))
        names[event.name[:90]] = names.get(event.name[:90], 0.0) + took_ms
    busy = busy_pct(spans)
    if picture is not None:
        draw(bars, busy, picture)
    longest = sorted(names.items(), key=lambda item: -item[1])[:40]
    return {
        "kinds_ms": {kind: round(took, 3) for kind, took in kinds.items()},
        "busy_pct": busy,
        "kernels": len(spans) / steps,
        "longest_ms": {name: round(took, 3) for name, took in longest},
    }


def draw(bars: list[tuple[str, float, float]], busy: float, path: Path) -> None:
    """Draw which kind of kernel ran when, one line a kind, and how much of each 2 ms something ran."""
    import_module("matplotlib").use("Agg")
    pyplot = import_module("matplotlib.pyplot")

    begin = min(start for _, start, _ in bars)
    kinds = [*(kind for kind, _ in KINDS), "rest"]
    figure, (lanes, share) = pyplot.subplots(2, 1, figsize=(14, 5), sharex=True, height_ratios=(3, 1))
    for lane, kind in enumerate(kinds):
        mine = [((start - begin) / 1e3, (end - start) / 1e3) for name, start, end in bars if name == kind]
        lanes.broken_barh(mine, (lane - 0.4, 0.8), facecolors=f"C{lane}")
    lanes.set_yticks(range(len(kinds)), kinds)
    lanes.set_title(f"three steps: something runs {busy:.1f} % of the time")
    last = max(end for _, _, end in bars) - begin
    buckets = [0.0] * (int(last / 2000) + 1)
    for _, start, end in bars:  # kernels that overlap are counted twice, so a bucket is cut at 100 %
        for bucket in range(int((start - begin) / 2000), int((end - begin) / 2000) + 1):
            low, high = max(start - begin, bucket * 2000), min(end - begin, (bucket + 1) * 2000)
            buckets[bucket] += max(0.0, high - low) / 20
    share.step([2 * i for i in range(len(buckets))], [min(100.0, value) for value in buckets], where="post")
    share.set(xlabel="ms", ylabel="busy %", ylim=(0, 105))
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def busy_pct(spans: list[tuple[float, float]]) -> float:
    """Share of the time between the first start and the last end in which something runs."""
    spans.sort()
    busy, until = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return 100 * busy / (until - spans[0][0])
