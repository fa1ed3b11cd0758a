"""speculators' own model and loss beside ours at the demo's size: the same packs, steps and batch, on a CPU.

    TORCHDYNAMO_DISABLE=1 python -m benchmarks.accepted_length_demo --target FOLDER --out FILE

The demo's conversations (the target's own greedy answers), one layer, block 4, whole vocabulary, float32. Measured on
conversations that neither side trained on, by walking blocks over the target's texts, which gives what the decoding
loop gives (tests/unit/test_heldout.py). Beside both: a bigram table, and each drafter with its context zeroed.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import accepted_length_measure as measuring
from benchmarks import accepted_length_sweep as sweeping
from benchmarks.accepted_length_data import DEMO_CHAT
from evaluation.prompts import prompt_ids

LAYER_IDS = (1, 8, 14, 20, 27)
SETTINGS: dict[str, dict[str, Any]] = {
    "drafter": {"num_layers": 1, "block_size": 4},
    "anchors": {"num": 32},
    "optimizer": {"lr": 2e-3},
}


def main() -> int:
    """Train and measure three drafters; one JSON line each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accepted_length_demo", description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--packs", type=int, default=150)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--heldout", type=int, default=40)
    options = parser.parse_args()
    began = time.monotonic()

    def record(**facts: Any) -> None:
        line = json.dumps({"at_s": round(time.monotonic() - began, 1), **facts})
        print(line, flush=True)
        with options.out.open("a") as file:
            file.write(line + "\n")

    rows = DEMO_CHAT.read_text().splitlines()
    random.Random(7).shuffle(rows)
    reader = measuring.Reader(str(options.target), LAYER_IDS, torch.device("cpu"), torch.float32)
    sets = {"chat": [_text(reader, json.loads(row)["messages"]) for row in rows[: options.heldout]]}
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "train.jsonl"
        corpus.write_text("\n".join(rows[options.heldout :]) + "\n")
        sizes = sweeping.Sizes(256, options.packs, options.steps, SETTINGS)
        bench = sweeping.Bench(reader, options.target, corpus, reader.device, torch.float32, LAYER_IDS, sizes)
    record(packs=len(bench.packs), tokens=bench.num_tokens, heldout=len(sets["chat"]), torch=torch.__version__)
    record(trial="bigram table", accept_len=round(measuring.bigram_rounds(bench.successor, sets["chat"], 4).mean, 4))
    never = float("inf")
    for trial in sweeping.trials(quick=True):
        record(**bench.run(trial, sets, never))
    return 0


def _text(reader: measuring.Reader, messages: list[dict[str, str]]) -> measuring.Text:
    prompt = prompt_ids(reader.tokenizer, messages[0]["content"])
    answer = reader.tokenizer(messages[1]["content"], add_special_tokens=False)["input_ids"]
    taps, final = reader.read([prompt + answer])[0]
    return measuring.Text(prompt + answer, len(prompt), taps, final)


if __name__ == "__main__":
    raise SystemExit(main())
