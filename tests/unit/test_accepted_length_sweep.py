"""The sweep of accepted lengths: what it gets by walking over texts is what the decoding loop gets."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.accepted_length_measure import Decoding, Reader, Text
from benchmarks.accepted_length_sweep import MASK_TOKEN, Bench, Sizes, Trial, pack_of
from evaluation.prompts import prompt_ids
from tests.helpers.tiny_target import save_target, write_chats

CPU, LAYER_IDS = torch.device("cpu"), (1, 3)
SIZES = Sizes(128, 2, 60, {"drafter": {"num_layers": 1, "block_size": 4, "head_dim": 16}, "anchors": {"num": 16}})


def test_the_decoding_loop_and_the_walk_over_its_texts_agree(tmp_path: Path) -> None:
    target = save_target(tmp_path / "target")
    reader = Reader(str(target), LAYER_IDS, CPU, torch.float32)
    prompts = [prompt_ids(reader.tokenizer, f"say {word}") for word in ("fghij 5", "klmno 10")]
    texts = []
    for prompt, answer in zip(prompts, reader.write(prompts, 24), strict=True):
        taps, final = reader.read([prompt + answer])[0]
        texts.append(Text(prompt + answer, len(prompt), taps, final))
    corpus = write_chats(tmp_path / "chats.jsonl", 6)
    bench = Bench(reader, target, corpus, CPU, torch.float32, LAYER_IDS, SIZES)
    bench.packs = [pack_of(reader, [(text.ids, text.start) for text in texts], SIZES.tokens, CPU)]  # by heart
    decoding = Decoding(target, LAYER_IDS, MASK_TOKEN, {"said": texts}, 2, CPU)
    found = bench.run(Trial("base", decode=True), {"said": texts}, float("inf"), decoding)
    decoded = found["decoded"]["said"]
    assert decoded["prompts"] == decoded["same_text"] == 2
    assert decoded["accept_len"] == decoded["walked"] == found["accept_len"]["said"] > 1
    quiet = bench.run(Trial("base"), {"said": texts}, float("inf"), decoding)
    assert "decoded" not in quiet, "only where the trial wants it"
    assert quiet["accept_len"] == found["accept_len"], "the same seed gives the same drafter"
