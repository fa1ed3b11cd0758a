"""Turn the lines of benchmarks/accepted_length.py into one result file and its pictures.

    python -m benchmarks.accepted_length_report RESULTS.jsonl [SWEEP.jsonl] --hardware H200 --commit C --out FILE.json

Of several files, lines of the same stage add up. Beside FILE.json: FILE_b8.png and FILE_b16.png, acceptance by slot and
by tree budget (matplotlib).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from evaluation.report import draw

Lines = list[dict[str, Any]]


def read(paths: list[Path]) -> Lines:
    """The lines of all files, in order."""
    return [json.loads(line) for path in paths for line in path.read_text().splitlines() if line.strip()]


def measured(lines: Lines) -> dict[str, Any]:
    """By drafter: its training, and for each set the accepted length of every method and without context."""
    found: dict[str, Any] = {}
    for line in lines:
        if line["stage"] == "train" and "block_size" in line:
            facts = {key: line[key] for key in ("steps", "packs_trained", "train_seconds", "wall_s", "exit_code")}
            found[f"b{line['block_size']}"] = {"block_size": line["block_size"], "train": facts, "sets": {}}
    for line in lines:
        if line["stage"] == "evaluate" and "set" in line:
            methods = [{"method": name, **method} for name, method in line["methods"].items()]
            facts = {"texts": line["texts"], "zero_context": line["zero_context"], "methods": methods}
            found[f"b{line['block_size']}"]["sets"][line["set"]] = facts
        if line["stage"] == "decode":
            sets = line["found"]["sets"]
            found[f"b{line['drafter']}"]["decoded"] = {Path(name).stem: each for name, each in sets.items()}
    return found


def summary_of(drafters: dict[str, Any], lines: Lines) -> dict[str, float]:
    """The plain numbers: DRAFTER.SET.METHOD, and bigram.BLOCK.SET."""
    summary: dict[str, float] = {}
    for name, drafter in drafters.items():
        for kind, found in drafter["sets"].items():
            summary[f"{name}.{kind}.zero_context"] = found["zero_context"]
            for method in found["methods"]:
                summary[f"{name}.{kind}.{method['method'].replace(' ', '')}"] = method["accept_len"]
    for line in lines:
        if line["stage"] == "bigram":
            for kind, value in line["accept_len"].items():
                summary[f"bigram.b{line['block_size']}.{kind}"] = value
    return summary


def main() -> int:
    """Read, add up, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accepted_length_report", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--hardware", required=True)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--note", default="")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    lines = read(options.files)
    drafters = measured(lines)
    trials = [{key: value for key, value in line.items() if key != "stage"} for line in lines if "trial" in line]
    result = {
        "hardware": options.hardware,
        "commit": options.commit,
        "note": options.note,
        "answers": next((line["answered"] for line in lines if "answered" in line), None),
        "stage_seconds": {line["stage"]: line["seconds"] for line in lines if "seconds" in line},
        "summary": summary_of(drafters, lines),
        "drafters": drafters,
        "sweep": trials,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    for name, drafter in drafters.items():
        if drafter["sets"]:
            shown = {"drafter": f"drafter {name}", "device": options.hardware, **drafter}
            draw(shown, options.out.with_name(f"{options.out.stem}_{name}.png"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
