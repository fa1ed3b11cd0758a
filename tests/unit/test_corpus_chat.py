"""Loss masks and refusals of chat rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from producer.corpus.chat import BadRow, messages_of, tokenize_chat, tokenize_text
from tests.helpers.tiny_target import make_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


def supervised_text(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    document = tokenize_chat(tokenizer, messages, {})
    return str(tokenizer.decode(document.ids[document.loss_mask == 1]))


def chat(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(contents)]


def test_the_assistants_turn_is_supervised_with_its_end_and_nothing_after(tokenizer: Any) -> None:
    assert supervised_text(tokenizer, chat("hi", "hello")) == "hello<|im_end|>"


def test_all_assistant_turns_are_supervised(tokenizer: Any) -> None:
    assert supervised_text(tokenizer, chat("a", "b", "c", "d")) == "b<|im_end|>d<|im_end|>"


def test_a_reply_that_quotes_markup_keeps_its_mask(tokenizer: Any) -> None:
    reply = "write user\n then assistant\n and user again"
    assert supervised_text(tokenizer, chat("how?", reply)) == f"{reply}<|im_end|>"


def test_an_unfinished_question_after_the_reply_is_not_supervised(tokenizer: Any) -> None:
    assert supervised_text(tokenizer, chat("a", "b", "c")) == "b<|im_end|>"


def test_generation_markers_are_used_where_the_template_has_them() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
        "<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}{% endfor %}"
    )
    assert supervised_text(tokenizer, chat("hi", "hello")) == "hello<|im_end|>"


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(BadRow) as caught:
        tokenize_chat(tokenizer, chat("a", "b"), {})
    assert caught.value.reason == "template_not_prefix"


def test_raw_text_is_supervised_whole(tokenizer: Any) -> None:
    document = tokenize_text(tokenizer, "abc")
    assert np.array_equal(document.loss_mask, [1, 1, 1])


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": []}, "empty"),
        ({"messages": [{"role": "user", "content": "a"}]}, "no_assistant"),
        ({"messages": [{"role": "system", "content": "a"}]}, "no_assistant"),
        ({"messages": chat("a", "b")[:1] * 2 + chat("a", "b")[1:]}, "role_order"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]}, "bad_content"),
        ({"messages": [{"role": "wizard", "content": "a"}]}, "unknown_role"),
        ({"conversations": [{"from": "human"}]}, "bad_content"),
    ],
)
def test_bad_rows_are_refused_by_reason(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRow) as caught:
        messages_of(row)
    assert caught.value.reason == reason


def test_all_forms_of_a_conversation_are_read() -> None:
    expected = chat("a", "b")
    assert messages_of({"messages": expected}) == expected
    assert messages_of({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}) == expected
    assert messages_of({"prompt": "a", "response": "b"}) == expected
    parts = [{"type": "text", "text": "b"}]
    assert messages_of({"messages": [expected[0], {"role": "assistant", "content": parts}]}) == expected
    assert messages_of({"text": "a"}) is None
