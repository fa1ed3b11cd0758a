"""Turn rows into token ids and loss masks: which tokens of a conversation the assistant wrote.

Assistant spans come from the template's own generation markers where it has them; else from rendering the prefix
before each assistant turn with the generation prompt, and the same with the turn: the text between is what the
assistant wrote, end of turn included. Nothing is searched for in the ids, so a reply that quotes markup is safe.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class BadRow(Exception):
    """The row cannot be used; `reason` is what it is counted under."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason = reason


class Document(NamedTuple):
    """A tokenised document: ids [n] int32 and loss_mask [n] uint8 (1 = supervised)."""

    ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]


def messages_of(row: dict[str, Any]) -> list[dict[str, str]] | None:
    """Read the conversation of a row in any of the usual forms; None if it has none. Raises BadRow."""
    if "messages" in row:
        return _checked(row["messages"], "role", "content")
    if "conversations" in row:
        return _checked(row["conversations"], "from", "value")
    for question in ("prompt", "instruction", "question"):
        for answer in ("response", "completion", "output", "answer"):
            if question in row and answer in row:
                turns = [{"role": "user", "content": row[question]}, {"role": "assistant", "content": row[answer]}]
                return _checked(turns, "role", "content")
    return None


_ROLES = {"human": "user", "gpt": "assistant", "model": "assistant"}


def _checked(turns: Any, role_key: str, content_key: str) -> list[dict[str, str]]:
    if not isinstance(turns, list) or not turns:
        raise BadRow("empty")
    messages: list[dict[str, str]] = []
    for turn in turns:
        if not isinstance(turn, dict) or not isinstance(turn.get(role_key), str):
            raise BadRow("bad_turn")
        role = _ROLES.get(turn[role_key], turn[role_key])
        if role not in ("system", "user", "assistant", "tool"):
            raise BadRow("unknown_role")
        messages.append({"role": role, "content": _text(turn.get(content_key))})
    spoken = [message["role"] for message in messages if message["role"] != "system"]
    if "assistant" not in spoken:
        raise BadRow("no_assistant")
    if any(first == second == "user" for first, second in pairwise(spoken)):
        raise BadRow("role_order")
    return messages


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(str(part.get("text", "")) for part in content)
    raise BadRow("bad_content")


def tokenize_text(tokenizer: Any, text: str) -> Document:
    """Tokenise raw text as the tokenizer does by default; every token but a leading bos is supervised."""
    ids = np.asarray(tokenizer(text)["input_ids"], dtype=np.int32)
    mask = np.ones(len(ids), dtype=np.uint8)
    if len(ids) and ids[0] == tokenizer.bos_token_id:
        mask[0] = 0
    return Document(ids, mask)


def tokenize_chat(tokenizer: Any, messages: list[dict[str, str]], template_kwargs: dict[str, Any]) -> Document:
    """Render and tokenise a conversation with its assistant turns supervised, end of turn included. Raises BadRow.

    The rendered text is encoded without added special tokens, so a bos that the template prints is not doubled.
    """
    if "{% generation" in _template(tokenizer):
        return _from_markers(tokenizer, messages, template_kwargs)
    spans = []
    text = ""
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prefix = _render(tokenizer, messages[:number], template_kwargs, prompt=True)
        text = _render(tokenizer, messages[: number + 1], template_kwargs, prompt=False)
        if not text.startswith(prefix):
            raise BadRow("template_not_prefix", "the template rewrites earlier turns; use generation markers")
        spans.append((len(prefix), len(text)))
    full = _render(tokenizer, messages, template_kwargs, prompt=False)
    if not full.startswith(text):
        raise BadRow("template_not_prefix")
    encoded = tokenizer(full, add_special_tokens=False, return_offsets_mapping=True)
    ids = np.asarray(encoded["input_ids"], dtype=np.int32)
    starts = np.asarray([start for start, _ in encoded["offset_mapping"]])
    mask = np.zeros(len(ids), dtype=np.uint8)
    special = np.isin(ids, tokenizer.all_special_ids)
    for first, last in spans:
        inside = (starts >= first) & (starts < last)
        ends = np.flatnonzero(inside & special)
        if len(ends):  # white space that the template prints after the end of turn is never served
            inside[ends[-1] + 1 :] = False
        mask[inside] = 1
    return Document(ids, mask)


def _from_markers(tokenizer: Any, messages: list[dict[str, str]], template_kwargs: dict[str, Any]) -> Document:
    encoded = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **template_kwargs
    )
    ids = np.asarray(encoded["input_ids"], dtype=np.int32)
    return Document(ids, np.asarray(encoded["assistant_masks"], dtype=np.uint8))


def _render(tokenizer: Any, messages: list[dict[str, str]], template_kwargs: dict[str, Any], prompt: bool) -> str:
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt, **template_kwargs)
    except Exception as error:  # templates raise what they like (jinja2 errors, type errors)
        raise BadRow("template_error", str(error)) from None
    return str(text)


def _template(tokenizer: Any) -> str:
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        raise BadRow("no_chat_template", "the tokenizer has no chat template; use text rows")
    return str(template)
