"""`launch.py plan`: what would run, without a network and before anything is loaded; what cannot fit is one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from configs.load import ConfigError, config_from
from configs.schema import Config
from evaluation.facts import find_facts, target_size
from ops.errors import NoResource
from ops.plan import Machine, plan
from producer import packed_recurrent
from producer.corpus.sources import SourceError
from producer.target import describe_target
from tests.helpers.families import make_family
from tests.helpers.tiny_target import make_tokenizer, save_target, write_chats

REPOSITORY = Path(__file__).parents[2]
CPU = Machine([], [], 10**10, 2)


def config_of(folder: Path, *overrides: str) -> Config:
    raw = {"target": {"model": str(folder), "num_taps": 3, "devices": ["auto"]}}
    return config_from(raw | {"data": {"sources": [{"path": str(write_chats(folder / "chats.jsonl", 1))}]}}, overrides)


def text_of(folder: Path, machine: Machine = CPU, *overrides: str) -> str:
    return "\n".join(plan(config_of(folder, *overrides), find_facts, machine))


def test_l10_it_says_what_was_found_and_every_size(tmp_path: Path) -> None:
    text = text_of(save_target(tmp_path), CPU, "pack.tokens=128", "ring.num_slots=4")
    for said in (
        "LlamaForCausalLM",
        "layers 6 (full_attention), of which 4 are run; hidden size 64, 4 heads, 2 kv heads of 16",
        "taps [1, 2, 3]; head tied to the embedding, 264 rows; mask token 3; context 512",
        "in float32",
        "read packed",
        "target0: cpu, 1 threads",
        "ring: 1 of 4 slots of 2.1 MB (128 tokens), 10.49 MB of 10.00 GB free in /dev/shm",
        "checkpoints: 2.37 MB each; on disk up to 14.22 MB (free: not known) in runs (checkpoint.keep 3, ",
        "2.37 MB of /dev/shm beside the rings",
        "drafter: ",
        "drafter step: ",
    ):
        assert said in text, text


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "qwen3_5", "llava", "gemma3"])
def test_parameters_are_counted_without_being_allocated(family: str, tmp_path: Path) -> None:
    model = make_family(family)
    model.save_pretrained(tmp_path)
    config = config_of(tmp_path, "target.target_layer_ids=[0, 3]").target
    found = target_size(tmp_path, describe_target(tmp_path, family, config, make_tokenizer(), on_gpu=False))
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert 0 < found.trunk_parameters < found.parameters
    assert found.bytes == 4 * found.parameters


def test_a_hybrid_target_is_read_packed_and_on_a_gpu_its_kernel_library_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_family("qwen3_5").save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    monkeypatch.setattr(packed_recurrent, "_library", lambda: (None, "No module named 'fla'"))
    gpu, warned = Machine(["0"], [10**11], 10**10, 4), "warning: a hybrid target without flash-linear-attention"
    assert "layers 6 (full_attention, linear_attention)" in text_of(tmp_path)
    assert "read packed" in text_of(tmp_path)
    assert "read rows" in text_of(tmp_path, CPU, "target.layout=rows")
    assert warned in text_of(tmp_path, gpu)
    assert warned not in text_of(tmp_path)
    monkeypatch.setattr(packed_recurrent, "_library", lambda: (lambda: None, ""))
    assert warned not in text_of(tmp_path, gpu)


def test_a_recurrent_target_of_another_kind_is_read_in_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_family("qwen3_5").save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    monkeypatch.setattr(packed_recurrent, "DELTA_RULE", "a_function_of_another_name")
    assert "read rows" in text_of(tmp_path)


def test_a_gpu_that_is_too_small_is_refused_with_both_sides_named(tmp_path: Path) -> None:
    folder = save_target(tmp_path)
    small = Machine(["0"], [10**9], 10**10, 4)
    with pytest.raises(
        NoResource, match=r"GPU 0: target0, drafter0 need about .* it has 1\.00 GB; use another GPU"
    ) as no:
        text_of(folder, small)
    assert no.value.exit_code == 5
    assert "GPU 0: " in text_of(folder, Machine(["0"], [10**11], 10**10, 4))
    two = text_of(folder, Machine(["0", "1"], [10**11] * 2, 10**10, 4), 'target.devices=["cuda:0+1"]')
    assert "target0: GPU 0,1" in two


def test_dev_shm_that_is_too_small_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoResource, match=r"ring: .* need .* of /dev/shm, 60\.00 MB are free"):
        text_of(save_target(tmp_path), Machine([], [], 60_000_000, 2))


def test_gpus_that_are_not_here_are_planned_with_and_warned_about_in_one_line(tmp_path: Path) -> None:
    devices = ("target.devices=[cuda:0, cuda:1]", "training.devices=[cuda:2]")
    for machine, gpus, last in (
        (CPU, "no GPU", "GPU 2"),
        (Machine(["7"], [10**11], 10**10, 2), "GPUs 7", "GPU cuda:2"),
    ):
        text = text_of(save_target(tmp_path), machine, *devices)
        missing = "cuda:0, cuda:1, cuda:2" if machine is CPU else "cuda:1, cuda:2"
        said = [line for line in text.splitlines() if "asked" in line]
        keys, here = "target.devices, training.devices", len(machine.gpus)
        start = f"warning: {keys}: {missing} asked, but {here} can be used here ({gpus}); planned for a machine"
        assert len(said) == 1
        assert said[0].startswith(start)
        assert f"drafter0: {last}, " in text
        assert "memory: target about" in text
    text = text_of(save_target(tmp_path), CPU._replace(shm_free_bytes=1000), *devices)
    assert "warning: ring: 2 ring(s) of " in text


def test_checkpoints_that_have_no_room_are_a_warning(tmp_path: Path) -> None:
    folder = save_target(tmp_path)
    rings = 2 * 2**20 + 4 * 2**21
    settings = ("pack.tokens=128", "ring.num_slots=4", "checkpoint.keep=2")
    text = text_of(folder, Machine([], [], rings + 1000, 2, 1000), *settings)
    assert "warning: checkpoints: the rings leave 0.00 MB of /dev/shm, 2.37 MB do not fit" in text
    assert "warning: checkpoints: up to 11.85 MB are needed in runs, 0.00 MB are free" in text
    assert "warning: checkpoints" not in text_of(folder, Machine([], [], 10**9, 2, 10**9), *settings)
    without = text_of(folder, Machine([], [], rings + 1000, 2, 10**9), *settings, "checkpoint.handover=false")
    assert "beside the rings" not in without
    assert "warning: checkpoints" not in without


def test_l10_missing_data_files_are_listed_each_and_packages_are_not_looked_for(tmp_path: Path) -> None:
    here = write_chats(tmp_path / "here.jsonl", 1)
    sources = [
        {"path": str(here)},
        {"path": "no/one.jsonl"},
        {"path": "no/two"},
        {"path": "package:pydoc_data/topics.py"},
    ]
    config = config_from({"target": {"model": str(save_target(tmp_path / "t"))}, "data": {"sources": sources}})
    with pytest.raises(ConfigError) as no:
        plan(config, find_facts, CPU)
    assert "no/one.jsonl" in str(no.value)
    assert "no/two" in str(no.value)
    assert "here.jsonl" not in str(no.value)
    assert "pydoc" not in str(no.value)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.sources=[]", "data.sources: expected at least one source, got none"),
        ("data.sources=[{path: SELF/config.json}]", "data.sources.0.path: SELF/config.json: expected one of .jsonl"),
        ("drafter.init_from=/no/such", "drafter.init_from: /no/such: expected an exported drafter's folder"),
        ("drafter.num_attention_heads=3", "drafter shape: 3 heads, 2 kv heads"),
    ],
)
def test_what_a_run_would_refuse_is_refused(override: str, words: str, tmp_path: Path) -> None:
    folder = save_target(tmp_path)
    with pytest.raises((ConfigError, SourceError)) as no:
        text_of(folder, CPU, override.replace("SELF", str(folder)))
    assert str(no.value).startswith(words.replace("SELF", str(folder)))


@pytest.mark.parametrize(("tokens", "warned"), [(64, True), (256, False)])
def test_p10_training_context_much_shorter_than_the_targets_is_warned_about(
    tokens: int, warned: bool, tmp_path: Path
) -> None:
    text = text_of(save_target(tmp_path), CPU, f"pack.tokens={tokens}")
    assert ("warning: documents have at most 64 tokens, the target's context is 512" in text) == warned


def test_l10_the_command_needs_no_network(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    chats = write_chats(tmp_path / "chats.jsonl", 1)
    path.write_text(
        f"target:\n  model: {save_target(tmp_path / 'target')}\n  num_taps: 3\ndata: {{sources: [{{path: {chats}}}]}}\n"
    )
    command = [sys.executable, "launch.py", "plan", str(path), "--set", "pack.tokens=256"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=500, env=environment, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "taps [1, 2, 3]" in ended.stdout
