"""Answers of many prompts at once, greedy or sampled, one CUDA graph replay a token.

transformers' `generate` launches every kernel of every layer from Python: about 100 ms a token on the machine where it
was measured, whatever the batch (docs/log.md). Here the cache is static and the step is captured, so the GPU sets the
pace. On a CPU the same step runs line by line. Prompts stand right-aligned, their padding masked.

Shapes: R rows, P columns of the prompts, L columns of the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
import transformers
from torch import Tensor

CHECK_EVERY = 16  # tokens between two looks whether every row has ended


@torch.inference_mode()
def write_answers(
    model: Any, prompts: list[list[int]], max_new_tokens: int, end: int, temperature: float = 0.0
) -> list[list[int]]:
    """Return the model's answers as ids, each up to and including `end`, at most `max_new_tokens` long.

    temperature 0: greedy. Above: sampled, each token by the largest logit after Gumbel noise.
    """
    device, longest = model.device, max(map(len, prompts))
    ids = torch.tensor([[end] * (longest - len(row)) + row for row in prompts], device=device)
    real_RP = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts], device=device).bool()
    keyword = "cache" if "cache" in signature(model.model.forward).parameters else "past_key_values"
    cache = transformers.StaticCache(config=model.config, max_cache_len=longest + max_new_tokens)
    column_L = torch.arange(longest + max_new_tokens, device=device)
    real_RL = torch.cat([real_RP, real_RP.new_ones(len(prompts), max_new_tokens)], dim=1)
    position_RP = (real_RP.long().cumsum(1) - 1).clamp(min=0)

    def forward(tokens: Tensor, position: Tensor, column: Tensor) -> Tensor:
        visible = real_RL[:, None, :] & (column_L <= column[:, None])
        visible = visible | (column_L == column[:, None])  # a padding row sees itself: no softmax row is empty
        output = model(
            input_ids=tokens,
            position_ids=position,
            attention_mask=visible[:, None],
            use_cache=True,
            logits_to_keep=1,
            **{keyword: cache},
        )
        logits = output.logits[:, -1]
        if temperature > 0:
            logits = logits.float() / temperature - torch.empty_like(logits, dtype=torch.float32).exponential_().log()
        chosen: Tensor = logits.argmax(-1)
        return chosen

    token_R = forward(ids, position_RP, column_L[:longest])
    position_R = position_RP[:, -1] + 1
    column = torch.tensor([longest], device=device)

    def one_step() -> None:
        token_R.copy_(forward(token_R[:, None], position_R[:, None], column))
        position_R.add_(1)
        column.add_(1)

    written = [token_R.clone()]
    ended_R = token_R == end
    step = _captured(one_step, cache, [token_R, position_R, column]) if device.type == "cuda" else one_step
    while len(written) < max_new_tokens:
        if len(written) % CHECK_EVERY == 0 and bool(ended_R.all()):
            break
        step()
        written.append(token_R.clone())
        ended_R |= token_R == end
    answers = torch.stack(written, dim=1).tolist()
    return [answer[: answer.index(end) + 1] if end in answer else answer for answer in answers]


def _captured(one_step: Callable[[], None], cache: Any, moving: list[Tensor]) -> Callable[[], None]:
    """Capture the step; what its trial runs moved is put back (cached columns are written again)."""
    lengths = [layer.cumulative_length for layer in cache.layers]
    kept = [value.clone() for value in (*moving, *lengths)]

    def put_back() -> None:
        for value, before in zip((*moving, *lengths), kept, strict=True):
            value.copy_(before)

    try:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                one_step()
                put_back()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            one_step()
    except RuntimeError as error:
        torch.cuda.synchronize()
        print(f"not captured, going on line by line: {str(error).splitlines()[0]}", flush=True)
        put_back()
        return one_step
    put_back()
    return graph.replay
