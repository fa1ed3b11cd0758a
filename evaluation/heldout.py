"""Held-out accepted length of a run, first and last weights, beside a bigram table and the drafter without context.

`python -m evaluation.heldout --run-dir RUN` writes RUN/heldout.json; all four go through the same decoding loop over
the same prompts. Exit codes: 0 done, 2 configuration, 5 resources.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch

from configs.drafter_shape import shape_from_dict
from configs.load import load_config
from configs.run_files import read_plan, write_atomically
from configs.schema import Config
from consumer.checkpoint import Checkpoint, CheckpointError, newest_checkpoint, read_checkpoint
from consumer.drafter import Drafter
from consumer.setup import make_head
from evaluation.decode import Decoded, decode
from evaluation.proposers import BigramProposer, DrafterProposer, Proposer, count_successors
from evaluation.verifier import Verifier
from producer.corpus.documents import Documents
from producer.target import TargetDescription, TargetError


def main() -> int:
    """Measure the run named on the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m evaluation.heldout", description="Held-out accepted length")
    parser.add_argument("--run-dir", type=Path, required=True)
    arguments = parser.parse_args()
    try:
        measure(arguments.run_dir, load_config(arguments.run_dir / "config.yaml"))
    except (TargetError, CheckpointError) as error:
        print(str(error), file=sys.stderr)
        return error.exit_code
    return 0


def measure(run_dir: Path, config: Config) -> dict[str, float]:
    """Decode the held-out prompts with each proposer and write the accepted lengths to heldout.json."""
    plan = read_plan(run_dir)
    device = torch.device(os.environ.get("DFLASH_DEVICE", "cpu"))
    description = TargetDescription.from_dict(plan["target"])
    prompts = heldout_prompts(run_dir)
    before = _initial(run_dir, device)
    last = newest_checkpoint(run_dir / "checkpoints", print)
    if last is None or not prompts:
        raise CheckpointError(f"{run_dir}: nothing to measure: no complete checkpoint, or no held-out prompt")
    head = make_head(plan, torch.float32, device)  # as the drafter's weights are loaded
    trained = load_drafter(last, device)
    successors = count_successors(Documents(run_dir / "data"), description.vocab_size)
    proposers: dict[str, Proposer] = {
        **({} if before is None else {"before": DrafterProposer(before, head)}),
        "after": DrafterProposer(trained, head),
        "zero_context": DrafterProposer(trained, head, zero_context=True),
        "bigram": BigramProposer(successors, trained.shape.block_size),
    }
    verifier = Verifier(description, device)
    results: dict[str, float] = {"heldout_prompts": len(prompts), "max_new_tokens": config.evaluation.max_new_tokens}
    texts: dict[str, list[list[int]]] = {}
    for name, proposer in proposers.items():
        began = time.monotonic()
        decoded = decode_all(verifier, proposer, prompts, config, name)
        results[f"heldout_accept_len_{name}"] = round(decoded.accept_len, 4)
        results[f"heldout_rounds_{name}"] = sum(map(len, decoded.accepted))
        texts[name] = decoded.tokens
        print(
            f"held-out accepted length, {name}: {decoded.accept_len:.3f} ({time.monotonic() - began:.0f} s)", flush=True
        )
    same = sum(text == other for text, other in zip(texts["after"], texts["bigram"], strict=True))
    results["same_text_share"] = round(same / len(prompts), 4)
    write_atomically(run_dir / "heldout.json", json.dumps(results, indent=1))
    return results


def _initial(run_dir: Path, device: torch.device) -> Drafter | None:
    """Return the drafter before its training; None where its checkpoint was given up for a restart's newer state."""
    try:
        return load_drafter(read_checkpoint(run_dir / "checkpoints" / "step-0"), device)
    except CheckpointError as error:
        print(f"held-out accepted length, before: not measured: {error}", flush=True)
        return None


def decode_all(verifier: Verifier, proposer: Proposer, prompts: list[list[int]], config: Config, name: str) -> Decoded:
    """Decode all prompts, `evaluation.batch_size` at a time.

    Says how far it is, in place: the launcher shows a part that ends in a carriage return on a terminal alone.
    """
    size, parts = config.evaluation.batch_size, []
    for start in range(0, len(prompts), size):
        print(f"held-out accepted length, {name}: {start} of {len(prompts)} prompts", end="\r", flush=True)
        parts.append(decode(verifier, proposer, prompts[start : start + size], config.evaluation.max_new_tokens))
    return Decoded([text for part in parts for text in part.tokens], [run for part in parts for run in part.accepted])


def heldout_prompts(run_dir: Path) -> list[list[int]]:
    """Read the prompts of the documents that are never trained on, as token ids, shortest first."""
    lines = (run_dir / "data" / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    return sorted((json.loads(line)["prompt_ids"] for line in lines), key=len)


def load_drafter(checkpoint: Checkpoint, device: torch.device) -> Drafter:
    """Build the drafter of a checkpoint with its weights."""
    drafter = Drafter(shape_from_dict(checkpoint.meta["shape"]))
    drafter.load_state_dict(checkpoint.drafter())
    return drafter.to(device)


if __name__ == "__main__":
    raise SystemExit(main())
