"""From a row in any of the usual forms to a checked conversation. Knows nothing of templates or tokens.

Forms: `messages` (OpenAI), `conversations` (ShareGPT), a bare list of turns, prompt with response (text or turns each).
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any, NamedTuple

Message = dict[str, Any]

_ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "function": "tool", "observation": "tool"}
_KNOWN = ("system", "user", "assistant", "tool")
_QUESTIONS = ("prompt", "instruction", "question", "query")
_ANSWERS = ("response", "completion", "output", "answer")
_CHAT_FIELDS = "messages, conversations, prompt with response"
_SHOWN_FIELDS = 6
_KEPT = ("name", "tool_call_id", "reasoning_content", "reasoning", "thinking", "finish_reason")


class BadRow(Exception):
    """The row cannot be used; `reason` is what it is counted under."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason = reason


class Conversation(NamedTuple):
    """Messages as a chat template takes them, and the tools it may name.

    An assistant message with finish_reason "length" was cut off at a token limit: its end of turn is not its own.
    """

    messages: list[Message]
    tools: list[Any] | None = None


def conversation_of(row: Any, answered: bool = True) -> Conversation | None:
    """Read the conversation of a row; None if the row has none of the known forms. Raises BadRow.

    answered: an assistant turn must be there; False for prompts whose answers are still to be written.
    """
    tools = row.get("tools") if isinstance(row, dict) else None
    turns = _turns(row, answered)
    if turns is None:
        return None
    if not isinstance(turns, list) or not turns:
        raise BadRow("empty")
    messages = [_message(turn) for turn in turns]
    if isinstance(row, dict) and row.get("finish_reason") == "length" and messages[-1]["role"] == "assistant":
        messages[-1]["finish_reason"] = "length"
    _check_order(messages, answered)
    return Conversation(messages, _tools(tools))


def question_of(row: Any) -> str | None:
    """Read the user's first turn as conversation_of reads it; None where no user begins. Raises BadRow.

    Answers and what follows the turn are not looked at.
    """
    asked = {key: value for key, value in row.items() if key not in _ANSWERS} if isinstance(row, dict) else row
    turns = _turns(asked, answered=False)
    for turn in turns if isinstance(turns, list) else ():
        message = _message(turn)
        if message["role"] != "system":
            return str(message["content"]) if message["role"] == "user" else None
    return None


def unknown_fields(row: Any, kind: str) -> str:
    """Say which fields a row has and which are looked for; `kind` as in SourceConfig."""
    expected = {"chat": _CHAT_FIELDS, "text": "text"}.get(kind, f"{_CHAT_FIELDS}, or text")
    if not isinstance(row, dict):
        return f"expected {expected}; got a bare {'text' if isinstance(row, str) else 'list'}"
    asked = [name for name in _QUESTIONS if row.get(name) is not None]
    if asked and kind != "text":
        answers = ", ".join(_ANSWERS)
        return f"{asked[0]} without an answer ({answers}); prepare --regenerate lets the target write it"
    found = ", ".join(list(map(str, row))[:_SHOWN_FIELDS]) + (", ..." if len(row) > _SHOWN_FIELDS else "")
    return f"expected {expected}; got {found or 'an empty row'}"


def _turns(row: Any, answered: bool) -> Any:
    if isinstance(row, list):
        return row
    for key in ("messages", "conversations", "conversation"):
        if row.get(key) is not None:
            return _with_system(row, row[key])
        if key in row:
            raise BadRow("empty")
    for question in _QUESTIONS:
        if row.get(question) is None:
            continue
        for answer in _ANSWERS:
            if row.get(answer) is not None:
                asked = _as_turns("user", _asked(row, question))
                return _with_system(row, asked + _as_turns("assistant", row[answer]))
        if not answered:
            return _with_system(row, _as_turns("user", _asked(row, question)))
    return None


def _asked(row: dict[str, Any], question: str) -> Any:
    """The question; an instruction with the text that it is about (Alpaca's `input`, Dolly's `context`)."""
    instruction = row[question]
    more = (row.get("input") or row.get("context")) if question == "instruction" else None
    if isinstance(instruction, str) and isinstance(more, str) and more:
        return f"{instruction}\n\n{more}"
    return instruction


def _with_system(row: dict[str, Any], turns: Any) -> Any:
    """Put a system prompt that has a field of its own before the turns, unless they begin with one."""
    text = row.get("system") or row.get("system_prompt")
    if not (isinstance(text, str) and text and isinstance(turns, list) and turns):
        return turns
    first = turns[0] if isinstance(turns[0], dict) else {}
    return (
        turns if "system" in (first.get("role"), first.get("from")) else [{"role": "system", "content": text}, *turns]
    )


def _as_turns(role: str, content: Any) -> list[Any]:
    is_turns = isinstance(content, list) and bool(content) and isinstance(content[0], dict) and "role" in content[0]
    return list(content) if is_turns else [{"role": role, "content": content}]


def _message(turn: Any) -> Message:
    if not isinstance(turn, dict):
        raise BadRow("bad_turn")
    role = turn.get("role") or turn.get("from")
    if not isinstance(role, str):
        raise BadRow("bad_turn")
    role = _ROLES.get(role, role)
    if role not in _KNOWN:
        raise BadRow("unknown_role", f"role {role!r}")
    calls = turn.get("tool_calls")
    message: Message = {"role": role}
    if calls:
        decoded = _decoded(calls)
        if not isinstance(decoded, list):
            raise BadRow("bad_tool_call")
        message["tool_calls"] = [_tool_call(call) for call in decoded]
    content = turn.get("content", turn.get("value"))
    if content is None and not calls:
        raise BadRow("null_content" if "content" in turn or "value" in turn else "bad_content")
    message["content"] = "" if content is None else _text(content)
    if role == "assistant" and not message["content"].strip() and not calls:
        raise BadRow("empty_answer")
    return message | {key: turn[key] for key in _KEPT if turn.get(key) is not None}


def _text(content: Any) -> str:
    """Join the text parts of a content given as parts; anything but text is refused."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(str(part.get("text") or "") for part in content)
    raise BadRow("bad_content")


def _tool_call(call: Any) -> dict[str, Any]:
    """Bring a tool call into the form that templates expect: arguments as a mapping, also where they are JSON text."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRow("bad_tool_call")
    arguments = _decoded(function.get("arguments") or {})
    if not isinstance(arguments, dict):
        raise BadRow("bad_tool_call")
    known = {"id": call["id"]} if call.get("id") else {}
    return {**known, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _tools(value: Any) -> list[Any] | None:
    """The tools of a row, a list or JSON text of one; an empty text is none, as tables with one column for all have."""
    tools = _decoded(value) if not isinstance(value, str) or value.strip() else None
    if tools and not isinstance(tools, list):
        raise BadRow("bad_tool_call", f"tools: expected a list, got {type(tools).__name__}")
    return tools or None


def _decoded(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        raise BadRow("bad_tool_call") from None


def _check_order(messages: list[Message], answered: bool) -> None:
    spoken = [message["role"] for message in messages if message["role"] != "system"]
    if answered and "assistant" not in spoken:
        raise BadRow("no_assistant")
    if not spoken:
        raise BadRow("empty")
    if any(first == second and first in ("user", "assistant") for first, second in pairwise(spoken)):
        raise BadRow("role_order")
