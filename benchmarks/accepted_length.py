"""How many tokens a drafter of SmolLM2-135M-Instruct gets accepted, trained in minutes on one GPU, and what moved it.

    python -m benchmarks.accepted_length all --target FOLDER --work WORK --out OUT

prompts    thousands of prompts from installed packages (accepted_length_data.py)
texts      the target's greedy answers to the prompts to measure with
data       the target answers the others, to train on
sweep      one setting changed at a time, and speculators' own model and loss, all on the same packs for the same steps;
           of ours and theirs from the same start some prompts are decoded for real too (--decode)
train      the real thing through launch.py, both processes on one GPU: block size 8 and 16 at the same time, on a GPU
           each where --more-devices names another
evaluate   export, accepted length on HumanEval, GSM-symbolic and chat, plain block and DDTree, beside a bigram table
           and the drafter without context; then `launch.py eval` decodes some prompts of each set for real

Every stage appends to OUT/results.jsonl as it goes and can be run alone. --quick: tiny, for a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import accepted_length_data as data
from benchmarks import accepted_length_measure as measuring
from benchmarks import accepted_length_sweep as sweeping
from evaluation.prompts import prompt_ids
from evaluation.subject import load_subject

BUDGETS = (16, 32, 64, 128, 256, 512)
LAYER_IDS = (1, 8, 14, 20, 27)


class Run:
    """The folders, sizes and deadlines of one call."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.target, self.work, self.out = options.target, options.work, options.out
        self.words = ["--target", str(self.target), "--work", str(self.work), "--out", str(self.out)]
        self.words += ["--device", options.device, "--sweep-seconds", str(options.sweep_seconds)]
        self.words += ["--quick"] if options.quick else []
        self.words += ["--decode", str(options.decode), "--pack-tokens", str(options.pack_tokens)]
        self.words += ["--packs", str(options.packs), "--steps", str(options.steps), "--anchors", str(options.anchors)]
        self.words += ["--trials", *options.trials] if options.trials else []
        self.decode, self.num_texts, self.wanted_trials = options.decode, options.texts, options.trials
        self.sizes = sweeping.TINY if options.quick else sweeping.Sizes(
            options.pack_tokens, options.packs, options.steps, {"anchors": {"num": options.anchors}}
        )  # fmt: skip
        self.quick, self.device = options.quick, torch.device(options.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # kernels go to the current device
        self.devices = [options.device, *options.more_devices]
        self.seconds, self.sweep_seconds = options.train_seconds, options.sweep_seconds
        self.answer_seconds: float = options.answer_seconds
        self.settings: list[str] = options.set
        self.blocks: list[int] = options.blocks
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.began = time.monotonic()
        for folder in (self.work, self.out):
            folder.mkdir(parents=True, exist_ok=True)

    def record(self, stage: str, **facts: Any) -> None:
        """Append a line of results and show it."""
        line = {"stage": stage, "at_s": round(time.monotonic() - self.began, 1), **facts}
        with (self.out / "results.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line)[:1500], flush=True)

    def read_texts(self) -> tuple[measuring.Reader, dict[str, list[measuring.Text]]]:
        """The texts to measure with, read by the target."""
        reader = measuring.Reader(str(self.target), LAYER_IDS, self.device, self.dtype)
        sets = {}
        for name, rows in json.loads((self.work / "eval_texts.json").read_text()).items():
            texts = []
            for start in range(0, len(rows), 32):
                part = rows[start : start + 32]
                states = reader.read([row["prompt"] + row["answer"] for row in part])
                for row, (taps, final) in zip(part, states, strict=True):
                    texts.append(measuring.Text(row["prompt"] + row["answer"], len(row["prompt"]), taps, final))
            sets[name] = texts
        return reader, sets


def make_prompts(run: Run) -> None:
    """Prompts to train on and to measure with, from the packages installed here; the two files may be carried over."""
    sizes = (6, 4, 4) if run.quick else (9000, 3500, 1100)
    kinds = data.training_prompts(*sizes)
    (run.work / "prompts.json").write_text(json.dumps(kinds))
    (run.work / "eval_prompts.json").write_text(json.dumps(data.evaluation_prompts(3 if run.quick else None)))
    run.record("prompts", prompts={kind: len(rows) for kind, rows in kinds.items()})


def make_texts(run: Run) -> None:
    """The texts to measure with: the target's greedy answers."""
    reader = measuring.Reader(str(run.target), LAYER_IDS, run.device, run.dtype)
    texts = {}
    for name, rows in json.loads((run.work / "eval_prompts.json").read_text()).items():
        ids = [prompt_ids(reader.tokenizer, prompt) for prompt in rows[: run.num_texts]]
        answers = reader.write(ids, 16 if run.quick else 128)
        texts[name] = [{"prompt": p, "answer": a} for p, a in zip(ids, answers, strict=True) if len(a) > 1]
    (run.work / "eval_texts.json").write_text(json.dumps(texts))
    run.record("texts", eval_tokens={name: sum(len(row["answer"]) for row in rows) for name, rows in texts.items()})


def make_data(run: Run) -> None:
    """The target's answers to train on."""
    kinds = json.loads((run.work / "prompts.json").read_text())
    prompts = [prompt for kind in kinds.values() for prompt in kind]
    tokens, batch = (24, 8) if run.quick else (160, 800)
    corpus = run.work / "train.jsonl"
    answered = data.answer_all(run.target, prompts, corpus, run.devices, batch, tokens, run.answer_seconds)
    run.record("data", answered=answered)


def sweep(run: Run) -> None:
    """One setting at a time; in a process without torch.compile, which speculators' model needs on torch 2.11."""
    if os.environ.get("TORCHDYNAMO_DISABLE") != "1":
        command = [sys.executable, "-m", "benchmarks.accepted_length", "sweep", *run.words]
        subprocess.run(command, env=os.environ | {"TORCHDYNAMO_DISABLE": "1"}, check=False)
        return
    reader, sets = run.read_texts()
    bench = sweeping.Bench(reader, run.target, run.work / "train.jsonl", run.device, run.dtype, LAYER_IDS, run.sizes)
    del reader
    decoding = None
    if run.decode:
        mask = sweeping.MASK_TOKEN
        decoding = measuring.Decoding(run.target, LAYER_IDS, mask, sets, run.decode, run.device)
    run.record("sweep", packs=len(bench.packs), tokens=bench.num_tokens, settings=run.sizes._asdict())
    for size in (8, 16):
        lines = {name: measuring.bigram_rounds(bench.successor, texts, size).mean for name, texts in sets.items()}
        run.record("bigram", block_size=size, accept_len={name: round(value, 4) for name, value in lines.items()})
    deadline = time.monotonic() + run.sweep_seconds
    for trial in sweeping.trials(run.quick):
        if run.wanted_trials and not any(word in trial.name for word in run.wanted_trials):
            continue
        if time.monotonic() > deadline:
            run.record("sweep", left_out=trial.name)
            continue
        try:
            run.record("sweep", **bench.run(trial, sets, deadline, decoding))
        except Exception as error:  # one trial that fails is no reason to lose the others
            run.record("sweep", trial=trial.name, failed=repr(error)[:300])


def train(run: Run) -> None:
    """The real runs, through launch.py, at the same time."""
    started = []
    for number, size in enumerate(run.blocks):
        device = run.devices[number % len(run.devices)]
        command = [sys.executable, "launch.py", "configs/smollm2.yaml", "--name", f"b{size}"]
        settings = [f"run.folder={run.work / 'runs'}", f"target.model={run.target}", f"drafter.block_size={size}"]
        settings += [
            f"data.sources=[{{path: {run.work / 'train.jsonl'}, kind: chat}}]",
            f"training.max_seconds={run.seconds}",
            f"target.devices=['{device}']",
            f"training.devices=['{device}']",
        ]
        if run.quick:
            settings += ["pack.tokens=256", "anchors.num=8"]
            settings += ["training.max_steps=4", "training.precision=float32", "drafter.num_layers=1"]
        command += [word for setting in settings + run.settings for word in ("--set", setting)]
        log = (run.out / f"launch_b{size}.log").open("w")
        started.append((size, subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT), time.monotonic()))
    for size, process, began in started:
        code = process.wait()
        final = run.work / "runs" / f"b{size}" / "final.json"
        facts = json.loads(final.read_text()) if final.exists() else {}
        run.record("train", block_size=size, exit_code=code, wall_s=round(time.monotonic() - began, 1), **facts)


def evaluate(run: Run) -> None:
    """Export, measure by walking over texts, and decode some prompts for real."""
    writing = {size: _export(run, size) for size in run.blocks}
    _, sets = run.read_texts()
    exports = {}
    for size, (process, folder) in writing.items():
        said = process.communicate()[0].decode()
        run.record("export", block_size=size, exit_code=process.returncode, said=said[-600:])
        if process.returncode == 0:
            exports[size] = folder
    decoding = [_decode(run, folder, size) for size, folder in exports.items()]
    for size, folder in exports.items():
        subject = load_subject(folder, str(run.target), run.device)
        budgets, workers = ((4, 8), 1) if run.quick else (BUDGETS, max(1, (os.cpu_count() or 2) - 6))
        found = measuring.measure(subject.drafter, subject.head, sets, budgets, workers)
        blind = measuring.measure(subject.drafter, subject.head, sets, zero_context=True)
        for name, methods in found.items():
            zero = blind[name]["dflash"]["accept_len"]
            run.record("evaluate", block_size=size, set=name, texts=len(sets[name]), zero_context=zero, methods=methods)
    for process in decoding:
        process.wait()
    for size in exports:
        decoded = run.out / f"eval_b{size}" / "eval.json"
        if decoded.exists():
            run.record("decode", drafter=size, found=json.loads(decoded.read_text()))


def _export(run: Run, size: int) -> tuple[subprocess.Popen[bytes], Path]:
    folder = run.work / f"export_b{size}"
    command = [sys.executable, "launch.py", "export", str(run.work / "runs" / f"b{size}"), "--out", str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT), folder


def _decode(run: Run, folder: Path, size: int) -> subprocess.Popen[bytes]:
    """Decode code prompts for real; the other sets are decoded with the same command where there is more time."""
    prompts = run.work / "humaneval.jsonl"
    rows = json.loads((run.work / "eval_prompts.json").read_text())["humaneval"]
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in rows))
    command = [sys.executable, "launch.py", "eval", str(folder), "--target", str(run.target)]
    command += ["--prompts", str(prompts), "--limit", "1" if run.quick else "12", "--tree", "16", "64"]
    command += ["--max-new-tokens", "8" if run.quick else "128", "--device", str(run.device)]
    log = (run.out / f"decode_b{size}.log").open("w")
    return subprocess.Popen([*command, "--out", str(run.out / f"eval_b{size}")], stdout=log, stderr=subprocess.STDOUT)


STAGES: dict[str, Callable[[Run], None]] = {
    "prompts": make_prompts,
    "texts": make_texts,
    "data": make_data,
    "sweep": sweep,
    "train": train,
    "evaluate": evaluate,
}


def main() -> int:
    """Run the stages asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accepted_length", description=__doc__)
    parser.add_argument("stages", nargs="+", choices=[*STAGES, "all"])
    parser.add_argument("--target", type=Path, required=True, help="folder of the target")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--more-devices", nargs="*", default=[], help="answer too; the second run has the next")
    parser.add_argument("--train-seconds", type=float, default=80.0)
    parser.add_argument("--sweep-seconds", type=float, default=60.0)
    usual = sweeping.Sizes()
    parser.add_argument("--trials", nargs="*", default=[], help="of the sweep: those whose name holds one of these")
    parser.add_argument("--decode", type=int, default=6, help="prompts of each set that the sweep decodes for real")
    parser.add_argument("--steps", type=int, default=usual.steps, help="of a trial")
    parser.add_argument("--packs", type=int, default=usual.packs)
    parser.add_argument("--pack-tokens", type=int, default=usual.tokens)
    parser.add_argument("--anchors", type=int, default=sweeping.BASE["anchors"]["num"])
    parser.add_argument("--texts", type=int, help="answers of each set to measure with; all if left out")
    parser.add_argument("--answer-seconds", type=float, default=120.0, help="answers after that are left out")
    parser.add_argument("--blocks", nargs="+", type=int, default=[8, 16])
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value", help="for the real runs")
    parser.add_argument("--quick", action="store_true")
    run = Run(parser.parse_args())
    stages = list(STAGES) if "all" in sys.argv else parser.parse_args().stages
    for stage in stages:
        began = time.monotonic()
        STAGES[stage](run)
        run.record(stage, seconds=round(time.monotonic() - began, 1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
