"""Run by the client's interpreter: load a z-lab export with the package dflash, decode prompts with its own function.

zlab_decode.py EXPORT TARGET PROMPTS.json OUT.json MAX_NEW_TOKENS STOP...
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import dflash.model as client
import torch
import transformers

folder, target_folder, prompts, out, limit, *stops = sys.argv[1:]
client._cuda_time = time.perf_counter  # its clock waits for a GPU
drafter = client.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
target = transformers.AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32).eval()
found = []
for prompt in json.loads(Path(prompts).read_text()):
    ids = torch.tensor([prompt])
    made = client.dflash_generate(drafter, target, ids, int(limit), [int(stop) for stop in stops], return_stats=True)
    tokens = made.output_ids[0, len(prompt) :].tolist()
    found.append({"tokens": tokens, "accepted": made.acceptance_lengths})
Path(out).write_text(json.dumps(found))
