"""Prompts and the target's own answers for benchmarks/accepted_length.py: to train on, and to measure with.

Trained on: Python functions with docstrings of the installed packages and tasks of reasoning-gym's codeio (code), word
problems of four fifths of GSM-symbolic's templates, and chat turns. Measured with: HumanEval, the other fifth of the
templates, and 64 chat turns, none of which is trained on; a function named as a HumanEval problem's is left out too.
Answers are written by the target in several processes at once, first the greedy one of every prompt, then sampled ones
as long as there is time.
"""

from __future__ import annotations

import ast
import gzip
import importlib.util
import json
import random
import re
import subprocess
import sys
import sysconfig
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

from evaluation.prompts import CODE_REQUEST, GSM_SEED, gsm_symbolic, humaneval, load_prompts, prompt_ids

DEMO_CHAT = Path("data/demo_chat.jsonl")
NUM_EVAL_CHAT = 64
TEMPERATURE, MOST_SAMPLED = 0.7, 3  # of the answers beside the greedy one, and how many of them a prompt gets
PACKAGES = (
    "sympy",
    "networkx",
    "scipy",
    "sklearn",
    "numpy",
    "pandas",
    "statsmodels",
    "torch",
    "transformers",
    "matplotlib",
)
TOPICS = (
    "a rainy day", "the moon", "honey bees", "learning to swim", "an old clock", "bread", "train journeys", "volcanoes",
    "friendship", "the number zero", "gardening", "chess", "sleep", "libraries", "bicycles", "the sea", "glass",
    "coffee", "maps", "mountains", "music", "the invention of paper", "penguins", "time management", "public speaking",
    "recycling", "photosynthesis", "inflation", "electric cars", "the immune system", "black holes", "budgeting",
    "writing letters", "the printing press", "bridges", "dinosaurs", "healthy breakfasts", "meditation", "rivers",
    "computer networks",
)  # fmt: skip
REQUESTS = (
    "Explain {} to a child.", "Write a short story about {}.", "Give me five facts about {}.", "Write a poem about {}.",
    "What should I know about {}?", "Describe {} in three sentences.", "Write an email to a friend about {}.",
    "What are the advantages and disadvantages of {}?", "Plan a lesson about {}.", "Make a list of questions about {}.",
    "Summarise the history of {}.", "How does {} affect our daily life?",
)  # fmt: skip


def training_prompts(num_code: int, num_gsm: int, num_chat: int, seed: int = 0) -> dict[str, list[str]]:
    """Prompts to train on, by kind; fewer of a kind where the machine has no more."""
    shuffle = random.Random(seed).shuffle
    code = [CODE_REQUEST.format(code=function) for function in functions(forbidden=_humaneval_names())]
    shuffle(code)
    tasks = list(codeio_tasks())
    shuffle(tasks)
    half = max(num_code // 3, num_code - len(code))
    chat = chat_prompts()[NUM_EVAL_CHAT:] + [request.format(topic) for topic in TOPICS for request in REQUESTS]
    shuffle(chat)
    return {
        "code": code[: num_code - min(half, len(tasks))] + tasks[:half],
        "gsm-symbolic": gsm_symbolic(num_gsm, seed=GSM_SEED + 1, held_out=False),
        "chat": chat[:num_chat],
    }


def evaluation_prompts(limit: int | None = None) -> dict[str, list[str]]:
    """Prompts to measure with, by set."""
    sets = {"humaneval": load_prompts("humaneval"), "gsm-symbolic": load_prompts("gsm-symbolic", 128)}
    texts = {name: [str(prompt) for prompt in prompts] for name, prompts in sets.items()}
    return {name: prompts[:limit] for name, prompts in (texts | {"chat": chat_prompts()[:NUM_EVAL_CHAT]}).items()}


def chat_prompts() -> list[str]:
    """The user's turns of the demo's conversations, in a fixed random order."""
    rows = [json.loads(line)["messages"][0]["content"] for line in DEMO_CHAT.read_text().splitlines()]
    random.Random(1).shuffle(rows)
    return rows


def _humaneval_names() -> set[str]:
    return {name for problem in humaneval() for name in re.findall(r"def (\w+)\(", problem)}


def functions(forbidden: set[str]) -> Iterator[str]:
    """Signature and docstring of public functions and methods of the standard library and installed packages."""
    seen: set[str] = set()
    for file in _source_files():
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError, OSError):
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_") or node.name in forbidden:
                continue
            text = _head_of(node)
            if text is not None and text not in seen:
                seen.add(text)
                yield text


def _head_of(node: ast.FunctionDef) -> str | None:
    docstring = ast.get_docstring(node)
    if docstring is None or not 40 <= len(docstring) <= 500:
        return None
    arguments = ast.unparse(node.args)
    if len(arguments) > 160 or "self" in arguments or "cls" in arguments:
        return None
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    body = textwrap.indent(f'"""{docstring}\n"""', "    ")
    return f"def {node.name}({arguments}){returns}:\n{body}\n"


def _source_files() -> Iterator[Path]:
    yield from sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    yield from sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-l]*/*.py"))
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            found = sorted(Path(spec.origin).parent.rglob("*.py"))
            yield from (file for file in found if "test" not in str(file))


def codeio_tasks() -> Iterator[str]:
    """Tasks of reasoning-gym's codeio data, as requests for a Python function."""
    spec = importlib.util.find_spec("reasoning_gym")
    if spec is None or spec.origin is None:
        return
    with gzip.open(Path(spec.origin).parent / "data" / "codeio.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in lines:
            try:
                task = str(json.loads(line)["task_description"])
            except (ValueError, KeyError):
                continue
            if 40 <= len(task) <= 700:
                yield f"Write a Python function that solves this task.\n\n{task}"


def answer_all(
    model: Path, prompts: list[str], out: Path, devices: list[str], batch: int, tokens: int, limit_s: float
) -> dict[str, int]:
    """Let the target answer `prompts`, two processes a device (one on a CPU), for `limit_s` at most.

    Writes conversations to `out` in random order and returns how many are greedy and how many sampled.
    """
    give_up = time.monotonic() + limit_s
    places = [device for device in devices for _ in range(1 if device == "cpu" else 2)]
    processes = []
    for number, device in enumerate(places):
        given, answered = out.with_suffix(f".prompts{number}.jsonl"), out.with_suffix(f".answers{number}.jsonl")
        given.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts[number :: len(places)]))
        command = [sys.executable, "-m", "benchmarks.accepted_length_data", str(model), str(given), str(answered)]
        log = out.with_suffix(f".log{number}").open("w")
        words = [*command, device, str(batch), str(tokens), str(number)]
        processes.append((subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT), answered))
    rows: list[str] = []
    for process, answered in processes:
        try:
            process.wait(max(0.0, give_up - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        rows += answered.read_text().splitlines() if answered.exists() else []
    rows = [row for row in rows if row.endswith("}")]  # the last one of a process that was ended may be cut
    random.Random(0).shuffle(rows)
    out.write_text("".join(row + "\n" for row in rows))
    sampled = sum('"sampled": true' in row for row in rows)
    return {"greedy": len(rows) - sampled, "sampled": sampled}


def answer_worker(model: str, given: Path, out: Path, device: str, batch: int, tokens: int, seed: int) -> None:
    """Answer the prompts of one file, batches of near-equal length, each appended to `out` as it is done."""
    import torch

    from benchmarks.accepted_length_measure import Reader

    torch.manual_seed(seed)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    reader = Reader(model, (), torch.device(device), dtype)
    prompts = [str(json.loads(line)["prompt"]) for line in given.read_text().splitlines()]
    rows = sorted(((prompt_ids(reader.tokenizer, prompt), prompt) for prompt in prompts), key=lambda row: len(row[0]))
    batches = [rows[start : start + batch] for start in range(0, len(rows), batch)]
    random.Random(seed).shuffle(batches)
    with out.open("w") as file:
        for temperature in (0.0, *[TEMPERATURE] * MOST_SAMPLED):
            for number, part in enumerate(batches):
                answers = reader.write([ids for ids, _ in part], tokens, temperature)
                texts = reader.tokenizer.batch_decode(answers, skip_special_tokens=True)
                for (_, prompt), text in zip(part, texts, strict=True):
                    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": text.strip()}]
                    row = {"messages": turns, "sampled": temperature > 0}
                    file.write(json.dumps(row) + "\n" if text.strip() else "")
                file.flush()
                print(f"temperature {temperature}: batch {number + 1} of {len(batches)} answered", flush=True)


if __name__ == "__main__":
    words = sys.argv[1:]
    answer_worker(words[0], Path(words[1]), Path(words[2]), words[3], int(words[4]), int(words[5]), int(words[6]))
