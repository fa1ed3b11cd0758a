"""What benchmarks/scaling.py makes of its measurements, and that a setting which fails does not end the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu_clocks import means_of
from benchmarks.scaling import _process_of, scalings
from benchmarks.scaling_settings import SETTINGS

REPOSITORY = Path(__file__).parents[2]


def test_scaling_is_against_the_mean_rate_alone_and_against_the_slower_card() -> None:
    found = scalings([100.0, 125.0], 125.0)  # alone 10 and 8 steps a second, together 8 on each
    assert found["scaling"] == pytest.approx(2 * 8 / 9)
    assert found["scaling_to_slower"] == pytest.approx(2.0)
    assert scalings([100.0, 100.0], 104.0)["scaling"] == pytest.approx(2 / 1.04)


def test_settings_share_a_process_unless_copies_or_nccls_variables_differ() -> None:
    kinds = {name: _process_of(f"8b/{name}") for name in SETTINGS}
    assert kinds["during"] == kinds["after"] == kinds["ctas4"] == kinds["float32"] == (False, ())
    assert len({kinds[name] for name in ("during", "copies", "memcpy", "channels2")}) == 4


def test_clocks_are_means_between_two_times_by_gpu() -> None:
    began = time.mktime(time.strptime("2026/11/30 12:00:01", "%Y/%m/%d %H:%M:%S"))
    text = (
        "2026/11/30 12:00:00.900, 0, 1980, 100.0, 40\n"
        "2026/11/30 12:00:01.200, 0, 1500, 690.0, 60\n2026/11/30 12:00:01.210, 1, 1600, 695.5, 55\n"
        "2026/11/30 12:00:01.400, 0, 1400, 700.0, 62\n2026/11/30 12:00:01.410, 1, [N/A], 700.0, 62\n2026/11/30 12:0"
    )
    assert means_of(text, began, began + 1) == {
        "0": {"clock_mhz": 1450.0, "power_w": 695.0, "celsius": 61.0},
        "1": {"clock_mhz": 1600.0, "power_w": 695.5, "celsius": 55.0},
    }


def test_a_setting_that_fails_is_recorded_and_the_others_are_measured(tmp_path: Path) -> None:
    main = "import sys; from benchmarks import scaling as it; it.START_S = it.SETTING_S = 1e9; sys.exit(it.main())"
    command = [sys.executable, "-c", main, "--quick", "--limit", "1e9", "--try", "copies", "during", "float32"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path), "--results", str(tmp_path / "results.json")], cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert list(results["failed"]) == ["quick/copies"]
    assert "GPUs, are needed" in results["failed"]["quick/copies"]
    assert [run["setting"] for run in results["runs"]] == ["during", "float32"]
    for run in results["runs"]:
        assert run["gradient_error"] < 1e-6
        assert run["weights_differ_by"] == 0.0
        assert len(run["alone_ms"]) == len(run["runs"]) == 2
        assert results["summary"][f"quick.scaling_{run['setting']}"] == run["scaling"]
