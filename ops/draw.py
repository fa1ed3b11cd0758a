"""Draw a Viewer's picture as styled lines; knows only plain values, so a test can draw what it likes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.text import Text

from ops.paths import DRAFTER

BARS = "▁▂▃▄▅▆▇█"
_SLOT_MARKS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_STATE_STYLES = {"running": "green", "starting": "yellow", "restarting": "yellow", "paused": "yellow",
                 "suspended": "red", "stopping": "yellow", "gone": "red", "silent": "red"}  # fmt: skip
_VERDICT_STYLES = {"balanced": "green", "target-bound": "yellow", "drafter-bound": "cyan", "unknown": "dim"}


def frame(picture: dict[str, Any], occupancies: Callable[[str], Sequence[int]], width: int, footer: str = "") -> Text:
    """Draw the whole picture, each line at most `width` columns."""
    lines = [*_head(picture, width)]
    for ring in picture["rings"]:
        lines += _ring(ring, occupancies(ring["name"]), width)
    lines += [line for process in picture["processes"] for line in _process(process, width)]
    lines += [_gpu(gpu, picture["processes"]) for gpu in picture["gpus"]]
    lines += [line for host in picture.get("hosts", []) for line in _host(host, width)]
    if footer:
        lines.append(Text(footer, style="dim"))
    for line in lines:
        line.no_wrap = True
        line.truncate(width, overflow="ellipsis")
    return Text("\n").join(lines)


def sparkline(values: Sequence[int], top: int, width: int) -> str:
    """Draw values 0..top as bars, the newest at the right; each column is the mean of its share of the values."""
    if not values or top < 1:
        return ""
    values = values[-width * max(1, len(values) // width) :] if len(values) > width else values
    size = max(1, len(values) // width)
    means = [sum(values[at : at + size]) / size for at in range(0, len(values) - size + 1, size)]
    return "".join(BARS[min(len(BARS) - 1, round(value / top * (len(BARS) - 1)))] for value in means[-width:])


def duration(seconds: float | None) -> str:
    """Word a duration: 42 s, 3:12, 1:02:03."""
    if seconds is None:
        return "unknown"
    minutes, rest = divmod(int(seconds), 60)
    if minutes == 0:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _head(picture: dict[str, Any], width: int) -> list[Text]:
    verdict = picture["verdict"]
    head = Text.assemble(
        ("run ", "dim"), (picture["run"], "bold"), "  ", _state(picture["state"]),
        *(_times(picture) if picture["launcher_pid"] else ()),
    )  # fmt: skip
    judged = Text.assemble(
        (verdict["kind"], f"bold {_VERDICT_STYLES.get(verdict['kind'], '')}"), f": {verdict['reason']}"
    )
    lines = [head, judged]
    if verdict["advice"]:
        lines += [Text(f"  {part}") for part in _wrapped(verdict["advice"], width - 2)]
    return [*lines, Text("")]


def _times(picture: dict[str, Any]) -> tuple[tuple[str, str] | str, ...]:
    """How long a living run has run and will."""
    return (
        ("  up ", "dim"), duration(picture["uptime_s"]), ("  ETA ", "dim"), duration(picture["eta_s"]),
        ("  launcher pid ", "dim"), str(picture["launcher_pid"]),
    )  # fmt: skip


def _flow(ring: dict[str, Any]) -> str:
    if ring["published_per_s"] is None:
        return "rates not known yet"
    return (
        f"{ring['published_per_s']:.2f} in, {ring['released_per_s']:.2f} out per s, "
        f"{ring['bytes_per_s'] / 1e9:.3f} GB/s"
    )


def _wrapped(text: str, width: int) -> list[str]:
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = ""
        line = f"{line} {word}" if line else word
    return [*lines, line]


def _ring(ring: dict[str, Any], history: Sequence[int], width: int) -> list[Text]:
    bars = sparkline(history, ring["num_slots"], max(10, min(60, width - 62)))
    head = Text.assemble(
        (f"ring {ring['ring_index']}  ", "bold"), f"{ring['occupancy']}/{ring['num_slots']}  ", (bars, "cyan"),
        f"  {_flow(ring)}",
        ("  end of data" if ring["end_of_data"] else "", "dim"),
    )  # fmt: skip
    lines = [head, *_slot_map(ring["slots"], width)]
    signs: list[str] = []
    for end in ring["attached"]:
        age = end["heartbeat_age_s"]
        if end["state"] != "running":
            sign = "" if age is None else f", last sign {age:.1f} s ago"
            lines.append(
                Text.assemble(f"  {end['role']}: ", _state(end["state"]), f", pid {end['pid'] or 'none'}{sign}")
            )
        elif age is not None:
            signs.append(f"{end['role']} {age:.1f} s" if signs else f"{end['role']} last sign {age:.1f} s ago")
    if signs:
        lines += [Text(f"  {part}", style="dim") for part in _wrapped(", ".join(signs), width - 2)]
    return [*lines, Text("")]


def _slot_map(slots: Sequence[dict[str, Any]], width: int) -> list[Text]:
    """Draw one character per slot: `.` FREE, `R` READY, a digit or letter for the consumer that holds it."""
    per_line = max(8, width - 36)
    lines = []
    for at in range(0, len(slots), per_line):
        line = Text("  ")
        for slot in slots[at : at + per_line]:
            if slot["state"] == "HELD":
                line.append(_SLOT_MARKS[slot["consumer"] % len(_SLOT_MARKS)], "bold magenta")
            else:
                line.append("R" if slot["state"] == "READY" else ".", "green" if slot["state"] == "READY" else "dim")
        lines.append(line)
    if lines:
        lines[0].append("   . FREE  R READY  0-9 HELD by", "dim")
    return lines


def _process(process: dict[str, Any], width: int) -> list[Text]:
    line = Text.assemble(
        (f"{process['name']:9}", "bold"), " ", _state(process["state"]), f"  pid {process['pid'] or 'none'}"
    )
    parts = [_number(process, "packs", "{:,.0f} packs")]
    if process["role"] == DRAFTER:
        parts = [_number(process, "step", "step {:,.0f}"), _number(process, "loss", "loss {:.3f}"),
                 _number(process, "accept_len", "accepted {:.2f}"), _number(process, "lr", "lr {:.2e}"),
                 _number(process, "grad_norm", "grad {:.2g}"),
                 _number(process, "anchors", "{:.0f} anchors")]  # fmt: skip
    parts += [
        _number(process, "tokens_per_s", "{:,.0f} tokens/s"),
        _number(process, "starved_pct", "starved {:.0f} %"),
        _number(process, "blocked_pct", "blocked {:.0f} %"),
        _number(process, "step_s", "{:.3f} s a step" if process["role"] == DRAFTER else "{:.3f} s a pack"),
        f"{process['restarts']} restarts" if process.get("restarts") else "",
    ]
    lines = [line]
    for part in filter(None, parts):
        if len(lines[-1]) + 2 + len(part) > width:
            lines.append(Text(" " * 8))
        lines[-1].append(f"  {part}")
    per_slot = process.get("accuracy")
    if process["role"] != DRAFTER or not isinstance(per_slot, list):
        return lines
    shares = [value for value in per_slot if isinstance(value, (int, float))]
    text = " ".join(f"{value:.2f}" for value in shares[:15])
    bars = "".join(BARS[min(len(BARS) - 1, round(value * (len(BARS) - 1)))] for value in shares)
    return [*lines, Text.assemble(("          right per slot  ", "dim"), (bars, "cyan"), f"  {text}")]


def _host(host: dict[str, Any], width: int) -> list[Text]:
    """Another host: one line, then its rings in a line each and its processes as our own."""
    head = Text.assemble(
        Text(f"\nnode {host['node']}  ", "bold"), host["host"], "  ",
        _state("silent" if host["lost"] else host.get("state", "")),
    )  # fmt: skip
    lines = [head]
    for ring in host.get("rings", []):
        counts = f"{ring['published']} published, {ring['released']} released"
        lines.append(Text(f"ring {ring['ring_index']}  {ring['occupancy']}/{ring['num_slots']}  {counts}"))
    return lines + [line for process in host.get("processes", []) for line in _process(process, width)]


def _number(values: dict[str, Any], name: str, shape: str) -> str:
    value = values.get(name)
    return shape.format(value) if isinstance(value, (int, float)) else ""


def _state(state: str) -> tuple[str, str]:
    return (state, _STATE_STYLES.get(state, ""))


def _gpu(gpu: dict[str, Any], processes: Sequence[dict[str, Any]]) -> Text:
    """Use, memory, and which processes of the run are there."""
    used, total = gpu["memory_bytes"] / 2**30, gpu["memory_total_bytes"] / 2**30
    use = "unknown" if gpu["use_pct"] is None else f"{gpu['use_pct']} %"
    here = [each["name"] for each in processes if str(gpu["index"]) in _gpu_ids(each.get("device"))]
    return Text(f"GPU {gpu['index']}     use {use}  memory {used:.1f} of {total:.1f} GiB  {' '.join(here)}".rstrip())


def _gpu_ids(device: Any) -> list[str]:
    """Ids in `GPU 0` or `GPU 0,1`."""
    return str(device).removeprefix("GPU ").split(",") if str(device).startswith("GPU ") else []
