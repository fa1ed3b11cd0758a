"""A tiny random target with a byte-level tokenizer and a chat template, as an ordinary folder on disk."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<|reserved|>"]


def make_tokenizer() -> Any:
    """Build a byte-level tokenizer: 4 special tokens, then one token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        chat_template=CHAT_TEMPLATE,
    )


def make_model(num_layers: int = 6, hidden: int = 64) -> Any:
    """Build a random Llama of 4 heads, always the same."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=264,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4.0)  # the usual 0.02 would leave every layer's output almost its input
    return model


def save_target(folder: Path, num_layers: int = 6, hidden: int = 64) -> Path:
    """Write the tiny target as a safetensors folder and return it."""
    make_model(num_layers, hidden).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def write_chats(path: Path, num_chats: int) -> Path:
    """Write `num_chats` distinct conversations of different lengths as JSON lines."""
    with path.open("w") as file:
        for number in range(num_chats):
            words = string.ascii_lowercase[number % 20 : number % 20 + 5]
            turns = [
                {"role": "user", "content": f"say {words} {number}"},
                {"role": "assistant", "content": f"{words} " * (1 + number % 7) + f"that was {number}"},
            ]
            file.write(json.dumps({"messages": turns}) + "\n")
    return path
