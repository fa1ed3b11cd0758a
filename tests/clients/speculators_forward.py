"""Run by the client's interpreter: load a speculators export with the package speculators and run its own forward.

speculators_forward.py EXPORT TARGET INPUT.safetensors OUT.safetensors NUM_ANCHORS
"""

from __future__ import annotations

import sys

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModelConfig
from speculators.models.dflash import DFlashDraftModel

folder, target, given, out, anchors = sys.argv[1:]
config = SpeculatorModelConfig.from_pretrained(folder)
config.speculators_config.verifier.name_or_path = target  # the export names it as it was trained: a hub id, maybe
config.transformer_layer_config._attn_implementation = "sdpa"
model = DFlashDraftModel.from_pretrained(folder, config=config, dtype=torch.float32).eval()
batch = {name: value[None] for name, value in load_file(given).items()}
with torch.no_grad():
    _, logits, _, mask, _ = model._backbone_forward(**batch, max_anchors=int(anchors))
d2t = model.d2t if model.d2t is not None else torch.zeros(0, dtype=torch.long)
save_file({"logits": logits[0].contiguous(), "mask": mask[0].contiguous(), "d2t": d2t}, out)
