"""From files to trained documents: sources, cache key, held-out and duplicates, mixture, conservation."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from configs.load import config_from
from configs.schema import Config, SourceConfig
from ops.telemetry import Log
from producer.corpus.documents import DataError, Documents
from producer.corpus.report import DataReport
from producer.corpus.schedule import schedule_of
from producer.corpus.sources import SourceError, check_files, read_chunks
from producer.prepare import check_tokens, prepare, prepare_data
from producer.target import describe_target
from tests.helpers.tiny_target import make_tokenizer, save_target, write_chats


class Prepared:
    """Prepares one configuration after the other in one run folder, as repeated launches do."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run_dir = folder, folder / "runs" / "r"
        self.tokenizer = make_tokenizer()
        self.tokenizer.save_pretrained(folder / "tokenizer")
        self.said: list[str] = []
        self.digest = ""
        self.context: int | None = None

    def config(self, sources: list[dict[str, Any]], **data: Any) -> Config:
        return config_from({"data": {"sources": sources, **data}, "pack": {"tokens": 128}})

    def prepare(self, sources: list[dict[str, Any]], **data: Any) -> DataReport:
        self.said.clear()
        log = _Remembering("prepare", 0)
        log.said = self.said
        config = self.config(sources, **data)
        folder = self.folder / "tokenizer"
        report, self.digest = prepare_data(self.run_dir, config, self.tokenizer, folder, log, self.context)
        return report

    @property
    def documents(self) -> Documents:
        return Documents(self.run_dir / "data")


class _Remembering(Log):
    """A log whose lines a test can read."""

    said: list[str]

    def __call__(self, event: str, **values: Any) -> None:
        self.said.append(f"{event} {values}")


@pytest.fixture
def prepared(tmp_path: Path) -> Prepared:
    return Prepared(tmp_path)


def write_rows(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def texts(prepared: Prepared) -> list[str]:
    documents = prepared.documents
    return [str(prepared.tokenizer.decode(documents[number].ids)) for number in range(len(documents))]


def test_every_kind_of_source_gives_the_same_documents(prepared: Prepared, tmp_path: Path) -> None:
    """JSON lines, Parquet, a saved data set, and a folder of data files; messages may be long or short."""
    import datasets
    import pyarrow
    import pyarrow.parquet

    rows = [chat(f"question {n}", f"answer {n} " * (1 + n % 3)) for n in range(300)]
    (tmp_path / "hub").mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "hub" / "train.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(tmp_path / "splits")
    paths = [write_rows(tmp_path / "rows.jsonl", rows), str(tmp_path / "rows.parquet"), str(tmp_path / "saved")]
    paths += [f"dataset:{tmp_path / 'splits'}", f"dataset:{tmp_path / 'hub'}"]
    found = []
    for path in paths:
        assert prepared.prepare([{"path": path}]).used == 300
        found.append(texts(prepared))
    assert all(other == found[0] for other in found)


def test_plain_text_and_text_rows_are_supervised_whole(prepared: Prepared, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("plain words", encoding="utf-8-sig")  # a byte order mark is no text
    path = write_rows(tmp_path / "b.jsonl", [{"text": "row words"}, "bare words"])
    report = prepared.prepare([{"path": str(tmp_path / "a.txt")}, {"path": path}])
    assert texts(prepared) == ["plain words", "row words", "bare words"]
    assert report.supervised_tokens == report.tokens


def test_bad_rows_are_counted_by_reason_with_their_place_and_one_good_row_is_enough(
    prepared: Prepared, tmp_path: Path
) -> None:
    """Case D-05: one row of five is usable; each other has its reason, file and line."""
    path = tmp_path / "rows.jsonl"
    rows = [[], [{"role": "assistant", "content": "only"}], [{"role": "system", "content": "s"}]]
    rows.append([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    write_rows(path, [*rows, chat("q", "a good one")])
    with path.open("ab") as file:
        file.write(b'{"messages": [\n\n"\xff"\n3\n' + b"[" * 200_000 + b'\n{"text": "half a pair \\ud83d"}\n')
    report = prepared.prepare([{"path": str(path)}])
    assert report.skipped == {
        "empty": 1, "no_assistant": 2, "not_json": 2, "not_utf8": 1, "not_an_object": 1, "lone_surrogate": 1,
    }  # fmt: skip
    assert report.used == 2  # an assistant's greeting alone is legal, since the template renders it
    assert report.first_place["no_assistant"].startswith(f"{path}:3")
    assert report.first_place["not_utf8"] == f"{path}:8"
    assert report.rows == report.used + sum(report.skipped.values()) == 10
    with pytest.raises(DataError, match=rf"{path}:1: empty; mend the row"):
        prepared.prepare([{"path": str(path)}], bad_rows="fail")


def test_with_nothing_usable_the_reasons_are_told(prepared: Prepared, tmp_path: Path) -> None:
    def told(rows: list[Any], **data: Any) -> str:
        with pytest.raises(DataError) as caught:
            prepared.prepare([{"path": write_rows(tmp_path / "x.jsonl", rows), **data.pop("source", {})}], **data)
        (line,) = str(caught.value).splitlines()
        return line

    place = tmp_path / "x.jsonl"
    assert told([{"quest": 1, "repl": 2}, {"b": 2}]) == (
        f"data: no usable document left of 2 rows: no_known_fields 2, first {place}:1 (expected messages, "
        "conversations, prompt with response, or text; got quest, repl)"
    )
    assert "expected text; got messages" in told([chat("q", "a")], source={"kind": "text"})
    assert f"first {place}:1 (prompt without an answer (response," in told([{"prompt": "why"}])
    assert "--regenerate" in told([{"prompt": "why"}])
    assert "empty 1, first" in told([[], {"prompt": "why"}])
    assert told([]) == f"data.sources: no usable document, since there is not one row in {place}"
    assert told([chat(f"q {n}", "a") for n in range(4)], heldout_documents=9).startswith(
        "data.heldout_documents: 9 would hold out all 4 usable rows of 4"
    )


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("chat.json", b' [\n{"messages": []}]', "got a JSON array; write its rows one a line: jq -c '.[]' chat.json"),
        ("chat.json", b'{"messages": []}\n', "if it has one row a line, rename it to .jsonl"),
        ("chat.csv", b"prompt,response\n", "got a .csv file; convert rows to .jsonl"),
        ("rows.jsonl.gz", b"\x1f\x8b", "got a .gz file"),
        ("notes", b"text", "got a name without a suffix"),
    ],
)
def test_a_file_of_a_kind_that_is_not_read_is_refused(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    config = config_from({"data": {"sources": [{"path": str(tmp_path / name)}]}})
    for look in (lambda sources: list(read_chunks(sources)), check_files):
        with pytest.raises(SourceError, match=r"^data\.sources\.0\.path: \S+: expected one of \.jsonl, .*") as caught:
            look(config.data.sources)
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 3


def test_the_case_of_a_suffix_does_not_matter_and_other_files_of_a_folder_are_passed_over(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.JSONL", [chat("q", "a")])
    (tmp_path / "b.TXT").write_text("text")
    (tmp_path / "c.json").write_text("[]")
    chunks = list(read_chunks(config_from({"data": {"sources": [{"path": str(tmp_path)}]}}).data.sources))
    assert [Path(chunk.origin).name for chunk in chunks] == ["a.JSONL", "b.TXT"]
    assert [len(list(chunk.rows())) for chunk in chunks] == [1, 1]


def test_files_of_rows_that_a_folder_holds_and_nobody_reads_are_said(prepared: Prepared, tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    (folder / "more").mkdir(parents=True)
    write_rows(folder / "a.jsonl", [chat("q", "a")])
    for name in ("b.json", "more/c.JSON", "more/d.jsonl.gz", "picture.png"):
        (folder / name).write_bytes(b"x")
    report = prepared.prepare([{"path": str(folder)}, {"path": str(folder / "a.jsonl")}])
    (line,) = report.warnings
    assert line.startswith(f"data.sources.0.path: files in {folder} are not read: 1 .gz, 2 .json; unpack them, or")


def test_a_text_that_is_not_utf8_is_a_bad_row_with_the_byte(prepared: Prepared, tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_bytes("é is two bytes, ".encode() + b"\xe9 alone is none")
    (tmp_path / "good.txt").write_text("fine")
    report = prepared.prepare([{"path": str(tmp_path / name)} for name in ("bad.txt", "good.txt")])
    assert texts(prepared) == ["fine"]
    assert report.first_place == {"not_utf8": f"{tmp_path / 'bad.txt'}, byte 17 (0xe9)"}
    with pytest.raises(DataError, match=r"bad\.txt, byte 17 \(0xe9\): not_utf8; mend the row"):
        prepared.prepare([{"path": str(tmp_path / "bad.txt")}], bad_rows="fail")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/nowhere.jsonl", r"data\.sources\.0\.path: no .*\.jsonl.* file at /nowhere\.jsonl"),
        ("package:no_such_package_here/x.jsonl", "no_such_package_here is not installed"),
        ("package:no_such_package_here.inside/x.jsonl", "no_such_package_here.inside is not installed"),
        ("dataset:/nowhere/at/all", r"data\.sources\.0\.path: dataset:/nowhere/at/all"),
    ],
)
def test_a_source_that_cannot_be_read_is_one_line(path: str, words: str) -> None:
    config = config_from({"data": {"sources": [{"path": path}]}})
    with pytest.raises(SourceError, match=words) as caught:
        list(read_chunks(config.data.sources))
    assert "\n" not in str(caught.value)


def test_a_parquet_file_with_a_date_beyond_pythons_is_one_line(tmp_path: Path) -> None:
    dates = pyarrow.array([10**15], type=pyarrow.timestamp("ms"))
    pyarrow.parquet.write_table(pyarrow.table({"text": ["words"], "made": dates}), tmp_path / "x.parquet")
    with pytest.raises(SourceError, match="date value out of range"):
        list(read_chunks((SourceConfig(path=str(tmp_path / "x.parquet")),)))


def test_a_damaged_parquet_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_bytes(b"PAR1 but no more")
    config = config_from({"data": {"sources": [{"path": str(tmp_path / "x.parquet")}]}})
    with pytest.raises(SourceError, match=r"x\.parquet: not a Parquet file"):
        list(read_chunks(config.data.sources))


def test_a_prompt_that_fills_the_limit_leaves_nothing_to_train_on(prepared: Prepared, tmp_path: Path) -> None:
    """Case D-06: overlong prompts are dropped and counted, overlong answers cut at the right and counted."""
    rows = [chat("p" * 40, "abcde"), chat("p", "a" * 60)]
    report = prepared.prepare([{"path": write_rows(tmp_path / "x.jsonl", rows)}], max_document_tokens=32)
    assert report.skipped == {"no_supervised_tokens": 1}
    assert (report.used, report.truncated, report.documents) == (1, 1, 1)
    assert prepared.documents.lengths == [32]


def test_no_document_is_longer_than_the_targets_context(prepared: Prepared, tmp_path: Path) -> None:
    sources = [{"path": write_rows(tmp_path / "x.jsonl", [{"text": "a" * 100}, {"text": "b" * 20}])}]
    prepared.context = 512  # more than the pack's 128: nothing to say
    prepared.prepare(sources)
    assert prepared.documents.lengths == [100, 20]
    assert not any("context" in line for line in prepared.said)
    prepared.context = 48
    assert prepared.prepare(sources).truncated == 1
    assert prepared.documents.lengths == [48, 20]
    assert any("48 tokens, the target's context, not 128" in line for line in prepared.said)


@pytest.mark.parametrize("policy", ["truncate", "split", "skip"])
@pytest.mark.parametrize("dedup", [False, True])
def test_what_is_read_is_accounted_for(prepared: Prepared, tmp_path: Path, policy: str, dedup: bool) -> None:
    """Case P-11: rows and supervised tokens add up, and the schedule hands out each document of an epoch once."""
    draw = random.Random(3)
    rows: list[Any] = [{"text": "x" * draw.randint(1, 300)} for _ in range(100)]
    rows += [chat("q" * draw.randint(1, 200), "a" * draw.randint(1, 200)) for _ in range(60)]
    rows += [*rows[:5], {"text": ""}, {"nothing": 1}]
    path = write_rows(tmp_path / "x.jsonl", rows)
    report = prepared.prepare([{"path": path}], long_documents=policy, deduplicate=dedup, heldout_documents=9)
    assert report.broken_laws() == []
    assert report.rows == len(rows)
    documents = prepared.documents
    offered = sum(int(documents[number].loss_mask.sum()) for number in range(len(documents)))
    assert offered == report.supervised_tokens
    assert report.documents == len(documents) == len(documents.lengths)
    assert (report.split > 0) == (policy == "split")
    assert (report.truncated > 0) == (policy == "truncate")
    assert ("too_long" in report.skipped) == (policy == "skip")
    config = prepared.config([{"path": path}])
    schedule = schedule_of(documents, prepared.digest, config)
    handed_out = [number for pack in range(schedule.num_packs) for number in schedule.documents(pack)]
    assert sorted(handed_out) == list(range(len(documents)))


def test_a_report_that_loses_documents_is_noticed() -> None:
    broken = DataReport(rows=3, used=1, supervised_read=10, supervised_tokens=9)
    assert [law.split(":")[0] for law in broken.broken_laws()] == ["rows", "supervised tokens"]


def test_the_cache_is_found_again_and_a_change_says_what_changed(prepared: Prepared, tmp_path: Path) -> None:
    """Case D-12: one character of the template makes new tokens, and the line names it with both values."""
    sources = [{"path": write_rows(tmp_path / "x.jsonl", [chat("q", "answer")])}]
    prepared.prepare(sources)
    before = prepared.digest
    assert any("tokenised 1 rows" in line for line in prepared.said)
    prepared.prepare(sources)
    assert any("found in the cache" in line for line in prepared.said)
    template = prepared.tokenizer.chat_template
    prepared.tokenizer.chat_template = template.replace("<|im_end|>\n{%", "<|im_end|> {%")
    prepared.prepare(sources)
    assert not any("found in the cache" in line for line in prepared.said)
    (line,) = [line for line in prepared.said if "these changed" in line]
    assert "chat template: " in line
    assert "data.sources" not in line
    assert prepared.digest != before
    write_rows(tmp_path / "x.jsonl", [chat("q", "another")])
    prepared.prepare(sources)
    (line,) = [line for line in prepared.said if "these changed" in line]
    assert "data.sources.0 content 0: " in line


def test_tokenised_data_that_are_gone_say_how_to_get_them_again(prepared: Prepared, tmp_path: Path) -> None:
    sources = [{"path": write_rows(tmp_path / "x.jsonl", [chat("q", "answer")])}]
    prepared.prepare(sources)
    shutil.rmtree(prepared.run_dir.parent / ".data")
    with pytest.raises(DataError, match=r"is gone; 'python launch\.py prepare' makes it again"):
        Documents(prepared.run_dir / "data")
    prepared.prepare(sources)
    assert any("the cached data are gone" in line for line in prepared.said)
    assert len(prepared.documents) == 1


def test_a_template_argument_is_part_of_the_key_and_of_the_record(prepared: Prepared, tmp_path: Path) -> None:
    """Case D-10: the same data with a flag on and off are two data sets, and the plan says which."""
    prepared.tokenizer.chat_template = "{% if on %}on{% endif %}" + prepared.tokenizer.chat_template
    sources = [{"path": write_rows(tmp_path / "x.jsonl", [chat("q", "answer")])}]
    records = []
    for flag in (True, False):
        report = prepared.prepare(sources, chat_template_kwargs={"on": flag})
        key = json.loads((prepared.run_dir / "data" / "view.json").read_text())["corpus"]
        records.append((key, prepared.digest, json.dumps(report.template)))
    assert all(first != second for first, second in zip(*records, strict=True))


def test_held_out_documents_are_chosen_by_digest_with_their_duplicates_and_never_trained(
    prepared: Prepared, tmp_path: Path
) -> None:
    rows = [chat(f"q{n}", f"answer {n}") for n in range(50)]
    rows += rows[:10]
    path = write_rows(tmp_path / "x.jsonl", rows)
    prepared.prepare([{"path": path}], heldout_documents=8)
    lines = (prepared.run_dir / "data" / "heldout.jsonl").read_text().splitlines()
    prompts = {json.loads(line)["text"] for line in lines}
    assert all(not any(text.startswith(prompt) for prompt in prompts) for text in texts(prepared))
    random.Random(1).shuffle(rows)
    write_rows(tmp_path / "x.jsonl", rows)
    prepared.prepare([{"path": path}], heldout_documents=8)
    again = (prepared.run_dir / "data" / "heldout.jsonl").read_text().splitlines()
    assert {json.loads(line)["text"] for line in again} == prompts


def test_duplicates_are_reported_and_dropped_on_request(prepared: Prepared, tmp_path: Path) -> None:
    """Case D-14."""
    path = write_rows(tmp_path / "x.jsonl", [chat("q", "a")] * 4 + [chat("q", "b")])
    assert (prepared.prepare([{"path": path}]).duplicates, len(prepared.documents)) == (3, 5)
    report = prepared.prepare([{"path": path}], deduplicate=True)
    assert (report.duplicates_dropped, report.used, len(prepared.documents)) == (3, 2, 2)
    assert any("found in the cache" in line for line in prepared.said)


def test_a_mixture_takes_each_source_by_its_weight_and_reports_the_shares(prepared: Prepared, tmp_path: Path) -> None:
    many = write_rows(tmp_path / "many.jsonl", [{"text": f"code {n:04d}"} for n in range(80)])
    few = write_rows(tmp_path / "few.jsonl", [{"text": f"chat {n:04d}"} for n in range(20)])
    sources = [{"path": many, "weight": 0.25, "name": "code"}, {"path": few, "weight": 1.5}]
    report = prepared.prepare(sources)
    assert [(share.name, share.share_pct, share.weighted_share_pct) for share in report.sources] == [
        ("code", 80.0, 40.0), (few, 20.0, 60.0),
    ]  # fmt: skip
    config = config_from({"data": {"sources": sources}, "pack": {"tokens": 128}, "training": {"epochs": 4}})
    schedule = schedule_of(prepared.documents, prepared.digest, config)
    per_epoch = [schedule.epoch_documents(epoch) for epoch in range(4)]
    assert [len(documents) for documents in per_epoch] == [50, 50, 50, 50]
    counts = np.bincount(np.concatenate(per_epoch), minlength=100)
    assert set(counts[:80].tolist()) == {1}  # a quarter each epoch: each once in four
    assert set(counts[80:].tolist()) == {6}
    other = schedule_of(prepared.documents, prepared.digest, config, schedule.packs_per_epoch)
    assert all(schedule.documents(pack) == other.documents(pack) for pack in range(schedule.num_packs))


def test_weights_that_leave_nothing_are_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "x.jsonl", [chat("q", "a"), chat("q", "b")])
    raw = {"target": {"model": str(save_target(tmp_path / "target")), "num_taps": 3}, "pack": {"tokens": 64}}
    config = config_from(raw | {"data": {"sources": [{"path": path, "weight": 0.25}]}})
    with pytest.raises(DataError, match="weights leave none of 2 documents in 1 epochs"):
        prepare(tmp_path / "runs" / "w", config, Log("prepare", 0), on_gpu=False)


def test_other_weights_are_other_data_but_need_no_new_tokens(prepared: Prepared, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "x.jsonl", [chat("q", "a"), chat("q", "b")])
    prepared.prepare([{"path": path}])
    before = prepared.digest
    prepared.prepare([{"path": path, "weight": 2.0}])
    assert prepared.digest != before
    assert any("found in the cache" in line for line in prepared.said)


def test_processes_make_the_same_corpus_as_one(prepared: Prepared, tmp_path: Path) -> None:
    path = write_chats(tmp_path / "x.jsonl", 3000)
    digests = []
    for workers, folder in ((1, "one"), (2, "two")):
        prepared.prepare([{"path": str(path)}], workers=workers, cache_folder=str(tmp_path / folder))
        digests.append(prepared.digest)
    assert digests[0] == digests[1]


def test_one_document_is_enough(prepared: Prepared, tmp_path: Path) -> None:
    """Case D-14: a corpus smaller than one pack, and than the number of producers."""
    report = prepared.prepare([{"path": write_rows(tmp_path / "x.jsonl", [chat("q", "a")])}])
    schedule = schedule_of(prepared.documents, prepared.digest, prepared.config([{"path": "x"}]))
    assert (report.documents, schedule.num_packs, schedule.documents(0)) == (1, 1, (0,))


def test_a_token_without_an_embedding_row_is_named(prepared: Prepared, tmp_path: Path) -> None:
    """Case D-13: fatal where the data uses it; more rows than tokens are normal."""
    config = config_from({"target": {"num_taps": 3}})
    folder = save_target(tmp_path / "target")
    description = describe_target(folder, "tiny", config.target, prepared.tokenizer, on_gpu=False)
    path = write_rows(tmp_path / "x.jsonl", [chat("q", "a<extra>")])
    prepared.prepare([{"path": path}])
    check_tokens(prepared.documents, description, prepared.tokenizer)
    prepared.tokenizer.add_tokens([f"<filler{n}>" for n in range(10)] + ["<extra>"])
    prepared.prepare([{"path": path}])
    with pytest.raises(DataError, match=r"token id 270 \('<extra>'\) has no row .*\(264 rows\)"):
        check_tokens(prepared.documents, description, prepared.tokenizer)


def test_a_mask_token_that_the_data_uses_is_refused(tmp_path: Path) -> None:
    """Case T-09: explicit or picked, a mask token that occurs in the data is an error; see also test_target."""
    folder = save_target(tmp_path / "target")
    path = write_rows(tmp_path / "x.jsonl", [chat("q", "a<|reserved|>")])
    config = config_from(
        {"data": {"sources": [{"path": path}]}, "target": {"model": str(folder), "num_taps": 3}, "pack": {"tokens": 64}}
    )
    with pytest.raises(DataError, match=r"target\.mask_token_id: 3 occurs in the data"):
        prepare(tmp_path / "runs" / "t", config, Log("prepare", 0), on_gpu=False)
