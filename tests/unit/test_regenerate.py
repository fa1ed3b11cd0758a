"""Answers rewritten by the target: by a server and on the spot, in order, marked where cut, resumed after a stop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import date
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from configs.load import config_from, dump_config
from configs.schema import Config, SourceConfig
from ops.telemetry import Log
from producer.corpus.answers import PROBE, AnswerFailed, split_thoughts
from producer.corpus.regenerate import item_of, regenerate, regenerated_files
from producer.corpus.sources import Row, SourceError
from producer.prepare import prepare
from tests.helpers.ports import kept_port
from tests.helpers.tiny_target import save_target


class Server:
    """A small OpenAI-compatible server: it answers with the number of messages and the last one's text, reversed."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.fail_from: int | None = None
        self.status = 503
        self.lock = threading.Lock()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                code, answer = owner.answer(self.path, body)
                data = json.dumps(answer).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                """Stay silent."""

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.05})
        self.thread.start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.http.server_port}/v1"

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        with self.lock:
            self.asked.append(body)
            number = len(self.asked)
        if path != "/v1/chat/completions":
            return 404, {"error": "no such path"}
        if self.fail_from is not None and number >= self.fail_from:
            return self.status, {"error": "no more"}
        last = body["messages"][-1]["content"]
        if len(last) > 100:
            return 400, {"error": "the prompt is longer than the context"}
        text = f"{len(body['messages'])}:{last[::-1]}"
        cut = "cut" in last
        message = {"role": "assistant", "content": text} | ({"reasoning": "hm"} if "think" in last else {})
        return 200, {"choices": [{"message": message, "finish_reason": "length" if cut else "stop"}]}


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.http.shutdown()
    made.thread.join()
    made.http.server_close()


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


ROWS: list[Any] = [
    {"messages": [{"role": "system", "content": "s"}, user("one"), assistant("old"), user("two"), assistant("old")]},
    {"prompt": "alone"},
    {"text": "a text stays"},
    {"messages": [{"role": "wizard", "content": "?"}]},
    {"messages": [user("cut here"), assistant("old"), user("never asked"), assistant("old")]},
]


def config_of(folder: Path, server: str | None, rows: list[Any], **more: Any) -> Config:
    source = folder / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = {"enabled": True, "server": server, "batch_size": 3} | more
    return config_from(
        {
            "target": {"model": str(folder / "target"), "num_taps": 3},
            "data": {"sources": [{"path": str(source)}], "regenerate": asked, "chat_template_kwargs": {"flag": 1}},
            "pack": {"tokens": 128},
        }
    )


def lines_of(config: Config, run_dir: Path) -> list[dict[str, Any]]:
    (file,) = regenerated_files(config, run_dir)
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_server_writes_every_answer_after_the_new_ones_before_it(tmp_path: Path, server: Server) -> None:
    config, run_dir = config_of(tmp_path, server.address, [*ROWS, {"prompt": "think"}]), tmp_path / "runs" / "r"
    regenerate(config, run_dir, Log("regenerate", 0))
    assert lines_of(config, run_dir) == [
        {"messages": [{"role": "system", "content": "s"}, user("one"), assistant("2:eno"), user("two"),
                      assistant("4:owt")]},
        {"messages": [user("alone"), assistant("1:enola")]},
        {"text": "a text stays"},
        {"skipped": "unknown_role", "place": f"{tmp_path / 'rows.jsonl'}:4"},
        {"messages": [user("cut here"), assistant("1:ereh tuc") | {"finish_reason": "length"}]},
        {"messages": [user("think"), assistant("1:kniht") | {"reasoning_content": "hm"}]},
    ]  # fmt: skip
    body = server.asked[0]
    assert (body["temperature"], body["max_tokens"]) == (0.0, config.data.regenerate.max_new_tokens)
    assert body["chat_template_kwargs"] == {"flag": 1}
    assert body["model"] == config.target.model


def test_a_stopped_rewriting_goes_on_after_the_last_whole_line(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a torn line: what is written at last equals an unbroken rewriting, and nothing is asked twice."""
    monkeypatch.setattr("producer.corpus.answers.FIRST_WAIT_S", 0.0)
    rows = [{"prompt": f"number {number}"} for number in range(40)]
    config, run_dir = config_of(tmp_path, server.address, rows), tmp_path / "runs" / "r"
    server.fail_from = 20
    with pytest.raises(AnswerFailed, match="HTTP 503") as caught:
        regenerate(config, run_dir, Log("regenerate", 0))
    assert "\n" not in str(caught.value)
    (file,) = regenerated_files(config, run_dir)
    partial = file.with_suffix(".partial")
    whole = len(partial.read_text().splitlines())
    assert 0 < whole < 20
    with pytest.raises(SourceError, match="are not all written"):
        prepare_tiny(tmp_path, config, run_dir)
    with partial.open("a") as torn:
        torn.write('{"messages": [{"role": "us')
    for thread in threading.enumerate():
        if thread.name.startswith("answers"):  # requests of the first attempt may still be under way
            thread.join()
    server.fail_from = None
    server.asked.clear()
    regenerate(config, run_dir, Log("regenerate", 0))
    asked = [int(body["messages"][-1]["content"].split()[-1]) for body in server.asked]
    assert sorted(asked) == list(range(whole, 40))
    assert lines_of(config, run_dir) == [
        {"messages": [user(row["prompt"]), assistant(f"1:{row['prompt'][::-1]}")]} for row in rows
    ]
    server.asked.clear()
    regenerate(config, run_dir, Log("regenerate", 0))  # complete: nothing to ask
    assert server.asked == []


@pytest.mark.parametrize("first", ["long", "last"])
def test_a_conversation_that_the_server_refuses_is_skipped_and_the_others_are_answered(
    tmp_path: Path, server: Server, first: str
) -> None:
    rows = [{"prompt": "x" * 200}, {"prompt": "alone"}, {"prompt": "y" * 200}]
    rows = rows if first == "long" else rows[1:]
    config, run_dir = config_of(tmp_path, server.address, rows), tmp_path / "runs" / "r"
    regenerate(config, run_dir, Log("regenerate", 0))
    for row, line in zip(rows, lines_of(config, run_dir), strict=True):
        if row["prompt"] == "alone":
            assert line == {"messages": [user("alone"), assistant("1:enola")]}
        else:
            assert line["skipped"] == "refused_by_server"
            assert "longer than the context" in line["place"]
    assert sum(body["messages"] == PROBE for body in server.asked) == 1
    plan = prepare_tiny(tmp_path, config, run_dir)
    assert plan["data_report"]["skipped"]["refused_by_server"] == len(rows) - 1


@pytest.mark.parametrize(("status", "asked"), [(404, 1), (400, 2), (503, 5)])
def test_a_refusal_is_told_at_once_and_a_failure_that_may_pass_is_tried_again(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch, status: int, asked: int
) -> None:
    monkeypatch.setattr("producer.corpus.answers.FIRST_WAIT_S", 0.0)
    server.fail_from, server.status = 1, status
    config = config_of(tmp_path, server.address, ROWS[1:2])
    with pytest.raises(AnswerFailed, match=f"HTTP {status}"):
        regenerate(config, tmp_path / "runs" / "r", Log("regenerate", 0))
    assert len(server.asked) == asked


def test_a_server_that_is_not_there_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("producer.corpus.answers.FIRST_WAIT_S", 0.0)
    with kept_port() as port:
        config = config_of(tmp_path, f"http://127.0.0.1:{port}/v1", ROWS[1:2])
        with pytest.raises(AnswerFailed, match="refused"):
            regenerate(config, tmp_path / "runs" / "r", Log("regenerate", 0))


def prepare_tiny(folder: Path, config: Config, run_dir: Path) -> dict[str, Any]:
    save_target(folder / "target")
    run_dir.mkdir(parents=True, exist_ok=True)
    return prepare(run_dir, config, Log("prepare", 0), on_gpu=False)


def test_the_rewritten_rows_are_what_is_trained_on_and_every_row_is_accounted_for(
    tmp_path: Path, server: Server
) -> None:
    config, run_dir = config_of(tmp_path, server.address, ROWS), tmp_path / "runs" / "r"
    regenerate(config, run_dir, Log("regenerate", 0))
    report = prepare_tiny(tmp_path, config, run_dir)["data_report"]
    assert (report["rows"], report["used"]) == (5, 4)
    assert report["skipped"] == {"unknown_role": 1}
    assert report["sources"][0]["name"] == str(tmp_path / "rows.jsonl")
    assert report["notes"] == {"answers cut at a token limit, without their end of turn": 1}
    shown = "".join(text for text, _ in report["example"])
    assert "2:eno" in shown
    assert "old" not in shown


def test_the_command_rewrites_prepares_and_reports_without_training(tmp_path: Path, server: Server) -> None:
    """As a user runs it: one command, exit code 0, the report with its laws, and no checkpoint or ring."""
    save_target(tmp_path / "target")
    config = config_of(tmp_path, server.address, ROWS, enabled=False)
    file = tmp_path / "c.yaml"
    file.write_text(dump_config(config))
    command = [sys.executable, "launch.py", "prepare", str(file), "--regenerate", "--name", "prep"]
    done = subprocess.run(
        [*command, "--set", f"run.folder={tmp_path / 'runs'}", "--set", "target.devices=[cpu]"],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=500, check=False,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 read = 4 used + 0 held out + 1 skipped" in done.stdout
    assert "unknown_role" in done.stdout
    assert "2:eno" in done.stdout
    run_dir = tmp_path / "runs" / "prep"
    assert json.loads((run_dir / "plan.json").read_text())["num_packs"] > 0
    assert not (run_dir / "checkpoints").exists()


def test_of_a_row_of_text_nothing_but_the_text_is_passed_on() -> None:
    """Columns of a table, dates and images, are no JSON; a source of chats has no texts."""
    row = Row({"text": "words", "made": date(2026, 11, 30), "image": b"\xff"}, "x.parquet:1")
    for kind in ("auto", "text"):
        assert item_of(row, SourceConfig(path="x.parquet", kind=kind)) == {"text": "words"}
    skipped = {"skipped": "no_known_fields", "place": "x.parquet:1"}
    assert item_of(row, SourceConfig(path="x.parquet", kind="chat")) == skipped
    assert item_of(Row({"image": b"\xff"}, "x.parquet:1"), SourceConfig(path="x.parquet")) == skipped


def test_transformers_writes_the_targets_own_greedy_answers(tmp_path: Path) -> None:
    """Each new token is the argmax of the target after what stands before it; a random target rarely ends by itself."""
    import torch
    import transformers

    save_target(tmp_path / "target")
    config = config_of(tmp_path, None, ROWS, max_new_tokens=6)
    run_dir = tmp_path / "runs" / "r"
    regenerate(config, run_dir, Log("regenerate", 0))
    lines = lines_of(config, run_dir)
    assert len(lines) == len(ROWS)
    answer = lines[1]["messages"][-1]
    assert answer["finish_reason"] == "length"
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "target")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    prompt = tokenizer.apply_chat_template([user("alone")], tokenize=False, add_generation_prompt=True, flag=1)
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
    start = ids.shape[1]
    for _ in range(6):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    assert answer["content"] == tokenizer.decode(ids[0, start:], skip_special_tokens=True).strip()


def test_a_conversation_that_template_or_context_refuses_is_skipped_and_the_others_are_answered(tmp_path: Path) -> None:
    save_target(tmp_path / "target")
    template = tmp_path / "target" / "chat_template.jinja"
    refusal = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    template.write_text(refusal + template.read_text())
    rows = [[user("a")], [{"role": "system", "content": "s"}, user("a")], [user("b" * 600)], [user("c")]]
    config = config_of(tmp_path, None, [{"messages": messages} for messages in rows], max_new_tokens=4)
    run_dir = tmp_path / "runs" / "r"
    regenerate(config, run_dir, Log("regenerate", 0))
    first, system, long, last = lines_of(config, run_dir)
    assert system == {"skipped": "template_error", "place": "System role not supported"}
    assert long["skipped"] == "too_long"
    assert "the target's context is 512" in long["place"]
    assert [len(line["messages"]) for line in (first, last)] == [2, 2]


@pytest.mark.parametrize(
    ("prompt", "text", "message"),
    [
        ("assistant\n", "yes", {"content": "yes"}),
        ("assistant\n", "<think>\nhm\n</think>\n\nyes", {"content": "yes", "reasoning_content": "hm"}),
        ("assistant\n<think>\n", "hm\n</think>\n\nyes", {"content": "yes", "reasoning_content": "hm"}),
        ("assistant\n<think>\n", "\n</think>\n\nyes", {"content": "yes"}),
        ("assistant\n<think>\n\n</think>\n\n", "yes", {"content": "yes"}),
        ("assistant\n<think>\n", "hm, cut", {"content": "", "reasoning_content": "hm, cut"}),
        ("assistant\n", "<think>\ncut", {"content": "", "reasoning_content": "cut"}),
        ("assistant\n", "say <think> and </think>", {"content": "say <think> and </think>"}),
    ],
)  # fmt: skip
def test_thoughts_are_taken_off_an_answer_whoever_opens_them(prompt: str, text: str, message: dict[str, str]) -> None:
    assert split_thoughts(prompt, text) == message
