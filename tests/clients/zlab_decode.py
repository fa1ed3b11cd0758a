"""Run by the client's interpreter: load z-lab exports with the package dflash, decode prompts with its own function.

zlab_decode.py JOBS.json    a list of {export, target, prompts, max_new_tokens, stops, out}
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import dflash.model as client
import torch
import transformers

client._cuda_time = time.perf_counter  # its clock waits for a GPU
for job in json.loads(Path(sys.argv[1]).read_text()):
    drafter = client.DFlashDraftModel.from_pretrained(job["export"], dtype=torch.float32).eval()
    target = transformers.AutoModelForCausalLM.from_pretrained(job["target"], dtype=torch.float32).eval()
    found = []
    for prompt in job["prompts"]:
        made = client.dflash_generate(
            drafter, target, torch.tensor([prompt]), job["max_new_tokens"], job["stops"], return_stats=True
        )
        tokens = made.output_ids[0, len(prompt) :].tolist()
        found.append({"tokens": tokens, "accepted": made.acceptance_lengths})
    Path(job["out"]).write_text(json.dumps(found))
