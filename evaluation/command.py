"""The command `python launch.py eval`, from its arguments to table, JSON and picture."""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console

from configs.load import ConfigError
from evaluation import report
from evaluation.measure import Plan, as_json, measure
from evaluation.subject import load_subject

LOWEST, HIGHEST = 1e-4, 1e4
"""Temperatures between which float32 probabilities are what they say."""


def evaluate(path: Path, options: argparse.Namespace) -> None:
    """Evaluate the drafter at `path`. Raises what loading and measuring raise, and ConfigError."""
    plan = plan_of(options)
    device = device_of(options.device)
    subject = load_subject(path, options.target, device, options.dtype)
    out = writable(options.out or path / "eval")
    found = measure(subject, plan, device, lambda line: print(line, flush=True))
    report.write(
        as_json(subject, plan, found, device),
        out,
        Console(width=None if sys.stdout.isatty() else 120),
    )


def writable(folder: Path) -> Path:
    """Try the folder of results before anything is measured, and leave no trace of that. Raises ConfigError."""
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise ConfigError([f"--out: {folder} cannot be written: {error.strerror}; give another"]) from None
    finally:
        for place in made:  # innermost first; report.write makes them again
            with contextlib.suppress(OSError):
                place.rmdir()


def plan_of(options: argparse.Namespace) -> Plan:
    """Check the arguments. Raises ConfigError with a line for each that is wrong."""
    wrong = []
    if options.max_new_tokens < 2:  # the first comes with the prompt and is no round
        wrong.append(f"--max-new-tokens: expected at least 2, got {options.max_new_tokens}")
    if options.limit is not None and options.limit < 1:
        wrong.append(f"--limit: expected at least 1, got {options.limit}")
    if any(not 1 <= budget <= 4096 for budget in options.tree):
        wrong.append(f"--tree: expected node budgets in 1..4096, got {options.tree}")
    if options.temperature != 0 and not LOWEST <= options.temperature <= HIGHEST:  # nan is neither
        expected = f"0 (greedy), or {LOWEST:g} to {HIGHEST:g}"
        wrong.append(f"--temperature: expected {expected}, got {options.temperature}")
    if not 0 <= options.seed < 2**63:
        wrong.append(f"--seed: expected 0 to 2**63 - 1, got {options.seed}")
    if options.tree and options.temperature > 0:
        wrong.append("--tree: a tree is decoded greedily; leave out --tree or --temperature")
    if wrong:
        raise ConfigError(wrong)
    trees = tuple(sorted(set(options.tree)))
    return Plan(tuple(options.prompts), options.limit, options.max_new_tokens, trees, options.temperature, options.seed)


def device_of(name: str) -> torch.device:
    """The device asked for; auto: the first GPU, else the CPU. Raises ConfigError."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError([f"--device: expected cpu or cuda:N, got {name!r}"]) from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError([f"--device: {name} asked, {torch.cuda.device_count()} GPUs found"])
    return device
