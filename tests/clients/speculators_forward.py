"""Run by the client's interpreter: load speculators exports with the package speculators and run its own forward.

speculators_forward.py JOBS.json    a list of {export, target, given, num_anchors, out}
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModelConfig
from speculators.models.dflash import DFlashDraftModel

for job in json.loads(Path(sys.argv[1]).read_text()):
    config = SpeculatorModelConfig.from_pretrained(job["export"])
    config.speculators_config.verifier.name_or_path = job["target"]  # the export says how it was named in training
    config.transformer_layer_config._attn_implementation = "sdpa"
    model = DFlashDraftModel.from_pretrained(job["export"], config=config, dtype=torch.float32).eval()
    batch = {name: value[None] for name, value in load_file(job["given"]).items()}
    with torch.no_grad():
        _, logits, _, mask, _ = model._backbone_forward(**batch, max_anchors=job["num_anchors"])
    d2t = model.d2t if model.d2t is not None else torch.zeros(0, dtype=torch.long)
    save_file({"logits": logits[0].contiguous(), "mask": mask[0].contiguous(), "d2t": d2t}, job["out"])
