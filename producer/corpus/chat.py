"""Turn conversations and texts into token ids and loss masks: which tokens the assistant wrote.

Assistant spans come from the template's own generation markers where it has them; else from rendering the messages
before each assistant turn with the generation prompt, and the same with the turn: the text between is what the
assistant wrote, end of turn included. Nothing is searched for in the ids, so a reply that quotes markup is safe. Where
the template rewrites earlier turns (it drops their reasoning, for example), only the last answer can be told exactly:
the earlier ones are then not supervised, and counted.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from producer.corpus.conversation import BadRow, Conversation, Message

_MARKERS = re.compile(r"{%-?\s*generation\b")
_EMPTY_REASONING = re.compile(r"\s*<(think|thinking|reasoning)>\s*</\1>\s*")
_REASONING_OPENED = re.compile(r"<(think|thinking|reasoning)>\s*\Z")
_LONGEST_OPENING = 32
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
END_OF_TURN_OUTSIDE = "ends of turn outside the template's generation markers"
TURNS_NOT_SUPERVISED = "earlier answers not supervised, since the template rewrites them"
ANSWERS_CUT = "answers cut at a token limit, without their end of turn"
EMPTY_REASONING = "empty reasoning blocks put in by the template, not supervised"


class Document(NamedTuple):
    """A tokenised document: ids [n] int32 and loss_mask [n] uint8 (1 = supervised)."""

    ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]


class _Rendered(NamedTuple):
    """A conversation as tokens: ids [n], where each token's text starts [n], and the supervised runs of tokens."""

    text: str
    ids: NDArray[np.int32]
    starts: NDArray[np.int64]
    runs: list[tuple[NDArray[np.bool_], Message]]


def has_markers(template: str) -> bool:
    """Whether a chat template says by itself which tokens are generated."""
    return bool(_MARKERS.search(template))


def tokenize_text(tokenizer: Any, text: str) -> Document:
    """Tokenise raw text as the tokenizer does by default, all but a leading bos supervised. Raises BadRow."""
    ids = np.asarray(tokenizer(text)["input_ids"], dtype=np.int32)
    mask = np.ones(len(ids), dtype=np.uint8)
    if len(ids) and ids[0] == tokenizer.bos_token_id:
        mask[0] = 0
    _refuse_doubled_bos(ids, tokenizer)
    return Document(ids, mask)


class ChatTokenizer:
    """Tokenises conversations with one tokenizer and one set of template arguments; `notes` counts what it did."""

    def __init__(
        self,
        tokenizer: Any,
        template_kwargs: dict[str, Any],
        end_of_turn: bool = True,
        empty_reasoning: bool = False,
    ) -> None:
        """end_of_turn: supervise it. empty_reasoning: supervise an empty reasoning block that the template puts in."""
        self.notes: Counter[str] = Counter()
        self._tokenizer, self._kwargs = tokenizer, template_kwargs
        self._end_of_turn, self._empty_reasoning = end_of_turn, empty_reasoning
        self._template = str(tokenizer.chat_template or "")
        self._has_markers = has_markers(self._template)
        self._special = np.asarray(
            sorted({*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}), dtype=np.int32
        )
        self._end_id: int | None = None

    def tokenize(self, conversation: Conversation) -> Document:
        """Render and tokenise a conversation, up to its last answer, with what the assistant wrote supervised.

        The rendered text is encoded without added special tokens, so a bos that the template prints is not doubled.
        Raises BadRow.
        """
        if not self._template:
            raise BadRow("no_chat_template", "the tokenizer has no chat template; use text rows")
        last = max(n for n, message in enumerate(conversation.messages) if message["role"] == "assistant")
        messages = conversation.messages[: last + 1]
        if any("tool_calls" in message for message in messages) and "tool_calls" not in self._template:
            raise BadRow("tools_not_in_template", "the chat template does not print tool calls")
        plain = [_as_templates_read(message) for message in messages]
        render = self._by_markers if self._has_markers else self._by_prefixes
        rendered = render(plain, messages, conversation.tools)
        mask = np.zeros(len(rendered.ids), dtype=np.uint8)
        for inside, message in rendered.runs:
            mask[self._settle(rendered, inside, message)] = 1
        _refuse_doubled_bos(rendered.ids, self._tokenizer)
        return Document(rendered.ids, mask)

    def _by_prefixes(self, plain: list[Message], messages: list[Message], tools: Any) -> _Rendered:
        full = self._render(plain, tools)
        spans: list[tuple[int, int, Message]] = []
        for number in [n for n, message in enumerate(plain) if message["role"] == "assistant"]:
            is_last = number == len(plain) - 1
            prefix = self._prompt(plain[:number], tools, full)
            turn = full if is_last else self._render(plain[: number + 1], tools)
            if turn.startswith(prefix) and full.startswith(turn):
                spans.append((len(prefix), len(turn), messages[number]))
            elif is_last:
                raise BadRow("template_not_prefix", "the template rewrites what it was prompted with")
            else:
                self.notes[TURNS_NOT_SUPERVISED] += 1
        ids, starts = self._encode(full)
        return _Rendered(full, ids, starts, [((starts >= a) & (starts < z), message) for a, z, message in spans])

    def _by_markers(self, plain: list[Message], messages: list[Message], tools: Any) -> _Rendered:
        try:
            encoded = self._tokenizer.apply_chat_template(
                plain,
                tools=tools,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
                tokenizer_kwargs={"return_offsets_mapping": True},
                **self._kwargs,
            )
        except Exception as error:  # templates raise what they like
            raise BadRow("template_error", str(error)) from None
        full = self._render(plain, tools)
        ids = np.asarray(encoded["input_ids"], dtype=np.int32)
        starts = np.asarray([start for start, _ in encoded["offset_mapping"]], dtype=np.int64)
        marked = np.asarray(encoded["assistant_masks"], dtype=np.int8)
        edges = np.flatnonzero(np.diff(np.concatenate([[0], marked, [0]])))
        answers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        if len(edges) != 2 * len(answers):
            raise BadRow("markers_miss_a_turn", "the generation markers do not mark each assistant turn once")
        places = np.arange(len(ids))
        runs = []
        for number, first, stop in zip(answers, edges[::2], edges[1::2], strict=True):
            prompt = self._prompt(plain[:number], tools, full)
            supplied = starts < (len(prompt) if full.startswith(prompt) else 0)
            inside = (places >= first) & (places < stop) & ~supplied
            if self._end_token() in ids[stop : stop + 1]:
                self.notes[END_OF_TURN_OUTSIDE] += 1
                inside[stop] = True
            runs.append((inside, messages[number]))
        return _Rendered(full, ids, starts, runs)

    def _settle(self, rendered: _Rendered, inside: NDArray[np.bool_], message: Message) -> NDArray[np.bool_]:
        """Leave out of one answer's tokens what the assistant did not write, or is not to learn."""
        ids, starts = rendered.ids, rendered.starts
        inside = inside.copy()
        ends = np.flatnonzero(inside & np.isin(ids, self._special))
        cut = message.get("finish_reason") == "length"
        if len(ends) and not _text_after(rendered, inside, int(ends[-1])).strip():
            # white space that the template prints after the end of turn is never served
            inside[ends[-1] + 1 :] = False
            inside[ends[-1]] = self._end_of_turn and not cut
        self.notes[ANSWERS_CUT] += cut
        places = np.flatnonzero(inside)
        if len(places) and not self._empty_reasoning and not any(message.get(key) for key in _REASONING_KEYS):
            begin = int(starts[places[0]])
            before = max(0, begin - _LONGEST_OPENING)
            opened = _REASONING_OPENED.search(rendered.text[before:begin])  # the prompt may begin the block
            block = _EMPTY_REASONING.match(rendered.text, before + opened.start() if opened else begin)
            if block and not _EMPTY_REASONING.match(str(message["content"])):
                inside &= starts >= block.end()
                self.notes[EMPTY_REASONING] += 1
        return inside

    def _prompt(self, plain: list[Message], tools: Any, full: str) -> str:
        """What the model is served before it answers: the messages so far and the generation prompt."""
        if plain:
            return self._render(plain, tools, prompt=True)
        probe: list[Message] = [{"role": "user", "content": "a"}]  # templates refuse an empty conversation
        head = self._render(probe, None, prompt=True).removeprefix(self._render(probe, None))
        bos = str(self._tokenizer.bos_token or "")
        return next((start for start in (head, bos + head) if full.startswith(start)), head)

    def _end_token(self) -> int:
        """The template's end-of-turn token, from a short conversation: the first special one in or after its answer."""
        if self._end_id is None:
            probe: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
            ids, starts = self._encode(text := self._render(probe, None))
            start = len(self._prompt(probe[:1], None, text))
            after = ids[(starts >= start) & np.isin(ids, self._special)]
            self._end_id = int(after[-1]) if len(after) else -1
        return self._end_id

    def _encode(self, text: str) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        starts = np.asarray([start for start, _ in encoded["offset_mapping"]], dtype=np.int64)
        return np.asarray(encoded["input_ids"], dtype=np.int32), starts

    def _render(self, messages: list[Message], tools: Any, prompt: bool = False) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=prompt, **self._kwargs
            )
        except Exception as error:  # templates raise what they like (jinja2 errors, type errors)
            raise BadRow("template_error", str(error)) from None
        return str(text)


def _as_templates_read(message: Message) -> Message:
    """A message for a template: reasoning under both names that templates read (newer transformers do the same)."""
    plain = {key: value for key, value in message.items() if key != "finish_reason"}
    reasoning = next((message[key] for key in _REASONING_KEYS if message.get(key)), None)
    return plain if reasoning is None else plain | dict.fromkeys(("reasoning_content", "thinking"), reasoning)


def _text_after(rendered: _Rendered, inside: NDArray[np.bool_], token: int) -> str:
    """The text of one answer's tokens that stand behind `token`."""
    stop = int(np.flatnonzero(inside)[-1]) + 1
    bounds = np.append(rendered.starts, len(rendered.text))
    return rendered.text[int(bounds[token + 1]) : int(bounds[stop])]


def _refuse_doubled_bos(ids: NDArray[np.int32], tokenizer: Any) -> None:
    if len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
        raise BadRow("doubled_bos", "the document begins with two begin-of-sequence tokens")
