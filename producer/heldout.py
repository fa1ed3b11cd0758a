"""Held-out documents read by the target once, at the start, for the measurement that the drafter makes while training.

RUN/heldout.safetensors holds their token ids, masks and features as one long pack. It is a file, not a pack in the
ring: it is read once by each life of the drafter and must outlive it.
Shapes: N tokens of all documents, K taps, H hidden.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors.torch import save_file

from configs.run_files import HELDOUT_PACK
from configs.schema import Config
from gpu.device import to_device
from ops.telemetry import Log
from producer.corpus.selection import HELDOUT_FILE
from producer.trunk import Target

MOST_DOCUMENTS = 32


def write_heldout(run_dir: Path, config: Config, target: Target, rank: int, log: Log) -> None:
    """Write the file if the run measures while training and it is not there yet; the first producer does."""
    path, source = run_dir / HELDOUT_PACK, run_dir / "data" / HELDOUT_FILE
    if config.evaluation.every_steps is None or rank != 0 or path.exists() or not source.exists():
        return
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()[:MOST_DOCUMENTS]]
    documents = [(row["prompt_ids"], row["answer_ids"]) for row in rows if len(row.get("answer_ids", [])) > 1]
    if not documents:
        log("heldout", detail="no held-out document with an answer: nothing is measured while training")
        return
    longest = max(len(prompt) + len(answer) for prompt, answer in documents)
    ids = torch.tensor([[*p, *a] + [0] * (longest - len(p) - len(a)) for p, a in documents])
    with target.in_rows():
        taps, _ = target.forward(to_device(ids, target.device))
    features = torch.cat([tap.to(target.device) for tap in taps], dim=-1)
    sizes = [len(prompt) + len(answer) for prompt, answer in documents]
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    masks = [[0] * len(prompt) + [1] * len(answer) for prompt, answer in documents]
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    save_file(
        {
            "input_ids": torch.cat([ids[row, :size] for row, size in enumerate(sizes)]).to(torch.int32),
            "loss_mask": torch.tensor([flag for mask in masks for flag in mask], dtype=torch.uint8),
            "doc_start": torch.repeat_interleave(torch.tensor(starts), torch.tensor(sizes)).to(torch.int32),
            "features": torch.cat([features[row, :size].cpu() for row, size in enumerate(sizes)]).contiguous(),
        },
        temporary,
    )
    temporary.replace(path)
    log("heldout", documents=len(documents), tokens=sum(sizes))
