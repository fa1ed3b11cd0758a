"""Who writes answers: the target in this process, or an OpenAI-compatible server of it. Conversations in, lines out.

Every answer of a conversation is written anew, in order, each after the new ones before it; a tool's reply stands as it
was. An answer that reaches the token limit is marked (finish_reason "length") and ends its conversation.
"""

from __future__ import annotations

import json
import re
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from configs.schema import RegenerateConfig
from producer.corpus.conversation import Conversation, Message

Item = Conversation | dict[str, Any]
Line = dict[str, Any]
ATTEMPTS = 5
REFUSED = (400, 413, 422)
PROBE = [{"role": "user", "content": "Hello"}]
FIRST_WAIT_S = 0.5
_READS_THOUGHTS = re.compile(r"\b(reasoning_content|thinking)\b")
_OPENED_LAST = re.compile(r"<(think|thinking|reasoning)>\s*\Z")
_OPENED_FIRST = re.compile(r"<(think|thinking|reasoning)>\s*")
WINDOW = 4  # requests under way or waiting to be written, per request under way


class AnswerFailed(Exception):
    """Answers cannot be had; what was written is kept. Exit code 5."""

    exit_code = 5


class _Refused(Exception):
    """The server will not answer this conversation, whenever it is asked."""


class Rewriter(Protocol):
    """Turns a stream of items into lines, in the same order; a line that is no conversation is passed on."""

    def rewrite(self, items: Iterable[Item]) -> Iterator[Line]:
        """Yield one line per item. Raises AnswerFailed."""


class _Dialogue:
    """A conversation on its way: the turns that stand, and those still to come."""

    def __init__(self, conversation: Conversation) -> None:
        self._left = deque(conversation.messages)
        self._tools = conversation.tools
        self._refused: Line | None = None
        self.messages: list[Message] = []
        if self._left[-1]["role"] != "assistant":
            self._left.append({"role": "assistant"})
        self._advance()

    @property
    def waiting(self) -> bool:
        """Whether an answer is to be written after `messages`."""
        return bool(self._left)

    @property
    def tools(self) -> Any:
        """The tools that the conversation may name."""
        return self._tools

    def answer(self, message: Message) -> None:
        """Put the answer in; the old one falls away."""
        self._left.popleft()
        self.messages.append(message)
        if message.get("finish_reason") == "length" or not (message.get("content") or message.get("tool_calls")):
            self._left.clear()
        self._advance()

    def refuse(self, reason: str, detail: str) -> None:
        """Give the conversation up: its row is skipped for this reason."""
        self._left.clear()
        self._refused = {"skipped": reason, "place": detail}

    def _advance(self) -> None:
        while self._left and self._left[0]["role"] != "assistant":
            self.messages.append(self._left.popleft())

    def line(self) -> Line:
        """The conversation as a row."""
        if self._refused is not None:
            return self._refused
        tools = {"tools": self._tools} if self._tools else {}
        return {"messages": self.messages, **tools}


class TransformersRewriter:
    """Writes answers with transformers, a batch of conversations at a time."""

    def __init__(
        self, asked: RegenerateConfig, folder: Path, dtype: str, device: str, template_kwargs: dict[str, Any]
    ) -> None:
        """Load the whole target from `folder` onto `device`. Raises TargetError."""
        import torch

        from producer.target import end_tokens, load_tokenizer, read_config
        from producer.trunk import load_for_decoding

        self._asked, self._kwargs = asked, template_kwargs
        self._tokenizer = load_tokenizer(folder)
        self._tokenizer.padding_side = "left"
        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        chosen = (torch.float32 if device == "cpu" else torch.bfloat16) if dtype == "auto" else getattr(torch, dtype)
        self._model: Any = load_for_decoding(folder, chosen, torch.device(device))
        text = read_config(folder).get_text_config()
        self._context = int(text.max_position_embeddings)
        self._ends = end_tokens(folder, text, self._tokenizer)
        self._reads_thoughts = bool(_READS_THOUGHTS.search(str(self._tokenizer.chat_template or "")))

    def rewrite(self, items: Iterable[Item]) -> Iterator[Line]:
        """Yield one line per item, in order."""
        items = iter(items)
        while batch := list(islice(items, self._asked.batch_size)):
            dialogues = {n: _Dialogue(item) for n, item in enumerate(batch) if isinstance(item, Conversation)}
            while waiting := [dialogue for dialogue in dialogues.values() if dialogue.waiting]:
                prompts = [self._prompt(dialogue) for dialogue in waiting]  # one that cannot be asked waits no more
                asked = [(dialogue, text) for dialogue, text in zip(waiting, prompts, strict=True) if dialogue.waiting]
                for (dialogue, _), message in zip(asked, self._answers([text for _, text in asked]), strict=True):
                    dialogue.answer(message)
            for number, item in enumerate(batch):
                yield dialogues[number].line() if isinstance(item, Conversation) else item

    def _prompt(self, dialogue: _Dialogue) -> str:
        """What the target is to continue; a conversation that template or context refuses is given up."""
        try:
            text = self._tokenizer.apply_chat_template(
                dialogue.messages, tools=dialogue.tools, tokenize=False, add_generation_prompt=True, **self._kwargs
            )
        except Exception as error:  # templates raise what they like
            dialogue.refuse("template_error", str(error))
            return ""
        tokens = len(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        if tokens >= self._context:
            dialogue.refuse("too_long", f"a prompt of {tokens} tokens, the target's context is {self._context}")
        return str(text)

    def _answers(self, texts: list[str]) -> list[Message]:
        import torch

        if not texts:
            return []
        inputs = self._tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
        sampling = {"do_sample": True, "temperature": self._asked.temperature} if self._asked.temperature else {}
        with torch.inference_mode():
            output = self._model.generate(
                **inputs.to(self._model.device),
                max_new_tokens=self._asked.max_new_tokens,
                pad_token_id=self._tokenizer.pad_token_id,
                eos_token_id=list(self._ends) or None,
                **(sampling or {"do_sample": False}),
            )
        rows = output[:, inputs["input_ids"].shape[1] :].tolist()
        return [self._message(text, row) for text, row in zip(texts, rows, strict=True)]

    def _message(self, prompt: str, ids: list[int]) -> Message:
        end = next((place for place, token in enumerate(ids) if token in self._ends), None)
        text = self._tokenizer.decode(ids[:end], skip_special_tokens=True).strip()
        message = split_thoughts(prompt, text) if self._reads_thoughts else {"content": text}
        return {"role": "assistant", **message} | ({} if end is not None else {"finish_reason": "length"})


def split_thoughts(prompt: str, text: str) -> dict[str, str]:
    """Take the reasoning off an answer, as servers do, whether the prompt opens it or the answer does.

    Reasoning that was cut before its end leaves an empty answer, whose row is skipped: the template would print it as
    if it were one.
    """
    opened = _OPENED_LAST.search(prompt) or _OPENED_FIRST.match(text)
    if opened is None:
        return {"content": text}
    thoughts, _, answer = text.removeprefix(opened[0]).partition(f"</{opened[1]}>")
    return {"content": answer.strip()} | ({"reasoning_content": thoughts.strip()} if thoughts.strip() else {})


class ServerRewriter:
    """Asks an OpenAI-compatible server (vLLM, SGLang); many conversations are under way at a time."""

    def __init__(self, asked: RegenerateConfig, model: str, template_kwargs: dict[str, Any]) -> None:
        """Nothing is asked yet. `model`: the target's name on the server."""
        self._asked, self._model, self._kwargs = asked, model, template_kwargs
        self._url = f"{str(asked.server).rstrip('/')}/chat/completions"
        self._answers_others = False
        self._probing = threading.Lock()

    def rewrite(self, items: Iterable[Item]) -> Iterator[Line]:
        """Yield one line per item, in order; a slow answer holds up the writing of later ones, not their making.

        A conversation that the server refuses, one that is too long for it, say, becomes a row that is skipped.
        """
        pool = ThreadPoolExecutor(self._asked.batch_size, thread_name_prefix="answers")
        under_way: deque[Future[Line]] = deque()
        try:
            for item in items:
                under_way.append(pool.submit(self._line, item))
                if len(under_way) >= WINDOW * self._asked.batch_size:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _line(self, item: Item) -> Line:
        if not isinstance(item, Conversation):
            return item
        dialogue = _Dialogue(item)
        try:
            while dialogue.waiting:
                dialogue.answer(self._answer(dialogue.messages, dialogue.tools))
        except _Refused as refused:
            self._check_that_others_are_answered()
            return {"skipped": "refused_by_server", "place": str(refused)}
        return dialogue.line()

    def _check_that_others_are_answered(self) -> None:
        """Raise AnswerFailed where the server refuses everything: then not the conversation is to blame."""
        with self._probing:
            if self._answers_others:
                return
            try:
                self._answer(PROBE, None)
            except _Refused as refused:
                raise self._failed(str(refused)) from None
            self._answers_others = True

    def _answer(self, messages: list[Message], tools: Any) -> Message:
        """Ask for the next message; raises AnswerFailed, _Refused."""
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [
                {key: value for key, value in message.items() if key != "finish_reason"} for message in messages
            ],
            "max_tokens": self._asked.max_new_tokens,
            "temperature": self._asked.temperature,
        }
        if tools:
            body["tools"] = tools
        if self._kwargs:
            body["chat_template_kwargs"] = self._kwargs
        choice = self._post(body)["choices"][0]
        found = choice["message"]
        message: Message = {"role": "assistant", "content": found.get("content") or ""}
        thoughts = found.get("reasoning_content") or found.get("reasoning")  # vLLM's name since 0.11
        message |= {"reasoning_content": thoughts} if thoughts else {}
        message |= {"tool_calls": found["tool_calls"]} if found.get("tool_calls") else {}
        return message | ({"finish_reason": "length"} if choice.get("finish_reason") == "length" else {})

    def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        """Ask once more after a failure that may pass; raises AnswerFailed, _Refused."""
        data = json.dumps(body).encode()
        reason = ""
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(FIRST_WAIT_S * 2 ** (attempt - 1))
            request = urllib.request.Request(self._url, data, {"Content-Type": "application/json"})
            try:
                with urllib.request.urlopen(request, timeout=self._asked.timeout_s) as answer:
                    found: dict[str, Any] = json.load(answer)
                    return found
            except urllib.error.HTTPError as error:
                reason = f"HTTP {error.code}: {error.read()[:200].decode(errors='replace')}"
                if error.code in REFUSED:
                    raise _Refused(reason) from None
                if error.code < 500 and error.code not in (408, 429):
                    break
            except (OSError, ValueError) as error:  # refused, broken off, timed out, no JSON
                reason = str(getattr(error, "reason", error))
        raise self._failed(reason)

    def _failed(self, reason: str) -> AnswerFailed:
        return AnswerFailed(
            f"data.regenerate.server: {self._url} ({self._model}): {reason}; what is written is kept, start again"
        )
