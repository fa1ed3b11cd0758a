"""Loss masks and refusals of chat rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from producer.corpus.chat import (
    ANSWERS_CUT,
    EMPTY_REASONING,
    END_OF_TURN_OUTSIDE,
    TURNS_NOT_SUPERVISED,
    ChatTokenizer,
    tokenize_text,
)
from producer.corpus.conversation import BadRow, Conversation, conversation_of
from tests.helpers.tiny_target import make_tokenizer

Messages = list[dict[str, Any]]
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{%- generation %}{{ m['content'] }}INSIDE{% endgeneration %}OUTSIDE\n"
    "{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% if m['reasoning_content'] is defined %}"
    "<think>{{ m['reasoning_content'] }}</think>{% elif loop.last %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if off %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


@pytest.fixture
def tokenizer() -> Any:
    return make_tokenizer()


def supervised(chats: ChatTokenizer, tokenizer: Any, messages: Messages, tools: Any = None) -> str:
    document = chats.tokenize(Conversation(messages, tools))
    return str(tokenizer.decode(document.ids[document.loss_mask == 1]))


def supervised_text(tokenizer: Any, messages: Messages) -> str:
    return supervised(ChatTokenizer(tokenizer, {}), tokenizer, messages)


def chat(*contents: str) -> Messages:
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(contents)]


def messages_of(row: Any) -> Messages | None:
    conversation = conversation_of(row)
    return None if conversation is None else conversation.messages


def test_the_assistants_turn_is_supervised_with_its_end_and_nothing_after(tokenizer: Any) -> None:
    assert supervised_text(tokenizer, chat("hi", "hello")) == "hello<|im_end|>"


def test_all_assistant_turns_are_supervised(tokenizer: Any) -> None:
    assert supervised_text(tokenizer, chat("a", "b", "c", "d")) == "b<|im_end|>d<|im_end|>"


def test_a_reply_that_quotes_markup_keeps_its_mask(tokenizer: Any) -> None:
    """Case D-04: spans come from the render, so neither markup in the reply nor another eos id cuts them."""
    tokenizer.eos_token = "<|reserved|>"  # not the token that ends a turn
    reply = "write user\n then assistant\n and <|im_start|>user again"
    assert supervised_text(tokenizer, chat("how?", reply, "more", "b")) == f"{reply}<|im_end|>b<|im_end|>"


def test_an_unfinished_question_after_the_reply_is_left_out(tokenizer: Any) -> None:
    document = ChatTokenizer(tokenizer, {}).tokenize(Conversation(chat("a", "b", "c")))
    assert tokenizer.decode(document.ids).endswith("b<|im_end|>\n")
    assert supervised_text(tokenizer, chat("a", "b", "c")) == "b<|im_end|>"


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("wanted", [True, False])
def test_markers_are_used_and_an_end_of_turn_that_they_leave_out_is_counted(inside: bool, wanted: bool) -> None:
    """Case D-02: markers closed before the end of turn are noticed, and the setting decides."""
    tokenizer = make_tokenizer()
    end = {"INSIDE": "<|im_end|>", "OUTSIDE": ""} if inside else {"INSIDE": "", "OUTSIDE": "<|im_end|>"}
    tokenizer.chat_template = MARKED.replace("INSIDE", end["INSIDE"]).replace("OUTSIDE", end["OUTSIDE"])
    chats = ChatTokenizer(tokenizer, {}, end_of_turn=wanted)
    text = supervised(chats, tokenizer, chat("hi", "hello", "more", "yes"))
    assert text == ("hello<|im_end|>yes<|im_end|>" if wanted else "helloyes")
    assert chats.notes[END_OF_TURN_OUTSIDE] == (0 if inside else 2)


@pytest.mark.parametrize("off", [True, False])
@pytest.mark.parametrize("kept", [True, False])
def test_an_empty_reasoning_block_of_the_template_is_not_supervised(off: bool, kept: bool) -> None:
    """Case D-03: whether the generation prompt supplies the block or not; the option includes it where it does not."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = THINKING
    chats = ChatTokenizer(tokenizer, {"off": off}, empty_reasoning=kept)
    included = kept and not off  # what the prompt supplies is never supervised
    wanted = "<think>\n\n</think>\n\nhello<|im_end|>" if included else "hello<|im_end|>"
    assert supervised(chats, tokenizer, chat("hi", "hello")) == wanted
    assert chats.notes[EMPTY_REASONING] == (0 if kept or off else 1)
    reasoned = [*chat("hi"), {"role": "assistant", "content": "hello", "reasoning_content": "hm"}]
    assert supervised(ChatTokenizer(tokenizer, {}), tokenizer, reasoned) == "<think>hm</think>hello<|im_end|>"


def test_an_empty_reasoning_block_that_the_prompt_opens_is_not_supervised() -> None:
    """Case D-03: as Qwen3.5's template has it, where the prompt ends in an opened block and the answer closes it."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n"
        "{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    chats = ChatTokenizer(tokenizer, {})
    assert supervised(chats, tokenizer, chat("hi", "hello")) == "hello<|im_end|>"
    assert chats.notes[EMPTY_REASONING] == 1
    kept = ChatTokenizer(tokenizer, {}, empty_reasoning=True)
    assert supervised(kept, tokenizer, chat("hi", "hello")) == "\n</think>\n\nhello<|im_end|>"
    for name in ("reasoning_content", "reasoning", "thinking"):
        reasoned = [*chat("hi"), {"role": "assistant", "content": "hello", name: "hm"}]
        assert supervised(chats, tokenizer, reasoned) == "hm\n</think>\n\nhello<|im_end|>"
    assert chats.notes[EMPTY_REASONING] == 1


def test_reasoning_reaches_the_template_by_the_name_that_it_reads() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.thinking %}({{ m.thinking }}){% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    for name in ("reasoning_content", "reasoning", "thinking"):
        reasoned = [*chat("hi"), {"role": "assistant", "content": "hello", name: "hm"}]
        assert supervised_text(tokenizer, reasoned) == "(hm)hello<|im_end|>"


def test_where_earlier_turns_are_rewritten_only_the_last_answer_is_supervised_and_the_others_counted() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = THINKING
    chats = ChatTokenizer(tokenizer, {})
    assert supervised(chats, tokenizer, chat("a", "b", "c", "d")) == "d<|im_end|>"
    assert chats.notes[TURNS_NOT_SUPERVISED] == 1


def test_an_answer_cut_at_a_token_limit_has_no_supervised_end_of_turn(tokenizer: Any) -> None:
    cut = [*chat("hi"), {"role": "assistant", "content": "hello", "finish_reason": "length"}]
    chats = ChatTokenizer(tokenizer, {})
    assert supervised(chats, tokenizer, cut) == "hello"
    assert chats.notes[ANSWERS_CUT] == 1
    assert messages_of({"messages": chat("hi", "hello"), "finish_reason": "length"}) == cut


def test_a_template_that_rewrites_what_it_was_prompted_with_is_refused() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(BadRow) as caught:
        supervised_text(tokenizer, chat("a", "b"))
    assert caught.value.reason == "template_not_prefix"


def test_an_assistant_first_conversation_is_legal_where_the_template_renders_it(tokenizer: Any) -> None:
    """Case D-05."""
    messages = [{"role": "assistant", "content": "welcome"}, *chat("a", "b")]
    assert supervised_text(tokenizer, messages) == "welcome<|im_end|>b<|im_end|>"


def test_raw_text_is_supervised_whole(tokenizer: Any) -> None:
    document = tokenize_text(tokenizer, "abc")
    assert np.array_equal(document.loss_mask, [1, 1, 1])


def test_a_begin_of_sequence_token_that_the_template_prints_is_not_doubled(tokenizer: Any) -> None:
    """Case D-09: rendered chat is encoded without added tokens; two of them are refused."""
    from tokenizers import processors

    tokenizer.bos_token = "<|reserved|>"
    single = processors.TemplateProcessing(single="<|reserved|> $A", special_tokens=[("<|reserved|>", 3)])
    tokenizer.backend_tokenizer.post_processor = single
    assert tokenizer("x")["input_ids"][0] == 3
    tokenizer.chat_template = "<|reserved|>" + tokenizer.chat_template
    ids = ChatTokenizer(tokenizer, {}).tokenize(Conversation(chat("a", "b"))).ids
    assert (ids[0], ids[1]) == (3, 1)
    with pytest.raises(BadRow) as caught:
        tokenize_text(tokenizer, "<|reserved|>x")
    assert caught.value.reason == "doubled_bos"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": []}, "empty"),
        ([], "empty"),
        ({"messages": None}, "empty"),
        ({"messages": [{"role": "user", "content": "a"}]}, "no_assistant"),
        ({"messages": [{"role": "system", "content": "a"}]}, "no_assistant"),
        ({"messages": chat("a", "b")[:1] * 2 + chat("a", "b")[1:]}, "role_order"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]}, "null_content"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": " "}]}, "empty_answer"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}, *chat("a", "b")[1:]]}, "bad_content"),
        ({"messages": [{"role": "wizard", "content": "a"}]}, "unknown_role"),
        ({"messages": ["hello"]}, "bad_turn"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
         "bad_tool_call"),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "bad_tool_call"),
        ({"messages": chat("a", "b"), "tools": 5}, "bad_tool_call"),
        ({"conversations": [{"from": "human"}]}, "bad_content"),
    ],
)  # fmt: skip
def test_bad_rows_are_refused_by_reason(row: Any, reason: str) -> None:
    """Cases D-05 and D-08."""
    with pytest.raises(BadRow) as caught:
        conversation_of(row)
    assert caught.value.reason == reason


def test_all_forms_of_a_conversation_are_read() -> None:
    expected = chat("a", "b")
    assert messages_of({"messages": expected}) == expected
    assert messages_of(expected) == expected
    assert messages_of({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}) == expected
    assert messages_of({"prompt": "a", "response": "b"}) == expected
    assert messages_of({"prompt": expected[:1], "completion": expected[1:]}) == expected
    assert messages_of({"instruction": "a", "input": "x", "output": "b"}) == chat("a\n\nx", "b")
    system = {"role": "system", "content": "s"}
    assert messages_of({"system": "s", "prompt": "a", "response": "b"}) == [system, *expected]
    assert messages_of({"system_prompt": "s", "question": "a", "response": "b"}) == [system, *expected]
    shared = {"system": "s", "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    assert messages_of(shared) == [system, *expected]
    assert messages_of({"system": "other", "messages": [system, *expected]}) == [system, *expected]
    assert messages_of({"instruction": "a", "context": "x", "response": "b"}) == chat("a\n\nx", "b")
    parts = [{"type": "text", "text": "b"}]
    assert messages_of({"messages": [expected[0], {"role": "assistant", "content": parts}]}) == expected
    assert messages_of({"text": "a"}) is None


def test_a_tool_call_may_have_no_content_and_its_arguments_become_a_mapping() -> None:
    """Case D-08: where the template does not print calls, the row is refused rather than trained on without them."""
    assert conversation_of({"messages": chat("a", "b"), "tools": ""}) == Conversation(chat("a", "b"))
    tokenizer = make_tokenizer()
    call = {"function": {"name": "add", "arguments": '{"x": 1}'}}
    row = {"messages": [*chat("a"), {"role": "assistant", "content": None, "tool_calls": [call]}], "tools": [{"n": 1}]}
    conversation = conversation_of(row)
    assert conversation is not None
    with pytest.raises(BadRow) as caught:
        ChatTokenizer(tokenizer, {}).tokenize(conversation)
    assert caught.value.reason == "tools_not_in_template"
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{ m['content'] }}",
        "{{ m['content'] }}{% for c in m['tool_calls'] or [] %}{{ c.function.name }}{{ c.function.arguments.x }}"
        "{% endfor %}",
    )
    chats = ChatTokenizer(tokenizer, {})
    assert supervised(chats, tokenizer, conversation.messages, conversation.tools) == "add1<|im_end|>"
