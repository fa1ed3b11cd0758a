"""A file of the run that the drafter cannot write ends the run with one line; the next launch has lost nothing."""

from __future__ import annotations

import json

from tests.helpers.tiny_run import Tiny, planned_packs, tiny

__all__ = ["tiny"]


def test_a_result_that_cannot_be_written_is_one_line_and_the_next_launch_writes_it(tiny: Tiny) -> None:
    words = ("--set", "evaluation.enabled=false", "training.epochs=1")
    tiny.launch(*words, hold_at=5)
    tiny.wait_for_step(5)
    (tiny.dir / "final.json").mkdir()
    tiny.let_go()
    code, out = tiny.end()
    assert code == 5, out
    fault = (
        f"drafter 0: {tiny.dir}/final.json: cannot be used (Is a directory); remove the folder that is in the file's "
        "place and launch again: the run goes on from what is saved"
    )
    assert [line.strip() for line in out.splitlines() if "final.json" in line] == [fault]
    assert "Traceback" not in tiny.log("drafter0")
    assert tiny.log("drafter0").count("| started |") == 1, "no restart, which could not help"
    (tiny.dir / "final.json").rmdir()
    tiny.launch(*words)
    code, out = tiny.end()
    assert code == 0, out
    assert json.loads((tiny.dir / "final.json").read_text())["packs_trained"] == planned_packs(tiny)
    steps = [record["step"] for record in tiny.metrics("drafter") if record.get("tokens_per_s")]
    assert max(steps) == planned_packs(tiny), "nothing is trained twice"
    tiny.assert_nothing_left()
