"""Write a chat corpus whose answers come from the target itself (greedy), which is what a drafter should learn.

Resumable: prompts whose answer is already in the output file are skipped, and each batch is appended as it is done.

    python -m producer.corpus.regenerate --model MODEL --prompts prompts.jsonl --out answers.jsonl

Each line of the prompts file has `prompt`; each line of the output has `messages` (user, assistant).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

from producer.target_source import find_target


def main() -> int:
    """Generate the missing answers; returns the exit code."""
    parser = argparse.ArgumentParser(description="Answer prompts with the target, greedily")
    parser.add_argument("--model", required=True, help="folder or hub id of the target")
    parser.add_argument("--prompts", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    prompts = [json.loads(line)["prompt"] for line in arguments.prompts.read_text().splitlines() if line.strip()]
    done = _answered(arguments.out)
    missing = list(dict.fromkeys(prompt for prompt in prompts if prompt not in done))
    print(f"{len(prompts)} prompts, {len(done)} answered before, {len(missing)} to do")
    folder = find_target(arguments.model, None, print).path
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
    dtype = torch.float32 if arguments.device == "cpu" else torch.bfloat16
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(arguments.device).eval()
    with arguments.out.open("a", encoding="utf-8") as out:
        for batch in tqdm(list(_batches(missing, tokenizer, arguments.batch_size)), desc="regenerate"):
            for prompt, answer in zip(
                batch, answer_batch(model, tokenizer, batch, arguments.max_new_tokens), strict=True
            ):
                if answer:
                    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
                    out.write(json.dumps({"messages": turns}, ensure_ascii=False) + "\n")
            out.flush()
    return 0


@torch.inference_mode()
def answer_batch(model: Any, tokenizer: Any, prompts: list[str], max_new_tokens: int) -> list[str]:
    """Answer `prompts` greedily, all in one batch; an answer cut off by the limit is kept as it is."""
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    ).to(model.device)
    output = model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)
    answers = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return [str(answer).strip() for answer in answers]


def _answered(path: Path) -> set[str]:
    if not path.exists():
        return set()
    return {json.loads(line)["messages"][0]["content"] for line in path.read_text().splitlines() if line.strip()}


def _batches(prompts: list[str], tokenizer: Any, size: int) -> Iterator[list[str]]:
    """Group prompts of near-equal length, so that little is padded."""
    ordered = sorted(prompts, key=lambda prompt: len(tokenizer(prompt)["input_ids"]))
    for start in range(0, len(ordered), size):
        yield ordered[start : start + size]


if __name__ == "__main__":
    raise SystemExit(main())
