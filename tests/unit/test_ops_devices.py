"""Placement: each process sees exactly its device; what is not there is refused, what is doubtful is a warning."""

from __future__ import annotations

import pytest

from configs.load import ConfigError, config_from
from configs.schema import Config
from ops import devices
from ops.devices import find_gpus, place


def _config(target: list[str], drafter: list[str], target_threads: int | None = None) -> Config:
    return config_from({"target": {"devices": target, "threads": target_threads}, "training": {"devices": drafter}})


def test_two_targets_and_two_drafters_make_four_lines_each_with_its_own_gpu() -> None:
    places = place(_config(["auto", "auto"], ["auto", "auto"]), ["0", "1", "2", "3"], cores=64)
    assert [each.line for each in places.placements] == [
        "target0: GPU 0, 16 threads",
        "target1: GPU 1, 16 threads",
        "drafter0: GPU 2, 16 threads",
        "drafter1: GPU 3, 16 threads",
    ]
    assert places.warnings == ()


def test_a_process_sees_one_gpu_and_calls_it_the_first() -> None:
    (target, drafter) = place(_config(["cuda:1"], ["cpu"]), ["5", "7"], cores=8).placements
    assert target.environment == {"CUDA_VISIBLE_DEVICES": "7", "DFLASH_DEVICE": "cuda:0", "OMP_NUM_THREADS": "4"}
    assert drafter.environment == {"CUDA_VISIBLE_DEVICES": "", "DFLASH_DEVICE": "cpu", "OMP_NUM_THREADS": "4"}


def test_auto_takes_the_gpu_that_nobody_asked_for() -> None:
    places = place(_config(["cuda:0"], ["auto"]), ["0", "1"], cores=2)
    assert [each.gpu for each in places.placements] == ["0", "1"]


def test_without_a_gpu_auto_is_the_cpu_and_cores_are_shared_out() -> None:
    places = place(_config(["auto"], ["auto"]), [], cores=2)
    assert [(each.gpu, each.threads) for each in places.placements] == [(None, 1), (None, 1)]
    assert places.warnings == ()


def test_a_shared_gpu_is_a_warning_that_names_who_shares_it() -> None:
    places = place(_config(["auto"], ["auto"]), ["0"], cores=8)
    assert places.warnings == ("GPU 0 is shared by target0, drafter0: they compete for its memory and time",)


def test_a_gpu_that_is_not_visible_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    assert find_gpus() == ["4", "5", "6"]
    with pytest.raises(ConfigError, match=r"training\.devices: cuda:3 asked, but 3 can be used here \(GPUs 4, 5, 6\)"):
        place(_config(["cuda:0", "cuda:1"], ["cuda:2", "cuda:3"]), find_gpus(), cores=8)


def test_gpus_that_are_not_there_are_one_line_however_many_are_asked_for() -> None:
    asked = _config([f"cuda:{number}" for number in range(5)], ["cuda:5", "cuda:6", "cuda:7"])
    with pytest.raises(ConfigError) as no:
        place(asked, [], cores=8)
    (line,) = no.value.problems
    assert line.startswith("target.devices, training.devices: cuda:0, cuda:1, ")
    assert "cuda:7 asked, but 0 can be used here (no GPU); " in line


def test_drafters_that_could_not_add_up_their_gradients_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"training\.devices: 2 drafters on GPU 7; NCCL takes one a GPU"):
        place(_config(["cuda:0"], ["cuda:1", "cuda:1"]), ["5", "7"], cores=8)
    with pytest.raises(ConfigError, match="some on GPUs, some on the CPU"):
        place(_config(["cuda:0"], ["cuda:1", "cpu"]), ["5", "7"], cores=8)
    assert len(place(_config(["cuda:0"], ["cuda:0", "cuda:1"]), ["5", "7"], cores=8).placements) == 3


@pytest.mark.parametrize("text", ["gpu", "cuda", "cuda:-1", "cuda:1:2"])
def test_a_word_that_is_no_device_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"target\.devices: expected cpu, auto or cuda:N, got"):
        place(_config([text], ["cpu"]), [], cores=2)


def test_more_threads_than_cores_is_a_warning() -> None:
    places = place(_config(["cpu"], ["cpu"], target_threads=4), [], cores=2)
    assert places.warnings == ("5 threads on 2 cores: the processes compete; lower target.threads or training.threads",)


def test_no_devices_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one entry each"):
        place(_config([], ["cpu"]), [], cores=2)


def test_one_target_may_go_over_several_gpus_and_a_drafter_may_not() -> None:
    places = place(_config(["cuda:0+2", "cuda:1"], ["cuda:2"]), ["0", "1", "3"], cores=12)
    assert [each.gpu for each in places.placements] == ["0,3", "1", "3"]
    assert places.placements[0].environment["CUDA_VISIBLE_DEVICES"] == "0,3"
    assert [line for line in places.warnings if "shared" in line] == [
        "GPU 3 is shared by target0, drafter0: they compete for its memory and time"
    ]
    with pytest.raises(ConfigError, match=r"training\.devices: cuda:0\+1: only a target"):
        place(_config(["cpu"], ["cuda:0+1"]), ["0", "1"], cores=2)
    with pytest.raises(ConfigError, match="each named once"):
        place(_config(["cuda:1+1"], ["cpu"]), ["0", "1"], cores=2)


@pytest.mark.parametrize("able", [True, False])
def test_bf16_on_a_cpu_that_cannot_do_it_is_warned_about(able: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "cpu_has_bf16", lambda: able)
    asked = {"target": {"devices": ["cpu"], "dtype": "bfloat16"}, "training": {"devices": ["cuda:0"]}}
    warnings = place(config_from(asked), ["0"], cores=2).warnings
    assert [line.split(":")[0] for line in warnings] == ([] if able else ["target.dtype"])
    asked["training"] = {"devices": ["cpu"], "precision": "bfloat16"}
    assert len(place(config_from(asked), [], cores=2).warnings) == (0 if able else 2)
    assert place(_config(["cpu"], ["cpu"]), [], cores=2).warnings == ()
